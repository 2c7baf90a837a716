"""Pictures in folders by domain; lists; Digits-5; what is damaged is refused by file."""

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
    again = FromFolders(domains, in_memory=False)
    kept = FromFolders(domains, in_memory=True)
    for one, other in zip(samples(again, 0), samples(kept, 0), strict=True):
        assert torch.equal(one[0], other[0])
    small = FromFolders(domains, image_size=[3, 4], mode="L")
    assert samples(small, 0)[0][0].shape == (1, 3, 4)


def test_the_picture_of_the_partition_names_the_classes(domains: Path) -> None:
    axes = FromFolders(domains).plot_partition().axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["cat", "dog"]


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
    with pytest.raises(UserError, match=r"art_train\.txt' names 'art/cat/9\.png' in line 2"):
        FromFolders(domains).setup()
    (domains / "splits" / "art_train.txt").write_text("art/cat/1.png cat\n")
    with pytest.raises(UserError, match=r"art_train\.txt' has .* in line 1"):
        FromFolders(domains).setup()


def test_lists_that_number_classes_otherwise_are_refused(domains: Path) -> None:
    def lists(domain: str, cat: int, dog: int, test: str = "") -> None:
        rows = [f"{domain}/cat/{i}.png {cat}\n{domain}/dog/{i}.png {dog}" for i in (1, 2)]
        (domains / f"{domain}_train.txt").write_text("\n".join(rows))
        (domains / f"{domain}_test.txt").write_text(test)

    lists("art", 0, 1)
    lists("webcam", 1, 0)
    says = r"'webcam' give the folder 'cat' the label 1, and those of 'art' the label 0"
    with pytest.raises(UserError, match=says):
        FromFolders(domains, layout="lists").setup()
    lists("webcam", 0, 1, "webcam/dog/4.png 0")
    with pytest.raises(UserError, match="'webcam' give the folder 'dog' the label 0"):
        FromFolders(domains, layout="lists").setup()
    lists("webcam", 0, 1, "webcam/dog/4.png 1")
    assert FromFolders(domains, layout="lists").num_clients == 2
    # Folders that are not classes: one label in two of them.
    lists("webcam", 1, 1)
    assert FromFolders(domains, layout="lists", missing="allow").num_clients == 2


def test_pictures_that_are_trained_and_tested_on_are_told(domains: Path) -> None:
    (domains / "art_train.txt").write_text("art/cat/1.png 0\nart/dog/1.png 1\n")
    (domains / "art_test.txt").write_text("art/cat/1.png 0\nart/dog/2.png 1\n")
    with pytest.warns(UserWarning, match="1 pictures of the domain 'art' are in its training list"):
        FromFolders(domains, layout="lists").setup()


def test_what_is_damaged_is_refused_by_file(domains: Path) -> None:
    for file in (domains / "webcam" / "dog").iterdir():
        file.rename(domains / "webcam" / "cat" / f"d{file.name}")
    with pytest.raises(UserError, match=r"domain 'webcam' has no pictures of dog.*missing=allow"):
        FromFolders(domains).setup()
    assert FromFolders(domains, missing="allow").num_clients == 2
    broken = domains / "art" / "cat" / "2.png"
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(UserError, match=r"cat/2\.png' cannot be read"):
        FromFolders(domains, missing="allow", check=True).setup()
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
    with pytest.raises(UserError, match=r"usps_28x28\.mat' of Digits-5 is not there"):
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


@pytest.mark.parametrize("classes", [None, ["3", "0"], ["0", "3", "5"]])
def test_digits_5_of_some_classes(classes: list[str] | None, tmp_path: Path) -> None:
    """Files in which digits are lacking: in one domain, or in all."""
    pixels = np.arange(2 * 28 * 28).reshape(2, 1, 28, 28) % 7 / 7
    colour = np.arange(2 * 32 * 32 * 3).reshape(32, 32, 3, 2).astype(np.uint8)
    for side in ("train", "test"):
        both = {"X": colour, "y": np.array([[3], [10]])}
        savemat(tmp_path / f"svhn_{side}_32x32.mat", both)
    cells = np.empty((2, 2), object)
    cells[0] = cells[1] = [pixels, np.array([3, 5])]
    savemat(tmp_path / "usps_28x28.mat", {"dataset": cells})
    given: dict[str, Any] = {"layout": "digits5", "domains": ["usps", "svhn"], "image_size": 8}
    with pytest.raises(UserError, match=r"domain 'usps' has no pictures of 0.*data\.classes"):
        FromFolders(tmp_path, classes=classes, **given).setup()
    only = FromFolders(tmp_path, classes=["3"], **given)
    assert only.num_classes == 1 and only.client_sizes().tolist() == [1, 1]
    data = FromFolders(tmp_path, classes=classes, missing="allow", **given)
    data.setup()
    names = classes or list(map(str, range(10)))
    found: Any = [[data.class_names[y] for _, y in data.client_dataset(i)] for i in (0, 1)]
    assert list(data.class_names) == names == list(data.class_names)
    assert found == [[name for name in own if name in names] for own in (["3", "5"], ["3", "0"])]
    assert list(data.client_names) == ["usps", "svhn"]


def lists(path: Path, text: bytes) -> Path:
    for name in ("cat", "dog"):
        (path / "art" / name).mkdir(parents=True)
        Image.new("RGB", (2, 2)).save(path / "art" / name / "0.png")
    (path / "art_train.txt").write_bytes(text)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"art/cat/0.png 0\nart/dog/0.png 1700000000000\n", r"label 1700000000000 in line 2"),
        (b"art/cat/0.png 0\nart/dog/0.png " + b"9" * 5000, r"label 9{40} in line 2"),
        (b"art/cat/0.png 0\nart/d\xf6g/0.png 1\n", "not in UTF-8.* at byte 21"),
    ],
)
def test_a_list_that_is_odd_is_refused_by_its_place(
    text: bytes, words: str, tmp_path: Path
) -> None:
    """A name for each class up to such a label would take the machine's memory."""
    with pytest.raises(UserError, match=rf"art_train\.txt' .*{words}"):
        FromFolders(lists(tmp_path, text)).setup()


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    data = FromFolders(lists(tmp_path, b"\xef\xbb\xbfart/cat/0.png 0\nart/dog/0.png 1\n"))
    assert data.num_classes == 2


def test_lists_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "art" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match=r"layout is 'lists', and .* no lists .*layout=folders"):
        FromFolders(tmp_path, layout="lists", leave_out=["art"]).setup()


@pytest.mark.parametrize("limit", [[1], [1, 2, 3]])
def test_a_limit_has_two_numbers(limit: list[int]) -> None:
    with pytest.raises(UserError, match=r"data\.limit is \[1.*give two numbers"):
        FromFolders("anywhere", limit=limit)
