"""Pictures in folders by domain; lists; Digits-5; modes; what is damaged is refused by file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from fl_lightning import UserError
from fl_lightning.datamodules import DirichletByClass, FromFolders

SIZE = (6, 5)


def picture(path: Path, level: int, size: tuple[int, int] = SIZE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = (np.arange(size[0] * size[1] * 3) + level).astype(np.uint8)
    Image.fromarray(pixels.reshape(size[1], size[0], 3)).save(path)


@pytest.fixture
def domains(tmp_path: Path) -> Path:
    level = 0
    for domain in ("webcam", "art"):
        for name in ("dog", "cat"):
            for i in range(5):
                picture(tmp_path / domain / name / f"{i}.png", level)
                level += 1
    (tmp_path / "art" / "cat" / "notes.txt").write_text("no picture")
    (tmp_path / "art" / "cat" / ".hidden.png").write_text("no picture")
    return tmp_path


def samples(data: FromFolders, client: int) -> list[Any]:
    found: Any = data.client_dataset(client)
    return [found[i] for i in range(len(found))]


def test_a_domain_is_a_client_and_pictures_are_read_back(domains: Path) -> None:
    data = FromFolders(domains, mean=[0.5, 0.5, 0.5], std=[0.5, 0.25, 0.5])
    assert data.num_clients == 2 and list(data.client_names) == ["art", "webcam"]
    assert list(data.class_names) == ["cat", "dog"] and data.num_classes == 2
    assert list(data.client_domains) == ["art", "webcam"]
    own = samples(data, 1)
    assert [y for _, y in own] == [0] * 5 + [1] * 5
    with Image.open(domains / "webcam" / "dog" / "3.png") as image:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    expected = (pixels - 0.5) / torch.tensor([0.5, 0.25, 0.5]).view(3, 1, 1)
    assert torch.equal(own[8][0], expected)
    assert data.card()["label map"] == "0 = cat, 1 = dog"
    axes = data.plot_partition().axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["cat", "dog"]
    again = FromFolders(domains, in_memory=False)
    kept = FromFolders(domains, in_memory=True)
    for one, other in zip(samples(again, 0), samples(kept, 0), strict=True):
        assert torch.equal(one[0], other[0])
    small = FromFolders(domains, image_size=[3, 4], mode="L")
    assert samples(small, 0)[0][0].shape == (1, 3, 4)


def test_classes_and_domains_may_be_named(domains: Path) -> None:
    data = FromFolders(domains, domains=["webcam"], classes=["dog", "cat"])
    assert data.num_clients == 1 and list(data.class_names) == ["dog", "cat"]
    assert [y for _, y in samples(data, 0)] == [1] * 5 + [0] * 5
    with pytest.raises(UserError, match=r"data\.domains has 'webca'.*Did you mean 'webcam'"):
        FromFolders(domains, domains=["webca"]).setup()


def test_a_share_of_each_domain_is_its_clients_test_set(domains: Path) -> None:
    data = FromFolders(domains, test=0.4)
    assert data.client_sizes().tolist() == [6, 6]
    assert [len(data.client_test_indices(i)) for i in range(2)] == [4, 4]
    assert len(data.test_set or ()) == 8
    labels = [int(batch[1].sum()) for batch, _ in data.full_batches(0, what="test", size=100)]
    assert labels == [2]
    # The same files, whatever the seed.
    assert FromFolders(domains, test=0.4, seed=8).partition_hash == data.partition_hash


def test_a_domain_that_is_left_out_is_the_global_test_set(domains: Path) -> None:
    data = FromFolders(domains, test=0.4, leave_out=["art"])
    assert data.num_clients == 1 and list(data.client_names) == ["webcam"]
    assert len(data.test_set or ()) == 10 and len(data.client_test_indices(0)) == 4
    with pytest.raises(UserError, match=r"data\.leave_out has all domains"):
        FromFolders(domains, leave_out=["art", "webcam"]).setup()


def test_a_domain_is_dealt_to_several_clients(domains: Path) -> None:
    data = FromFolders(domains, clients_per_domain=2, test=0.2, seed=3)
    assert data.num_clients == 4
    assert list(data.client_names) == ["art/0", "art/1", "webcam/0", "webcam/1"]
    assert list(data.client_domains) == ["art", "art", "webcam", "webcam"]
    assert [len(data.client_test_indices(i)) for i in range(4)] == [2] * 4
    split = FromFolders(domains, partition=DirichletByClass(5.0, min_samples=1), num_clients=3)
    assert split.num_clients == 3 and list(split.client_domains) == []
    assert list(split.client_names) == []


def test_lists_name_files_and_labels(domains: Path) -> None:
    (domains / "splits").mkdir()
    for domain in ("art", "webcam"):
        rows = [f"{domain}/cat/{i}.png 0" for i in (1, 2)]
        rows += [f"{domain}/dog/{i}.png 1" for i in (1, 2)]
        (domains / "splits" / f"{domain}_train.txt").write_text("\n".join(rows) + "\n")
        (domains / "splits" / f"{domain}_test.txt").write_text(f"{domain}/dog/4.png 1\n")
    data = FromFolders(domains)
    assert data.client_sizes().tolist() == [4, 4] and len(data.test_set or ()) == 2
    assert [len(data.client_test_indices(i)) for i in range(2)] == [1, 1]
    assert list(data.class_names) == ["cat", "dog"]
    (domains / "splits" / "art_train.txt").write_text("art/cat/1.png 0\nart/cat/9.png 0\n")
    with pytest.raises(UserError, match=r"art_train\.txt' has 'art/cat/9\.png 0' in line 2"):
        FromFolders(domains).setup()
    for label in ("cat", "1700000000000"):
        (domains / "splits" / "art_train.txt").write_text(f"art/cat/1.png {label}\n")
        with pytest.raises(UserError, match=r"art_train\.txt' has .* in line 1"):
            FromFolders(domains).setup()
    with pytest.raises(UserError, match=r"layout is 'lists', and .* no lists .*layout=folders"):
        FromFolders(domains / "art", layout="lists").setup()


def test_what_is_damaged_is_refused_by_file(domains: Path) -> None:
    for file in (domains / "webcam" / "dog").iterdir():
        file.rename(domains / "webcam" / "cat" / f"d{file.name}")
    with pytest.raises(UserError, match=r"domain 'webcam' has no pictures of dog.*missing=allow"):
        FromFolders(domains).setup()
    assert FromFolders(domains, missing="allow").num_clients == 2
    broken = domains / "art" / "cat" / "2.png"
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(UserError, match=r"cat/2\.png' cannot be read"):
        FromFolders(domains, missing="allow", in_memory=True).setup()
    picture(broken, 3, (9, 9))
    with pytest.raises(UserError, match=r"cat/2\.png' has the shape .*cat/0\.png' has"):
        FromFolders(domains, missing="allow").setup()
    with pytest.raises(UserError, match="which is not a folder"):
        FromFolders(domains / "gone").setup()


def test_a_class_that_a_limit_takes_away_is_named(domains: Path) -> None:
    with pytest.raises(UserError, match="the domain 'art' has no pictures of dog"):
        FromFolders(domains, limit=[5, 5]).setup()
    assert FromFolders(domains, limit=[6, 5]).client_sizes().tolist() == [6, 6]


def test_digits_5(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    one_hot = np.eye(10)[[3, 0]]
    grey = draw.integers(0, 255, (2, 32, 32)).astype(np.uint8)
    colour = draw.integers(0, 255, (2, 32, 32, 3)).astype(np.uint8)
    labels = {"label_train": one_hot, "label_test": one_hot}
    savemat(tmp_path / "mnist_data.mat", {"train_32": grey, "test_32": grey, **labels})
    savemat(tmp_path / "mnistm_with_label.mat", {"train": colour, "test": colour, **labels})
    for name in ("svhn", "synth"):
        for side in ("train", "test"):
            content = {"X": colour.transpose(1, 2, 3, 0), "y": np.array([[10], [4]])}
            savemat(tmp_path / f"{name}_{side}_32x32.mat", content)
    cells = np.empty((2, 2), dtype=object)
    for row in cells:
        row[0] = draw.random((2, 1, 28, 28))
        row[1] = np.array([[1], [10]])
    savemat(tmp_path / "usps_28x28.mat", {"dataset": cells})
    with pytest.raises(UserError, match=r"has the shape .* give data\.image_size"):
        FromFolders(tmp_path, missing="allow").setup()
    data = FromFolders(tmp_path, image_size=32, missing="allow", limit=[1, 2])
    assert data.client_sizes().tolist() == [1] * 5
    assert [len(data.client_test_indices(i)) for i in range(5)] == [2] * 5
    assert samples(data, 4)[0][0].shape == (3, 32, 32)
    four = FromFolders(tmp_path, domains=["mnist", "mnistm", "svhn", "syn"], missing="allow")
    assert four.num_clients == 4 and four.num_classes == 10
    assert [y for _, y in samples(four, 0)] == [3, 0]
    assert [y for _, y in samples(four, 2)] == [0, 4]
    (x, _) = samples(four, 0)[1]
    assert torch.equal(x[0], x[2]) and torch.equal(x[1] * 255, torch.from_numpy(grey[1]).float())
    usps = FromFolders(tmp_path, "digits5", domains=["usps"], missing="allow")
    (x, y) = samples(usps, 0)[1]
    assert x.shape == (3, 28, 28) and y == 0
    expected = np.floor(cells[0, 0][1, 0] * 255 + 0.5).astype(np.float32)
    assert torch.equal((x[0] * 255).round(), torch.from_numpy(expected))
    (tmp_path / "usps_28x28.mat").unlink()
    with pytest.raises(UserError, match=r"usps_28x28\.mat' of Digits-5 cannot be read"):
        FromFolders(tmp_path).setup()


def test_another_seed_deals_a_domain_anew(domains: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = FromFolders(domains, clients_per_domain=2)
    hashes = []
    for seed in ("0", "1"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        data.setup()
        hashes.append(data.partition_hash)
    assert hashes[0] != hashes[1]
    assert hashes[1] == FromFolders(domains, clients_per_domain=2, seed=1).partition_hash


HALF = np.repeat(np.array([[0, 255]], np.uint8), 4, axis=0)


def pets(path: Path, picture: Image.Image) -> Path:
    for name in ("cat", "dog"):
        (path / "art" / name).mkdir(parents=True)
        picture.save(path / "art" / name / "0.png")
    return path


def first_of(data: Any) -> torch.Tensor:
    data.setup()
    (x, _) = data.client_dataset(0)[0]
    return x  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_each_mode_gives_its_channels(mode: str, tmp_path: Path) -> None:
    pets(tmp_path, Image.fromarray(HALF).convert("RGB"))
    x = first_of(FromFolders(tmp_path, mode=mode))  # type: ignore[arg-type]
    assert x.shape == FromFolders.shape_of_samples(path=str(tmp_path), mode=mode)
    expected = np.asarray(Image.fromarray(HALF).convert("RGB").convert(mode), np.float64)
    expected = expected / (1 if mode == "1" else 255)
    np.testing.assert_allclose(x.double().numpy().T, np.atleast_3d(expected).transpose(1, 0, 2))


@pytest.mark.parametrize("stored", ["1", "L"])
def test_pictures_of_two_values_are_zeros_and_ones(stored: str, tmp_path: Path) -> None:
    pets(tmp_path, Image.fromarray(HALF).convert(stored))
    x = first_of(FromFolders(tmp_path, mode="1"))
    assert x.tolist() == [[[0, 1]] * 4]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"image_size": 2.5}, "image_size=2.5"),
        ({"std": [0.0]}, "std=.*above 0"),
        ({"limit": [1]}, "limit="),
        ({"mode": "rgb"}, "mode='rgb' is not accepted.*'RGB'"),
        ({"mode": "L", "mean": [0.5, 0.5, 0.5]}, "mean is .*a picture has 1 channels"),
        ({"std": [0.5, 0.5]}, "std is .*a picture has 3 channels"),
        ({"classes": ["cat", "cat"]}, "classes names 'cat' twice"),
        ({"domains": ["art", "art"]}, "domains names 'art' twice"),
    ],
)
def test_options_that_do_not_fit_the_pictures_are_refused(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    pets(tmp_path, Image.fromarray(HALF))
    with pytest.raises(UserError, match=words):
        first_of(FromFolders(tmp_path, **given))


@pytest.mark.parametrize(("mode", "name"), [("I;16", "deep"), ("RGB", "link")])
def test_pictures_of_16_bits_and_links_to_nothing_are_refused(
    mode: str, name: str, tmp_path: Path
) -> None:
    pets(tmp_path, Image.new(mode, (4, 4), 5))
    (tmp_path / "art" / "dog" / "link.png").symlink_to(tmp_path / "gone.png")
    words = {"deep": "A picture of the mode 'I.*8 bits per", "link": "link.png' cannot be read"}
    with pytest.raises(UserError, match=words[name]):
        first_of(FromFolders(tmp_path, mode="L", in_memory=True))
