"""The named data sets: real ones if they are at hand, false ones, damaged ones, generated ones."""

from __future__ import annotations

import shutil
import zipfile

import numpy as np
import pytest
import torch

from fl_lightning import UserError
from fl_lightning import datamodules as dm
from fl_lightning.datamodules.sources import human_activity
from fl_lightning.evaluation.client_tables import by_domain, over_domains, rows_of_domains
from fl_lightning.sampling import generator


@pytest.mark.parametrize(
    ("kind", "shape", "train", "test"),
    [
        (dm.MNIST, (1, 28, 28), 60_000, 10_000),
        (dm.FashionMNIST, (1, 28, 28), 60_000, 10_000),
        (dm.CIFAR10, (3, 32, 32), 50_000, 10_000),
        (dm.HumanActivity, (9, 128), 7_352, 2_947),
    ],
)
def test_real_data(real_data, kind, shape, train, test):
    options = {} if kind is dm.HumanActivity else {"augment": False, "partition": dm.Dirichlet(0.1)}
    data = kind(real_data, seed=0, **options)
    assert data.num_clients == (21 if kind is dm.HumanActivity else 100)
    sizes = data.client_sizes()
    assert sizes.sum() == train and data.num_classes == (6 if kind is dm.HumanActivity else 10)
    assert sum(len(y) for _, y in data.test_dataloader()) == test
    x = torch.cat([b[0] for b in data.val_dataloader()])
    assert x.shape == (test, *shape) and x.dtype == torch.float32
    axes = (0, 2) if kind is dm.HumanActivity else (0, 2, 3)
    assert x.mean(axes).abs().max() < 0.15 and (x.std(axes) - 1).abs().max() < 0.15
    batch, labels = next(data.client_batches(20, 0, 1))
    assert batch.shape == (50, *shape) and labels.dtype == torch.int64


def test_real_images_are_the_right_way_up(real_data):
    """The nearest class mean recognises them only if pixels and labels belong together."""
    for data, least in ((dm.MNIST(real_data), 0.8), (dm.CIFAR10(real_data, augment=False), 0.25)):
        data.setup()
        x, y = data.train_set.x[:20_000].float().flatten(1), data.train_set.y[:20_000]
        means = torch.stack([x[y == c].mean(0) for c in range(10)])
        test = data.test_set
        guess = torch.cdist(test.x.float().flatten(1), means).argmin(1)
        assert (guess == test.y).float().mean() > least


def test_digits_are_split_by_class_whatever_the_seed():
    one, other = dm.Digits(seed=0), dm.Digits(seed=1)
    one.setup(), other.setup()
    assert torch.equal(one.test_set.x, other.test_set.x) and one.train_set.x.max() == 16
    counts = np.bincount(one.test_set.labels), np.bincount(one.train_set.labels)
    assert np.abs(counts[0] / (counts[0] + counts[1]) - 0.2).max() < 0.01
    x = torch.cat([b[0] for b in one.val_dataloader()])
    assert abs(x.mean()) < 0.05 and abs(x.std() - 1) < 0.05


@pytest.mark.parametrize(
    "kind", [dm.MNIST, dm.FashionMNIST, dm.CIFAR10, dm.CIFAR100, dm.SVHN, dm.HumanActivity]
)
def test_missing_data_say_what_is_expected(tmp_path, kind):
    with pytest.raises(UserError) as caught:
        kind(tmp_path / "nowhere").setup()
    message = str(caught.value)
    assert all(
        word in message
        for word in ("data.root is", "nowhere", "is expected", "--data.download true")
    )
    assert len(message) <= 600 and "\n" not in message and not (tmp_path / "nowhere").exists()


FILES = {
    dm.MNIST: ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"],
    dm.CIFAR10: ["data_batch_1", "batches.meta"],
    dm.SVHN: ["train_32x32.mat"],
}


@pytest.mark.parametrize("kind", FILES)
def test_damaged_data_name_the_file(tmp_path, kind):
    (tmp_path / kind.folder).mkdir(parents=True, exist_ok=True)
    for name in FILES[kind]:
        (tmp_path / kind.folder / name).write_bytes(b"\x00\x00\x08\x01nonsense")
    with pytest.raises(UserError, match="files are missing or damaged"):
        kind(tmp_path).setup()


def false_har(root, layout, rng):
    """Four training windows of subjects 1, 3, 3, 5 and two for testing."""
    signals = {}
    for part, subjects in (("train", [1, 3, 3, 5]), ("test", [2, 2])):
        folder = root / "UCI HAR Dataset" / part
        (folder / "Inertial Signals").mkdir(parents=True)
        n = len(subjects)
        np.savetxt(folder / f"subject_{part}.txt", subjects, "%d")
        np.savetxt(folder / f"y_{part}.txt", [1, 6, 2, 3][:n], "%d")
        np.savetxt(folder / f"X_{part}.txt", rng.uniform(-1, 1, (n, 561)))
        signals[part] = rng.normal(3, 2, (n, 9, 128)).astype(np.float32)
        if layout == "compact":
            np.save(folder / "Inertial Signals" / f"signals_{part}.npy", signals[part])
        else:
            for c, name in enumerate(human_activity.CHANNELS):
                path = folder / "Inertial Signals" / f"{name}_{part}.txt"
                np.savetxt(path, signals[part][:, c], "%.9e")
    return signals


@pytest.mark.parametrize("layout", ["compact", "text"])
def test_human_activity_reads_both_layouts(tmp_path, layout):
    signals = false_har(tmp_path, layout, np.random.default_rng(0))
    data = dm.HumanActivity(tmp_path)
    assert [data.client_indices(i).tolist() for i in range(data.num_clients)] == [[0], [1, 2], [3]]
    data.setup()
    assert data.num_clients == 3 and data.train_set.labels.tolist() == [0, 5, 1, 2]
    train = signals["train"].astype(np.float64)
    mean, std = train.mean((0, 2))[:, None], train.std((0, 2))[:, None]
    for part, got in (("train", data.train_set), ("test", data.test_set)):
        np.testing.assert_allclose(
            got.x.numpy(), (signals[part] - mean) / std, rtol=1e-4, atol=1e-5
        )
    inside = dm.HumanActivity(
        tmp_path / "UCI HAR Dataset", features="features", num_clients=2, partition=dm.IID()
    )
    inside.setup()
    assert inside.train_set.x.shape == (4, 561) and inside.num_clients == 2


def test_human_activity_refusals(tmp_path):
    false_har(tmp_path, "text", np.random.default_rng(0))
    folder = tmp_path / "UCI HAR Dataset" / "train"
    with pytest.raises(UserError, match=r"num_clients is 100.*ByGroup has 3"):
        dm.HumanActivity(tmp_path, num_clients=100).setup()
    (folder / "Inertial Signals" / "body_gyro_y_train.txt").write_text("1 2\n3 4\n")
    with pytest.raises(UserError, match=r"a file is missing or damaged .*shape"):
        dm.HumanActivity(tmp_path).setup()
    (folder / "X_train.txt").unlink()
    with pytest.raises(UserError, match=r"X_train.txt not found"):
        dm.HumanActivity(tmp_path, features="features").setup()


def test_human_activity_downloads_a_zip_in_a_zip(tmp_path, monkeypatch):
    false_har(tmp_path / "made", "compact", np.random.default_rng(0))
    shutil.make_archive(str(tmp_path / "inner"), "zip", tmp_path / "made")
    with zipfile.ZipFile(tmp_path / "outer.zip", "w") as outer:
        outer.write(tmp_path / "inner.zip", "UCI HAR Dataset.zip")
    monkeypatch.setattr(human_activity, "URL", (tmp_path / "outer.zip").as_uri())
    assert dm.HumanActivity(tmp_path / "got", download=True).client_sizes().tolist() == [1, 2, 1]
    monkeypatch.setattr(human_activity, "URL", (tmp_path / "none.zip").as_uri())
    with pytest.raises(UserError, match="could not be downloaded"):
        dm.HumanActivity(tmp_path / "again", download=True).client_sizes()


def test_failed_download_is_one_paragraph(tmp_path, monkeypatch):
    def offline(self, train, download=False):
        raise OSError("no network\nat all")

    monkeypatch.setattr(dm.CIFAR10, "_open", offline)
    with pytest.raises(UserError, match=r"download is true.*no network at all"):
        dm.CIFAR10(tmp_path, download=True).client_sizes()


def test_samples_follow_the_rule_whatever_the_seed() -> None:
    data = dm.GeneratedDomains(3, 4, 20, 10, size=2, noise=0.3, shift=0.7, data_seed=5, seed=1)
    assert data.num_clients == 3 and list(data.client_names) == ["domain 0", "domain 1", "domain 2"]
    assert list(data.client_domains) == list(data.client_names) and data.num_classes == 4
    p = generator(5, "prototypes").standard_normal((4, 3, 2, 2))
    a = np.exp(0.7 * generator(5, "gain", 2).standard_normal(3))
    b = 0.7 * generator(5, "offset", 2).standard_normal(3)
    for side, indices in ((0, data.client_indices(2)), (1, data.client_test_indices(2) - 60)):
        n = (20, 10)[side]
        r = generator(5, "domain samples", 2, side)
        y = r.integers(0, 4, n)
        z = r.standard_normal((n, 3, 2, 2))
        samples = data.test_set if side else data.train_set
        assert samples is not None and samples.labels is not None
        assert samples.labels[indices].tolist() == y.tolist()
        for i, place in enumerate(indices):
            for c in range(3):
                x = a[c] * (p[y[i], c] + 0.3 * z[i, c]) + b[c]
                found = samples.x[int(place), c]  # type: ignore[attr-defined]
                assert torch.equal(found, torch.from_numpy(x.astype(np.float32)))
    other = dm.GeneratedDomains(3, 4, 20, 10, size=2, noise=0.3, shift=0.7, data_seed=5, seed=9)
    assert other.partition_hash == data.partition_hash


def test_tables_of_domains() -> None:
    domains = ["a", "b", "a", "c"]
    samples = {0: 1, 1: 4, 2: 3, 3: 0}
    table = {"acc": {0: 1.0, 1: 0.25, 2: 0.0}, "loss": {0: 2.0, 1: float("nan"), 2: 4.0}}
    assert by_domain(table["acc"], samples, domains) == {"a": 0.25, "b": 0.25}
    assert over_domains({"a": 1.0, "b": 3.0}, greater=False) == {"_mean": 2.0, "_worst": 3.0}
    greater = {"acc": True, "loss": False}
    lines = rows_of_domains(table, samples, domains, greater)
    assert lines == [
        ["domain", "clients", "samples", "acc", "loss"],
        ["a", "2", "4", "0.25", "3.5"],
        ["b", "1", "4", "0.25", ""],
        ["c", "1", "0", "", ""],
        ["mean", "4", "8", "0.25", "3.5"],
        ["worst", "4", "8", "0.25", "3.5"],
    ]
