"""Configs of files that users have, on small files of their form, and other tools' splits."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fl_lightning.lab.cli.compose import packaged, read
from tests.helpers.commands import done, said, table, typed
from tests.helpers.zygote import Cli

FIT = ("fit", "-c", "base", "-c", "trainer/cpu", "--trainer.max_epochs", 1)


def heart_disease(data: Path) -> None:
    draw = random.Random(0)
    for name, count in (("cleveland", 60), ("hungarian", 50), ("switzerland", 30), ("va", 30)):
        rows = []
        for i in range(count):
            row = [draw.randint(30, 80), i % 2, 1.0 + i % 4, 120, 200, 0, float(i % 3), 150, 0, 1.5]
            rows.append(",".join(map(str, [*row, "?", "?", "?", i % 3])))
        rows[1] = rows[1].replace("120", "?")
        (data / f"processed.{name}.data").write_text("\n".join(rows) + "\n")


def pictures(path: Path) -> None:
    draw = np.random.default_rng(0)
    for shift, domain in enumerate(("art", "photo")):
        for level, name in enumerate(("cat", "dog")):
            folder = path / domain / name
            folder.mkdir(parents=True)
            for i in range(8):
                pixels = draw.integers(0, 120, (8, 8, 3)) + 60 * level + 40 * shift
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")


def test_partition_takes_the_options_of_a_run_and_names_clients_and_classes(cli: Cli) -> None:
    pictures(cli.folder / "pets")
    (cli.folder / "pets/art/cat/Thumbs.db").touch()
    own = "from fl_lightning.datamodules import FromFolders, IID\nclass Own(FromFolders):\n"
    own += "    def __init__(self, path, num_clients=2):\n        super().__init__(path, "
    own += "image_size=8, partition=IID(), num_clients=num_clients)\n"
    (cli.folder / "own_folders.py").write_text(own)
    pets = "partition -c base --data.path pets --data.image_size 8 --data"
    trained = "--model.learner.num_classes 2 --trainer.max_epochs=3 --model.lr_decay -.5"
    shown = done(cli(*typed(pets, "FromFolders", trained)))
    assert shown.stdout.splitlines()[0].split() == ["client", "samples", "name", "cat", "dog"]
    assert "Note: 'pets' is read as layout=folders" in shown.stderr
    effect = "--data.num_clients has no effect: FromFolders takes its clients"
    for cls in ("FromFolders", "own_folders.FromFolders"):
        said(cli(*typed(pets, cls, "--data.num_clients 7")), effect)
    dealt = typed(pets, "FromFolders --data.num_clients=7 --data.partition IID")
    assert "7 clients" in done(cli(*dealt)).stdout
    taken = "partition --data own_folders.Own --data.path pets --data.num_clients 3"
    assert "3 clients" in done(cli(*typed(taken))).stdout


def test_domains_are_measured_by_name(cli: Cli) -> None:
    pictures(cli.folder / "pets")
    run = typed(
        "--data FromFolders --data.path pets --data.test 0.25 --data.image_size 8",
        "--data.clients_per_domain 2 --model.participation all",
        "--trainer.callbacks+ PerClientEvaluation",
    )
    done(cli(*FIT, *run))
    (folder,) = (cli.folder / "runs").iterdir()
    rows = {row["domain"]: row for row in table(folder / "domains.csv")}
    assert list(rows) == ["art", "photo", "mean", "worst"]
    assert [rows[name]["clients"] for name in ("art", "photo")] == ["2", "2"]
    each = [float(rows[name]["acc"]) for name in ("art", "photo")]
    assert float(rows["mean"]["acc"]) == sum(each) / 2 and float(rows["worst"]["acc"]) == min(each)
    losses = [float(rows[name]["loss"]) for name in ("art", "photo")]
    assert float(rows["worst"]["loss"]) == max(losses)
    logged = table(folder / "metrics.csv")[-1]
    assert float(logged["domains/acc/art"]) == each[0]
    assert float(logged["domains/acc_worst"]) == min(each)
    done(cli("report", folder))


def leaf(path: Path, x: Sequence[object], y: list[int]) -> None:
    """Two users with the same samples, who are tested on them, too."""
    users = {name: {"x": x, "y": y} for name in ("a", "b")}
    content = {"users": list(users), "num_samples": [len(y)] * 2, "user_data": users}
    for side in ("train", "test"):
        (path / side).mkdir(parents=True)
        (path / side / "all.json").write_text(json.dumps(content))


def domains(path: Path, size: int = 8) -> None:
    """Two domains of two classes, and their lists."""
    for domain in ("art", "photo"):
        rows = []
        for label, name in enumerate(("cat", "dog")):
            (path / domain / name).mkdir(parents=True)
            for i in range(5):
                level = 30 * i + 60 * label
                Image.new("RGB", (size, size), (level, level, 9)).save(
                    path / domain / name / f"{i}.png"
                )
                rows.append(f"{domain}/{name}/{i}.png {label}")
        (path / f"{domain}_train.txt").write_text("\n".join(rows[1:]))
        (path / f"{domain}_test.txt").write_text(rows[0])


def digits(path: Path) -> None:
    """The seven files of Digits-5, of ten pictures each."""
    path.mkdir(parents=True)
    grey = np.zeros((10, 32, 32), np.uint8)
    colour = np.zeros((10, 32, 32, 3), np.uint8)
    labels = {"label_train": np.eye(10), "label_test": np.eye(10)}
    savemat(path / "mnist_data.mat", {"train_32": grey, "test_32": grey, **labels})
    savemat(path / "mnistm_with_label.mat", {"train": colour, "test": colour, **labels})
    numbers = np.arange(1, 11)[:, None]
    for name in ("svhn", "synth"):
        for side in ("train", "test"):
            savemat(
                path / f"{name}_{side}_32x32.mat", {"X": colour.transpose(1, 2, 3, 0), "y": numbers}
            )
    cells = np.empty((2, 2), dtype=object)
    for row in cells:
        row[0] = np.zeros((10, 1, 28, 28))
        row[1] = numbers
    savemat(path / "usps_28x28.mat", {"dataset": cells})


def hdf5(path: Path, name: str, x: object) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py, of the extra hdf5, is not installed")
    for side in ("train", "test"):
        with h5py.File(path / f"{name}_{side}.h5", "w") as file:
            for client in ("0", "1"):
                file[f"examples/{client}/{'image' if 'cifar' in name else 'pixels'}"] = x
                file[f"examples/{client}/label"] = np.arange(4)


def pfllib(path: Path) -> None:
    for side in ("train", "test"):
        (path / side).mkdir(parents=True)
        for i in range(2):
            content = {"x": np.zeros((4, 1, 28, 28)), "y": np.arange(4)}
            with open(path / side / f"{i}.npz", "wb") as file:
                np.savez_compressed(file, data=content)


def celeba(data: Path) -> None:
    images = data / "celeba/data/raw/img_align_celeba"
    images.mkdir(parents=True)
    for i in range(2):
        Image.new("RGB", (20, 30), (9, 9, 9)).save(images / f"{i}.jpg")
    leaf(data / "celeba/data", ["0.jpg", "1.jpg"], [0, 1])


def speech(path: Path) -> None:
    """Two roles of LEAF's Shakespeare."""
    users = {name: {"x": ["to be " * 13 + "or", "x" * 80], "y": ["n", "o"]} for name in "ab"}
    content = {"users": ["a", "b"], "num_samples": [2, 2], "user_data": users}
    for side in ("train", "test"):
        (path / side).mkdir(parents=True)
        (path / side / "all.json").write_text(json.dumps(content))


def tweets(path: Path) -> None:
    rows = [["1", "Mon", "NO_QUERY", "me", text, "training"] for text in ("good day", "oh, no", "")]
    leaf(path, rows, [1, 0, 0])


def speeches(data: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py, of the extra hdf5, is not installed")
    for side in ("train", "test"):
        with h5py.File(data / f"shakespeare_{side}.h5", "w") as file:
            for role in ("HAMLET", "KING"):
                file[f"examples/{role}/snippets"] = [b"to be, or not to be " * 5, b"Ay."]


def answers(data: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py, of the extra hdf5, is not installed")
    rows = np.array([[1, 9, 10_003, 0], [1, 5, 6, 7]])
    with h5py.File(data / "stackoverflow.hdf5", "w") as file:
        file["metadata/pad_symbol"] = 0
        for side in ("train", "val", "test"):
            for person in ("7", "8"):
                file[f"{side}/{person}/inputs"] = rows
                file[f"{side}/{person}/targets"] = np.roll(rows, -1, axis=1)


def saved(path: Path) -> None:
    datasets = pytest.importorskip(
        "datasets", reason="datasets, of the extra huggingface, is not installed"
    )
    names = [f"class {i}" for i in range(10)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    images = [Image.new("L", (8, 8), i) for i in range(20)]
    rows = {"image": images, "label": [i % 10 for i in range(20)]}
    made = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(path)


def tiny_imagenet(path: Path) -> None:
    """Folders as in tiny-imagenet-200.zip: two classes, a grey picture among them."""
    names = ("n01443537", "n01629819")
    lines = []
    for label, name in enumerate(names):
        folder = path / "train" / name / "images"
        folder.mkdir(parents=True)
        (folder.parent / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t10\t63\t58\n")
        for i in range(60):
            mode, level = ("L", 90) if i == 0 else ("RGB", (90 * label, i, 9))
            Image.new(mode, (64, 64), level).save(folder / f"{name}_{i}.JPEG")
    for side in ("val", "test"):
        (path / side / "images").mkdir(parents=True)
        for i in range(6):
            image = Image.new("RGB", (64, 64), (90 * (i % 2), 9, 9))
            image.save(path / side / "images" / f"{side}_{i}.JPEG")
            lines += [f"val_{i}.JPEG\t{names[i % 2]}\t0\t32\t44\t62"] if side == "val" else []
    (path / "val/val_annotations.txt").write_text("\n".join(lines) + "\n")
    (path / "wnids.txt").write_text("\n".join(names))


def medical(path: Path, shape: tuple[int, ...] = (28, 28, 3), labels: int = 1) -> None:
    """A file of MedMNIST: labels (N, 1), or (N, 14) of ChestMNIST."""
    draw = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 80), ("val", 10), ("test", 20)):
        arrays[f"{split}_images"] = draw.integers(0, 256, (count, *shape), np.uint8)
        found = np.arange(count)[:, None] % 9 if labels == 1 else draw.integers(0, 2, (count, 14))
        arrays[f"{split}_labels"] = found.astype(np.uint8)
    np.savez(path, **arrays)


def sentiments(path: Path) -> None:
    path.mkdir()
    for side, count in (("train", 40), ("dev", 10)):
        rows = [f'a "film {i}\t{i % 2}' for i in range(count)]
        (path / f"{side}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")


MADE = {
    "glue": lambda data: sentiments(data / "SST-2"),
    "medmnist": lambda data: medical(data / "pathmnist.npz"),
    "tinyimagenet": lambda data: tiny_imagenet(data / "tiny-imagenet-200"),
    "heart_disease": heart_disease,
    "shakespeare_leaf": lambda data: speech(data / "shakespeare/data"),
    "sent140_leaf": lambda data: tweets(data / "sent140/data"),
    "shakespeare_tff": speeches,
    "stackoverflow_pfl": answers,
    "huggingface": lambda data: saved(data / "dataset"),
    "femnist_leaf": lambda data: leaf(data / "femnist/data", [[0.5] * 784] * 4, [0, 9, 40, 61]),
    "synthetic_leaf": lambda data: leaf(data / "synthetic/data", [[0.5] * 60] * 3, [0, 9, 4]),
    "celeba_leaf": celeba,
    "femnist_tff": lambda data: hdf5(data, "fed_emnist_digitsonly", np.zeros((4, 28, 28))),
    "cifar100_tff": lambda data: hdf5(data, "fed_cifar100", np.zeros((4, 32, 32, 3), np.uint8)),
    "pfllib": lambda data: pfllib(data / "MNIST"),
    "digits5": lambda data: digits(data / "digits5"),
    "pacs": lambda data: domains(data / "pacs"),
    "domainnet": lambda data: domains(data / "domainnet"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_round_of_every_config(name: str, cli: Cli) -> None:
    (cli.folder / "data").mkdir()
    MADE[name](cli.folder / "data")
    who = "2" if name == "tinyimagenet" else "all"
    options = typed(f"--model.participation {who} --model.local_epochs 1")
    options += typed("--model.local_steps 1") if name == "glue" else ()
    options += typed("--trainer.callbacks+ PerClientEvaluation") if name == "heart_disease" else ()
    done(cli(*FIT, "-c", f"data/{name}", *options))
    (folder,) = (cli.folder / "runs").iterdir()
    assert float(table(folder / "metrics.csv")[-1]["val/loss"]) > 0
    if name == "heart_disease":
        rows = table(folder / "clients.csv")
        assert [row["name"] for row in rows] == ["cleveland", "hungarian", "switzerland", "va"]
        assert [int(row["samples"]) for row in rows] == [21, 17, 10, 10]


@pytest.mark.parametrize(("name", "classes"), [("office_caltech", 10), ("office_home", 65)])
def test_configs_that_are_pacs_with_another_number_of_classes(name: str, classes: int) -> None:
    pacs = read("data/pacs")
    pacs["data"]["init_args"]["path"] = f"data/{name}"
    learner = pacs["model"]["learner"]["init_args"]
    learner["num_classes"] = learner["network"]["init_args"]["num_classes"] = classes
    assert read(f"data/{name}") == pacs


@pytest.mark.parametrize("split", sorted(name for name in packaged() if name.startswith("split/")))
def test_every_split_is_made(split: str, cli: Cli) -> None:
    run = done(cli("partition", "-c", "data/digits", "-c", split))
    assert "Gini of sizes" in run.stdout and (cli.folder / "partition.npz").is_file()


@pytest.mark.parametrize(
    ("configs", "folder"),
    [
        ("-c recipe/flsimulator/fedsmoo -c method/ri", "fedsmoo+ri"),
        ("-c recipe/flsimulator/scaffold -c recipe/flsimulator/ri", "scaffold+ri"),
        ("-c recipe/flsimulator/fedadam", "fedadam"),
        ("-c recipe/pfllib/fedavg", "fedavg"),
        ("-c recipe/pfllib/fedavg -c method/ditto", "ditto"),
    ],
)
def test_a_round_of_a_recipe_with_other_data(configs: str, folder: str, cli: Cli) -> None:
    small = "-c data/digits -c model/mlp -c trainer/cpu --trainer.max_epochs 1"
    tests = "--data.client_test_fraction 0.25 --data.num_clients 8"
    done(cli("fit", *typed(configs, small, tests)))
    (row,) = table(cli.folder / "runs" / f"digits-{folder}-1" / "metrics.csv")
    assert float(row["val/acc"]) > 0
    # PFLlib's accuracy: right answers over all clients' test samples.
    assert ("clients/acc_weighted" in row) == ("pfllib" in configs)


def test_ri_of_updates_is_refused_beside_duals_that_need_models(cli: Cli) -> None:
    words = "-c recipe/flsimulator/feddyn -c recipe/flsimulator/ri -c data/digits -c model/mlp"
    said(cli("fit", *typed(words)), "cannot run together", "-c method/ri")


def test_pooled_clients_are_tested_on_their_own_samples_of_the_split(cli: Cli) -> None:
    options = typed("-c data/digits -c split/pfllib_dir --model.participation 4")
    done(cli(*FIT, *options, "--trainer.callbacks+", "PerClientEvaluation"))
    (folder,) = (cli.folder / "runs").iterdir()
    rows = table(folder / "clients.csv")
    assert len(rows) == 20 and sum(int(row["samples"]) for row in rows) > 400
    assert float(table(folder / "metrics.csv")[-1]["val/acc"]) > 0
