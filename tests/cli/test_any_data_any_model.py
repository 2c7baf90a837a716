"""Any data/* with any model/*, in either order.

A network for these data, or refused by name before all else.
"""

from __future__ import annotations

import math
import os
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
NETWORKS = {
    "lenet": "LeNet",
    "mlp": "MLP",
    "resnet18gn": "ResNet18GN",
    "resnet20": "ResNet20",
    "vgg11": "VGG11",
}
REFUSED = {("har", model): "9x128" for model in NETWORKS if model != "mlp"} | {
    ("digits", "lenet"): "16x16"
}


def learner(*arguments: str) -> dict[str, Any]:
    """``model.learner`` that a command line comes to."""
    prepared = prepare("fit", list(arguments))
    apply_options(prepared)
    fit_network_to_data(prepared)
    found: dict[str, Any] = prepared.config["model"]["learner"]
    return found


TEXTS = ("text", "multinli", "instructions")
# Of files that users have: what a sample is, only these tell. tests/cli/test_reader_configs.py runs
# them.
FILES = (
    *("femnist_leaf", "synthetic_leaf", "celeba_leaf", "femnist_tff", "cifar100_tff", "pfllib"),
    *("shakespeare_leaf", "sent140_leaf", "shakespeare_tff", "stackoverflow_pfl", "huggingface"),
    *("office_caltech", "office_home", "pacs", "domainnet", "digits5", "heart_disease"),
)
OF_TEXTS = ("tiny_opt", "opt125m")


def test_the_tables_are_complete() -> None:
    assert {f"data/{name}" for name in (*SAMPLES, *TEXTS, *FILES)} == {
        name for name in packaged() if name.startswith("data/")
    }
    models = {name for name in packaged() if name.startswith("model/")}
    assert {f"model/{name}" for name in (*NETWORKS, *OF_TEXTS)} == models


@pytest.mark.parametrize("base", [(), ("-c", "base")], ids=["", "base"])
@pytest.mark.parametrize("model", OF_TEXTS)
@pytest.mark.parametrize("data", TEXTS)
def test_a_learner_of_texts_replaces_the_one_that_comes_with_the_data(
    data: str, model: str, base: tuple[str, ...]
) -> None:
    first = learner(*base, "-c", f"data/{data}", "-c", f"model/{model}")
    assert first == learner(*base, "-c", f"model/{model}", "-c", f"data/{data}")
    assert first == read(f"model/{model}")["model"]["learner"]


@pytest.mark.parametrize(
    ("data", "model", "says"),
    [
        *((data, model, "takes texts, but a sample of") for data in SAMPLES for model in OF_TEXTS),
        *(
            (data, model, "takes numbers, but a sample of .* is a text")
            for data in TEXTS
            for model in NETWORKS
        ),
    ],
)
def test_texts_and_images_are_not_mixed(data: str, model: str, says: str) -> None:
    for order in ((f"data/{data}", f"model/{model}"), (f"model/{model}", f"data/{data}")):
        with pytest.raises(UserError, match=rf"^model\.learner.* {says}"):
            learner("-c", order[0], "-c", order[1])


@pytest.mark.parametrize("base", [(), ("-c", "base")], ids=["", "base"])
@pytest.mark.parametrize("model", NETWORKS)
@pytest.mark.parametrize("data", SAMPLES)
def test_every_pair(data: str, model: str, base: tuple[str, ...]) -> None:
    shape, classes = SAMPLES[data]
    orders = [
        (*base, "-c", f"data/{data}", "-c", f"model/{model}"),
        (*base, "-c", f"model/{model}", "-c", f"data/{data}"),
    ]
    if (data, model) in REFUSED:
        for order in orders:
            with pytest.raises(
                UserError, match=rf"model\.learner\.network: {NETWORKS[model]} takes .*Use MLP"
            ) as error:
                learner(*order)
            assert REFUSED[data, model] in str(error.value) and len(str(error.value)) < 300
        return
    first, second = (learner(*order) for order in orders)
    assert first == second and first["init_args"]["num_classes"] == classes
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
        node = learner(*order)["init_args"]["network"]
        sizes = node["init_args"].get(
            "sizes", [math.prod(shape), node["init_args"].get("num_classes")]
        )
        assert (sizes[0], sizes[-1]) == (math.prod(shape), classes)


EXPLICIT = [
    ("cifar100", "vgg11", "network.num_classes=10", "CIFAR100 has 100 classes"),
    ("cifar10", "vgg11", "network.num_classes=0", "CIFAR10 has 10 classes"),
    ("cifar10", "vgg11", "num_classes=-5", "CIFAR10 has 10 classes"),
    ("digits", "mlp", "network.sizes=[64,3]", "sizes .64, 3.: 3 classes, but Digits has 10"),
    ("digits", "mlp", "network.sizes=[65,10]", "65 inputs, but .*8x8.* has 64"),
    ("mnist", "resnet20", "network.in_channels=3", "in_channels: 3 channels, .*28x28.* has 1"),
    ("mnist", "lenet", "network.input_size=32", "input_size: 32 pixels a side, .* has 28"),
]


@pytest.mark.parametrize(("data", "model", "option", "says"), EXPLICIT)
def test_what_is_given_is_refused_where_it_cannot_fit(
    data: str, model: str, option: str, says: str
) -> None:
    with pytest.raises(UserError, match=says) as error:
        learner("-c", f"data/{data}", "-c", f"model/{model}", f"--model.learner.{option}")
    assert f"model.learner.{option.split('=')[0]}" in str(error.value).split(". ")[0]


def test_of_two_numbers_of_classes_one_is_enough_and_both_have_to_be_the_same() -> None:
    argv = ("-c", "data/mnist", "-c", "model/lenet", "--model.learner.network.num_classes=12")
    assert learner(*argv)["init_args"]["num_classes"] == 12
    with pytest.raises(UserError, match="they have to be the same"):
        learner(*argv, "--model.learner.num_classes", "13")


def test_images_too_large_for_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "large_images.py").write_text(OWN.replace("(2, 16, 16)", "(2, 64, 64)"))
    with pytest.raises(
        UserError, match=r"VGG11 takes images of up to 32x32 pixels, but .* Telling has 2x64x64"
    ):
        learner("-c", "model/vgg11", "--data", "large_images.Telling")


def test_more_classes_than_there_are_can_be_given() -> None:
    found = learner("-c", "data/mnist", "-c", "model/vgg11", "--model.learner.num_classes", "47")[
        "init_args"
    ]
    assert found["num_classes"] == found["network"]["init_args"]["num_classes"] == 47


def test_options_choose_data_and_network() -> None:
    found = learner("-c", "base", "--data", "CIFAR100", "--model.learner.network", "VGG11")[
        "init_args"
    ]["network"]
    assert found == {
        "class_path": "fl_lightning.models.VGG11",
        "init_args": {"num_classes": 100, "in_channels": 3},
    }
    features = learner("-c", "data/har", "--data.features=features")["init_args"]["network"][
        "init_args"
    ]
    assert features["sizes"] == [561, 100, 6]


def test_a_file_of_one_s_own_beats_the_learner_that_comes_with_data(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: {learner: {class_path: my_learner.Lit, init_args: {width: 3}}}")
    wanted = {"class_path": "my_learner.Lit", "init_args": {"width": 3}}
    assert (
        learner("-c", str(mine), "-c", "data/mnist")
        == learner("-c", "data/mnist", "-c", str(mine))
        == wanted
    )
    mine.write_text("model: {learner: {init_args: {lr: 0.5}}}")
    for order in (("-c", str(mine), "-c", "data/mnist"), ("-c", "data/mnist", "-c", str(mine))):
        assert (
            learner(*order)["init_args"]["lr"] == 0.5 and "network" in learner(*order)["init_args"]
        )


def a_table(folder: Path) -> tuple[str, ...]:
    """Options for a table of two features, of which a third column is called by a number."""
    (folder / "sites.csv").write_text("site,f1,7,label\n" + "a,1,2,up\nb,2,1,down\n" * 6)
    data = ("--data", "FromTable", "--data.path", str(folder / "sites.csv"))
    return (*data, "--data.client", "site", "--model.learner", "ImageClassifier")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data.target", "lable"), ["data.target='lable'", "Did you mean 'label'?"]),
        (
            ("--data.target=label", "--data.client=hospital"),
            ["data.client='hospital'", "site, f1, 7, label"],
        ),
        (
            ("--data.target=label", "--data.features=[f1, f2]"),
            ["data.features='f2'", "site, f1, 7, label"],
        ),
    ],
)
def test_a_column_that_is_not_there_is_told_before_sizes(
    tmp_path: Path, options: tuple[str, ...], words: list[str]
) -> None:
    sizes = ("--model.learner.network", "MLP", "--model.learner.network.sizes", "[2, 9, 2]")
    with pytest.raises(UserError) as refused:
        learner("-c", "base", *a_table(tmp_path), *options, *sizes)
    assert [word for word in words if word not in str(refused.value)] == []


def test_columns_called_by_numbers_are_counted(tmp_path: Path) -> None:
    options = (*a_table(tmp_path), "--data.target", "7", "--data.features=[f1]")
    sizes = ("--model.learner.network", "MLP", "--model.learner.network.sizes=[null, 9, 2]")
    network = learner("-c", "base", *options, *sizes)["init_args"]["network"]
    assert network["init_args"]["sizes"] == [1, 9, 2]


# --------------------------------------------------------------------------- real runs

FIT = ("fit", "-c", "base", "-c", "trainer/cpu", "-c", "debug/tiny", "--trainer.max_epochs", 1)
FOLDER = ("--trainer.default_root_dir", "x", "--model.engine", "sequential")


@pytest.mark.parametrize("model", ["mlp", "resnet20", "resnet18gn", "vgg11"])
def test_a_round_on_digits_and_its_config(cli: Cli, model: str) -> None:
    one_client = ("--model.participation", 1, "--model.local_steps", 1)
    result = cli(*FIT, "-c", f"model/{model}", "-c", "data/digits", *FOLDER, *one_client)
    assert result.returncode == 0, result.stderr
    config = yaml.safe_load((cli.folder / "x/config.yaml").read_text())["model"]["learner"][
        "init_args"
    ]
    network = config["network"]["init_args"]
    assert config["num_classes"] == 10
    assert network["sizes"] == [64, 200, 200, 10] if model == "mlp" else network["in_channels"] == 1
    state = torch.load(cli.folder / "x/checkpoints/last.ckpt", weights_only=True)
    assert state["hyper_parameters"]["num_classes"] == 10
    result = cli("fit", "x", "--data", "CIFAR100")
    assert (
        result.returncode == 2 and "CIFAR100" in result.stderr and "Traceback" not in result.stderr
    )


def test_gaps_in_options_are_filled_as_those_of_configs_are(cli: Cli) -> None:
    sizes = ("--model.learner.network.sizes", "[null, 16, null]")
    classes = ("--model.learner.num_classes=null", "--model.local_steps", 1)
    result = cli(*FIT, "-c", "model/mlp", "-c", "data/digits", *FOLDER, *sizes, *classes)
    assert result.returncode == 0, result.stderr
    config = yaml.safe_load((cli.folder / "x/config.yaml").read_text())["model"]["learner"]
    assert config["init_args"]["network"]["init_args"]["sizes"] == [64, 16, 10]
    assert config["init_args"]["num_classes"] == 10


def test_what_cannot_fit_leaves_nothing(cli: Cli) -> None:
    result = cli(*FIT, "-c", "model/lenet", "-c", "data/digits", *FOLDER)
    assert result.returncode == 2 and "16x16" in result.stderr and os.listdir(cli.folder) == []


OWN = """
import torch
from fl_lightning.datamodules import FederatedDataModule, IID
from fl_lightning.datamodules.batches.samples import TensorSamples

class Quiet(FederatedDataModule):
    def load(self):
        images = torch.randn(40, 3, 32, 32)
        self.train_set = self.test_set = TensorSamples(images, torch.arange(40) % 10)

class Telling(Quiet):
    sample_shape, num_classes = (2, 16, 16), 4
    def load(self):
        images = torch.randn(40, 2, 16, 16)
        self.train_set = self.test_set = TensorSamples(images, torch.arange(40) % 4)
"""


@pytest.mark.parametrize(("data", "channels", "classes"), [("Quiet", 3, 10), ("Telling", 2, 4)])
def test_data_of_one_s_own(cli: Cli, data: str, channels: int, classes: int) -> None:
    (cli.folder / "own_data.py").write_text(OWN)
    result = cli(
        *FIT,
        "-c",
        "model/lenet" if data == "Telling" else "model/resnet20",
        "--data",
        f"own_data.{data}",
        "--data.num_clients",
        4,
        *FOLDER,
    )
    assert result.returncode == 0, result.stderr
    network = yaml.safe_load((cli.folder / "x/config.yaml").read_text())["model"]["learner"][
        "init_args"
    ]["network"]
    assert (network["init_args"]["in_channels"], network["init_args"]["num_classes"]) == (
        channels,
        classes,
    )
    assert ("does not say what its samples are" in result.stderr) == (data == "Quiet")


SETS = """
import torch
from torch.utils.data import Dataset, TensorDataset

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
OF_FOUR = ("--model.learner.network", "MLP", "--model.learner.network.sizes", "[4, 2]")
OF_FOUR += ("--model.learner.num_classes", "2", "--trainer.max_epochs", "1")


def test_datasets_by_their_classes(cli: Cli) -> None:
    (cli.folder / "my_sets.py").write_text(SETS)
    (cli.folder / "clients.yaml").write_text(
        "data:\n  class_path: FromDatasets\n  init_args:\n    clients:\n"
        "    - {class_path: my_sets.Own, init_args: {n: 12}}\n    - class_path: my_sets.Own\n"
    )
    run = cli("fit", "-c", "base", "-c", "clients.yaml", *OF_FOUR)
    assert run.returncode == 0 and "of 2 clients" in run.stdout, run.stderr
    one = ("--data", "FromDatasets", "--data.num_clients", "2", "--data.train")
    for name, more in (("my_sets.Own", ("--data.train.n", "14")), ("my_sets.make", ())):
        run = cli("fit", "-c", "base", *OF_FOUR, *one, name, *more)
        assert run.returncode == 0, run.stderr
    run = cli("fit", "-c", "base", *OF_FOUR, *one, "my_sets.unsaid")
    assert run.returncode == 2 and run.stderr.count("NoneType") == 0
    assert "data.train: my_sets.unsaid is no subclass of Dataset. Give one, or a f" in run.stderr
    (cli.folder / "clients.yaml").write_text(
        "data: {class_path: FromDatasets, init_args: {clients: my_sets.make}}"
    )
    run = cli("fit", "-c", "base", "-c", "clients.yaml", *OF_FOUR)
    assert "data.clients: 'my_sets.make' is not accepted; it has to be a list" in run.stderr


def test_images_of_torchvision_and_the_network_that_it_has_too(cli: Cli) -> None:

    for kind in ("cat", "dog"):
        (cli.folder / "images" / kind).mkdir(parents=True)
        for number in range(6):
            pixels = np.full((4, 4, 3), 20 * number, np.uint8)
            Image.fromarray(pixels).save(cli.folder / "images" / kind / f"{number}.png")
    config = (
        "data:\n  class_path: FromDatasets\n  init_args:\n    clients:\n"
        "    - class_path: torchvision.datasets.ImageFolder\n"
        "      init_args: {root: images TRANSFORM}\n"
        "model: {participation: all, learner: {class_path: ImageClassifier, init_args:\n"
        "  {network: {class_path: MLP, init_args: {sizes: [48, 2]}}, num_classes: 2}}}\n"
    )
    transform = ", transform: {class_path: torchvision.transforms.ToTensor}"
    (cli.folder / "a.yaml").write_text(config.replace("TRANSFORM", transform))
    one = ("--trainer.max_epochs", "1")
    # torchvision is imported for the data, and its MLP is no network of ours.
    short = ("--model.learner.network", "MLP", "--model.learner.network.sizes", "[48, 2]")
    for more in ((), short):
        run = cli("fit", "-c", "base", "-c", "a.yaml", *one, *more)
        assert run.returncode == 0, run.stderr
    shorter = config.replace("{class_path: MLP, init_args: {sizes: [48, 2]}}", "MLP")
    (cli.folder / "b.yaml").write_text(shorter.replace("TRANSFORM", transform))
    run = cli("fit", "-c", "base", "-c", "b.yaml", *one)
    assert "Multiple subclasses" not in run.stderr
    (cli.folder / "c.yaml").write_text(config.replace(" TRANSFORM", ""))
    run = cli("fit", "-c", "base", "-c", "c.yaml", *one)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert "The data's samples cannot be stacked into a batch" in run.stderr
