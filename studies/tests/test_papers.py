"""The papers' small twins, re-made: which sweeps, what is kept of them, and the page."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning.lab.report.claims import read_claims
from fl_lightning.lab.report.runs import find
from fl_lightning.lab.report.summary import summarise
from fl_lightning.lab.sweep.grid import arms
from fl_lightning.lab.sweep.sweep_file import read_spec
from studies import papers
from studies.kept import keep, pack, unpack, unpacked
from tests.report.folders import make_arm, make_run

FORMS = ("consensus", "consensus_per_coordinate", "consensus_relative")
CLAIM = "- {id: X-a, a: new, b: old, metric: val/acc, direction: greater, margin: 0.005}\n"


@pytest.fixture()
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, where a sweep of two arms has ended but for one run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_LIGHTNING_DATA", "/somewhere/data-of-mine")
    sweep = papers.OUT / "all/x-small"
    for arm, level in (("old", 0.7), ("new", 0.8)):
        for run in make_arm(sweep, arm, {seed: level + seed / 1000 for seed in range(20, 26)}):
            (run / "config.yaml").write_text("data: {init_args: {root: /somewhere/data-of-mine}}\n")
            shutil.copytree(run, sweep / f"select/{arm}/0.1/{run.name}")
            (run / "checkpoints").mkdir()
            (run / "checkpoints/last.ckpt").write_bytes(b"weights")
    unfinished = sweep / "new/seed-25/run.json"
    unfinished.write_text(json.dumps({**json.loads(unfinished.read_text()), "status": "running"}))
    (sweep / "sweep.yaml").write_text("configs: [base]\n")
    (sweep / "claims.yaml").write_text(CLAIM)
    return tmp_path


def test_what_has_ended_is_kept_without_weights_and_without_paths_of_this_machine(
    ran: Path,
) -> None:
    assert keep(papers.OUT / "all", papers.RESULTS) == 0
    made = [path.relative_to(papers.RESULTS).as_posix() for path in papers.RESULTS.rglob("*.*")]
    assert sorted(made) == ["sweeps.csv", "x-small/curves.csv.xz", "x-small/runs.csv.xz"]
    with unpacked(papers.RESULTS) as folders:
        sweep = folders / "x-small"
        kept = sorted(path.parent.name for path in sweep.glob("new/*/run.json"))
        assert kept == [f"seed-{seed}" for seed in range(20, 25)], (
            "the one that runs still is not there"
        )
        assert not list(sweep.rglob("*.ckpt"))
        assert len(list(sweep.glob("select/*/0.1/*/run.json"))) == 12, (
            "a copy goes on from its selection"
        )
        assert "root: data}" in (sweep / "new/seed-20/config.yaml").read_text()
        assert (sweep / "claims.yaml").read_text() == CLAIM, "whose hash the runs recorded"


def test_a_row_of_which_runs_are_missing_waits_beside_the_tables(ran: Path) -> None:
    sweep = papers.OUT / "all/x-small"
    listed = "arm,seed,status,folder\nold,25,done,a\nnew,25,running,b\n"
    (sweep / "runs.csv").write_text(listed)
    assert papers.main(["keep"]) == 0
    waiting = papers.RESULTS / "unfinished"
    assert [path.name for path in papers.RESULTS.iterdir()] == ["unfinished"]
    shutil.rmtree(sweep)
    assert papers.main(["unpack"]) == 0
    assert len(list(sweep.glob("*/seed-*/run.json"))) == 11
    assert len(list(sweep.glob("select/*/0.1/*/run.json"))) == 12
    make_arm(sweep, "new", {25: 0.8})
    (sweep / "new/seed-25/config.yaml").write_text("data: {}\n")
    (sweep / "runs.csv").write_text(listed.replace("running", "diverged"))
    assert papers.main(["keep"]) == 0
    assert not waiting.exists()
    with unpacked(papers.RESULTS) as folders:
        assert len(list(folders.glob("x-small/*/seed-*/metrics.csv"))) == 12


def test_tables_hold_every_digit_and_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    columns = {"val/acc": [0.1 + 0.2, None, 5e-324], "b, c": [1e16, -0.0, 1 / 3], "a": [None] * 3}
    run = make_run(tmp_path / "runs/x/arm/seed-1", "arm", 1, columns)
    make_run(tmp_path / "runs/x/arm/seed-2", "arm", 2, {"a": [math.inf]})
    (tmp_path / "runs/x/sweep.yaml").write_text('text: "of, two\nlines"\n')
    for target in ("one", "two"):
        pack(tmp_path / "runs", tmp_path / target)
    unpack(tmp_path / "one", tmp_path / "back")
    for path in (run / "metrics.csv", run / "run.json", tmp_path / "runs/x/sweep.yaml"):
        back = tmp_path / "back" / path.relative_to(tmp_path / "runs")
        assert back.read_bytes() == path.read_bytes()
    for path in (tmp_path / "one").rglob("*.*"):
        other = tmp_path / "two" / path.relative_to(tmp_path / "one")
        assert path.read_bytes() == other.read_bytes()


def test_runs_are_added_to_tables_whose_own_runs_stay(ran: Path) -> None:
    keep(papers.OUT / "all", papers.RESULTS)
    finished = papers.OUT / "all/x-small/new/seed-25/run.json"
    finished.write_text(finished.read_text().replace("running", "done"))
    again = papers.OUT / "all/x-small/new/seed-20/run.json"
    again.write_text(again.read_text().replace("FedAvg", "another"))
    shutil.rmtree(papers.OUT / "all/x-small/old/seed-22")
    keep(papers.OUT / "all", papers.RESULTS)
    with unpacked(papers.RESULTS) as folders:
        assert len(list(folders.glob("x-small/*/seed-*/metrics.csv"))) == 12
        assert "FedAvg" in (folders / "x-small/new/seed-20/run.json").read_text()


def test_the_page_has_the_findings_with_their_numbers_the_report_and_what_is_missing(
    ran: Path,
) -> None:
    keep(papers.OUT / "all", papers.RESULTS)
    (papers.RESULTS / "findings.md").write_text(
        "The new one is {X-a.verdict}, by {X-a.mean}; a factor of {O-a.mean:factor}°.\n"
    )
    (papers.RESULTS / "observed.yaml").write_text(
        "- {id: O-a, text: new / old, a: new, b: old, metric: val/acc, scale: log_ratio, "
        "unit: factor}\n"
    )
    assert papers.page(papers.RESULTS, papers.PAGE) == 0
    text = papers.PAGE.read_text()
    assert "The new one is reproduced, by +0.1; a factor of 1.14°." in text
    assert "| O-a: new / old | 1.14 | 1.14 to 1.14 | 5 |" in text, "and no verdict"
    tables = papers.PAGE.with_name(papers.TABLES).read_text()
    assert "(results/figures/" in tables and (papers.RESULTS / "figures").is_dir()
    assert "## Runs" in tables and "## Claims" not in tables and "## Claims" in text
    assert "| P1-helps | +3.4 points (NeurIPS, Table 3) | at least +1 point |" in text, (
        "a claim without runs"
    )


def test_the_committed_page_is_what_the_committed_runs_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(papers.__file__).parents[1]
    if (root / papers.RESULTS).is_dir():
        shutil.copytree(root / papers.RESULTS, tmp_path / papers.RESULTS)
    else:
        (tmp_path / papers.RESULTS).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert papers.page(papers.RESULTS, papers.PAGE) == 0
    for page in (papers.PAGE, papers.PAGE.with_name(papers.TABLES)):
        assert page.read_bytes() == (root / page).read_bytes()
    report = root / papers.RESULTS / "report.json"
    if report.is_file():
        assert_alike(
            json.loads((papers.RESULTS / "report.json").read_text()), json.loads(report.read_text())
        )


def assert_alike(found: Any, expected: Any) -> None:
    """The same but for the last digits of numbers, in which processors differ."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert_alike(value, expected[key])
    elif isinstance(found, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    else:
        assert found == (pytest.approx(expected, rel=1e-9) if type(found) is float else expected)


def test_the_rows_come_in_the_protocols_order(tmp_path: Path) -> None:
    stems = [name.rpartition("/")[2] for name in papers.ROWS.values()]
    for stem in (*stems, "another"):
        make_arm(tmp_path / stem, "arm", {20: 0.5})
        (tmp_path / stem / "sweep.yaml").write_text("configs: [base]\n")
    (tmp_path / "waits").mkdir()
    (tmp_path / "waits/sweep.yaml").write_text("configs: [base]\n")
    assert [folder.name for folder in papers.sweeps(tmp_path)] == [*stems, "another"]


def test_quick_takes_stored_rates_and_never_writes_over_the_committed_results(ran: Path) -> None:
    name = papers.ROWS["P2"]
    stem = name.rpartition("/")[2]
    assert not any("select.from" in part for part in papers.sweep(name, "quick"))
    committed = ran / "committed" / stem
    make_arm(committed, "arm", {20: 0.5})
    (committed / "sweep.yaml").write_text("configs: [base]\n")
    (committed / "selections.yaml").write_text("{arm: {lr: 0.1}}\n")
    pack(committed.parent, papers.RESULTS)
    command = papers.sweep(name, "quick")
    rates = f"runs/papers/quick/{stem}.selections.yaml"
    assert f"select.from={rates}" in command
    assert Path(rates).read_text() == "{arm: {lr: 0.1}}\n"
    assert command[command.index("--out") + 1].startswith("runs/papers/quick/")


@pytest.mark.parametrize("row", papers.QUICK)
def test_quick_judges_every_claim_of_its_rows_with_no_arm_more(row: str, ran: Path) -> None:
    whole = read_spec(f"experiment/{papers.ROWS[row]}")
    _, file, *_ = papers.sweep(papers.ROWS[row], "quick")
    spec = read_spec(file, papers.CUT)
    assert spec.claims == whole.claims and spec.claims is not None
    claimed: set[str] = set()
    for claim in read_claims(spec.claims, []).claims:
        claimed.update(claim.arms)
    assert {arm.name for arm in arms(spec)} == claimed <= {arm.name for arm in arms(whole)}
    assert spec.fixed == {**whole.fixed, "trainer.max_epochs": 60}
    assert spec.seeds == [20, 21, 22, 23, 24] and spec.configs == whole.configs


def test_committed_runs_are_the_protocols() -> None:
    commits = papers.protocols(papers.RESULTS).values()
    if not all(papers.descends("HEAD", commit) for commit in commits):
        pytest.skip("this clone lacks the protocol's commit: git fetch --unshallow")
    assert papers.objections(papers.RESULTS) == []


def objected_to() -> list[str]:
    """What is objected to in folders of runs; protocol.txt is beside them."""
    return papers.objections_to(papers.sweeps(papers.RESULTS), papers.RESULTS)


def test_a_run_from_before_the_protocol_or_with_other_claims_or_sources_is_objected_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "fedinit/table3-cifar10-dir0.1-100-small"
    packaged = Path(papers.__file__).parents[1] / f"configs/experiment/{name}.claims.yaml"
    claims = tmp_path / f"configs/experiment/{name}.claims.yaml"
    claims.parent.mkdir(parents=True)
    shutil.copy(packaged, claims)
    sweep_file = claims.with_name(claims.name.replace(".claims", ""))
    sweep_file.write_text("configs: [base]\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    papers.git("init", "-q")
    papers.git("add", ".")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-02T00:00:00+00:00")
    papers.git(*who, "commit", "-q", "-m", "protocol-1")
    protocol = papers.git("rev-parse", "HEAD")
    stated = hashlib.sha256(claims.read_bytes()).hexdigest()
    sweep_file.write_text("configs: [base]  # edited\n")
    papers.git(*who, "commit", "-q", "-a", "-m", "edited")
    edited = papers.git("rev-parse", "HEAD")
    folder = papers.RESULTS / name.rpartition("/")[2]
    good = {"started": "2026-01-03T00:00:00+00:00", "commit": protocol, "claims_hash": stated}
    every = papers.places(name)
    for place in every:
        arm, _, seed = place.rpartition("/seed-")
        make_arm(folder, arm, {int(seed): 0.5}, **good)
    chosen = make_arm(folder / "select/old", "0.1", {100: 0.5, 101: 0.5, 20: 0.5}, **good)
    shutil.rmtree(chosen[2])
    (folder / "sweep.yaml").write_text("configs: [base]\n\n# over it: data.init_args.root=data\n")
    (folder / "runs.csv").write_text("arm,seed,status,folder\n")
    (papers.RESULTS / "protocol.txt").write_text(f"{protocol} protocol-1\n")
    assert objected_to() == []
    other = "configs: [base]\n\n# over it: data.init_args.root=data trainer.max_epochs=1\n"
    (folder / "sweep.yaml").write_text(other)
    assert objected_to() == [f"{folder.name}/sweep.yaml: was run with trainer.max_epochs=1"]
    (folder / "sweep.yaml").write_text("configs: [base]\n\n# over it: data.init_args.root=data\n")

    def change(place: str, **more: str) -> None:
        path = folder / place / "run.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))

    change(every[0], started="2026-01-01T00:00:00+00:00")
    change(every[1], commit=f"{protocol}-dirty")
    change(every[2], claims_hash="0" * 64)
    shutil.rmtree(folder / every[3])
    make_arm(folder, "another", {20: 0.5}, **good)
    change(every[4], commit=edited)
    change("select/old/0.1/seed-100", started="2026-01-01T00:00:00+00:00")
    make_arm(folder / "select/old", "0.1", {20: 0.5}, **good)
    (folder / "sweep.yaml").write_text("configs: [other]\n")
    objected = objected_to()
    expected = {
        every[0]: "began before the protocol",
        every[1]: f"ran from {protocol}-dirty",
        every[2]: "had other claims",
        every[3]: "is absent and not listed",
        every[4]: f"ran from {edited}, whose configs are others",
        "another/seed-20": "is no run of the protocol",
        "select/old/0.1/seed-100": "began before the protocol",
        "select/old/0.1/seed-20": "selects by a reported seed",
        "sweep.yaml": "is not the protocol's",
    }
    assert set(objected) == {f"{folder.name}/{place}: {why}" for place, why in expected.items()}


def test_a_row_is_held_to_the_protocol_that_it_came_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, later = "fedinit/table3-cifar10-dir0.1-100-small", papers.ROWS["A7-models, A7-updates"]
    sources = Path(papers.__file__).parents[1] / "configs/experiment"
    commits = []
    papers.git("init", "-q")
    for day, name in enumerate((first, later, None), start=1):
        (tmp_path / "README").write_text(f"{day}\n")
        for end in (".yaml", ".claims.yaml") if name is not None else ():
            target = tmp_path / f"configs/experiment/{name}{end}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(sources / f"{name}{end}", target)
        papers.git("add", ".")
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2026-01-0{day}T00:00:00+00:00")
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        papers.git(*who, "commit", "-q", "-m", f"{day}")
        commits.append(papers.git("rev-parse", "HEAD"))

    def made(name: str, commit: str, day: int) -> None:
        claims = (sources / f"{name}.claims.yaml").read_bytes()
        facts = {
            "started": f"2026-01-0{day}T12:00:00+00:00",
            "commit": commit,
            "claims_hash": hashlib.sha256(claims).hexdigest(),
        }
        folder = papers.RESULTS / name.rpartition("/")[2]
        shutil.rmtree(folder, ignore_errors=True)
        (arm, _, seed) = papers.places(name)[0].rpartition("/seed-")
        make_arm(folder, arm, {int(seed): 0.5}, **facts)
        shutil.copy(sources / f"{name}.yaml", folder / "sweep.yaml")
        rest = [place.rpartition("/seed-") for place in papers.places(name)[1:]]
        rows = [f"{arm},{seed},waiting,-" for arm, _, seed in rest]
        (folder / "runs.csv").write_text("\n".join(["arm,seed,status,folder", *rows]) + "\n")

    both = f"{commits[0]} protocol-1\n{commits[1]} protocol-2\n"
    stem = later.rpartition("/")[2]
    # The first row ran while a protocol came that does not concern it, and goes on after it.
    for commit in commits:
        made(first, commit, 3)
        made(later, commits[2], 3)
        (papers.RESULTS / "protocol.txt").write_text(both)
        assert objected_to() == []
    (papers.RESULTS / "protocol.txt").write_text(f"{commits[0]} protocol-1\n")
    named = papers.RESULTS / "protocol.txt"
    assert objected_to() == [f"{stem}: protocol-2 is not in {named}"]
    named.write_text(both)
    made(later, commits[0], 1)
    place = papers.places(later)[0]
    assert objected_to() == [
        f"{stem}/{place}: began before the protocol",
        f"{stem}/{place}: ran from {commits[0]}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", papers.ROWS.values())
def test_every_claim_of_the_protocol_can_be_judged(name: str, tmp_path: Path) -> None:
    """On made-up runs of every arm and seed, in which nothing has an effect."""
    spec, random = read_spec(f"experiment/{name}"), np.random.default_rng(0)
    folder = tmp_path / name.rpartition("/")[2]
    layers = [f"{form}/{layer}" for form in FORMS for layer in ("first", "second", "last")]
    rising = np.linspace(0, 0.3, 12)
    logged = [
        "divergence/all",
        "divergence/participants",
        "divergence/update",
        "global/train_loss",
        "global/gap",
        "hessian/top_eigenvalue",
        "hessian/trace",
        "val/loss",
    ]
    for arm in arms(spec):
        for seed in spec.seeds or []:
            noise = 0.5 + random.normal(0, 0.01, (len(logged) + len(layers), 12))
            columns = {
                metric: list(map(float, own))
                for metric, own in zip([*logged, *layers], noise, strict=True)
            }
            columns["val/acc"] = list(map(float, rising + random.normal(0.5, 0.01, 12)))
            columns["communication/total_bytes"] = [1e6 * (done + 1) for done in range(12)]
            columns["cost/gradients"] = [24.0] * 12
            make_run(
                folder / arm.name / f"seed-{seed}", arm.name, seed, columns, axes=dict(arm.axes)
            )
    (folder / "sweep.yaml").write_text(spec.text)
    assert spec.claims is not None
    shutil.copy(spec.claims, folder / "claims.yaml")
    found = summarise(find([folder]), "val/acc", [], None).to_json()["claims"]
    assert [claim["id"] for claim in found] == [
        claim.id for claim in read_claims(spec.claims, []).claims
    ]
    for claim in found:
        assert claim["n"] == len(spec.seeds or []), claim
