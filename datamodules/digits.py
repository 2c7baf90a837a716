"""scikit-learn's bundled 8-by-8 digits: real images that need no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.datamodules.augment import CropFlip
from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.samples import TensorSamples
from fl_lightning.sampling import generator


class Digits(FederatedDataModule):
    """1,797 grey images ``(1, 8, 8)`` of ten digits, with levels 0 to 16 (Alpaydin & Kaynak, 1998).

    A fifth of each class, the same whatever the seed, is the test set. ``root`` and ``download``
    are not needed: the images come with scikit-learn. ``augment``: random crops with padding 1. All
    other arguments as for ``MNIST``.
    """

    default_clients = 10
    sample_shape = (1, 8, 8)
    num_classes = 10

    def __init__(
        self,
        root: str | Path = "data",
        augment: bool = False,
        download: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        if augment:
            self.augmentation = CropFlip(padding=1, flip=False)

    def load(self) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        x = found.images.astype(np.uint8)[:, None]
        y = found.target
        test = np.zeros(len(y), dtype=bool)
        for label in range(10):
            members = generator(0, "digits-test", label).permutation(np.flatnonzero(y == label))
            test[members[: round(len(members) / 5)]] = True
        self.train_set = TensorSamples(x[~test], y[~test], 16.0, (0.3053,), (0.3760,))
        self.test_set = TensorSamples(x[test], y[test], 16.0, (0.3053,), (0.3760,))
