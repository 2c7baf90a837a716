"""The generated tables of the methods are what the packaged methods are and do."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_lightning.lab.cli.compose import packaged, parse_yaml, read
from fl_lightning.lab.sweep.grid import arms
from fl_lightning.lab.sweep.sweep_file import read_spec
from studies import methods
from tests.helpers.zygote import Cli

ROOT = Path(__file__).parents[2]


def on_page(page: Path, key: str) -> list[str]:
    """The lines of a generated table."""
    _, made, _ = methods.between((ROOT / page).read_text("utf-8"), key)
    return made.splitlines()


# A second each; these are for every day.
EVERY_DAY = ("fedavg", "scaffold", "qsgd", "ifca")
MEASURED = {*EVERY_DAY, *[method.config for method in methods.rows()][::6]}
ROWS = [
    pytest.param(
        method, id=method.called(), marks=[] if method.config in EVERY_DAY else [pytest.mark.slow]
    )
    for method in methods.rows()
]


@pytest.mark.parametrize("method", ROWS)
def test_a_row_is_what_a_method_declares_and_its_rounds_cost(
    method: methods.Packaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which engines take it is measured of some rows: the contracts hold of all in each engine."""
    page, config = on_page(methods.COSTS, "costs"), f"`{method.config}`"
    if method.config not in MEASURED:
        rows = [line.split("|") for line in page if config in line]
        (engines,) = {row[11].strip() for row in rows if row[1].strip() == method.called()}
        monkeypatch.setattr(methods.Packaged, "engines", lambda self: engines)
    assert method.row() in page


def test_every_packaged_method_has_one_row() -> None:
    head, _, *body = on_page(methods.COSTS, "costs")
    assert head == methods.line(methods.COLUMNS)
    configs = [method.config for method in methods.rows()]
    assert [row.split("|")[2].strip() for row in body] == [f"`{config}`" for config in configs]
    known = {name.removeprefix("method/") for name in packaged() if name.startswith("method/")}
    assert known == {*configs, *methods.ADDED}


# --------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("key", methods.SWEEPS)
def test_the_page_has_the_accuracy_of_the_runs_that_are_kept(key: str) -> None:
    made, _ = methods.accuracy(ROOT / methods.RESULTS, methods.SWEEPS[key])
    assert made.splitlines() == on_page(methods.COMPARED, key)
    assert (ROOT / methods.PICTURE).is_file()


SWEEPS = tuple(methods.SWEEPS.values())


@pytest.mark.parametrize("sweep", SWEEPS)
def test_the_sweep_gives_every_arm_four_candidates_and_other_seeds(sweep: str) -> None:
    spec = read_spec(sweep)
    select = spec.select
    assert select is not None and not set(select.seeds) & set(spec.seeds or ())
    for arm in arms(spec):
        number = 1
        for values in {**select.over, **select.arms.get(arm.name, {})}.values():
            number *= len(values)
        # This arm of FedAvg has the two rates of methods that also choose a coefficient.
        assert number == (2 if arm.name.startswith("fedavg-two-rates") else 4), arm.name
        option = next((name for name in select.arms.get(arm.name, {}) if "method." in name), None)
        if option:
            config = next(name for name in arm.configs if name.startswith("method/"))
            given = [item["init_args"] for item in read(config)["method"]]
            assert any(option.removeprefix("method.") in names for names in given), arm.name


def test_claims_compare_arms_of_the_sweep() -> None:
    """Every new method against FedAvg or a control; one claim per method is primary."""
    file = packaged()[SWEEPS[1]]
    claims = parse_yaml((file.parent / f"{file.stem}.claims.yaml").read_text("utf-8"))
    known = {arm.name for arm in arms(read_spec(SWEEPS[1]))}
    assert {claim[side] for claim in claims for side in "ab"} <= known
    assert len({claim["id"] for claim in claims}) == len(claims)
    primary = [claim["a"] for claim in claims if claim.get("primary")]
    assert len(primary) == len(set(primary)) == 7


@pytest.mark.slow
@pytest.mark.parametrize("sweep", SWEEPS)
def test_every_arm_is_a_configuration_with_its_candidates(sweep: str, cli: Cli) -> None:
    spec = read_spec(sweep)
    assert spec.select is not None
    for arm in arms(spec):
        if arm.name.endswith("dir0.6"):
            continue
        over = {**spec.select.over, **spec.select.arms.get(arm.name, {})}
        tried = arm.with_options(arm.name, {name: values[-1] for name, values in over.items()})
        result = cli("fit", *tried.argv(), "--print_config")
        assert result.returncode == 0, (arm.name, result.stderr)
