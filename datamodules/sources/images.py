"""Image data sets through torchvision, and MedMNIST's files."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.augmentations import CropFlip
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import PositiveFloat
from fl_lightning.introspection.papers import Paper
from fl_lightning.sampling import generator


class ImageDataModule(FederatedDataModule):
    """Base class of image data sets: uint8 in memory, normalised per channel.

    Args:
        root: the folder that holds the data set's own folder.
        augment: random crops (padding 4; with flips for CIFAR) of the training images; None: only
            for CIFAR. Or a mapping, ``{padding: 4, flip: true, probability: 1.0}``; keys that it
            leaves out have these values. Or names, ``[crop, flip, randaugment]``, as in
            ``FederatedDataModule``.
        download: get the files first if they are missing.
        mean, std: of the pixels in [0, 1], one number per channel, by which they are normalised;
            None: the data set's own.
        arguments: those of ``FederatedDataModule``; without ``num_clients`` the partition's own
            number, else 100.
    """

    has_test_set = True
    default_clients = 100
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    scale = 255.0
    crop = CropFlip(padding=4, flip=False)
    augment_by_default = False
    folder = ""
    of_torchvision = ""  # the name of torchvision's class

    def __init__(
        self,
        root: str | Path = "data",
        augment: bool | dict[str, Any] | list[str | dict[str, Any]] | None = None,
        download: bool = False,
        mean: Sequence[float] | None = None,
        std: Sequence[PositiveFloat] | None = None,
        **arguments: Any,
    ) -> None:
        named = list(augment) if isinstance(augment, list | tuple) else None
        super().__init__(augment=named, **arguments)
        self.root = Path(root)
        self.download = download
        self.mean = self._per_channel("mean", mean) or self.mean
        self.std = self._per_channel("std", std) or self.std
        if isinstance(augment, dict):
            self.augmentation = CropFlip.of(augment)
        elif named is None and (self.augment_by_default if augment is None else augment):
            self.augmentation = self.crop

    def _per_channel(self, name: str, given: Sequence[float] | None) -> tuple[float, ...]:
        if given is None:
            return ()
        channels = self.sample_shape[0] if self.sample_shape else len(given)
        if len(given) != channels:
            raise UserError(
                f"data.{name} is {given}: give one number for each of the {channels} channels of "
                f"{type(self).__name__}."
            )
        return tuple(given)

    def _open(self, train: bool, download: bool = False) -> Any:
        from torchvision import datasets

        return getattr(datasets, self.of_torchvision)(self.root, train, download=download)

    def _samples(self, dataset: Any) -> TensorSamples:
        return TensorSamples(dataset.data, dataset.targets, self.scale, self.mean, self.std)

    def prepare_data(self) -> None:
        if not self.download:
            return
        with refused(
            f"data.download is true, but {type(self).__name__} could not be downloaded to "
            f"{str(self.root)!r}",
            "Put the files there by hand, or try again.",
        ):
            for train in (True, False):
                self._open(train, download=True)

    def load(self) -> None:
        with refused(
            f"data.root is {str(self.root)!r}: {type(self).__name__} is expected in "
            f"{str(self.root / self.folder)!r}, and its files are missing or damaged",
            "Give the right --data.root, or --data.download true to get them.",
        ):
            self.train_set = self._samples(self._open(True))
            self.test_set = self._samples(self._open(False))


class MNIST(ImageDataModule):
    """70,000 grey images ``(1, 28, 28)`` of handwritten digits (LeCun et al., 1998).

    The arguments are those of ``ImageDataModule``.
    """

    paper = Paper("lecun1998mnist")
    sample_shape = (1, 28, 28)
    num_classes = 10
    mean = (0.1307,)
    std = (0.3081,)
    folder = "MNIST/raw"
    of_torchvision = "MNIST"

    def _samples(self, dataset: Any) -> TensorSamples:
        return TensorSamples(
            dataset.data.unsqueeze(1), dataset.targets, self.scale, self.mean, self.std
        )


class FashionMNIST(MNIST):
    """70,000 grey images ``(1, 28, 28)`` of ten kinds of clothing (Xiao et al., 2017).

    The arguments are those of ``ImageDataModule``.
    """

    paper = Paper("xiao2017fashion")
    mean = (0.2860,)
    std = (0.3530,)
    folder = "FashionMNIST/raw"
    of_torchvision = "FashionMNIST"


class CIFAR10(ImageDataModule):
    """60,000 colour images ``(3, 32, 32)`` of ten classes (Krizhevsky, 2009).

    The arguments are those of ``ImageDataModule``.
    """

    paper = Paper("krizhevsky2009cifar")
    sample_shape = (3, 32, 32)
    num_classes = 10
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    crop = CropFlip(padding=4, flip=True)
    augment_by_default = True
    folder = "cifar-10-batches-py"
    of_torchvision = "CIFAR10"

    def _samples(self, dataset: Any) -> TensorSamples:
        images = torch.from_numpy(dataset.data.transpose(0, 3, 1, 2).copy())  # channels first
        return TensorSamples(images, dataset.targets, self.scale, self.mean, self.std)


class CIFAR100(CIFAR10):
    """60,000 colour images ``(3, 32, 32)`` of a hundred classes (Krizhevsky, 2009).

    The arguments are those of ``ImageDataModule``.
    """

    num_classes = 100
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
    folder = "cifar-100-python"
    of_torchvision = "CIFAR100"


class SVHN(ImageDataModule):
    """99,289 colour images ``(3, 32, 32)`` of house numbers (Netzer et al., 2011).

    The arguments are those of ``ImageDataModule``.
    """

    paper = Paper("netzer2011svhn")
    sample_shape = (3, 32, 32)
    num_classes = 10
    mean = (0.4377, 0.4438, 0.4728)
    std = (0.1980, 0.2010, 0.1970)

    def _open(self, train: bool, download: bool = False) -> Any:
        from torchvision.datasets import SVHN

        return SVHN(str(self.root), split="train" if train else "test", download=download)

    def _samples(self, dataset: Any) -> TensorSamples:
        return TensorSamples(
            np.ascontiguousarray(dataset.data), dataset.labels, self.scale, self.mean, self.std
        )


class Digits(FederatedDataModule):
    """1,797 grey images ``(1, 8, 8)`` of ten digits, with levels 0 to 16 (Alpaydin & Kaynak, 1998).

    The test set is a fifth of each class, the same for every seed. ``root`` and ``download`` are
    not needed: the images come with scikit-learn. ``augment``: random crops with padding 1, or
    names as in ``FederatedDataModule``. The other arguments are those of ``MNIST``.
    """

    paper = Paper("alpaydin1998digits")
    has_test_set = True
    default_clients = 10
    sample_shape = (1, 8, 8)
    num_classes = 10
    mean = (0.3053,)
    std = (0.3760,)

    def __init__(
        self,
        root: str | Path = "data",
        augment: bool | list[str | dict[str, Any]] = False,
        download: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(augment=None if isinstance(augment, bool) else augment, **arguments)
        if augment is True:
            self.augmentation = CropFlip(padding=1, flip=False)

    def load(self) -> None:
        pixels, y = _table()
        x = pixels.reshape(-1, *self.sample_shape)
        test = np.zeros(len(y), dtype=bool)
        for label in range(10):
            members = generator(0, "digits-test", label).permutation(np.flatnonzero(y == label))
            test[members[: round(len(members) / 5)]] = True
        self.train_set = TensorSamples(x[~test], y[~test], 16.0, self.mean, self.std)
        self.test_set = TensorSamples(x[test], y[test], 16.0, self.mean, self.std)


class MedMNIST(FederatedDataModule):
    """The 2-d sets of MedMNIST (Yang et al., 2023), such as PathMNIST, by their file.

    x are pictures ``(1 or 3, size, size)``, (pixel / 255 − 0.5) / 0.5. y are classes; ChestMNIST's
    are whole numbers ``(14,)``, one per finding, for a learner of your own.

    Args:
        path: the file, such as ``pathmnist.npz`` or ``pathmnist_64.npz``.
    """

    paper = Paper("yang2023medmnist")
    default_clients = 100
    mean = (0.5,)
    std = (0.5,)

    def __init__(self, path: str | Path, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.path = Path(path).expanduser()

    @classmethod
    def shape_of_samples(cls, **arguments: Any) -> tuple[int, ...] | None:
        """Return ``(channels, size, size)``."""
        pictures, _ = cls(arguments["path"])._arrays("val") if "path" in arguments else (None, None)
        return None if pictures is None else pictures.shape[1:]

    @classmethod
    def classes_of_samples(cls, **arguments: Any) -> int | None:
        """Return the number of classes; None with several labels per picture."""
        labels = cls(arguments["path"])._arrays("train")[1] if "path" in arguments else None
        return None if labels is None or labels.shape[1:] != (1,) else int(labels.max()) + 1

    def load(self) -> None:
        sides = {}
        for split in ("train", "val", "test"):
            pictures, labels = self._arrays(split)
            of = pictures.shape[1]
            self.mean, self.std = (0.5,) * of, (0.5,) * of
            sides[split] = TensorSamples(pictures, labels, 255.0, self.mean, self.std)
        self.train_set, self.val_set, self.test_set = sides.values()

    def _arrays(self, split: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return a split's pictures ``(N, channels, size, size)`` and labels ``(N, k)``."""
        with (
            refused(
                f"data.path is {str(self.path)!r}, which cannot be read as a file of MedMNIST",
                "Give the .npz of one of its 2-d sets, such as pathmnist.npz.",
            ),
            np.load(self.path, allow_pickle=False) as file,
        ):
            pictures, labels = file[f"{split}_images"], file[f"{split}_labels"]
        if pictures.ndim == 3:
            pictures = pictures[..., None]
        if pictures.ndim != 4 or pictures.shape[3] not in (1, 3):
            raise UserError(
                f"data.path is {str(self.path)!r}, whose pictures have the shape "
                f"{pictures.shape[1:]}: give a 2-d set of MedMNIST."
            )
        return np.ascontiguousarray(pictures.transpose(0, 3, 1, 2)), labels


def _table() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the 64 levels of each image, and the digits.

    The digits are read from scikit-learn's file, because importing scikit-learn takes as long as a
    short run.
    """
    found = find_spec("sklearn")
    assert found is not None and found.submodule_search_locations, "scikit-learn is required"
    (folder, *_) = found.submodule_search_locations
    table = np.loadtxt(Path(folder, "datasets", "data", "digits.csv.gz"), delimiter=",")
    return table[:, :-1].astype(np.uint8), table[:, -1].astype(int)
