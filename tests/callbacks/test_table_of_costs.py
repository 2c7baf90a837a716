"""The generated tables of the methods are what the packaged methods are and do."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fl_lightning.lab.cli.compose import packaged, parse_yaml, read
from fl_lightning.lab.sweep.grid import arms
from fl_lightning.lab.sweep.sweep_file import read_spec
from studies import compared, methods
from studies.kept import keep
from tests.helpers.zygote import Cli

ROOT = Path(__file__).parents[2]


def on_page(page: Path, key: str) -> list[str]:
    """The lines of a generated table."""
    _, made, _ = methods.between((ROOT / page).read_text("utf-8"), key)
    return made.splitlines()


# A second each; these are for every day.
EVERY_DAY = ("fedavg", "scaffold", "qsgd", "ifca")
ROWS = [
    pytest.param(
        method,
        id=method.called(),
        marks=[] if method.config in EVERY_DAY else [pytest.mark.slow],
    )
    for method in methods.rows()
]


@pytest.mark.parametrize("method", ROWS)
def test_a_row_is_what_a_method_declares_and_its_rounds_cost(method: methods.Packaged) -> None:
    assert method.row() in on_page(methods.COSTS, "costs")


def test_every_packaged_method_has_one_row() -> None:
    head, _, *body = on_page(methods.COSTS, "costs")
    assert head == methods.line(methods.COLUMNS)
    configs = [method.config for method in methods.rows()]
    assert [row.split("|")[2].strip() for row in body] == [f"`{config}`" for config in configs]
    known = {name.removeprefix("method/") for name in packaged() if name.startswith("method/")}
    assert known == {*configs, *methods.ADDED}


# --------------------------------------------------------------------------- accuracy


def test_the_page_has_the_accuracy_of_the_runs_that_are_kept() -> None:
    made, picture = methods.accuracy(ROOT / methods.RESULTS)
    assert made.splitlines() == on_page(methods.COMPARED, "accuracy")
    assert (ROOT / methods.PICTURE).is_file() == (picture is not None)


def test_the_sweep_gives_every_arm_four_candidates_and_other_seeds() -> None:
    spec = read_spec(methods.SWEEP)
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
            (config,) = [name for name in arm.configs if name.startswith("method/")]
            given = [item["init_args"] for item in read(config)["method"]]
            assert any(option.removeprefix("method.") in names for names in given), arm.name


@pytest.mark.slow
def test_every_arm_is_a_configuration_with_its_candidates(cli: Cli) -> None:
    spec = read_spec(methods.SWEEP)
    assert spec.select is not None
    for arm in arms(spec):
        if arm.name.endswith("dir0.6"):
            continue
        over = {**spec.select.over, **spec.select.arms.get(arm.name, {})}
        tried = arm.with_options(arm.name, {name: values[-1] for name, values in over.items()})
        result = cli("fit", *tried.argv(), "--print_config")
        assert result.returncode == 0, (arm.name, result.stderr)


@pytest.mark.slow
def test_kept_runs_fill_a_row_and_the_others_are_named_below(cli: Cli) -> None:
    """A small sweep of the same names: SCAFFOLD sends twice as much as FedAvg."""
    grid = {
        "method": [
            {"name": "fedavg", "configs": ["method/fedavg"]},
            {"name": "scaffold", "configs": ["method/scaffold"]},
        ],
        "data": [
            {"name": "dir0.1", "data.init_args.partition.init_args.alpha": 0.1},
            {"name": "dir0.6", "data.init_args.partition.init_args.alpha": 0.6},
        ],
        "seed_everything": [20, 21],
    }
    fixed = {
        "trainer.max_epochs": 2,
        "trainer.callbacks": [{"class_path": "CommunicationLogger"}],
        "data.init_args.partition": {"class_path": "Dirichlet", "init_args": {"alpha": 0.3}},
        "data.init_args.num_clients": 10,
    }
    sweep = {
        "configs": ["base", "data/digits", "logger/csv"],
        "fixed": fixed,
        "grid": grid,
        "select": {
            "over": {"model.learner.init_args.lr": [0.1, 10.0]},
            "metric": "val/acc",
            "val_fraction": 0.2,
            "rounds": 2,
            "seeds": [100],
        },
    }
    (cli.folder / "small.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    result = cli("sweep", "small.yaml", "--out", "runs/small", "--jobs", 1)
    assert result.returncode == 0, result.stderr
    keep(cli.folder / "runs", cli.folder / "kept", clocks=())
    made, picture = methods.accuracy(cli.folder / "kept")
    assert picture is not None and picture.startswith(b"\x89PNG")
    names = [
        item["name"] for item in parse_yaml(packaged()[methods.SWEEP].read_text())["grid"]["method"]
    ]
    others = [name for name in names if name not in ("fedavg", "scaffold")]
    for setting in ("dir0.1", "dir0.6"):
        _, _, part = made.partition(f"**{setting}.** A run of FedAvg sends ")
        head, _, *rows = part.partition("\n\n")[2].splitlines()[:4]
        assert head == methods.line(compared.COLUMNS)
        cells = {row.split(" | ")[0].strip("|* "): row.strip("| ").split(" | ") for row in rows}
        assert "±" in cells["scaffold"][1] and "[" in cells["scaffold"][2]
        assert cells["scaffold"][3] == "lr 0.1↓" and cells["scaffold"][4:6] == ["2", "1"]
        assert cells["fedavg"][2] == "–" and cells["fedavg"][4:] == ["1", "1", "1"]
        best_first = [float(row.split(" | ")[1].split(" ±")[0]) for row in rows]
        assert best_first == sorted(best_first, reverse=True)
        waiting = " ".join(made.split())
        assert f"Not run yet with {setting}: {', '.join(others)}." in waiting
