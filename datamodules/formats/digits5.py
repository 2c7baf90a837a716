"""Digits-5: five domains of digits in .mat files, as distributed by Peng et al. (2019)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.errors import UserError, suggest

DOMAINS = ["mnist", "mnistm", "svhn", "syn", "usps"]
# Training pictures and their classes, then test pictures and their classes.
Sides = tuple[list[Any], list[int], list[Any], list[int]]


def digits5(path: Path, domains: Sequence[str] | None) -> dict[str, Sides]:
    """Return the domains' pictures, uint8 ``(height, width, 3)``, and classes.

    Raises:
        UserError: a file does not exist, is damaged, or lacks an array.
    """
    found = {}
    for name in domains or DOMAINS:
        if name not in DOMAINS:
            raise UserError(
                f"data.domains has {name!r}, and Digits-5 has {', '.join(DOMAINS)}."
                + suggest(name, DOMAINS)
            )
        x, y, test_x, test_y = READ[name](path)
        for side_x, side_y in ((x, y), (test_x, test_y)):
            if len(side_x) != len(side_y):
                raise UserError(
                    f"The .mat files of {name!r} in {str(path)!r} have {len(side_x)} pictures and "
                    f"{len(side_y)} labels: copy them again."
                )
        sides = (list(coloured(x)), y.tolist(), list(coloured(test_x)), test_y.tolist())
        found[name] = sides
    return found


def coloured(x: NDArray[Any]) -> NDArray[np.uint8]:
    """Return pictures ``(N, H, W, 3)``; the channel of grey ones is repeated."""
    x = np.asarray(x)
    x = x[..., None] if x.ndim == 3 else x
    return np.broadcast_to(x, (*x.shape[:3], 3)).astype(np.uint8)


def arrays(path: Path, names: Sequence[str]) -> list[Any]:
    """Return arrays of a .mat file."""
    from scipy.io import loadmat

    try:
        content = loadmat(str(path))
    except FileNotFoundError:
        raise UserError(
            f"The file {str(path)!r} of Digits-5 is not there: put it there, or name the domains "
            "that are there by data.domains."
        ) from None
    except Exception as error:  # scipy raises many kinds of errors for damaged files
        raise UserError(
            f"The file {str(path)!r} cannot be read as .mat ({str(error)[:120]}): copy it again."
        ) from None
    for name in names:
        if name not in content:
            there = ", ".join(key for key in content if key[0] != "_")
            raise UserError(f"The file {str(path)!r} has no array {name!r}; it has {there}.")
    return [content[name] for name in names]


def classes(one_hot: Any) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.asarray(one_hot).argmax(axis=1)
    return found


def from_one(y: Any) -> NDArray[np.int64]:
    """Return classes from 0; in the file 0 is written as 10."""
    found: NDArray[np.int64] = np.asarray(y).ravel().astype(np.int64) % 10
    return found


Read = tuple[Any, NDArray[np.int64], Any, NDArray[np.int64]]


def mnist(path: Path) -> Read:
    names = ["train_32", "label_train", "test_32", "label_test"]
    x, y, test_x, test_y = arrays(path / "mnist_data.mat", names)
    return x, classes(y), test_x, classes(test_y)


def mnistm(path: Path) -> Read:
    names = ["train", "label_train", "test", "label_test"]
    x, y, test_x, test_y = arrays(path / "mnistm_with_label.mat", names)
    return x, classes(y), test_x, classes(test_y)


def street(name: str, path: Path) -> Read:
    """Read SVHN and the synthetic digits."""
    x, y = arrays(path / f"{name}_train_32x32.mat", ["X", "y"])
    test_x, test_y = arrays(path / f"{name}_test_32x32.mat", ["X", "y"])
    return x.transpose(3, 0, 1, 2), from_one(y), test_x.transpose(3, 0, 1, 2), from_one(test_y)


def usps(path: Path) -> Read:
    (cells,) = arrays(path / "usps_28x28.mat", ["dataset"])
    (x, y), (test_x, test_y) = cells
    sides = [np.floor(np.asarray(part)[:, 0] * 255 + 0.5).astype(np.uint8) for part in (x, test_x)]
    return sides[0], from_one(y), sides[1], from_one(test_y)


READ: dict[str, Callable[[Path], Read]] = {
    "mnist": mnist,
    "mnistm": mnistm,
    "svhn": lambda path: street("svhn", path),
    "syn": lambda path: street("synth", path),
    "usps": usps,
}
