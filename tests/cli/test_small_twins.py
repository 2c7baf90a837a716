"""The packaged sweeps, small twins of the papers' tables: every arm is a configuration, every claim about two arms."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from fl_lightning.cli.compose import packaged, parse_yaml
from fl_lightning.report.claims import read_claims
from tests.helpers.zygote import Cli

TWINS = [name for name in packaged() if name.startswith("experiment/") and name.endswith("-small")]


def sweep(name: str) -> Any:
    return parse_yaml(packaged()[name].read_text("utf-8"))


def arms(name: str) -> dict[str, Any]:
    """What a sweep's only axis beside the seed has, by the names that its arms get: what differs, joined by "-"."""
    (axis,) = set(sweep(name)["grid"]) - {"seed_everything"}
    assert axis == "method"
    named = {}
    for item in sweep(name)["grid"]["method"]:
        item = {"configs": [item]} if isinstance(item, str) else item
        values = [config.rsplit("/", 1)[-1] for config in item["configs"]]
        values += [str(value) for key, value in item.items() if key != "configs"]
        named["-".join(values)] = item
    assert len(named) == len(sweep(name)["grid"]["method"]), "arms have names of their own"
    return named


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_has_what_a_sweep_needs_and_claims_about_its_own_arms(name: str) -> None:
    twin = sweep(name)
    assert set(twin) == {"configs", "fixed", "grid", "select", "claims"}
    seeds = twin["grid"]["seed_everything"]
    assert len(seeds) >= 3 and not set(seeds) & set(twin["select"]["seeds"]), "rates are chosen with other seeds"
    assert twin["select"]["val_fraction"] > 0, "on data that are not the test set"
    folder = packaged()[name].parent  # type: ignore[attr-defined]  # Traversable has none; files of a folder do
    claims = read_claims(folder / twin["claims"], []).claims
    assert claims and {arm for claim in claims for arm in (claim.a, claim.b)} <= set(arms(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_every_arm_of_a_twin_is_a_configuration(name: str, cli: Cli) -> None:
    """Of arms that set other values of the same options, one."""
    twin = sweep(name)
    for item in {(*arm["configs"], *arm): arm for arm in arms(name).values()}.values():
        configs = [part for config in [*twin["configs"], *item["configs"]] for part in ("-c", config)]
        given = {**twin["fixed"], **{key: value for key, value in item.items() if key != "configs"}}
        options = [f"--{key}={json.dumps(value)}" for key, value in given.items()]
        result = cli("fit", *configs, *options, "--print_config")
        assert result.returncode == 0, (item, result.stderr)
        learner = yaml.safe_load(result.stdout)["model"]["learner"]["init_args"]
        assert learner["weight_decay"] == twin["fixed"]["model.learner.init_args.weight_decay"]
