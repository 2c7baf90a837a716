"""Arms within settings, and sweeps side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import make_arm, make_run, report
from test_claims import write as written

from fl_lightning.errors import UserError
from fl_lightning.lab.report.report_command import main


def refused(*argv: object) -> str:
    """The paragraph of a report that is refused."""
    with pytest.raises(UserError) as error:
        main([*map(str, argv), "--out", "nowhere"])
    return str(error.value)


def grid(folder: Path, alphas: tuple[str, ...] = ("0.1", "0.6"), shift: float = 0.0) -> Path:
    for alpha in alphas:
        for method, level in (("fedavg", 0.7), ("fedinit-0.1", 0.75)):
            arm = f"{method}_Dirichlet-{alpha}"
            axes = {"method": method, "data.partition": f"Dirichlet-{alpha}"}
            for seed in range(5):
                columns = {"val/acc": [level + shift + 0.001 * seed * (method != "fedavg")] * 20}
                given = {"partition": f"{alpha} {seed}", "axes": axes}
                make_run(folder / arm / f"seed-{seed}", arm, seed, columns, **given)
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
    pivot = (tmp_path / "out/pivot.csv").read_text()
    assert pivot.startswith("method,Dirichlet-0.1,Dirichlet-0.6\n")


def test_a_table_by_settings_says_what_was_compared(tmp_path: Path) -> None:
    within = "Each arm is compared with the first arm of its setting."
    claimed = "Only the claims are tested."
    folder = grid(tmp_path / "s")
    claim = {"id": "A", "a": "fedinit-0.1_Dirichlet-0.1", "b": "fedavg_Dirichlet-0.1"}
    claim |= {"metric": "val/acc", "margin": 0}
    claims = written(tmp_path / "c.yaml", {**claim, "direction": "greater"})
    # Of one method there is nothing in a setting to compare with.
    alone = tmp_path / "alone"
    for alpha in ("0.1", "1.0"):
        axes = {"method": "fedavg", "data.partition.alpha": alpha}
        make_arm(alone, alpha, {0: 0.5, 1: 0.6}, partition=alpha, axes=axes)
    cases = (([folder], 2, within), ([folder, "--claims", claims], 1, claimed), ([alone], 0, ""))
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
    shared = {"kind": "trend", "over": "data.partition", "metric": "val/acc"}
    shared["direction"] = "greater"
    claims = [
        {"id": "T", "arm": "fedavg", **shared},
        {"id": "U", "arm": "fedinit-0.1", **shared, "family": "f"},
    ]
    path = written(tmp_path / "c.yaml", *claims)
    said = report(tmp_path / "out", folder, "--claims", path)["claims"]
    assert said[0]["values"] == pytest.approx({str(s): 1.0 for s in range(5)})
    assert said[0]["verdict"] == "reproduced"
    assert (said[1]["n"], said[1]["verdict"]) == (5, "inconclusive")  # constant: ρ is 0
    several = refused(folder, "--claims", written(tmp_path / "d.yaml", {"id": "T", **shared}))
    assert "give as arm one of the methods fedavg, fedinit-0.1" in several


def test_sweeps_with_other_claims_keep_their_arms_apart(tmp_path: Path) -> None:
    claim = {"a": "up", "b": "base", "metric": "val/acc", "direction": "greater", "margin": 0.005}
    for name, level in (("one", 0.9), ("two", 0.1)):
        make_arm(tmp_path / name, "base", {s: 0.5 + 0.001 * s for s in range(5)})
        make_arm(tmp_path / name, "up", {s: level + 0.002 * s for s in range(5)})
        written(tmp_path / name / "claims.yaml", {"id": f"{name}-A", **claim})
    found = report(tmp_path / "out", tmp_path / "one", tmp_path / "two")
    assert set(found["arms"]) == {"one/base", "one/up", "two/base", "two/up"}
    expected = [("one-A", "reproduced"), ("two-A", "contradicted")]
    assert [(e["id"], e["verdict"]) for e in found["claims"]] == expected
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


def test_the_place_in_a_sweep_names_the_arm_of_a_run(tmp_path: Path) -> None:
    for arm in ("fedinit-0.1", "fedinit-0.01"):  # made by `fl-lightning fit`, which knows no arms
        make_run(tmp_path / f"s/{arm}/seed-0", None, 0, {"val/acc": [0.5] * 9}, title="FedInit")
    rows = "".join(f"{arm},0,done,x\n" for arm in ("fedinit-0.1", "fedinit-0.01"))
    (tmp_path / "s/runs.csv").write_text(f"arm,seed,status,folder\n{rows}")
    assert list(report(tmp_path / "out", tmp_path / "s")["arms"]) == ["fedinit-0.1", "fedinit-0.01"]
