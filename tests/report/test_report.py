"""report.json from folders made by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import make_arm, make_run, report
from scipy import stats

from fl_lightning.errors import UserError
from fl_lightning.lab.report.report_command import main
from fl_lightning.metrics import metrics_hash

LEVELS = {0: 0.70, 1: 0.72, 2: 0.69, 3: 0.75}


def close(found: Any, wanted: float) -> bool:
    return bool(found == pytest.approx(wanted, abs=1e-9))


def refused(out: Path, *argv: object) -> str:
    """The paragraph of a report that is refused and leaves nothing behind."""
    with pytest.raises(UserError) as error:
        main([*map(str, argv), "--out", str(out)])
    assert not out.exists()
    return str(error.value)


def test_the_last_bits_of_the_metrics_are_not_in_the_report(tmp_path: Path) -> None:
    """Another processor sums in another order: the files of a repository stay the same."""
    documents = []
    for name, toward in (("one", 0.0), ("other", 1.0)):
        for arm, raised in (("a", 0.0), ("b", 0.013)):
            levels = {s: float(np.nextafter(v + raised, toward)) for s, v in LEVELS.items()}
            make_arm(tmp_path / name, arm, levels)
        report(tmp_path / "out" / name, tmp_path / name)
        document = (tmp_path / "out" / name / "report.json").read_text()
        documents.append(document.replace(str(tmp_path / name), ""))
    assert documents[0] == documents[1] and "0.013" in documents[0]


def test_pairs_of_three_arms(tmp_path: Path) -> None:
    """Noisy curves, four seeds of two arms and three of the last."""
    rng = np.random.default_rng(0)
    curves: dict[str, dict[int, Any]] = {}
    for arm, seeds in (("base", 4), ("better", 4), ("same", 3)):
        for seed in range(seeds):
            curve = LEVELS[seed] + 0.05 * (arm == "better") + rng.normal(0, 0.01, 30)
            curves.setdefault(arm, {})[seed] = curve
            make_run(tmp_path / f"s/{arm}/seed-{seed}", arm, seed, {"val/acc": curve.tolist()})
    rows = [f"{a},{s},done,x\n" for a in ("base", "same", "better") for s in curves[a]]
    (tmp_path / "s/runs.csv").write_text(f"arm,seed,status,folder\n{''.join(rows)}")
    found = report(tmp_path / "out", tmp_path / "s")
    assert list(found) == ["metric", "arms", "pairs", "claims", "settings"]
    assert found["metric"] == "val/acc"
    assert list(found["arms"]) == ["base", "same", "better"]  # the grid's order
    last10 = {
        arm: {s: float(np.mean(c[-10:])) for s, c in own.items()} for arm, own in curves.items()
    }
    for arm, own in curves.items():
        entry = found["arms"][arm]
        assert entry["runs"] == [str(tmp_path / "s" / arm / f"seed-{s}") for s in own]
    assert [(p["a"], p["b"], p["score"], p["n"]) for p in found["pairs"]] == [
        ("same", "base", "tail", 3), ("better", "base", "tail", 4),  # of 30 rounds the last ten
    ]  # fmt: skip
    p_values = []
    for pair in found["pairs"]:
        a, b = ([last10[pair[side]][s] for s in range(pair["n"])] for side in "ab")
        test = stats.ttest_rel(a, b)
        low, high = test.confidence_interval(0.95)
        wanted = {"mean": np.mean(a) - np.mean(b), "low": low, "high": high, "p": test.pvalue}
        wanted["sd"] = np.std(np.subtract(a, b), ddof=1)
        assert all(close(pair[key], float(value)) for key, value in wanted.items())
        p_values.append(float(test.pvalue))
    small, large = sorted(p_values)
    corrected = {small: 2 * small, large: max(2 * small, large)}
    assert all(
        close(pair["p_holm"], min(1, corrected[p]))
        for pair, p in zip(found["pairs"], p_values, strict=True)
    )


def test_unfinished_runs_and_missing_seeds_are_shown_and_kept_out(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "a", LEVELS)
    make_arm(tmp_path / "s", "b", {0: 0.8, 3: 0.8, 9: 0.8})
    for seed, status in ((1, "running"), (2, "stopped"), (4, "failed")):
        other = {"partition": "another"}  # of no matter: it is in no pair
        make_run(tmp_path / f"s/b/seed-{seed}", "b", seed, {"val/acc": [0.9] * 9}, status, **other)
    (tmp_path / "s/b/seed-4/metrics.csv").unlink()
    found = report(tmp_path / "out", tmp_path / "s", "--targets", "0.8")
    b, (pair,) = found["arms"]["b"], found["pairs"]
    assert (b["n"], b["diverged"], b["unfinished"], len(b["runs"])) == (3, 0, 3, 6)
    assert set(b["scores"]["max"]["values"]) == set(b["rounds_to"]["0.8"]) == {"0", "3", "9"}
    assert pair["n"] == 2 and close(pair["mean"], (0.1 + 0.05) / 2)
    page = (tmp_path / "out/report.md").read_text()
    assert "b, seed 9: no pair, because a has no such finished run." in page
    assert "b, seed 4: failed." in page


def test_runs_of_a_sweep_that_never_began_are_said(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "b", {10: 0.8, 9: 0.7})
    rows = "b,9,done,x\nb,10,done,x\na,9,failed,x\na,10,waiting,x\n"
    (tmp_path / "s/runs.csv").write_text(f"arm,seed,status,folder\n{rows}")
    found = report(tmp_path / "out", tmp_path / "s")
    assert list(found["arms"]["b"]["scores"]["last"]["values"]) == ["9", "10"]
    assert list(found["arms"]) == ["b"]
    assert "have no run.json: 1 failed, 1 waiting" in (tmp_path / "out/report.md").read_text()
    (tmp_path / "none").mkdir()
    (tmp_path / "none/runs.csv").write_text("arm,seed,status,folder\na,0,waiting,x\n")
    assert "none of its 1 runs has begun" in refused(tmp_path / "no", tmp_path / "none")


def test_an_absent_metric_scores_nobody(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "a", LEVELS, "test/acc")
    make_arm(tmp_path / "s", "b", LEVELS, "test/acc")
    make_run(tmp_path / "s/b/seed-7", "b", 7, {"test/acc": [0.1]}, "diverged")
    told = refused(tmp_path / "out", tmp_path / "s", "--targets", "0.5")
    assert "val/acc: no run logs it" in told and "that they log: test/acc" in told


def test_runs_by_themselves_come_in_the_order_of_the_command_line(tmp_path: Path) -> None:
    one = make_run(tmp_path / "z", None, 0, {"val/acc": [0.5]}, title="SCAFFOLD")
    other = make_run(tmp_path / "a", None, 0, {"val/acc": [0.6]}, title="FedInit")
    found = report(tmp_path / "out", one, other, one)  # the same folder twice is one run
    assert list(found["arms"]) == ["SCAFFOLD", "FedInit"]
    assert (found["pairs"][0]["a"], found["pairs"][0]["b"]) == ("FedInit", "SCAFFOLD")
    head = "arm,seed,status,rounds,tail,last10,smoothed,last,max,folder"
    assert (tmp_path / "out/report.csv").read_text().startswith(head)


def test_runs_of_one_title_are_named_after_the_settings_that_differ(tmp_path: Path) -> None:
    """Seeds, engines and callbacks that measure make no arm of their own."""

    def made(place: str, seed: int, **settings: Any) -> Path:
        known = {"learner/network": "MLP", "client_optimizer/lr": 0.1, "engine": "auto"} | settings
        return make_run(tmp_path / place, None, seed, {"val/acc": [0.5]}, settings=known)

    wide = {"learner/network": "ViT", "learner/network/width": 8, "learner/parameters": 9}
    slow = {"client_optimizer/lr": 0.01, "engine": "stacked", "callback/HessianLogger/top": 2}
    folders = [made("a", 0), made("b", 1, engine="stacked"), made("c", 0, **wide)]
    folders += [made("d", 0, **slow), made("f", 0, **{**wide, "learner/network/width": 16})]
    arms = report(tmp_path / "out", *folders)["arms"]
    assert {name: arm["n"] for name, arm in arms.items()} == {
        "FedAvg, network MLP, lr 0.1": 2,
        "FedAvg, network ViT, lr 0.1, width 8": 1,
        "FedAvg, network MLP, lr 0.01": 1,
        "FedAvg, network ViT, lr 0.1, width 16": 1,
    }
    page = (tmp_path / "out/report.md").read_text()
    assert "| learner/network | MLP | ViT | MLP | ViT |" in page
    report(tmp_path / "two", folders[0], folders[2])
    page = (tmp_path / "two/report.md").read_text()
    assert "| learner/network | MLP | ViT |" in page and "learner/network/width" not in page
    other = made("e", 0, engine="sequential")
    assert "their recorded settings are the same" in refused(tmp_path / "no", folders[0], other)


def test_an_accuracy_of_a_model_that_no_client_uses_is_noted(tmp_path: Path) -> None:
    both = {"val/acc": [0.1], "clients/acc": [0.9]}
    one = make_run(tmp_path / "a", "fedavg", 0, both, shown=["val/acc"])
    own = make_run(tmp_path / "b", "fedbabu", 0, both, shown=["clients/acc"])
    summary_note = "the clients of fedbabu use their own models, which clients/acc measures."
    report(tmp_path / "out", one, own)
    page = (tmp_path / "out/report.md").read_text()
    assert summary_note in page and "All arms log clients/acc: give report" in page
    report(tmp_path / "out", one, own, "--metric", "clients/acc")
    assert "use their own models" not in (tmp_path / "out/report.md").read_text()


def test_another_partition_is_refused_by_name(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "a", LEVELS)
    make_arm(tmp_path / "s", "b", {0: 0.8, 1: 0.8})
    wrong = make_run(tmp_path / "s/b/seed-2", "b", 2, {"val/acc": [0.8]}, partition="another")
    said = refused(tmp_path / "out", tmp_path / "s")
    assert str(wrong) in said and str(tmp_path / "s/a/seed-2") in said


def test_a_second_run_of_one_arm_and_seed_is_refused_by_name(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", "a", 0, {"val/acc": [0.5]})
    for number, status in enumerate(("done", "running")):
        other = make_run(tmp_path / f"other-{number}", "a", 0, {"val/acc": [0.6]}, status)
        said = refused(tmp_path / "out", one, other)
        assert str(one) in said and str(other) in said and "seed 0" in said


@pytest.mark.parametrize(
    ("name", "text", "words"),  # None: there is no such file
    [
        ("run.json", "{", "run.json"),
        ("run.json", '{"status": "over", "seed": 0}', "running, done, diverged"),
        ("run.json", None, "there is no run here"),
        ("run.json", "[" * 100_000, "cannot be read"),
        ("metrics.csv", None, "metrics.csv"),
        ("metrics.csv", "round,val/acc\n0,high\n", "metrics.csv"),
        ("metrics.csv", "round,val/acc\n0,0.5\n0,0.6\n", "do not ascend"),
        ("metrics.csv", f"round,val/acc\n0,{'1' * 200_000}\n", "field larger"),
        ("metrics.csv", f"round,val/acc\n{'9' * 400},0.5\n", "rounds that do not ascend"),
        ("metrics.csv", "round,val/acc,val/acc\n0,0.1,0.9\n", "two columns 'val/acc'"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, name: str, text: str | None, words: str
) -> None:
    folder = make_run(tmp_path / "x", "a", 0, {"val/acc": [0.5]})
    (folder / name).unlink() if text is None else (folder / name).write_text(text)
    assert words in refused(tmp_path / "out", folder)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--targets", "0.8,high"], "'high' is not a number"),
        (["--metrics", "x"], "--help"),
        (["--metric", "val/ac"], "val/ac: no run logs it. Did you mean 'val/acc'?"),
        (["--figures", "png,gif"], "each 'png', 'svg' or 'pdf'"),
        ([], "FOLDER"),
    ],
)
def test_wrong_options_are_said_in_one_paragraph(
    tmp_path: Path, argv: list[str], words: str
) -> None:
    folder = [] if not argv else [make_run(tmp_path / "x", "a", 0, {"val/acc": [0.5]})]
    assert words in refused(tmp_path / "out", *folder, *argv)


def test_a_report_does_not_wait_for_torch(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "a", LEVELS)
    code = "import sys; from fl_lightning.__main__ import main\n"
    code += "main(sys.argv[1:]); print('torch' in sys.modules)"
    argv = [sys.executable, "-c", code, "report", str(tmp_path / "s")]
    result = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False" and (tmp_path / "s/report.json").is_file()


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda lines: [*lines[:5], *lines[7:]], "lacks 2 of the rounds 0 to 19"),
        (lambda lines: lines[:-3], "ends after 17 of 20 rounds"),
        (lambda lines: lines[:1], "ends after 0 of 20 rounds"),
    ],
)
def test_what_a_run_has_lost_is_said(tmp_path: Path, change: Any, words: str) -> None:
    make_arm(tmp_path / "s", "a", {0: 0.5})
    path = tmp_path / "s/a/seed-0/metrics.csv"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    report(tmp_path / "out", tmp_path / "s")
    assert words in (tmp_path / "out/report.md").read_text()


def test_a_run_that_ended_itself_early_has_lost_nothing(tmp_path: Path) -> None:
    (run,) = make_arm(tmp_path / "s", "a", {0: 0.5})
    record = json.loads((run / "run.json").read_text()) | {"rounds": 100}
    (run / "run.json").write_text(json.dumps(record | {"metrics_hash": metrics_hash(run)}))
    report(tmp_path / "out", tmp_path / "s")
    assert "ends after" not in (tmp_path / "out/report.md").read_text()


def test_what_lies_beside_the_runs_is_read_with_care(tmp_path: Path) -> None:
    for arm in "ab":
        make_arm(tmp_path / "s", arm, {0: 0.5})
    (tmp_path / "s/runs.csv").write_text("arm,seed\n" + "a" * 200_000 + ",0\n")
    (tmp_path / "s/sweep.yaml").write_bytes(b"\xff\xfe")
    assert set(report(tmp_path / "out", tmp_path / "s")["arms"]) == {"a", "b"}


def test_a_number_that_no_sum_can_hold_counts_as_infinite(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "a", {0: 0.5})
    (tmp_path / "s/a/seed-0/metrics.csv").write_text("round,val/acc\n0,1e308\n1,1e308\n2,0.5\n")
    scores = report(tmp_path / "out", tmp_path / "s")["arms"]["a"]["scores"]
    assert (scores["last10"]["mean"], scores["last"]["mean"]) == (0.0, 0.5)


def test_what_the_runs_themselves_warned_of_is_noted(tmp_path: Path) -> None:
    warned = "what is validated is the mean of 2 clusters' models, which is not a useful model"
    for seed in (0, 1):
        given = {"notes": [warned, f"seed={seed} was drawn"], "commit": f"commit-{seed}"}
        make_run(tmp_path / f"s/ifca/seed-{seed}", "ifca", seed, {"val/acc": [0.5]}, **given)
    report(tmp_path / "out", tmp_path / "s")
    text = (tmp_path / "out/report.md").read_text()
    assert f"ifca: {warned}." in text and "was drawn" not in text
    assert "different commits: commit-0, commit-1" in text
