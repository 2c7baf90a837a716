"""From a sweep's file to the names of its arms and the arguments of its runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_lightning.__main__ import main
from fl_lightning.errors import UserError
from fl_lightning.lab.sweep import sweep_command
from fl_lightning.lab.sweep.grid import arms, runs, seeds
from fl_lightning.lab.sweep.selection import candidates, unequal
from fl_lightning.lab.sweep.sweep import Sweep
from fl_lightning.lab.sweep.sweep_file import Spec, read_spec
from fl_lightning.lab.sweep.workers import places
from tests.helpers.commands import typed


def names(folder: Path, grid: str, *overrides: str) -> list[str]:
    path = folder / "mine.yaml"
    path.write_text(f"configs: [base]\ngrid: {grid}\n")
    return [arm.name for arm in arms(read_spec(str(path), overrides))]


@pytest.mark.parametrize(
    "grid, expected",
    [
        (
            "{method: [method/fedavg, {configs: [method/fedinit], method.beta: 0.1}]}",
            ["fedavg", "fedinit-0.1"],
        ),
        (
            "{method: [{class_path: my.A, init_args: {mu: 1}, name: ours}, {class_path: my.A}]}",
            ["ours", "A"],
        ),
        ("{method: [method/fedavg], model.participation: [0.1, 0.5]}", ["0.1", "0.5"]),
        ("{method: [method/fedavg], seed_everything: [0, 1]}", ["fedavg"]),
        ("{seed_everything: [0, 1]}", ["mine"]),
        (
            "{method: [method/fedavg, method/ri], model.participation: [0.1, all]}",
            ["fedavg_0.1", "fedavg_all", "ri_0.1", "ri_all"],
        ),
        (
            "{data.partition: [IID, {class_path: Dirichlet, init_args: {alpha: 0.1}}]}",
            ["IID", "Dirichlet-0.1"],
        ),
        (
            "{method: [{configs: [method/fedinit], method.beta: 0.1, model.participation: 0.2}, "
            "{configs: [method/fedavg], model.participation: 0.2}]}",
            ["fedinit-0.1", "fedavg"],
        ),
        ("{model.clip_norm: [null, 10]}", ["null", "10"]),
        (
            "{method: [method/fedavg, {configs: [method/fedinit], method.beta: -0.1}]}",
            ["fedavg", "fedinit--0.1"],
        ),
        ("{model.server_lr_decay: [-1, 1]}", ["-1", "1"]),
        ("{method: [{name: a b, configs: [method/ri]}, method/fedavg]}", ["a-b", "fedavg"]),
    ],
)
def test_an_arm_is_named_by_what_differs(tmp_path: Path, grid: str, expected: list[str]) -> None:
    assert names(tmp_path, grid) == expected


def test_arguments_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("""
configs: [base, data/digits]
fixed: {model.participation: 0.1, "method+": [DivergenceLogger, DriftLogger]}
grid: {method: [{configs: [method/fedinit], method.beta: 0.1}], seed_everything: [3, 4]}
""")
    spec = read_spec(str(path), ["trainer.max_epochs=3", "model.participation=all"])
    (arm,) = arms(spec)
    run = runs(Path("runs/s"), "", arm, seeds(spec, arm))[1]
    assert run.place == "fedinit-0.1/seed-4" and run.seed == 4
    assert list(run.argv) == list(
        typed(
            "-c base -c data/digits -c method/fedinit --model.participation=all",
            "--method+=DivergenceLogger --method+=DriftLogger --trainer.max_epochs=3",
            "--method.beta=0.1 --seed_everything=4",
            "--trainer.default_root_dir=runs/s/fedinit-0.1/seed-4 --ckpt_path=last",
        )
    )


def test_what_is_chosen_of_a_method_is_chosen_by_the_arms_that_have_it(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    text = (
        "configs: [base]\ngrid: {method: [method/fedavg, method/fedinit, [method/scaffold, "
        "method/ri]]}\n"
    )
    path.write_text(text + "select: {over: {method.beta: [0.1, 0.2]}, seeds: [7]}\n")
    spec = read_spec(str(path))
    assert spec.select is not None
    found = candidates(Path("runs/s"), spec.select, arms(spec))
    assert [(each.arm, each.choice["method.beta"]) for each in found] == [
        ("fedinit", 0.1),
        ("fedinit", 0.2),
        ("scaffold-ri", 0.1),
        ("scaffold-ri", 0.2),
    ]
    assert found[0].runs[0].place == "select/fedinit/0.1/seed-7"
    path.write_text(text + "select: {over: {method.gamma: [1]}, seeds: [7]}\n")
    spec = read_spec(str(path))
    assert spec.select is not None
    with pytest.raises(UserError, match=r"method\.gamma: no arm has a method with this option"):
        candidates(Path("runs/s"), spec.select, arms(spec))


SHARES = """
configs: [base, data/digits]
fixed: {trainer.max_epochs: 150}
grid:
  method: [method/fedavg, {configs: [method/fedinit], trainer.max_epochs: 15}]
  data.partition: [{class_path: Dirichlet, init_args: {alpha: 0.1}}, IID]
"""


def rounds_of(spec: Spec) -> dict[str, int]:
    return {arm.name: arm.options["trainer.max_epochs"] for arm in arms(spec)}


def test_an_arm_keeps_its_share_of_the_rounds_and_its_name(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SHARES)
    name = "fedinit-15_IID"
    for given, rounds, share in (
        ([], 150, 15),
        (["trainer.max_epochs=60"], 60, 6),
        (["trainer.max_epochs=4"], 4, 1),
    ):
        found = rounds_of(read_spec(str(tmp_path / "s.yaml"), given))
        assert found["fedavg_IID"] == rounds and found[name] == share
    (tmp_path / "s.yaml").write_text(SHARES.replace("fixed: {trainer.max_epochs: 150}\n", ""))
    with pytest.raises(UserError, match=r"set trainer\.max_epochs themselves"):  # a share of what?
        read_spec(str(tmp_path / "s.yaml"), ["trainer.max_epochs=60"])


def test_an_arm_says_where_it_stands_in_the_grid(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SHARES)
    spec = read_spec(str(tmp_path / "s.yaml"))
    axes = {arm.name: dict(arm.axes) for arm in arms(spec)}
    assert axes["fedinit-15_Dirichlet-0.1"] == {
        "method": "fedinit-15",
        "data.partition": "Dirichlet-0.1",
    }
    (run,) = runs(Path("runs/s"), "", arms(spec)[0], [0])
    assert dict(run.axes) == {"method": "fedavg", "data.partition": "Dirichlet-0.1"}


def test_candidates_of_ones_own_and_shorter(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    select = (
        "select: {over: {model.clip_norm: [1, 2]}, rounds: 60, seeds: [100], arms: "
        "{fedavg_IID: {method.x: [3]}}}"
    )
    path.write_text(f"{SHARES}{select}\n")
    spec = read_spec(str(path))
    assert spec.select is not None
    found = candidates(Path("runs/s"), spec.select, arms(spec))
    of_arm = [(each.arm, dict(each.choice)) for each in found if each.arm.endswith("IID")]
    assert of_arm == [
        ("fedavg_IID", {"method.x": 3}),
        ("fedinit-15_IID", {"model.clip_norm": 1}),
        ("fedinit-15_IID", {"model.clip_norm": 2}),
    ]
    asked = {each.arm: each.runs[0].argv for each in found}
    assert (
        "--trainer.max_epochs=60" in asked["fedavg_IID"]
        and "--trainer.max_epochs=6" in asked["fedinit-15_IID"]
    )
    assert unequal(found) == (
        "arms choose from unequal numbers of candidates: fedavg_Dirichlet-0.1 2, fedavg_IID 1, "
        "fedinit-15_Dirichlet-0.1 2, fedinit-15_IID 2"
    )
    path.write_text(f"{SHARES}{select.replace('fedavg_IID', 'fedavg_IDI')}\n")
    spec = read_spec(str(path))
    assert spec.select is not None
    with pytest.raises(
        UserError, match=r"fedavg_IDI: not an arm of the grid\. Did you mean 'fedavg_IID'"
    ):
        candidates(Path("runs/s"), spec.select, arms(spec))


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
    path = tmp_path / "s.yaml"
    path.write_text(AFTER)
    spec = read_spec(str(path))
    assert spec.select is not None
    rate = "model.learner.init_args.lr"
    found = candidates(Path("runs/s"), spec.select, arms(spec), {"fedavg": {rate: 0.2}})
    of_ri = [each for each in found if each.arm == "ri"]
    assert [each.whole for each in of_ri] == [
        {rate: 0.2, "method.beta": 0.05},
        {rate: 0.2, "method.beta": 0.1},
    ]
    assert of_ri[0].runs[0].place == "select/ri/0.05/seed-100"
    assert {f"--{rate}=0.2", "--method.beta=0.05"} <= set(of_ri[0].runs[0].argv)
    # Two and two: what fedavg had tried is not counted again.
    assert unequal(found) is None
    assert main(["sweep", str(path), "--dry_run", "--out", str(tmp_path / "out")]) == 0
    listed = capsys.readouterr().out
    assert "6 runs to select from" in listed and "  select/ri with the choice of fedavg\n" in listed
    assert "each with the choice of its arm: model.learner.init_args.lr, method.beta" in listed


@pytest.mark.parametrize(
    "own, message",
    [
        (
            "{after: fedavgg, method.beta: [1]}",
            "fedavgg: not an arm of the grid. Did you mean 'fedavg'",
        ),
        ("{after: ri, method.beta: [1]}", "ri after ri is a circle"),
        (
            "{after: fedavg, model.learner.init_args.lr: [1]}",
            "fedavg chooses model.learner.init_args.lr, and ri chooses it again",
        ),
        ("{after: fedavg}", "candidates of this arm"),
        ("{after: [fedavg], method.beta: [1]}", "give the name of the arm"),
        ("{after: scaffold, method.beta: [1]}, scaffold: {}", "scaffold has no candidates"),
        (
            "{after: scaffold, method.beta: [1]}, scaffold: {after: ri, model.clip_norm: [1]}",
            "ri after scaffold after ri is a circle",
        ),
        (
            "{after: scaffold, model.clip_norm: [1]}, scaffold: {after: fedavg, method.x: [1]}, "
            "fedavg: {model.clip_norm: [1]}",
            "fedavg chooses model.clip_norm, and ri chooses it again",
        ),
    ],
)
def test_whom_an_arm_cannot_come_after(
    tmp_path: Path, own: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(AFTER.replace("{after: fedavg, method.beta: [0.05, 0.1]}", own))
    assert main(["sweep", str(path), "--dry_run", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and "select.arms.ri.after" in said and said.count("\n") == 1


def test_what_was_chosen_elsewhere_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, names = (
        tmp_path / "s.yaml",
        ("fedavg_Dirichlet-0.1", "fedavg_IID", "fedinit-15_Dirichlet-0.1"),
    )
    path.write_text(f"{SHARES}select: {{over: {{model.clip_norm: [1, 2]}}, seeds: [100]}}\n")
    stored = tmp_path / "other/selections.yaml"
    stored.parent.mkdir()
    stored.write_text(
        "".join(
            f"{name}: {{model.clip_norm: {place}}}\n" for place, name in enumerate(names, start=5)
        )
    )
    argv = ["sweep", str(path), "select.from=other", "--dry_run", "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match="has no choice of fedinit-15_IID"):
        sweep_command.main(argv[1:])
    stored.write_text(stored.read_text() + "fedinit-15_IID: {}\n")
    assert main(argv) == 0
    listed = capsys.readouterr().out
    assert (
        "select" not in listed
        and listed.count("--model.clip_norm=") == 3
        and "--model.clip_norm=6" in listed
    )
    with pytest.raises(UserError, match="there is no such selection"):
        read_spec(str(path), ["select.from=nowhere"])
    path.write_text(f"{SHARES}select: {{from: other, seeds: [100]}}\n")
    with pytest.raises(UserError, match=r"select has from and seeds"):
        read_spec(str(path))


def test_overrides_give_the_values_of_an_axis(tmp_path: Path) -> None:
    grid = "{model.participation: [0.1, 0.5], method: [method/fedavg, method/fedinit]}"
    assert names(tmp_path, grid, "model.participation=[0.2,0.3]", "method=method/fedavg") == [
        "0.2",
        "0.3",
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("grids: {}", "the key 'grids' is not known. Did you mean 'grid'"),
        ("grid: {participation: [0.1]}", "grid.participation: not an option of a run"),
        ("grid: {method: [method/fedavg, a/fedavg]}", "'fedavg' is the name of two arms"),
        ("grid: {seed_everything: [0, 0]}", "0 is given twice"),
        ("grid: {seed_everything: [true]}", "Give integers"),
        ("grid: {model.participation: []}", "grid.model.participation is empty"),
        ("fixed: {ckpt_path: last}", "the sweep sets ckpt_path itself"),
        (
            "fixed: {model.participation: 1}\ngrid: {model.participation: [1, 2]}",
            "both fixed and in the grid",
        ),
        ("select: {over: {model.clip_norm: [1]}}", "select needs over"),
        ("claims: no.yaml", "claims no.yaml: there is no such file"),
        ("[1]", "a sweep is a mapping"),
    ],
)
def test_what_a_sweep_is_not(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(f"{text}\n")
    with pytest.raises(UserError) as error:
        arms(read_spec(str(path)))
    assert message in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("metric, seen", [("clients/acc_worst10", True), ("val/acc", False)])
def test_a_choice_by_the_clients_test_samples_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str, seen: bool
) -> None:
    select = f"select: {{over: {{model.clip_norm: [1, 2]}}, seeds: [100], metric: {metric}}}\n"
    (tmp_path / "s.yaml").write_text(f"configs: [base, data/digits]\n{select}")
    argv = ["sweep", str(tmp_path / "s.yaml"), "--dry_run", "--out", str(tmp_path / "out")]
    assert main(argv) == 0
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
    text = text.replace("seed.yaml", str(tmp_path / "seed.yaml"))
    (tmp_path / "seed.yaml").write_text("seed_everything: 5\n")
    path = tmp_path / "s.yaml"
    select = f"select: {{over: {{model.lr_decay: [1]}}, seeds: [100, {seed}]}}"
    path.write_text(f"configs: [base, data/digits]\n{text}\n{select}\n")
    with pytest.raises(UserError, match=f"select.seeds: {seed} is also a seed"):
        Sweep(read_spec(str(path)), tmp_path / "runs")


def test_a_dry_run_lists_commands_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text("configs: [base, data/digits]\ngrid: {seed_everything: [0, 1]}\n")
    assert main(["sweep", "s.yaml", "--dry_run", "trainer.max_epochs=3"]) == 0
    said = capsys.readouterr().out
    assert (
        "runs/s: 2 runs (2 waiting)" in said
        and said.count("fl-lightning fit -c base -c data/digits") == 2
    )
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


def test_workers_share_cores_and_gpus() -> None:
    assert [place.gpus for place in places(None, 2, range(8), ["0", "1", "2", "3"])] == [
        "0,1",
        "2,3",
    ]
    assert [len(place.cores) for place in places(None, 2, range(8), [])] == [2, 2, 2, 2]
    shares = places(3, 1, range(8), [])
    assert (
        set().union(*(place.cores for place in shares)) == set(range(8))
        and sum(len(p.cores) for p in shares) == 8
    )


def test_two_candidates_of_one_folder_are_refused(tmp_path: Path) -> None:
    """A folder is named by values: {"a": 1} and {"b": 1} would share one, and one's score."""
    path = tmp_path / "s.yaml"
    path.write_text(
        "configs: [base, data/digits]\ngrid: {seed_everything: [1]}\n"
        "select: {over: {data.samples: [{a: 1}, {b: 1}]}, seeds: [7]}\n"
    )
    spec = read_spec(str(path))
    assert spec.select is not None
    with pytest.raises(UserError, match="two candidates of s have the folder select/s/1"):
        candidates(Path("runs/s"), spec.select, arms(spec))


@pytest.mark.parametrize("select", ["over: {method.beta: [0.01, 0.1]}", "from: other"])
def test_what_the_grid_sets_is_not_chosen(tmp_path: Path, select: str) -> None:
    """The arm 0.1 would have another β."""
    (tmp_path / "other").mkdir()
    chosen = "'0.1': {method.beta: 0.01}\n'0.2': {method.beta: 0.01}\n"
    (tmp_path / "other/selections.yaml").write_text(chosen)
    seeds = "" if "from" in select else ", seeds: [7]"
    path = tmp_path / "s.yaml"
    path.write_text(
        "configs: [base, data/digits]\ngrid: {method: [{configs: [method/fedinit], "
        "method.beta: 0.1}, {configs: [method/fedinit], method.beta: 0.2}]}\n"
        f"select: {{{select.replace('other', str(tmp_path / 'other'))}{seeds}}}\n"
    )
    with pytest.raises(UserError, match=r"method\.beta is chosen for 0\.1, but the grid"):
        Sweep(read_spec(str(path)), tmp_path / "runs")
