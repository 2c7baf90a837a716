"""From a sweep's file to the names of its arms and the arguments of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.__main__ import main
from fl_lightning.errors import UserError
from fl_lightning.lab.sweep.grid import arms, runs, seeds
from fl_lightning.lab.sweep.selection import Candidate, candidates
from fl_lightning.lab.sweep.sweep import Sweep
from fl_lightning.lab.sweep.sweep_file import Spec, read_spec
from fl_lightning.lab.sweep.workers import places
from tests.helpers.commands import typed

OUT = Path("runs/s")
RATE = "model.learner.init_args.lr"


def spec_of(folder: Path, text: str, *overrides: str) -> Spec:
    (folder / "s.yaml").write_text(f"{text}\n")
    return read_spec(str(folder / "s.yaml"), overrides)


def tried(
    folder: Path, text: str, chosen: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Candidate]:
    spec = spec_of(folder, text)
    assert spec.select is not None
    return candidates(OUT, spec.select, arms(spec), chosen)


def dry_run(folder: Path, *overrides: str) -> int:
    return main(["sweep", str(folder / "s.yaml"), *overrides, "--dry_run", "--out", str(OUT)])


@pytest.mark.parametrize(
    "grid, expected",
    [
        ("method: [method/fedavg, {configs: [method/fedinit], method.beta: 0.1}]",
         ["fedavg", "fedinit-0.1"]),
        ("method: [{class_path: my.A, init_args: {mu: 1}, name: ours}, {class_path: my.A}]",
         ["ours", "A"]),
        ("method: [method/fedavg], model.participation: [0.1, 0.5]", ["0.1", "0.5"]),
        ("seed_everything: [0, 1]", ["s"]),
        ("method: [method/fedavg, method/ri], model.participation: [0.1, all]",
         ["fedavg_0.1", "fedavg_all", "ri_0.1", "ri_all"]),
        ("data.partition: [IID, {class_path: Dirichlet, init_args: {alpha: 0.1}}]",
         ["IID", "Dirichlet-0.1"]),
        ("method: [{configs: [method/fedinit], method.beta: 0.1, model.participation: 0.2}, "
         "{configs: [method/fedavg], model.participation: 0.2}]", ["fedinit-0.1", "fedavg"]),
        ("method: [method/fedavg, {configs: [method/fedinit], method.beta: -0.1}]",
         ["fedavg", "fedinit--0.1"]),
        ("model.server_lr_decay: [-1, 1]", ["-1", "1"]),
        ("method: [{name: a b, configs: [method/ri]}, method/fedavg]", ["a-b", "fedavg"]),
    ],
)  # fmt: skip
def test_an_arm_is_named_by_what_differs(tmp_path: Path, grid: str, expected: list[str]) -> None:
    spec = spec_of(tmp_path, f"configs: [base]\ngrid: {{{grid}}}")
    assert [arm.name for arm in arms(spec)] == expected


def test_overrides_give_the_values_of_an_axis(tmp_path: Path) -> None:
    grid = "grid: {model.participation: [0.1, 0.5], method: [method/fedavg, method/fedinit]}"
    spec = spec_of(tmp_path, grid, "model.participation=[0.2,0.3]", "method=method/fedavg")
    assert [arm.name for arm in arms(spec)] == ["0.2", "0.3"]


def test_arguments_of_a_run(tmp_path: Path) -> None:
    text = """
configs: [base, data/digits]
fixed: {model.participation: 0.1, "method+": [DivergenceLogger, DriftLogger]}
grid: {method: [{configs: [method/fedinit], method.beta: 0.1}], seed_everything: [3, 4]}
"""
    spec = spec_of(tmp_path, text, "trainer.max_epochs=3", "model.participation=all")
    (arm,) = arms(spec)
    run = runs(OUT, "", arm, seeds(spec, arm))[1]
    assert run.place == "fedinit-0.1/seed-4" and run.seed == 4
    assert list(run.argv) == list(
        typed(
            "-c base -c data/digits -c method/fedinit --model.participation=all",
            "--method+=DivergenceLogger --method+=DriftLogger --trainer.max_epochs=3",
            "--method.beta=0.1 --seed_everything=4",
            "--trainer.default_root_dir=runs/s/fedinit-0.1/seed-4 --ckpt_path=last",
        )
    )


SHARES = """
configs: [base, data/digits]
fixed: {trainer.max_epochs: 150}
grid:
  method: [method/fedavg, {configs: [method/fedinit], trainer.max_epochs: 15}]
  data.partition: [{class_path: Dirichlet, init_args: {alpha: 0.1}}, IID]
"""


def test_an_arm_keeps_its_share_of_the_rounds_and_its_name(tmp_path: Path) -> None:
    for given, rounds, share in (
        ([], 150, 15),
        (["trainer.max_epochs=60"], 60, 6),
        (["trainer.max_epochs=4"], 4, 1),
    ):
        found = {arm.name: arm for arm in arms(spec_of(tmp_path, SHARES, *given))}
        assert found["fedavg_IID"].options["trainer.max_epochs"] == rounds
        assert found["fedinit-15_IID"].options["trainer.max_epochs"] == share
    axes = {"method": "fedinit-15", "data.partition": "Dirichlet-0.1"}
    (run,) = runs(OUT, "", found["fedinit-15_Dirichlet-0.1"], [0])
    assert dict(run.axes) == axes
    without = SHARES.replace("fixed: {trainer.max_epochs: 150}\n", "")
    with pytest.raises(UserError, match=r"set trainer\.max_epochs themselves"):  # a share of what?
        spec_of(tmp_path, without, "trainer.max_epochs=60")


# ----------------------------------------------------------------------------------- selection


def test_what_is_chosen_of_a_method_is_chosen_by_the_arms_that_have_it(tmp_path: Path) -> None:
    text = "configs: [base]\ngrid: {method: [method/fedavg, method/fedinit, [method/scaffold, "
    text += "method/ri]]}\nselect: {over: {method.beta: [0.1, 0.2]}, seeds: [7]}"
    found = tried(tmp_path, text)
    expected = [(arm, beta) for arm in ("fedinit", "scaffold-ri") for beta in (0.1, 0.2)]
    assert [(each.arm, each.choice["method.beta"]) for each in found] == expected
    assert found[0].runs[0].place == "select/fedinit/0.1/seed-7"
    with pytest.raises(UserError, match=r"method\.gamma: no arm has a method with this option"):
        tried(tmp_path, text.replace("method.beta", "method.gamma"))


def test_candidates_of_ones_own_and_shorter(tmp_path: Path) -> None:
    select = "select: {over: {model.clip_norm: [1, 2]}, rounds: 60, seeds: [100], arms: "
    select += "{fedavg_IID: {method.x: [3]}}}"
    found = tried(tmp_path, SHARES + select)
    assert [(each.arm, dict(each.choice)) for each in found if each.arm.endswith("IID")] == [
        ("fedavg_IID", {"method.x": 3}),
        ("fedinit-15_IID", {"model.clip_norm": 1}),
        ("fedinit-15_IID", {"model.clip_norm": 2}),
    ]
    asked = {each.arm: each.runs[0].argv for each in found}
    assert "--trainer.max_epochs=60" in asked["fedavg_IID"]
    assert "--trainer.max_epochs=6" in asked["fedinit-15_IID"]
    with pytest.raises(UserError, match=r"fedavg_IDI is not known.*Did you mean 'fedavg_IID'"):
        tried(tmp_path, SHARES + select.replace("fedavg_IID", "fedavg_IDI"))


AFTER = """
configs: [base, data/digits]
grid: {method: [method/fedavg, {name: ri, configs: [method/fedinit]}, method/scaffold]}
select:
  over: {model.learner.init_args.lr: [0.1, 0.2]}
  arms: {ri: {after: fedavg, method.beta: [0.05, 0.1]}}
  seeds: [100]
"""


def test_an_arm_varies_the_rest_of_what_another_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tried(tmp_path, AFTER, {"fedavg": {RATE: 0.2}})
    of_ri = [each for each in found if each.arm == "ri"]
    assert [each.whole for each in of_ri] == [{RATE: 0.2, "method.beta": b} for b in (0.05, 0.1)]
    assert of_ri[0].runs[0].place == "select/ri/0.05/seed-100"
    assert {f"--{RATE}=0.2", "--method.beta=0.05"} <= set(of_ri[0].runs[0].argv)
    assert dry_run(tmp_path) == 0
    listed = capsys.readouterr().out
    assert "6 runs to select from" in listed
    assert f"each with the choice of its arm: {RATE}, method.beta" in listed


@pytest.mark.parametrize(
    "own, message",
    [
        ("{after: fedavgg, method.beta: [1]}", "fedavgg is not known. Did you mean 'fedavg'"),
        ("{after: fedavg}", "candidates of this arm"),
        ("{after: scaffold, method.beta: [1]}, scaffold: {}", "scaffold is not known"),
    ],
)
def test_whom_an_arm_cannot_come_after(tmp_path: Path, own: str, message: str) -> None:
    with pytest.raises(UserError, match=r"select\.arms\.ri\.after") as error:
        tried(tmp_path, AFTER.replace("{after: fedavg, method.beta: [0.05, 0.1]}", own))
    assert message in str(error.value)


def test_what_was_chosen_elsewhere_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{SHARES}select: {{over: {{model.clip_norm: [1, 2]}}, seeds: [100]}}"
    spec_of(tmp_path, text)
    stored = tmp_path / "other/selections.yaml"
    stored.parent.mkdir()
    names = ("fedavg_Dirichlet-0.1", "fedavg_IID", "fedinit-15_Dirichlet-0.1")
    rows = [f"{name}: {{model.clip_norm: {value}}}\n" for value, name in enumerate(names, 5)]
    stored.write_text("".join(rows))
    assert dry_run(tmp_path, "select.from=other") == 2
    assert "the choice of fedinit-15_IID is not known" in capsys.readouterr().err
    stored.write_text(stored.read_text() + "fedinit-15_IID: {}\n")
    assert dry_run(tmp_path, "select.from=other") == 0
    listed = capsys.readouterr().out
    assert "select" not in listed and "--model.clip_norm=6" in listed
    assert listed.count("--model.clip_norm=") == 3
    assert dry_run(tmp_path, "select.from=nowhere") == 2
    assert "select.from nowhere: this file cannot be read" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"select needs either over"):
        spec_of(tmp_path, f"{SHARES}select: {{from: other, seeds: [100]}}")


@pytest.mark.parametrize("metric, seen", [("clients/acc_worst10", True), ("val/acc", False)])
def test_a_choice_by_the_clients_test_samples_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str, seen: bool
) -> None:
    select = f"select: {{over: {{model.clip_norm: [1, 2]}}, seeds: [100], metric: {metric}}}"
    spec_of(tmp_path, f"configs: [base, data/digits]\n{select}")
    assert dry_run(tmp_path) == 0
    note = f"note: select.metric {metric}: it is measured on the clients' test samples"
    assert (note in capsys.readouterr().out) == seen


@pytest.mark.parametrize(
    "text, seed",
    [
        ("grid: {seed_everything: [0, 1]}", 1),
        ("fixed: {model.clip_norm: 3}", 0),
        ("fixed: {seed_everything: 7}", 7),
        ("grid: {method: [{configs: [method/fedavg, seed.yaml]}, method/fedinit]}", 5),
    ],
)
def test_what_is_selected_has_seeds_of_its_own(tmp_path: Path, text: str, seed: int) -> None:
    (tmp_path / "seed.yaml").write_text("seed_everything: 5\n")
    text = text.replace("seed.yaml", str(tmp_path / "seed.yaml"))
    select = f"select: {{over: {{model.lr_decay: [1]}}, seeds: [100, {seed}]}}"
    with pytest.raises(UserError, match=f"select.seeds: {seed} is also a seed"):
        Sweep(spec_of(tmp_path, f"configs: [base, data/digits]\n{text}\n{select}"), OUT)


BETAS = (
    "grid: {method: [{configs: [method/fedinit], method.beta: 0.1}, {configs: [method/fedinit], "
)
BETAS += "method.beta: 0.2}]}\n"


@pytest.mark.parametrize(
    "text, message",
    [
        # A folder is named by values: {"a": 1} and {"b": 1} would share one, and one's score.
        ("select: {over: {data.samples: [{a: 1}, {b: 1}]}, seeds: [7]}",
         "two candidates of s have the folder select/s/1"),
        # The arm 0.1 would have another β.
        (BETAS + "select: {over: {method.beta: [0.01, 0.1]}, seeds: [7]}",
         "method.beta is chosen for 0.1, but the grid"),
        (BETAS + "select: {from: FILE}", "method.beta is chosen for 0.1, but the grid"),
        ("select: {over: {model.lr_decay: [1, 2]}, seeds: [7], metric: val/quality}",
         "which way is better in val/quality is not known"),
    ],
)  # fmt: skip
def test_what_cannot_be_selected(tmp_path: Path, text: str, message: str) -> None:
    stored = tmp_path / "selections.yaml"
    stored.write_text("'0.1': {method.beta: 0.01}\n'0.2': {method.beta: 0.01}\n")
    text = text.replace("FILE", str(stored))
    with pytest.raises(UserError) as error:
        Sweep(spec_of(tmp_path, f"configs: [base, data/digits]\n{text}"), OUT)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("grids: {}", "grids is not known. Did you mean 'grid'"),
        ("grid: {participation: [0.1]}", "grid.participation: participation is not an option"),
        ("grid: {method: [method/fedavg, a/fedavg]}", "'fedavg' is the name of two arms"),
        ("grid: {seed_everything: [true]}", "has to be a list"),
        ("grid: {model.participation: []}", "grid.model.participation is empty"),
        ("fixed: {ckpt_path: last}", "the sweep sets ckpt_path itself"),
        ("fixed: [1]", "fixed=[1] is not accepted; it has to be a mapping"),
        ("select: {over: {model.clip_norm: [1]}}", "select needs either over"),
        ("select: {over: {model.clip_norm: [1]}, seeds: [7], val_fraction: 1}", "val_fraction=1"),
        ("select: {ovr: {}}", "select.ovr is not known. Did you mean 'over'"),
        ("[1]", "it has to be a mapping"),
    ],
)
def test_what_a_sweep_is_not(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        arms(spec_of(tmp_path, text))
    assert message in str(error.value) and str(tmp_path / "s.yaml") in str(error.value)


def test_a_dry_run_lists_commands_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    spec_of(tmp_path, "configs: [base, data/digits]\ngrid: {seed_everything: [0, 1]}")
    assert main(["sweep", "s.yaml", "--dry_run", "trainer.max_epochs=3"]) == 0
    said = capsys.readouterr().out
    assert "runs/s: 2 runs (2 waiting)" in said
    assert said.count("fl-lightning fit -c base -c data/digits") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


def test_workers_share_cores_and_gpus() -> None:
    gpus = [place.gpus for place in places(None, 2, range(8), ["0", "1", "2", "3"])]
    assert gpus == ["0,1", "2,3"]
    assert [len(place.cores) for place in places(None, 2, range(8), [])] == [2, 2, 2, 2]
    shares = places(3, 1, range(8), [])
    assert set().union(*(place.cores for place in shares)) == set(range(8))
    assert sum(len(place.cores) for place in shares) == 8
