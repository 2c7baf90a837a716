"""UCI HAR: six activities of thirty people, from a phone's motion sensors; each person is a
client.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.datamodules.partitions.partition import ByGroup
from fl_lightning.errors import UserError
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
        augment: has to be False, because there is no augmentation of signals.

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
        augment: bool = False,
        download: bool = False,
        features: Literal["signals", "features"] = "signals",
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        if augment:
            raise UserError(
                "HumanActivity's augment is true, but there is no augmentation of signals: give "
                "false."
            )
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

        try:
            with tempfile.TemporaryDirectory() as aside:
                outer, _ = urllib.request.urlretrieve(URL, Path(aside) / "outer.zip")
                with zipfile.ZipFile(outer) as outside, outside.open(f"{FOLDER}.zip") as inner:
                    zipfile.ZipFile(inner).extractall(self.root)
        except (OSError, zipfile.BadZipFile, KeyError) as error:
            raise UserError(
                "data.download is true, but HumanActivity could not be downloaded to "
                f"{str(self.root)!r} from {URL}: {error}. Put the folder {FOLDER!r} there by "
                "hand, or try again."
            ) from error

    def load(self) -> None:
        if not (self._folder / "train").is_dir():
            raise UserError(
                f"data.root is {str(self.root)!r}, but {str(self._folder / 'train')!r} is not "
                f"there: HumanActivity is expected as {FOLDER!r} with train/ and test/, each with "
                "y_*.txt, subject_*.txt and Inertial Signals/. Give the right --data.root, or "
                "--data.download true to get the files."
            )
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

    def _part(self, part: str) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs, labels from 0, and subjects of ``"train"`` or ``"test"``, one per
        window.
        """
        folder = self._folder / part
        y = _read(folder / f"y_{part}.txt", lambda f: np.loadtxt(f, np.int64, ndmin=1)) - 1
        subjects = _read(folder / f"subject_{part}.txt", lambda f: np.loadtxt(f, np.int64, ndmin=1))
        compact = folder / "Inertial Signals" / f"signals_{part}.npy"
        if self.features == "features":
            first = folder / f"X_{part}.txt"
            x = _read(first, lambda f: np.loadtxt(f, np.float32, ndmin=2))
            shape: tuple[int, ...] = (561,)
        else:
            shape = (9, 128)
            if compact.is_file():
                first = compact
                x = _read(compact, lambda f: np.load(f, allow_pickle=False))
            else:
                first = folder / "Inertial Signals" / f"{CHANNELS[0]}_{part}.txt"
                texts = [
                    folder / "Inertial Signals" / f"{channel}_{part}.txt" for channel in CHANNELS
                ]
                signals = [
                    _read(text, lambda f: np.loadtxt(f, np.float32, ndmin=2)) for text in texts
                ]
                lengths = [signal.shape for signal in signals]
                wrong = [t for t, s in zip(texts, lengths, strict=True) if s != (len(y), 128)]
                if wrong:
                    raise _damaged(wrong[0], f"not {len(y)} lines of 128 numbers")
                x = np.stack(signals, axis=1)
        if x.shape != (len(y), *shape):
            raise _damaged(first, f"shape {x.shape} instead of {(len(y), *shape)}")
        if len(subjects) != len(y):
            raise _damaged(
                folder / f"subject_{part}.txt", f"{len(subjects)} lines for {len(y)} windows"
            )
        if y.min() < 0 or y.max() > 5:
            raise _damaged(folder / f"y_{part}.txt", "labels other than 1 to 6")
        return x.astype(np.float32, copy=False), y, subjects


def _read(path: Path, how: Callable[[Path], Any]) -> Any:
    try:
        return how(path)
    except FileNotFoundError:
        raise UserError(
            f"The data file {str(path)!r} is not there: HumanActivity needs it. Give the right "
            "--data.root, or --data.download true to get the files (features='features' needs "
            "X_train.txt and X_test.txt)."
        ) from None
    except Exception as error:  # NumPy raises many kinds of errors for damaged files
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"The data file {str(path)!r} is damaged ({reason[:120]}): delete it and get it again."
    )
