"""Arms within settings, sweeps side by side; what runs have lost, and claims that are none."""

from __future__ import annotations

import hashlib
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from folders import make_arm, make_run, report
from test_claims import write as written

from fl_lightning.errors import UserError
from fl_lightning.lab.report.report_command import main
from fl_lightning.metrics import metrics_hash


def refused(*argv: object) -> str:
    """The paragraph of a report that is refused."""
    with pytest.raises(UserError) as error:
        main([*map(str, argv), "--out", "nowhere"])
    return str(error.value)


# --------------------------------------------------------------------------- settings, several
# sweeps


def grid(folder: Path, alphas: tuple[str, ...] = ("0.1", "0.6"), shift: float = 0.0) -> Path:
    for alpha in alphas:
        for method, level in (("fedavg", 0.7), ("fedinit-0.1", 0.75)):
            arm = f"{method}_Dirichlet-{alpha}"
            axes = {"method": method, "data.partition": f"Dirichlet-{alpha}"}
            for seed in range(5):
                columns = {"val/acc": [level + shift + 0.001 * seed * (method != "fedavg")] * 20}
                partition = f"{alpha} {seed}"
                make_run(
                    folder / arm / f"seed-{seed}",
                    arm,
                    seed,
                    columns,
                    partition=partition,
                    axes=axes,
                )
    (folder / "sweep.yaml").write_text("configs: [base]\n")
    return folder


def test_arms_are_compared_within_a_setting(tmp_path: Path) -> None:
    found = report(tmp_path / "out", grid(tmp_path / "s"))
    assert found["settings"] == {
        f"Dirichlet-{alpha}": {m: f"{m}_Dirichlet-{alpha}" for m in ("fedavg", "fedinit-0.1")}
        for alpha in ("0.1", "0.6")
    }
    assert [(pair["a"], pair["b"]) for pair in found["pairs"]] == [
        (f"fedinit-0.1_Dirichlet-{alpha}", f"fedavg_Dirichlet-{alpha}") for alpha in ("0.1", "0.6")
    ]
    for kind in ("md", "tex", "html"):
        text = (tmp_path / f"out/report.{kind}").read_text()
        assert "Methods by settings" in text and text.count("Dirichlet-0.6") > 1, kind
    assert "| fedavg | 70.00 ± 0.00 | 70.00 ± 0.00 |" in (tmp_path / "out/report.md").read_text()
    assert (
        (tmp_path / "out/pivot.csv").read_text().startswith("method,Dirichlet-0.1,Dirichlet-0.6\n")
    )


def alphas(folder: Path, **more: list[str]) -> Path:
    """Arms over ``data.partition.alpha`` and ``more`` axes, two seeds each."""
    swept = {**more, "data.partition.alpha": ["0.1", "1.0"]}
    several = [axis for axis, values in swept.items() if len(values) > 1]
    for values in product(*swept.values()):
        axes = dict(zip(swept, values, strict=True))
        arm = "_".join(axes[axis] for axis in several)
        make_arm(folder, arm, {0: 0.5, 1: 0.6}, partition=values[-1], axes=axes)
    (folder / "sweep.yaml").write_text("configs: [base]\n")
    return folder


@pytest.mark.parametrize(
    "more, title",
    [
        ({"method": ["fedavg", "own"]}, "Methods by settings (partition alpha)"),
        ({"method": ["fedavg"]}, "Methods by settings (partition alpha)"),
        (
            {"method": ["fedavg"], "method.init_args.beta": ["0", "0.1"]},
            "Methods (method beta) by settings (partition alpha)",
        ),
        (
            {"method": ["fedavg", "own"], "data.num_clients": ["5", "9"]},
            "Methods by settings (data num_clients × partition alpha)",
        ),
    ],
)
def test_a_table_by_settings_says_what_they_are(
    tmp_path: Path, more: dict[str, list[str]], title: str
) -> None:
    report(tmp_path / "out", alphas(tmp_path / "s", **more))
    for kind in ("md", "tex", "html"):
        text = (tmp_path / f"out/report.{kind}").read_text().replace(r"\_", "_")
        assert f"{title}: val/acc" in text.replace(r"$\times$", "×"), kind


def test_axes_of_sweeps_that_are_reported_together_are_all_named(tmp_path: Path) -> None:
    alphas(tmp_path / "one", method=["fedavg", "own"])
    for skew in ("iid", "group"):
        for method in ("fedavg", "own"):
            axes = {"method": method, "data.partition": skew}
            make_arm(tmp_path / "two", f"{method}_{skew}", {0: 0.5}, axes=axes)
    (tmp_path / "two/sweep.yaml").write_text("configs: [base]\n")
    report(tmp_path / "out", tmp_path / "one", tmp_path / "two")
    text = (tmp_path / "out/report.md").read_text()
    assert "## Methods by settings (partition alpha or data partition): val/acc" in text


def test_a_table_by_settings_says_what_was_compared(tmp_path: Path) -> None:
    within = "Each arm is compared with the first arm of its setting."
    claimed = "Only the claims are tested."
    folder = alphas(tmp_path / "s", method=["fedavg", "own"])
    claim = {"id": "A", "a": "own_0.1", "b": "fedavg_0.1", "metric": "val/acc", "margin": 0}
    claims = written(tmp_path / "c.yaml", {**claim, "direction": "greater"})
    # Of one method there is nothing in a setting to compare with.
    alone = alphas(tmp_path / "alone", method=["fedavg"])
    cases = (
        ([folder], 2, within),
        ([folder, "--claims", claims], 1, claimed),
        ([alone], 0, ""),
    )
    for words, compared, said in cases:
        found = report(tmp_path / "out", *words)
        assert len(found["pairs"]) == compared
        text = (tmp_path / "out/report.md").read_text()
        assert [note for note in (within, claimed) if note in text] == [said] * bool(said)


def test_without_other_axes_there_is_one_setting(tmp_path: Path) -> None:
    for arm in "ab":
        make_arm(tmp_path / "s", arm, {0: 0.5})
    found = report(tmp_path / "out", tmp_path / "s")
    assert found["settings"] == {"all": {"a": "a", "b": "b"}}
    assert not (tmp_path / "out/pivot.csv").exists()


def test_a_trend_over_an_axis_is_of_its_own_method(tmp_path: Path) -> None:
    folder = grid(tmp_path / "s", ("0.1", "0.6", "10"))
    for path in folder.glob("*/seed-*"):  # FedAvg rises with α
        alpha = float(path.parent.name.partition("-")[2].rpartition("-")[2])
        if path.parent.name.startswith("fedavg"):
            rows = "".join(f"{t},{0.5 + 0.01 * alpha}\n" for t in range(9))
            (path / "metrics.csv").write_text(f"round,val/acc\n{rows}")
    shared = {
        "kind": "trend",
        "over": "data.partition",
        "metric": "val/acc",
        "direction": "greater",
    }
    claims = [
        {"id": "T", "arm": "fedavg", **shared},
        {"id": "U", "arm": "fedinit-0.1", **shared, "family": "f"},
    ]
    said = report(tmp_path / "out", folder, "--claims", written(tmp_path / "c.yaml", *claims))[
        "claims"
    ]
    assert (
        said[0]["values"] == pytest.approx({str(s): 1.0 for s in range(5)})
        and said[0]["verdict"] == "reproduced"
    )
    assert (said[1]["n"], said[1]["verdict"]) == (5, "inconclusive")  # constant: ρ is 0
    several = refused(folder, "--claims", written(tmp_path / "d.yaml", {"id": "T", **shared}))
    assert "several methods were swept" in several


@pytest.mark.parametrize(
    "places, p, verdict", [(2, 0.0625, "inconclusive"), (4, 2 / 24**5, "reproduced")]
)
def test_seeds_that_agree_on_a_short_axis_may_agree_by_chance(
    tmp_path: Path, places: int, p: float, verdict: str
) -> None:
    for place in range(places):
        for seed in range(5):
            run = tmp_path / f"s/{place}/seed-{seed}"
            axes = {"model.participation": str(place)}
            make_run(run, str(place), seed, {"val/acc": [0.5 + 0.01 * place] * 9}, axes=axes)
    claim = {"kind": "trend", "over": "model.participation", "metric": "val/acc"}
    path = written(tmp_path / "c.yaml", {"id": "T", "direction": "greater", **claim})
    (said,) = report(tmp_path / "out", tmp_path / "s", "--claims", path)["claims"]
    assert said["mean"] == pytest.approx(1.0) and said["p"] == pytest.approx(p)
    assert said["verdict"] == verdict


def test_sweeps_with_other_claims_keep_their_arms_apart(tmp_path: Path) -> None:
    claim = {"a": "up", "b": "base", "metric": "val/acc", "direction": "greater", "margin": 0.005}
    for name, level in (("one", 0.9), ("two", 0.1)):
        make_arm(tmp_path / name, "base", {s: 0.5 + 0.001 * s for s in range(5)})
        make_arm(tmp_path / name, "up", {s: level + 0.002 * s for s in range(5)})
        written(tmp_path / name / "claims.yaml", {"id": f"{name}-A", **claim})
    found = report(tmp_path / "out", tmp_path / "one", tmp_path / "two")
    assert set(found["arms"]) == {"one/base", "one/up", "two/base", "two/up"}
    assert [(e["id"], e["verdict"]) for e in found["claims"]] == [
        ("one-A", "reproduced"),
        ("two-A", "contradicted"),
    ]
    assert set(found["settings"]) == {"one/all", "two/all"}
    # half of one sweep elsewhere: still one
    for folder in (tmp_path / "one/up/seed-4", tmp_path / "one/base/seed-4"):
        half = tmp_path / "half" / folder.relative_to(tmp_path / "one")
        half.parent.mkdir(parents=True)
        folder.rename(half)
    (tmp_path / "half/claims.yaml").write_bytes((tmp_path / "one/claims.yaml").read_bytes())
    found = report(tmp_path / "out", tmp_path / "one", tmp_path / "half")
    assert set(found["arms"]) == {"base", "up"} and found["claims"][0]["n"] == 5


def test_a_claim_means_the_runs_of_its_own_sweep(tmp_path: Path) -> None:
    claim = {"a": "up", "b": "base", "metric": "val/acc", "direction": "greater", "margin": 0.005}
    make_arm(tmp_path / "one", "up", {s: 0.9 + 0.002 * s for s in range(5)})
    make_arm(tmp_path / "two", "base", {s: 0.5 + 0.001 * s for s in range(5)})
    make_arm(tmp_path / "two", "other", {s: 0.5 for s in range(5)})
    for name, row in (("one", "base,0"), ("two", "other,9")):  # the base of the first has not begun
        written(
            tmp_path / name / "claims.yaml",
            {"id": f"{name}-A", **claim, "a": "up" if name == "one" else "other"},
        )
        (tmp_path / name / "runs.csv").write_text(f"arm,seed,status,folder\n{row},waiting,x\n")
    said = report(tmp_path / "out", tmp_path / "one", tmp_path / "two")["claims"]
    assert [(e["n"], e["provisional"]) for e in said] == [(0, True), (5, True)]
    written(tmp_path / "two/claims.yaml", {"id": "two-A", **claim, "a": "base", "b": "base"})
    said = report(tmp_path / "out", tmp_path / "one", tmp_path / "two")["claims"]
    # another sweep's base is awaited
    assert [(e["n"], e["provisional"]) for e in said] == [(0, True), (5, False)]


def test_a_trend_is_provisional_while_a_value_of_its_axis_has_no_run(tmp_path: Path) -> None:
    folder = grid(tmp_path / "s", ("0.1",))
    grid(folder, ("0.6",), shift=0.1)
    claim = {"kind": "trend", "over": "data.partition", "arm": "fedinit-0.1", "metric": "val/acc"}
    path = written(tmp_path / "c.yaml", {"id": "T", "direction": "greater", **claim})
    for (method, alpha), provisional in ((("fedavg", "0.6"), False), (("fedinit-0.1", "10"), True)):
        place = f"{method}_Dirichlet-{alpha}"
        (folder / "runs.csv").write_text(f"arm,seed,status,folder\n{place},7,waiting,x\n")
        said = report(tmp_path / "out", folder, "--claims", path)["claims"]
        assert said[0]["provisional"] is provisional


# --------------------------------------------------------------------------- what was damaged is
# said


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda lines: [*lines[:5], *lines[7:]], "lacks 2 of the rounds 0 to 19"),
        (lambda lines: lines[:-3], "ends after 17 of 20 rounds"),
        (lambda lines: lines[:1], "ends after 0 of 20 rounds"),
        (lambda lines: [*lines[:-1], lines[-1].rstrip("\n")], "last line without a line break"),
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
    (run / "run.json").write_text(json.dumps(record))  # an older run: nothing shows that it did
    report(tmp_path / "out", tmp_path / "s")
    assert "ends after 20 of 100 rounds" in (tmp_path / "out/report.md").read_text()


def test_the_place_in_a_sweep_names_the_arm_of_a_run(tmp_path: Path) -> None:
    for arm in ("fedinit-0.1", "fedinit-0.01"):  # made by `fl-lightning fit`, which knows no arms
        make_run(tmp_path / f"s/{arm}/seed-0", None, 0, {"val/acc": [0.5] * 9}, title="FedInit")
    rows = "".join(f"{arm},0,done,x\n" for arm in ("fedinit-0.1", "fedinit-0.01"))
    (tmp_path / "s/runs.csv").write_text(f"arm,seed,status,folder\n{rows}")
    assert list(report(tmp_path / "out", tmp_path / "s")["arms"]) == ["fedinit-0.1", "fedinit-0.01"]


def test_a_column_that_stands_twice_is_refused_and_removed_claims_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    make_arm(folder, "up", {0: 0.5, 1: 0.5}, claims_hash=hashlib.sha256(b"gone").hexdigest())
    report(tmp_path / "out", folder)
    assert "claims.yaml was removed" in (tmp_path / "out/report.md").read_text()
    path = folder / "up/seed-0/metrics.csv"
    path.write_text("round,val/acc,val/acc\n" + "".join(f"{t},0.1,0.9\n" for t in range(30)))
    assert "two columns 'val/acc'" in refused(folder)


@pytest.mark.parametrize(
    "claim, words",
    [
        (
            {"kind": "trnd"},
            "difference, every_seed, equivalence, interaction, to_target, trend, diverges",
        ),
        ({"kind": "interaction", "direction": "less", "margin": 0}, "c, d missing"),
        ({"kind": "to_target", "direction": "less", "margin": 0, "target": 0.8}, "cost missing"),
        (
            {
                "kind": "to_target",
                "direction": "less",
                "margin": 0,
                "target": {"arm": ""},
                "cost": "rounds",
            },
            "{arm: A",
        ),
        ({"kind": "equivalence"}, "margin missing"),
        (
            {"kind": "equivalence", "margin": 1, "over": "layers"},
            "'over' is not known in a claim of kind equivalence",
        ),
        ({"direction": "less", "margin": 0, "primary": "yes"}, "true or false"),
    ],
)
def test_claims_of_each_kind_are_checked(tmp_path: Path, claim: dict[str, Any], words: str) -> None:
    make_arm(tmp_path / "s", "a", {0: 0.5})
    path = written(
        tmp_path / "c.yaml", {"id": "A", "a": "a", "b": "b", "metric": "val/acc", **claim}
    )
    assert words in refused(tmp_path / "s", "--claims", path)


def test_a_family_has_one_primary_claim(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "a", {0: 0.5})
    one = {
        "a": "a",
        "b": "b",
        "metric": "val/acc",
        "direction": "less",
        "margin": 0,
        "primary": True,
    }
    path = written(tmp_path / "c.yaml", {"id": "A", **one}, {"id": "B", **one})
    assert "A and B are both the primary claim" in refused(tmp_path / "s", "--claims", path)
    written(path, {"id": "A", **one}, {"id": "B", **one, "family": "f"})
    assert len(report(tmp_path / "out", tmp_path / "s", "--claims", path)["claims"]) == 2
