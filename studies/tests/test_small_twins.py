"""The packaged sweeps, small twins of the papers' tables.

What the protocol says of them, held to a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.lab.cli.compose import packaged, parse_yaml
from fl_lightning.lab.sweep.grid import PlannedArm, arms
from fl_lightning.lab.sweep.sweep_file import read_spec
from studies import papers
from tests.helpers.zygote import Cli

SMALL = [name for name in packaged() if name.startswith("experiment/") and name.endswith("-small")]
# FedBN's study is no row of the protocol: studies/tests/test_domain_studies.py runs it.
TWINS = [name for name in SMALL if not name.startswith("experiment/fedbn/")]
EIGHT, FIVE, THREE = [*range(20, 28)], [*range(20, 25)], [*range(20, 23)]
# families (the first is the row's) → claims of each; arms, seeds, candidates of each arm, rounds
ROWS: dict[str, tuple[dict[str, int], int, list[int], int, int]] = {
    "fedinit/table3-fashionmnist-dir0.1-100-small": ({"P1": 2, "P3": 3, "P9": 2}, 5, EIGHT, 0, 150),
    "fedinit/controls-fashionmnist-dir0.1-100-small": ({"P2": 6}, 10, EIGHT, 6, 150),
    "fedinit/stability-fashionmnist-dir0.1-100-small": ({"P4": 6}, 9, THREE, 0, 150),
    "fedsmoo/table8-fashionmnist-path3-100-small": ({"P5": 8, "B3": 4}, 9, EIGHT, 3, 150),
    "fedsmoo/hessian-fashionmnist-dir0.1-100-small": ({"P6": 6}, 7, FIVE, 0, 150),
    "fedals/table2-cifar10-shards-5-small": ({"P7": 5, "P8": 6}, 6, FIVE, 4, 300),
    "fedinit/table3-har-subjects-21-small": ({"HAR": 2}, 3, EIGHT, 3, 150),
    "fedals/table1-shakespeare-parts-5-small": ({"C5": 2}, 3, FIVE, 4, 150),
    "fedinit/figure1-fashionmnist-dir0.1-100-small": ({"A6": 3}, 5, EIGHT, 0, 150),
    "fedinit/table2-fashionmnist-dir0.1-100-small": (
        {"A7-models": 6, "A7-updates": 6},
        18,
        EIGHT,
        4,
        150,
    ),
    "fedinit/table1-fashionmnist-splits-100-small": ({"A8": 1}, 4, EIGHT, 0, 150),
    "fedals/table1-cifar10-iid-5-small": ({"C2": 1}, 2, FIVE, 4, 300),
    "fedals/table1-cifar10-shards-5-small": ({"C4": 2}, 4, FIVE, 4, 300),
    "fedinit/table8-fashionmnist-dir0.1-100-small": ({"D1": 6}, 7, FIVE, 0, 30),
    "fedals/theorem1-fashionmnist-iid-small": ({"D3": 1}, 6, EIGHT, 0, 1),
    "fedinit/table1-fashionmnist-dir0.1-100-small": ({"T1": 6}, 7, EIGHT, 3, 150),
    "fedinit/table3-cifar10-dir0.1-100-small": ({"L1": 1}, 2, FIVE, 0, 60),
    "fedsmoo/table8-cifar10-path3-100-small": ({"L2": 3}, 4, FIVE, 0, 60),
    "methods/optimizers-shakespeare-parts-5-small": ({"O1": 9}, 9, FIVE, 4, 40),
    "fedals/table1-cifar10-shards-5-long-small": ({"P10": 1}, 2, THREE, 4, 2000),
}
PRIMARY = {"P1-helps", "P5-correction", "P7-rounds-batch"}
RATE = "model.learner.init_args.lr"


def sweep(name: str) -> dict[str, Any]:
    return parse_yaml(packaged()[name].read_text("utf-8"))  # type: ignore[no-any-return]


def claims(name: str) -> list[dict[str, Any]]:
    folder = Path(str(packaged()[name])).parent
    text = (folder / sweep(name)["claims"]).read_text("utf-8")
    return parse_yaml(text)  # type: ignore[no-any-return]


def arms_of(claim: Mapping[str, Any]) -> Iterator[str]:
    target = claim.get("target")
    named = [claim.get(key) for key in ("a", "b", "c", "d", "arm", "against")]
    named.append(target["arm"] if isinstance(target, dict) else None)
    yield from (name for name in named if name is not None)


def candidates(name: str) -> dict[str, int]:
    """How many candidates each arm has: 0, where nothing is selected."""
    select = sweep(name).get("select", {})
    own = select.get("arms", {})
    found = {}
    for arm in arms(read_spec(name)):
        over = dict(own.get(arm.name, select.get("over", {})))
        over.pop("after", None)
        found[arm.name] = math.prod(len(values) for values in over.values()) if over else 0
    return found


def test_every_twin_is_a_row_of_the_protocol_with_a_name_of_its_own() -> None:
    assert {name.removeprefix("experiment/") for name in TWINS} == set(ROWS)
    assert {name: row.split(", ") for row, name in papers.ROWS.items()} == {
        n: list(r[0]) for n, r in ROWS.items()
    }
    stems = [name.rpartition("/")[2] for name in TWINS]
    assert len(set(stems)) == len(stems), "a sweep's folder has the stem's name"


def test_ids_are_unique_over_all_twins_and_say_their_family() -> None:
    every = [claim for name in TWINS for claim in claims(name)]
    ids = [claim["id"] for claim in every]
    assert len(set(ids)) == len(ids)
    assert all(claim["id"].startswith(claim["family"] + "-") for claim in every)
    assert {claim["id"] for claim in every if claim.get("primary")} == PRIMARY


@pytest.mark.parametrize("name", TWINS)
def test_a_row_has_the_claims_arms_seeds_and_runs_of_the_protocol(name: str) -> None:
    families, number, seeds, most, rounds = ROWS[name.removeprefix("experiment/")]
    twin, known = sweep(name), {arm.name for arm in arms(read_spec(name))}
    found: dict[str, int] = {}
    for claim in claims(name):
        found[claim["family"]] = found.get(claim["family"], 0) + 1
        assert claim["paper_predicts"] and claim["we_predict"], claim["id"]
        assert claim.get("score", "tail") == "tail", claim["id"]
        assert set(arms_of(claim)) <= known, claim["id"]
    assert found == families
    assert len(known) == number and twin["grid"]["seed_everything"] == seeds
    assert twin["fixed"]["trainer.max_epochs"] == rounds
    assert max(candidates(name).values()) == most
    assert "select" in twin or twin["fixed"][RATE] == 0.1


@pytest.mark.parametrize("name", [name for name in TWINS if "select" in sweep(name)])
def test_what_is_selected_is_selected_alike_and_apart_from_what_is_reported(name: str) -> None:
    twin, count = sweep(name), candidates(name)
    select = twin["select"]
    looked_at = {*range(5), *twin["grid"]["seed_everything"]}
    seeds, rounds = [100, 101], 100 if "cifar10" in name else 60
    if "optimizers-shakespeare" in name:
        seeds, rounds = [100], 20
    if "-long-" in name:
        seeds, rounds = [100], 200
    assert (select["seeds"], select["rounds"]) == (seeds, rounds)
    assert not looked_at & {100, 101}
    assert select["val_fraction"] == 0.1, "on data that are not the test set"
    for claim in claims(name):
        assert len({count[arm] for arm in arms_of(claim)}) <= 1, claim["id"]


@pytest.mark.parametrize("name", TWINS)
def test_a_claim_is_not_about_what_no_run_logs(name: str) -> None:
    loggers = {
        "divergence": "DivergenceLogger",
        "consensus": "ConsensusDistanceLogger",
        "hessian": "HessianLogger",
        "global": "GlobalLossLogger",
        "communication": "CommunicationLogger",
    }
    for claim in claims(name):
        by = loggers.get(claim["metric"].split("/")[0].split("_")[0])
        by = "CommunicationLogger" if claim.get("cost") == "bytes" else by
        for arm in arms(read_spec(name)):
            if by is not None and arm.name in arms_of(claim):
                present = [item["class_path"] for item in arm.options["trainer.callbacks"]]
                assert by in present, (claim["id"], arm.name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_every_arm_of_a_twin_is_a_configuration(name: str, cli: Cli) -> None:
    """Of arms that set other values of the same options, one."""
    twin = sweep(name)
    for arm in {(*arm.configs, *arm.options): arm for arm in arms(read_spec(name))}.values():
        result = cli("fit", *arm.argv(), "--print_config")
        assert result.returncode == 0, (arm, result.stderr)
        config = yaml.safe_load(result.stdout)
        learner = config["model"]["learner"]["init_args"]
        assert learner.get("weight_decay") == twin["fixed"].get(
            "model.learner.init_args.weight_decay", 0.0
        )
        if "fedals" not in name:
            assert config["model"]["lr_decay"] == decay(arm), arm.name


def decay(arm: PlannedArm) -> float:
    """The papers': FedDyn and its kin decay the rate more slowly than the others."""
    slow = any(
        config.rpartition("/")[2] in ("feddyn", "feddyn_sam", "fedsmoo") for config in arm.configs
    )
    return float(arm.options.get("model.lr_decay", 0.9995 if slow else 0.998))
