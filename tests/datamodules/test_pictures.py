"""Pictures become numbers in [0, 1], whatever their mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning import UserError
from fl_lightning.datamodules import FromFolders, FromHuggingFace

HALF = np.repeat(np.array([[0, 255]], np.uint8), 4, axis=0)


def folders(path: Path, picture: Image.Image) -> Path:
    for name in ("cat", "dog"):
        (path / "art" / name).mkdir(parents=True)
        picture.save(path / "art" / name / "0.png")
    return path


def first(data: Any) -> torch.Tensor:
    data.setup()
    (x, _) = data.client_dataset(0)[0]
    return x  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_each_mode_gives_its_channels(mode: str, tmp_path: Path) -> None:
    folders(tmp_path, Image.fromarray(HALF).convert("RGB"))
    x = first(FromFolders(tmp_path, mode=mode))  # type: ignore[arg-type]
    assert x.shape == FromFolders.shape_of_samples(path=str(tmp_path), mode=mode)
    expected = np.asarray(Image.fromarray(HALF).convert("RGB").convert(mode), np.float64)
    expected = expected / (1 if mode == "1" else 255)
    np.testing.assert_allclose(x.double().numpy().T, np.atleast_3d(expected).transpose(1, 0, 2))


@pytest.mark.parametrize("stored", ["1", "L"])
def test_pictures_of_two_values_are_zeros_and_ones(stored: str, tmp_path: Path) -> None:
    folders(tmp_path, Image.fromarray(HALF).convert(stored))
    x = first(FromFolders(tmp_path, mode="1"))
    assert x.tolist() == [[[0, 1]] * 4]


@pytest.mark.parametrize("stored", ["1", "L"])
def test_rows_with_pictures_of_two_values(stored: str) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"x": datasets.Image(), "y": datasets.Value("int64")})
    picture = Image.fromarray(HALF).convert(stored)
    rows = datasets.Dataset.from_dict({"x": [picture] * 2, "y": [0, 1]}, features=features)
    x = first(FromHuggingFace(rows, "x", "y", mode="1", num_clients=1))
    assert x.tolist() == [[[0, 1]] * 4]


def test_a_mode_that_pil_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"mode='rgb' is not accepted.*'RGB'"):
        FromFolders("anywhere", mode="rgb")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"image_size": 2.5}, "image_size is 2.5"),
        ({"mean": [float("nan")] * 3}, "mean is .nan"),
        ({"mode": "L", "mean": [0.5, 0.5, 0.5]}, "mean is .*a picture has 1 channels"),
        ({"std": [0.5, 0.5]}, "std is .*a picture has 3 channels"),
        ({"classes": ["cat", "cat"]}, "classes names 'cat' twice"),
        ({"domains": ["art", "art"]}, "domains names 'art' twice"),
    ],
)
def test_options_that_do_not_fit_the_pictures_are_refused(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folders(tmp_path, Image.fromarray(HALF))
    with pytest.raises(UserError, match=words):
        first(FromFolders(tmp_path, **given))


def test_a_share_that_holds_out_nothing_is_told(tmp_path: Path) -> None:
    folders(tmp_path, Image.fromarray(HALF))
    with pytest.warns(UserWarning, match=r"data.test=0.1 holds out none of the 2 files of 'art'"):
        first(FromFolders(tmp_path, test=0.1))
