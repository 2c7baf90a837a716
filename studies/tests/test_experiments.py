"""The packaged experiments say what the papers say: key by key, against paper_settings.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.lab.cli.compose import class_name, merge, packaged, read
from fl_lightning.lab.report.claims import read_claims
from studies.tests.paper_settings import EXPERIMENTS, FRAGMENTS
from tests.helpers.zygote import Cli

PAIRS = [(paper, name) for paper, names in FRAGMENTS.items() for name in names]


UNSAID = {  # how a run is made, not what it computes; of simulated systems no paper has a table
    "asynchronous",
    "engine",
    "accumulate",
    "learner.base_dtype",
    "learner.quantize",
    "learner.gradient_checkpointing",
    "clients_at_once",
    "workers",
    "capture",
    "seed",
    "strict_resume",
    "on_nonfinite",
    "init_from",
    "learner",
    "client_scheduler",
    "root",
    "pooled",
    "download",
    "eval_batch_size",
    "learner.num_classes",
    "learner.label_smoothing",  # nor is smoothing in their tables
    "learner.metrics",
    "learner.heads",
    "quotes",
    "mean",  # None: the data set's own
    "std",
    "clients",
    "client_test_fraction",
    "test_clients",
    "samples",
}


# Devices, all methods, and domains are compared for our own pages.
OURS = tuple(
    f"experiment/{name}/"
    for name in ("adapters", "systems", "methods", "fedbn", "domains", "decentralised")
)


def plain(node: Any) -> Any:
    """A class as its bare name with its arguments beside it.

    Of torch's SGD what is not its default.
    """
    if isinstance(node, list):
        return [plain(item) for item in node]
    if not isinstance(node, dict) or "class_path" not in node:
        return node
    arguments = {key: plain(value) for key, value in (node.get("init_args") or {}).items()}
    if node["class_path"] == "torch.optim.SGD":
        arguments = {
            key: value for key, value in arguments.items() if value not in (0.0, False, None)
        }
    return {"class_path": class_name(node), **arguments}


def at(config: Any, key: str) -> Any:
    """The value of a key of a table."""
    section, _, rest = key.partition(".")
    node = config[section]
    if section == "data":
        node = class_name(node) if rest == "class_path" else plain(node["init_args"][rest])
    elif rest.startswith("learner."):
        node = plain(node["learner"]["init_args"][rest.removeprefix("learner.")])
    else:
        node = plain(node[rest] if rest else node)
    return node


def printed(cli: Cli, *names: str) -> Any:
    configs = [part for name in names for part in ("-c", name)]
    result = cli("fit", *configs, "--print_config")
    assert result.returncode == 0, result.stderr
    return yaml.safe_load(result.stdout)


def packaged_experiments() -> list[str]:
    """All that lie in experiment/, fragments and sweeps aside."""
    names = [
        name for name in packaged() if name.startswith("experiment/") and not name.startswith(OURS)
    ]
    return [
        name for name in names if "/method/" not in name and not name.endswith(("-small", "-full"))
    ]


CLAIMS = sorted(Path(__file__).parents[1].glob("configs/**/*.claims.yaml"))


@pytest.mark.parametrize("path", CLAIMS, ids=lambda path: path.name.removesuffix(".claims.yaml"))
def test_the_claims_of_a_sweep_can_be_judged(path: Path) -> None:
    """A sweep reads them before its first run."""
    assert read_claims(path, []).claims


def test_the_tables_name_every_experiment_and_every_fragment() -> None:
    assert set(packaged_experiments()) == set(EXPERIMENTS)
    fragments = {
        name
        for name in packaged()
        if name.startswith("experiment/") and "/method/" in name and not name.startswith(OURS)
    }
    assert fragments == {f"experiment/{paper}/method/{name}" for paper, name in PAIRS}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_what_its_paper_says(name: str, cli: Cli) -> None:
    config = printed(cli, name)
    expected = EXPERIMENTS[name]
    assert {key: at(config, key) for key in expected} == expected
    said = {key.partition(".")[2] for key in expected}
    learner, data = config["model"]["learner"]["init_args"], config["data"]["init_args"]
    there = {*config["model"], *data, *(f"learner.{key}" for key in learner)}
    assert there - said == UNSAID & there, "a key without a table"


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "name"), PAIRS)
def test_a_fragment_changes_what_its_paper_says_and_nothing_else(
    paper: str, name: str, cli: Cli
) -> None:
    experiment = next(e for e in EXPERIMENTS if e.startswith(f"experiment/{paper}/"))
    config = printed(cli, experiment, f"experiment/{paper}/method/{name}")
    expected = {**EXPERIMENTS[experiment], **FRAGMENTS[paper][name]}
    assert {key: at(config, key) for key in expected} == expected


@pytest.mark.parametrize("paper", FRAGMENTS)
def test_every_fragment_composes_with_every_experiment_whatever_came_before(paper: str) -> None:
    experiments = {
        name: read(name) for name in EXPERIMENTS if name.startswith(f"experiment/{paper}/")
    }
    fragments = [read(f"experiment/{paper}/method/{name}") for name in FRAGMENTS[paper]]
    whole = [fragment for fragment in fragments if "method" in fragment]
    for name, experiment in experiments.items():
        for last in whole:
            alone = merge(experiment, last)
            assert all(merge(merge(experiment, before), last) == alone for before in whole), name
            assert alone["model"].keys() == experiment["model"].keys(), (
                "a fragment brings no key that is not there"
            )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_value_says_where_it_is_from(name: str) -> None:
    for line in packaged()[name].read_text("utf-8").splitlines():
        key, _, value = line.strip().removeprefix("- ").partition(": ")
        unpublished = not value or key in ("root", "method", "class_path") or value == "null"
        assert line.startswith("#") or line.endswith(":") or unpublished or "  # " in line, line


ARRAYS = """
from types import SimpleNamespace

import numpy as np
import torch

from fl_lightning import datamodules


class Arrays:
    files = ()

    def _open(self, train, download=False):
        rng = np.random.default_rng(0)
        shape, n = self.sample_shape, 40
        labels = np.arange(n) % self.num_classes
        if type(self).__name__ == "MNIST":
            data = torch.from_numpy(rng.integers(0, 256, (n, *shape[1:]), dtype=np.uint8))
            return SimpleNamespace(data=data, targets=torch.from_numpy(labels))
        channels_last = type(self).__name__ != "SVHN"
        if channels_last:
            shape = shape[1:] + shape[:1]
        data = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
        return SimpleNamespace(data=data, targets=labels, labels=labels)


"""
DATA = ("CIFAR10", "CIFAR100", "MNIST", "SVHN")
ARRAYS += "\n".join(f"class {name}(Arrays, datamodules.{name}):\n    pass\n" for name in DATA)


KINDS = {  # of experiments that differ in a number of clients, an α or classes alone: the last
    (
        name.split("/")[1],
        *(str(of[key]) for key in ("data.class_path", "model.learner.network")),
        kind,
    ): name
    for name, of in EXPERIMENTS.items()
    if "model.learner.network" in of  # those of texts: tests/models/test_text_runs.py
    for kind in [of["data.partition"]["class_path"]]
}


FEW = ("-c", "trainer/cpu", "--trainer.max_epochs", 1, "--trainer.enable_checkpointing", "false")


def one_round(cli: Cli, *argv: object) -> None:
    result = cli("fit", *argv, *FEW, "--trainer.default_root_dir", "run")
    assert result.returncode == 0, result.stderr
    header, row = (cli.folder / "run" / "metrics.csv").read_text().splitlines()
    values = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(values["train/loss"]) > 0 and 0 <= float(values["val/acc"]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS.values())
def test_one_round_of_each_on_arrays_of_the_shape_of_its_data(name: str, cli: Cli) -> None:
    (cli.folder / "arrays.py").write_text(ARRAYS)
    config = read(name)
    config["data"]["class_path"] = f"arrays.{config['data']['class_path']}"
    (cli.folder / "mine.yaml").write_text(yaml.safe_dump(config))
    few = ("--data.num_clients", 4, "--model.participation", 2, "--model.local_steps", 1)
    one_round(cli, "-c", "mine.yaml", *few, "--model.engine", "sequential")


@pytest.mark.slow
def test_one_round_on_cifar10_itself(cli: Cli, real_data: Path) -> None:
    """Of one client with a few images: a round of ten, or all for validation, takes minutes."""
    if not (real_data / "cifar-10-batches-py").is_dir():
        pytest.skip(f"no CIFAR-10 in {real_data}; FL_LIGHTNING_DATA says where it is")
    name = next(name for key, name in KINDS.items() if key[0] == "fedsmoo" and "CIFAR10" in key)
    few = ("--data.samples", 1000, "--model.participation", 1, "--trainer.limit_val_batches", 1)
    one_round(cli, "-c", name, "--data.root", real_data, *few)
