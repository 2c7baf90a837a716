"""scikit-learn's bundled 8-by-8 digits: real images that need no download."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.crop_flip import CropFlip
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.introspection.papers import Paper
from fl_lightning.sampling import generator


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


def _table() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the 64 levels of each image, and the digits.

    The digits are read from scikit-learn's file, because importing scikit-learn takes as long as a
    short run.
    """
    found = find_spec("sklearn")
    folders = list(found.submodule_search_locations or []) if found is not None else []
    paths = [Path(folder, "datasets", "data", "digits.csv.gz") for folder in folders]
    for path in paths:
        if path.is_file():
            with gzip.open(path, "rt") as file:
                table = np.loadtxt(file, delimiter=",")
            return table[:, :-1].astype(np.uint8), table[:, -1].astype(int)
    # Some versions of scikit-learn keep the file elsewhere.
    from sklearn.datasets import load_digits

    data, target = load_digits(return_X_y=True)
    return data.astype(np.uint8), target
