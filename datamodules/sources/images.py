"""Image data sets through torchvision: MNIST, FashionMNIST, CIFAR10, CIFAR100, SVHN."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.crop_flip import CropFlip
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.errors import UserError
from fl_lightning.introspection.papers import Paper


class ImageDataModule(FederatedDataModule):
    """Base class of image data sets: uint8 in memory, normalised per channel, and augmented
    together.

    Args:
        root: the folder that holds the data set's own folder.
        augment: random crops (padding 4; with flips for CIFAR) of the training images; None: only
            for CIFAR. Or a mapping, ``{padding: 4, flip: true, probability: 1.0}``; keys that it
            leaves out have these values. Or names, ``[crop, flip, randaugment]``, as in
            ``FederatedDataModule``.
        download: get the files first if they are missing.
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
    files: Sequence[str] = ()

    def __init__(
        self,
        root: str | Path = "data",
        augment: bool | dict[str, Any] | list[str | dict[str, Any]] | None = None,
        download: bool = False,
        **arguments: Any,
    ) -> None:
        named = list(augment) if isinstance(augment, list | tuple) else None
        super().__init__(augment=named, **arguments)
        self.root = Path(root)
        self.download = download
        if isinstance(augment, dict):
            self.augmentation = CropFlip.of(augment)
        elif named is None and (self.augment_by_default if augment is None else augment):
            self.augmentation = self.crop

    def _open(self, train: bool, download: bool = False) -> Any:
        """The torchvision dataset."""
        raise NotImplementedError  # abstract: each torchvision class takes other arguments

    def _broken(self) -> str | None:
        """Return the first damaged file, or None."""
        raise NotImplementedError  # abstract: each dataset has its own files and checksums

    def _samples(self, dataset: Any) -> TensorSamples:
        return TensorSamples(dataset.data, dataset.targets, self.scale, self.mean, self.std)

    def prepare_data(self) -> None:
        if not self.download:
            return
        try:
            for train in (True, False):
                self._open(train, download=True)
        except Exception as error:  # the network and torchvision may raise anything
            reason = shorten(str(error), 300, placeholder=" …")
            raise UserError(
                f"data.download is true, but {type(self).__name__} could not be downloaded to "
                f"{str(self.root)!r}: {reason}. Put the files there by hand, or try again."
            ) from error

    def load(self) -> None:
        folder = self.root / self.folder
        missing = [name for name in self.files if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"data.root is {str(self.root)!r}, but {str(folder / missing[0])!r} is not there: "
                f"{type(self).__name__} is expected as "
                f"{self.folder + '/' if self.folder else ''}{{{', '.join(self.files)}}} in that "
                "folder. Give the right --data.root, or --data.download true to get the files."
            )
        try:
            self.train_set = self._samples(self._open(True))
            self.test_set = self._samples(self._open(False))
        except Exception as error:
            # torchvision, pickle and SciPy raise many kinds of errors for damaged files.
            name = self._broken()
            file = f"A data file in {str(folder)!r}"
            if name:
                file = f"The data file {str(folder / name)!r}"
            raise UserError(
                f"{file} is damaged ({' '.join(str(error).split())[:120]}): delete it and get it "
                "again, with --data.download true or by hand."
            ) from error


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
    files = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )

    def _open(self, train: bool, download: bool = False) -> Any:
        from torchvision.datasets import MNIST

        return MNIST(self.root, train=train, download=download)

    def _samples(self, dataset: Any) -> TensorSamples:
        if len(dataset.data) != len(dataset.targets):
            raise ValueError(f"{len(dataset.data)} images, {len(dataset.targets)} labels")
        return TensorSamples(
            dataset.data.unsqueeze(1), dataset.targets, self.scale, self.mean, self.std
        )

    def _broken(self) -> str | None:
        from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor

        for name in self.files:
            try:
                read_sn3_pascalvincent_tensor(str(self.root / self.folder / name))
            except Exception:  # the reader checks little, so it fails in many ways
                return name
        return None


class FashionMNIST(MNIST):
    """70,000 grey images ``(1, 28, 28)`` of ten kinds of clothing (Xiao et al., 2017).

    The arguments are those of ``ImageDataModule``.
    """

    paper = Paper("xiao2017fashion")
    mean = (0.2860,)
    std = (0.3530,)
    folder = "FashionMNIST/raw"

    def _open(self, train: bool, download: bool = False) -> Any:
        from torchvision.datasets import FashionMNIST

        return FashionMNIST(self.root, train=train, download=download)


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
    files = (*[f"data_batch_{i}" for i in range(1, 6)], "test_batch", "batches.meta")

    @staticmethod
    def _kind() -> Any:
        from torchvision.datasets import CIFAR10

        return CIFAR10

    def _open(self, train: bool, download: bool = False) -> Any:
        return self._kind()(self.root, train=train, download=download)

    def _samples(self, dataset: Any) -> TensorSamples:
        images = torch.from_numpy(dataset.data.transpose(0, 3, 1, 2).copy())  # channels first
        return TensorSamples(images, dataset.targets, self.scale, self.mean, self.std)

    def _broken(self) -> str | None:
        from torchvision.datasets.utils import check_integrity

        kind = self._kind()
        sums = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
        for name, md5 in sums:
            if not check_integrity(str(self.root / self.folder / name), md5):
                return str(name)
        return None


class CIFAR100(CIFAR10):
    """60,000 colour images ``(3, 32, 32)`` of a hundred classes (Krizhevsky, 2009).

    The arguments are those of ``ImageDataModule``.
    """

    num_classes = 100
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
    folder = "cifar-100-python"
    files = ("train", "test", "meta")

    @staticmethod
    def _kind() -> Any:
        from torchvision.datasets import CIFAR100

        return CIFAR100


class SVHN(ImageDataModule):
    """99,289 colour images ``(3, 32, 32)`` of house numbers (Netzer et al., 2011).

    The arguments are those of ``ImageDataModule``.
    """

    paper = Paper("netzer2011svhn")
    sample_shape = (3, 32, 32)
    num_classes = 10
    mean = (0.4377, 0.4438, 0.4728)
    std = (0.1980, 0.2010, 0.1970)
    files = ("train_32x32.mat", "test_32x32.mat")

    def _open(self, train: bool, download: bool = False) -> Any:
        from torchvision.datasets import SVHN

        return SVHN(str(self.root), split="train" if train else "test", download=download)

    def _samples(self, dataset: Any) -> TensorSamples:
        return TensorSamples(
            np.ascontiguousarray(dataset.data), dataset.labels, self.scale, self.mean, self.std
        )

    def _broken(self) -> str | None:
        from torchvision.datasets import SVHN
        from torchvision.datasets.utils import check_integrity

        for split in ("train", "test"):
            _, name, md5 = SVHN.split_list[split]
            if not check_integrity(str(self.root / name), md5):
                return str(name)
        return None
