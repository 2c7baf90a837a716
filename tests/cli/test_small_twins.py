"""The packaged sweeps, small twins of the papers' tables: every arm is a configuration, every claim about two arms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.cli.compose import packaged, parse_yaml
from fl_lightning.report.claims import read_claims
from fl_lightning.sweep.grid import arms
from fl_lightning.sweep.spec import read_spec
from tests.helpers.zygote import Cli

TWINS = [name for name in packaged() if name.startswith("experiment/") and name.endswith("-small")]


def sweep(name: str) -> Any:
    return parse_yaml(packaged()[name].read_text("utf-8"))


RATES, MLP = [0.03, 0.1, 0.3], [784, 64, 10]
SKEWED = {"class_path": "Dirichlet", "init_args": {"alpha": 0.1, "replacement": True}}
THREE = {"class_path": "Pathological", "init_args": {"classes": 3, "replacement": True}}
LENET, EIGHT = "LeNet", {"depth": 8, "width": 8}
# data, network, rounds, clients, participation, local epochs, batch, split, weight decay, rates, seeds
PLAN: dict[str, tuple[Any, ...]] = {
    "fedinit/controls-fashionmnist-dir0.1-100-small": ("F", MLP, 150, 100, 0.1, 2, 50, SKEWED, 1e-3, RATES, 5),
    "fedinit/figure1-fashionmnist-dir0.1-100-small": ("F", MLP, 60, 100, 0.1, 1, 50, SKEWED, 1e-3, RATES, 3),
    "fedinit/table2-fashionmnist-dir0.1-100-small": ("F", MLP, 100, 100, 0.1, 2, 50, SKEWED, 1e-3, RATES, 5),
    "fedinit/table3-fashionmnist-dir0.1-100-small": ("F", MLP, 150, 100, 0.1, 2, 50, SKEWED, 1e-3, RATES, 5),
    "fedinit/table3-fashionmnist-dir0.1-200-small": ("F", MLP, 150, 200, 0.05, 2, 50, SKEWED, 1e-3, RATES, 5),
    "fedinit/table1-fashionmnist-dir0.6-100-small": ("F", MLP, 150, 100, 0.1, 2, 50, 0.6, 1e-3, RATES, 5),
    "fedinit/table1-fashionmnist-iid-100-small": ("F", MLP, 150, 100, 0.1, 2, 50, "IID", 1e-3, RATES, 5),
    "fedinit/table3-cifar10-dir0.1-100-small": ("C", LENET, 150, 100, 0.1, 2, 50, SKEWED, 1e-3, RATES, 3),
    "fedinit/table3-har-subjects-21-small": ("H", "own", 150, None, 4, 2, 50, None, 1e-3, RATES, 5),
    "fedsmoo/table8-fashionmnist-path3-100-small": ("F", MLP, 150, 100, 0.1, 2, 50, THREE, 1e-3, RATES, 5),
    "fedsmoo/table8-cifar10-path3-100-small": ("C", LENET, 150, 100, 0.1, 2, 50, THREE, 1e-3, RATES, 3),
}
FACTORS_OF_TWO = [0.025, 0.05, 0.1, 0.2]
for table, split, norm in (
    ("table2", "shards-5-batch", "batch"), ("table2", "shards-5-group", "group"), ("table1", "iid-5", "batch"),
    ("table1", "shards-5", "batch"),
):  # fmt: skip
    kind = "IID" if split == "iid-5" else "SortedShards"
    own = ("C", {"norm": norm, **EIGHT}, 300, 5, "all", None, 64, kind, 1e-4, FACTORS_OF_TWO, 3)
    PLAN[f"fedals/{table}-cifar10-{split}-small"] = own
OF_ADAMW = [0.0005, 0.001, 0.002, 0.004]
TEXT = ("T", "own", 150, 5, "all", None, 16, "Contiguous", 0.01, OF_ADAMW, 3)
PLAN["fedals/table1-shakespeare-parts-5-small"] = TEXT
DATA = {"F": "data/fashionmnist", "C": "data/cifar10", "H": "data/har", "T": "data/text"}
MARGINS = {"val/acc": 0.005, "val/loss": 0.01}  # half a point; a hundredth of a nat


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_is_as_it_was_planned(name: str) -> None:
    twin, fixed = sweep(name), sweep(name)["fixed"]
    network = fixed.get("model.learner.init_args.network", {"class_path": ".own"})  # of its data/ config
    arguments = network.get("init_args", {})
    split = fixed.get("data.init_args.partition")
    if split is not None and split["class_path"] in ("Contiguous", "IID", "SortedShards"):
        split = split["class_path"]
    elif split is not None and split["init_args"].get("alpha") == 0.6:
        split = 0.6
    found = (
        next(key for key, config in DATA.items() if config in twin["configs"]),
        arguments.get("sizes") or arguments or network["class_path"].rpartition(".")[2],
        fixed["trainer.max_epochs"], fixed.get("data.init_args.num_clients"), fixed["model.participation"],
        fixed["model.local_epochs"], fixed["data.init_args.batch_size"], split,
        fixed["model.learner.init_args.weight_decay"], twin["select"]["over"]["model.learner.init_args.lr"],
        len(twin["grid"]["seed_everything"]),
    )  # fmt: skip
    assert found == PLAN[name.removeprefix("experiment/")]
    folder = Path(str(packaged()[name])).parent
    for claim in read_claims(folder / twin["claims"], []).claims:
        assert claim.score == "tail", claim
        assert claim.margin == MARGINS.get(claim.metric) or claim.metric.startswith("divergence/"), claim


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_has_what_a_sweep_needs_and_claims_about_its_own_arms(name: str) -> None:
    twin = sweep(name)
    assert set(twin) == {"configs", "fixed", "grid", "select", "claims"}
    seeds = twin["grid"]["seed_everything"]
    assert len(seeds) >= 3 and not set(seeds) & set(twin["select"]["seeds"]), "rates are chosen with other seeds"
    assert twin["select"]["val_fraction"] > 0, "on data that are not the test set"
    folder = Path(str(packaged()[name])).parent
    claims = read_claims(folder / twin["claims"], []).claims
    assert claims and {arm for claim in claims for arm in (claim.a, claim.b)} <= {
        arm.name for arm in arms(read_spec(name))
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_every_arm_of_a_twin_is_a_configuration(name: str, cli: Cli) -> None:
    """Of arms that set other values of the same options, one."""
    twin = sweep(name)
    for arm in {(*arm.configs, *arm.options): arm for arm in arms(read_spec(name))}.values():
        result = cli("fit", *arm.argv(), "--print_config")
        assert result.returncode == 0, (arm, result.stderr)
        learner = yaml.safe_load(result.stdout)["model"]["learner"]["init_args"]
        assert learner["weight_decay"] == twin["fixed"]["model.learner.init_args.weight_decay"]
