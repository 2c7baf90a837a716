"""UCI HAR: six activities of thirty people, by a phone's sensors; a person is a client."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.datamodules.partitions.partition import ByGroup
from fl_lightning.introspection.papers import Paper

FOLDER = "UCI HAR Dataset"
URL = (
    "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip"
)
CHANNELS = ["body_acc_x", "body_acc_y", "body_acc_z", "body_gyro_x", "body_gyro_y", "body_gyro_z"]
CHANNELS += ["total_acc_x", "total_acc_y", "total_acc_z"]


class HumanActivity(FederatedDataModule):
    """7,352 training and 2,947 test windows (Anguita et al., 2013), labels 0 to 5.

    Each client is one subject, 21 in all.

    Args:
        root: the folder that holds ``UCI HAR Dataset``, or that folder itself.
        features: ``"signals"``: the nine inertial signals ``(9, 128)``, each normalised by the
            training set's mean and deviation, from ``signals_train.npy`` or the official text
            files; ``"features"``: the 561 computed features.

    The other arguments are those of ``MNIST``.
    """

    paper = Paper("anguita2013har")
    has_test_set = True
    default_clients = 21
    sample_shape = (9, 128)
    num_classes = 6
    default_partition = ByGroup()

    def __init__(
        self,
        root: str | Path = "data",
        download: bool = False,
        features: Literal["signals", "features"] = "signals",
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.root = Path(root)
        self.download = download
        self.features = features

    @classmethod
    def shape_of_samples(cls, **arguments: Any) -> tuple[int, ...]:
        return (561,) if arguments.get("features") == "features" else (9, 128)

    @property
    def _folder(self) -> Path:
        return self.root if (self.root / "train").is_dir() else self.root / FOLDER

    def prepare_data(self) -> None:
        if not self.download or (self._folder / "train").is_dir():
            return
        import urllib.request

        with (
            refused(
                "data.download is true, but HumanActivity could not be downloaded to "
                f"{str(self.root)!r} from {URL}",
                f"Put the folder {FOLDER!r} there by hand, or try again.",
            ),
            tempfile.TemporaryDirectory() as aside,
        ):
            outer, _ = urllib.request.urlretrieve(URL, Path(aside) / "outer.zip")
            with zipfile.ZipFile(outer) as outside, outside.open(f"{FOLDER}.zip") as inner:
                zipfile.ZipFile(inner).extractall(self.root)

    def load(self) -> None:
        with refused(
            f"data.root is {str(self.root)!r}, where HumanActivity is expected as {FOLDER!r} with "
            "train/ and test/, each with y_*.txt, subject_*.txt and Inertial Signals/ "
            "(features='features' needs X_*.txt), and a file is missing or damaged",
            "Give the right --data.root, or --data.download true to get the files.",
        ):
            x, y, subjects = self._part("train")
            x_test, y_test, _ = self._part("test")
        if self.features == "signals":
            mean = x.mean((0, 2), np.float64)
            std = x.std((0, 2), np.float64)
            x, x_test = (
                ((a - mean[:, None]) / std[:, None]).astype(np.float32) for a in (x, x_test)
            )
        self.groups = subjects
        self.train_set = TensorSamples(x, y)
        self.test_set = TensorSamples(x_test, y_test)

    @property
    def computed_from_samples(self) -> str:
        return "the mean and deviation of each channel" if self.features == "signals" else ""

    def _part(self, part: str) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs, labels from 0 and subjects of ``"train"`` or ``"test"``."""
        folder = self._folder / part
        signals = folder / "Inertial Signals"
        compact = signals / f"signals_{part}.npy"
        y = np.loadtxt(folder / f"y_{part}.txt", np.int64, ndmin=1) - 1
        subjects = np.loadtxt(folder / f"subject_{part}.txt", np.int64, ndmin=1)
        if self.features == "features":
            x = np.loadtxt(folder / f"X_{part}.txt", np.float32, ndmin=2)
        elif compact.is_file():
            x = np.load(compact, allow_pickle=False)
        else:
            texts = [signals / f"{channel}_{part}.txt" for channel in CHANNELS]
            x = np.stack([np.loadtxt(text, np.float32, ndmin=2) for text in texts], axis=1)
        if x.shape[1:] != self.shape_of_samples(features=self.features) or len(subjects) != len(y):
            raise ValueError(f"{part}: x of shape {x.shape}, {len(subjects)} subjects, {len(y)} y")
        return x.astype(np.float32, copy=False), y, subjects
