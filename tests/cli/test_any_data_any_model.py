"""Any data/* with any model/*, in either order, and the sizes of networks from the data."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import fl_lightning.datamodules
import fl_lightning.models
from fl_lightning.errors import UserError
from fl_lightning.lab.cli.compose import packaged, prepare, read
from fl_lightning.lab.cli.network_sizes import fit_network_to_data
from fl_lightning.lab.cli.options import apply_options
from tests.helpers.commands import done, said, typed
from tests.helpers.zygote import Cli

SAMPLES = {  # what each data set is, from its publication
    "digits": ((1, 8, 8), 10),
    "mnist": ((1, 28, 28), 10),
    "fashionmnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "svhn": ((3, 32, 32), 10),
    "har": ((9, 128), 6),
}
NETWORKS = {"lenet": "LeNet", "mlp": "MLP", "resnet18gn": "ResNet18GN", "resnet20": "ResNet20"}
NETWORKS |= {"vgg11": "VGG11", "resnet18": "ResNet18", "fedavg_cnn": "FedAvgCNN"}
TEXTS = ("text", "multinli", "instructions")
# Of files that users have: what a sample is, only these tell. test_reader_configs.py runs them.
FILES = typed(
    "femnist_leaf synthetic_leaf celeba_leaf femnist_tff cifar100_tff pfllib shakespeare_leaf",
    "sent140_leaf shakespeare_tff stackoverflow_pfl huggingface office_caltech office_home pacs",
    "domainnet digits5 heart_disease glue medmnist tinyimagenet",
)
OF_TEXTS = ("tiny_opt", "opt125m")


def learner(*arguments: str) -> dict[str, Any]:
    """``model.learner`` that a command line comes to."""
    prepared = prepare("fit", list(arguments))
    apply_options(prepared)
    fit_network_to_data(prepared)
    found: dict[str, Any] = prepared.config["model"]["learner"]
    return found


def both_orders(data: str, model: str, *base: str) -> list[tuple[str, ...]]:
    one, other = ("-c", f"data/{data}"), ("-c", f"model/{model}")
    return [(*base, *one, *other), (*base, *other, *one)]


def test_the_tables_are_complete() -> None:
    # tests/models/test_vision.py has the one that needs timm, test_instructions.py that of a GPU.
    models = (*NETWORKS, *OF_TEXTS, "lora_vision", "qlora")
    kinds = {"data": (*SAMPLES, *TEXTS, *FILES), "model": models}
    for kind, names in kinds.items():
        there = {name for name in packaged() if name.startswith(f"{kind}/")}
        assert {f"{kind}/{name}" for name in names} == there


@pytest.mark.parametrize("model", OF_TEXTS)
@pytest.mark.parametrize("data", TEXTS)
def test_a_learner_of_texts_replaces_the_one_that_comes_with_the_data(
    data: str, model: str
) -> None:
    for order in both_orders(data, model) + both_orders(data, model, "-c", "base"):
        assert learner(*order) == read(f"model/{model}")["model"]["learner"]


def refusal(data: str, model: str) -> str:
    """Why these do not fit together; empty if they do."""
    if model in OF_TEXTS:
        return r"^model\.learner: .* takes texts, but a sample of"
    if data in TEXTS:
        return r"^model\.learner\.network: .* takes numbers, but a sample of .* is a text"
    if data == "har" and model != "mlp":
        return r"^model\.learner\.network: .* or use another network, such as MLP"
    if data == "digits" and model in ("lenet", "fedavg_cnn"):
        return f"{NETWORKS[model]} with these sizes cannot take"
    return ""


# Data of another shape, or number of classes; the others are like one of these.
SHAPES = ("digits", "mnist", "cifar10", "cifar100", "har")
PAIRS = [(data, model) for data in SHAPES for model in (*NETWORKS, OF_TEXTS[0])]
PAIRS += [(data, model) for data in TEXTS for model in ("mlp", "resnet20")]


@pytest.mark.parametrize(("data", "model"), PAIRS)
def test_every_pair(data: str, model: str) -> None:
    orders = [*both_orders(data, model), *both_orders(data, model, "-c", "base")[:1]]
    if words := refusal(data, model):
        for order in orders:
            with pytest.raises(UserError, match=words) as error:
                learner(*order)
            assert len(str(error.value)) < 450
        return
    shape, classes = SAMPLES[data]
    (first, *others) = (learner(*order) for order in orders)
    assert all(other == first for other in others)
    assert first["init_args"]["num_classes"] == classes
    node = first["init_args"]["network"]
    assert node["class_path"] == f"fl_lightning.models.{NETWORKS[model]}"
    with torch.random.fork_rng():
        network = getattr(fl_lightning.models, NETWORKS[model])(**node["init_args"]).eval()
    with torch.no_grad():
        out = network(torch.randn(2, *shape))
    assert out.shape == (2, classes) and torch.isfinite(out).all()


@pytest.mark.parametrize("data", SAMPLES)
def test_the_learner_that_comes_with_data_fits_them(data: str) -> None:
    shape, classes = SAMPLES[data]
    for order in (("-c", f"data/{data}"), ("-c", "base", "-c", f"data/{data}")):
        arguments = learner(*order)["init_args"]["network"]["init_args"]
        sizes = arguments.get("sizes", [math.prod(shape), arguments.get("num_classes")])
        assert (sizes[0], sizes[-1]) == (math.prod(shape), classes)


EXPLICIT = [
    ("digits mlp", "network.sizes=[65,10]", r"MLP .* whose shape is \(1, 8, 8\)"),
    ("mnist resnet20", "network.in_channels=3", r"ResNet20 .* \(1, 28, 28\)"),
    ("mnist lenet", "network.input_size=32", r"LeNet .* \(1, 28, 28\)"),
]


@pytest.mark.parametrize(("configs", "option", "says"), EXPLICIT)
def test_what_is_given_is_refused_where_it_cannot_fit(configs: str, option: str, says: str) -> None:
    data, model = configs.split()
    with pytest.raises(UserError, match=rf"^model\.learner.*{says}"):
        learner(*both_orders(data, model)[0], *f"--model.learner.{option}".split())


def sizes_of(*argv: str) -> tuple[Any, dict[str, Any]]:
    found = learner(*argv)["init_args"]
    return found["num_classes"], found["network"]["init_args"]


def test_options_choose_data_network_and_numbers() -> None:
    mnist = ("-c", "data/mnist", "-c", "model/lenet")
    assert sizes_of(*mnist, "--model.learner.network.num_classes=12")[0] == 12
    # More classes than there are can be given.
    classes, network = sizes_of(*mnist, "--model.learner.num_classes", "47")
    assert classes == network["num_classes"] == 47
    options = ("-c", "base", "--data", "CIFAR100", "--model.learner.network", "VGG11")
    assert sizes_of(*options) == (100, {"num_classes": 100, "in_channels": 3})
    assert sizes_of("-c", "data/har", "--data.features=features")[1]["sizes"] == [561, 100, 6]


def test_a_file_of_one_s_own_beats_the_learner_that_comes_with_data(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: {learner: {class_path: my_learner.Lit, init_args: {width: 3}}}")
    wanted = {"class_path": "my_learner.Lit", "init_args": {"width": 3}}
    orders = (("-c", str(mine), "-c", "data/mnist"), ("-c", "data/mnist", "-c", str(mine)))
    assert [learner(*order) for order in orders] == [wanted, wanted]
    mine.write_text("model: {learner: {init_args: {lr: 0.5}}}")
    for order in orders:
        found = learner(*order)["init_args"]
        assert found["lr"] == 0.5 and "network" in found


# --------------------------------------------------------------------------- from files

CLASSES = 13


def leaf(path: Path, x: Any = 0.5, width: int = 784, label: int = CLASSES - 1) -> list[str]:
    own = {"x": [[x] * width] * 2, "y": [0, label]}
    (path / "train").mkdir()
    (path / "train" / "a.json").write_text(json.dumps({"users": ["a"], "user_data": {"a": own}}))
    return ["FromLEAF", f"--data.path={path}"]


def pfllib(path: Path) -> list[str]:
    (path / "train").mkdir()
    both = {"x": np.zeros((2, 1, 2, 3), np.float32), "y": np.array([0, CLASSES - 1])}
    np.savez(path / "train" / "0.npz", data=both)
    return ["FromPFLlib", f"--data.path={path}"]


def hdf5(path: Path) -> list[str]:
    h5py = pytest.importorskip("h5py", reason="h5py, of the extra hdf5, is not installed")
    with h5py.File(path / "a.h5", "w") as file:
        file["examples/a/x"] = np.zeros((2, 6), np.float32)
        file["examples/a/y"] = [0, CLASSES - 1]
    return ["FromHDF5", f"--data.train={path / 'a.h5'}", "--data.x=x", "--data.y=y"]


def lists(path: Path) -> list[str]:
    (path / "art").mkdir()
    lines = []
    for label in range(CLASSES):
        Image.new("RGB", (2, 1)).save(path / "art" / f"{label}.png")
        lines.append(f"art/{label}.png {label}")
    (path / "art_train.txt").write_text("\n".join(lines) + "\n")
    return ["FromFolders", f"--data.path={path}", "--data.image_size=[1, 2]"]


def table(path: Path) -> list[str]:
    rows = [f"{i},0,0,red,0,{'abcdefghijklm'[i % CLASSES]}" for i in range(2 * CLASSES)]
    (path / "t.csv").write_text("a,b,c,colour,e,y\n" + "\n".join([*rows, "0,0,0,blue,0,a"]) + "\n")
    given = f"FromTable --data.path={path / 't.csv'} --data.target=y --data.encode=one-hot"
    return given.split()


def numbered(path: Path) -> list[str]:
    """A table with a column that is called by a number, of which one feature is taken."""
    (path / "n.csv").write_text("site,f1,7,label\n" + "a,1,2,up\nb,2,1,down\n" * 6)
    given = f"FromTable --data.path={path / 'n.csv'} --data.client=site --data.target=7"
    return [*given.split(), "--data.features=[f1]"]


READERS: dict[str, tuple[Callable[[Path], list[str]], list[int]]] = {
    "leaf, recognised": (leaf, [784, 62]),
    "leaf, numbers": (lambda path: leaf(path, width=6), [6, CLASSES]),
    "pfllib": (pfllib, [6, CLASSES]),
    "hdf5": (hdf5, [6, CLASSES]),
    "lists": (lists, [6, CLASSES]),
    "table": (table, [6, CLASSES]),
    "table, numbered": (numbered, [1, 2]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("error")
def test_a_network_gets_the_sizes_of_the_files(reader: str, tmp_path: Path) -> None:
    (written, ends) = READERS[reader]
    classes, network = sizes_of("-c", "base", "--data", *written(tmp_path))
    assert classes == ends[1] and network["sizes"] == [ends[0], 64, ends[1]]


@pytest.mark.parametrize(
    ("wrong", "words"), [("target=8", "data.target='8'"), ("client=hospital", "site, f1, 7, label")]
)
def test_a_column_that_is_not_there_is_told_before_sizes(
    tmp_path: Path, wrong: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        learner("-c", "base", "--data", *numbered(tmp_path), f"--data.{wrong}")


# --------------------------------------------------------------------------- real runs

FIT = ("fit", "-c", "base", "-c", "trainer/cpu", "-c", "debug/tiny", "--trainer.max_epochs", 1)
FOLDER = ("--trainer.default_root_dir", "x", "--model.engine", "sequential")
NULL = "--model.learner.network.sizes [null,16,null] --model.learner.num_classes=null"


@pytest.mark.parametrize(
    ("options", "expected"),
    [(f"-c model/mlp {NULL}", {"sizes": [64, 16, 10]}), ("-c model/resnet20", {"in_channels": 1})],
)
def test_a_round_on_digits_and_its_config(cli: Cli, options: str, expected: dict[str, Any]) -> None:
    one_client = ("--model.participation", 1, "--model.local_steps", 1)
    done(cli(*FIT, "-c", "data/digits", *options.split(), *FOLDER, *one_client))
    config = yaml.safe_load((cli.folder / "x/config.yaml").read_text())["model"]["learner"]
    assert config["init_args"]["num_classes"] == 10
    assert config["init_args"]["network"]["init_args"].items() >= expected.items()
    state = torch.load(cli.folder / "x/checkpoints/last.ckpt", weights_only=True)
    assert state["hyper_parameters"]["num_classes"] == 10
    said(cli("fit", "x", "--data", "CIFAR100"), "CIFAR100")


def test_what_cannot_fit_leaves_nothing(cli: Cli) -> None:
    refused = cli(*FIT, "-c", "model/lenet", "-c", "data/digits", *FOLDER)
    said(refused, "LeNet with these sizes cannot take")
    assert os.listdir(cli.folder) == []


OWN = """
import torch
from torch.utils.data import Dataset
from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.datamodules.batches.samples import TensorSamples

class Quiet(FederatedDataModule):
    size, classes = (3, 32, 32), 10
    def load(self):
        images = torch.randn(40, *self.size)
        labels = torch.arange(40) % self.classes
        self.train_set = self.test_set = TensorSamples(images, labels)

class Telling(Quiet):
    size = sample_shape = (2, 16, 16)
    classes = num_classes = 4

class Own(Dataset):
    def __init__(self, n: int = 10) -> None:
        self.x = torch.randn(n, 4)
    def __len__(self) -> int:
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], i % 2

def make(n: int = 10) -> Dataset:
    return Own(n)

def unsaid(n=10):
    return Own(n)
"""
OF_FOUR = "--model.learner.network MLP --model.learner.network.sizes [4,2]"
OF_FOUR += " --model.learner.num_classes 2 --data FromDatasets"
CLIENTS = """
data:
  class_path: FromDatasets
  init_args: {clients: [{class_path: own.Own, init_args: {n: 12}}, {class_path: own.Own}]}
"""
OWN_DATA: list[tuple[str, str]] = [  # what is typed; what is said, if it is refused
    ("-c model/lenet --data own.Telling --data.num_clients 4", ""),
    ("-c model/resnet20 --data own.Quiet --data.num_clients 4", "ResNet20 needs num_classes"),
    ("-c model/resnet20 --data own.Quiet --model.learner.num_classes 10 --data.num_clients 4", ""),
    (f"-c clients.yaml {OF_FOUR}", ""),
    (f"{OF_FOUR} --data.num_clients 2 --data.train own.Own --data.train.n 14", ""),
    (f"{OF_FOUR} --data.num_clients 2 --data.train own.make", ""),
    (f"{OF_FOUR} --data.num_clients 2 --data.train own.unsaid", "is no subclass of Dataset"),
    (f"{OF_FOUR} --data.clients own.make", "'own.make' is not accepted; it has to be a list"),
]


@pytest.mark.parametrize(("options", "refused"), OWN_DATA)
def test_data_of_one_s_own(cli: Cli, options: str, refused: str) -> None:
    (cli.folder / "own.py").write_text(OWN)
    (cli.folder / "clients.yaml").write_text(CLIENTS)
    run = cli(*FIT, *options.split(), *FOLDER)
    said(run, refused) if refused else done(run)
    if "Telling" in options:
        text = (cli.folder / "x/config.yaml").read_text()
        network = yaml.safe_load(text)["model"]["learner"]["init_args"]["network"]["init_args"]
        assert (network["in_channels"], network["num_classes"]) == (2, 4)


OF_TORCHVISION = """
data:
  class_path: FromDatasets
  init_args:
    clients:
    - class_path: torchvision.datasets.ImageFolder
      init_args: {root: images, transform: {class_path: torchvision.transforms.ToTensor}}
model: {participation: all, learner: {class_path: Classifier, init_args:
  {network: {class_path: MLP, init_args: {sizes: [48, 2]}}, num_classes: 2}}}
"""


def test_images_of_torchvision_and_the_network_that_it_has_too(cli: Cli) -> None:
    for kind in ("cat", "dog"):
        (cli.folder / "images" / kind).mkdir(parents=True)
        for number in range(6):
            pixels = np.full((4, 4, 3), 20 * number, np.uint8)
            Image.fromarray(pixels).save(cli.folder / "images" / kind / f"{number}.png")
    (cli.folder / "a.yaml").write_text(OF_TORCHVISION)
    fit = ("fit", "-c", "base", "-c", "a.yaml", "--trainer.max_epochs", "1")
    # torchvision is imported for the data, and its MLP is no network of ours.
    short = ("--model.learner.network", "MLP", "--model.learner.network.sizes", "[48, 2]")
    for more in ((), short):
        done(cli(*fit, *more))
