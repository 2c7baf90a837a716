"""Claims made before the runs: four planted effects, four verdicts.

What was edited, lost or absent is said.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from folders import make_arm, make_run, report

from fl_lightning.errors import UserError
from fl_lightning.lab.report.report_command import main

BASE = {0: 0.70, 1: 0.71, 2: 0.69, 3: 0.72, 4: 0.70}
EFFECTS = {  # differences to the base by seed
    "up": [0.021, 0.019, 0.020, 0.022, 0.018],
    "down": [-0.021, -0.019, -0.020, -0.022, -0.018],
    "flat": [0.001, -0.001, 0.0005, 0.0, 0.002],
    "wild": [0.08, -0.06, 0.05, -0.03, 0.01],
}
VERDICTS = {
    "up": "reproduced",
    "down": "contradicted",
    "flat": "not reproduced",
    "wild": "inconclusive",
}


def claim(id: str, a: str, b: str = "base", **other: Any) -> dict[str, Any]:
    given = {
        "metric": "val/acc",
        "score": "last10",
        "direction": "greater",
        "margin": 0.005,
        "scale": "difference",
    }
    return {"id": id, "a": a, "b": b, **given, **other}


def write(path: Path, *claims: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(list(claims)))
    return path


def effects(folder: Path, metric: str = "val/acc", **record: Any) -> None:
    make_arm(folder, "base", BASE, metric, **record)
    for arm, differences in EFFECTS.items():
        levels = {seed: BASE[seed] + d for seed, d in enumerate(differences)}
        make_arm(folder, arm, levels, metric, **record)


def test_four_planted_effects_give_the_four_verdicts(tmp_path: Path) -> None:
    effects(tmp_path / "s")
    write(tmp_path / "s/claims.yaml", *(claim(arm, arm) for arm in EFFECTS))
    found = report(tmp_path / "out", tmp_path / "s")
    assert {said["id"]: said["verdict"] for said in found["claims"]} == VERDICTS
    pairs = [tuple(pair[key] for key in ("a", "b", "metric", "score")) for pair in found["pairs"]]
    assert pairs == [(arm, "base", "val/acc", "last10") for arm in EFFECTS]


def test_an_edited_file_of_claims_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "s/claims.yaml", claim("A", "up", margin=0.03))
    stated = hashlib.sha256(path.read_bytes()).hexdigest()
    effects(tmp_path / "s", claims_hash=stated)
    (said,) = report(tmp_path / "out", tmp_path / "s")["claims"]
    assert (said["changed"], said["verdict"]) == (False, "not reproduced")
    write(path, claim("A", "up", margin=0.01))  # after the runs: the margin that would fit
    (said,) = report(tmp_path / "out", tmp_path / "s")["claims"]
    assert (said["changed"], said["verdict"]) == (True, "reproduced")
    assert "edited after the runs started" in (tmp_path / "out/report.html").read_text()


def test_other_claims_of_some_runs_are_said(tmp_path: Path) -> None:
    path = write(tmp_path / "s/claims.yaml", claim("A", "up"))
    effects(tmp_path / "s", claims_hash=hashlib.sha256(path.read_bytes()).hexdigest())
    make_run(tmp_path / "s/up/seed-8", "up", 8, {"val/acc": [0.5]}, claims_hash="of another file")
    (said,) = report(tmp_path / "out", tmp_path / "s")["claims"]
    assert said["changed"] is False
    assert "1 of 26 runs recorded other claims" in (tmp_path / "out/report.md").read_text()
    make_run(tmp_path / "s/up/seed-9", "up", 9, {"val/acc": [0.5]})
    report(tmp_path / "out", tmp_path / "s")
    assert "1 of 27 runs recorded no claims" in (tmp_path / "out/report.md").read_text()


def test_what_cannot_be_judged_is_inconclusive(tmp_path: Path) -> None:
    effects(tmp_path / "s")
    make_arm(tmp_path / "s", "zero", {0: 0.0, 1: 0.5, 2: -0.1})
    claims = [
        claim("metric", "up", metric="val/f1"),
        claim("arm", "upp"),
        claim("zero", "zero", scale="log_ratio"),
    ]
    found = report(
        tmp_path / "out", tmp_path / "s", "--claims", write(tmp_path / "c.yaml", *claims)
    )
    assert [(said["verdict"], said["n"]) for said in found["claims"]] == [
        ("inconclusive", 0), ("inconclusive", 0), ("inconclusive", 1),
    ]  # fmt: skip
    assert found["claims"][2]["mean"] == pytest.approx(math.log(0.5 / 0.71), abs=1e-9)
    assert [pair["p_holm"] for pair in found["pairs"]] == [None, None, None]
    assert "Did you mean 'up'?" in (tmp_path / "out/report.md").read_text()


def test_two_sweeps_bring_their_own_claims(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_arm(tmp_path / name, f"{name}-a", BASE)
        make_arm(tmp_path / name, f"{name}-b", BASE)
        write(tmp_path / name / "claims.yaml", claim(name, f"{name}-a", f"{name}-b"))
    found = report(tmp_path / "out", tmp_path / "one", tmp_path / "two")
    assert [said["id"] for said in found["claims"]] == ["one", "two"]
    assert found["pairs"][0]["p"] == 1 and found["pairs"][0]["sd"] == 0  # no difference at all


@pytest.mark.parametrize(
    "content, words",
    [
        ("id: A1", "a list of claims"),
        ("- {id: A1, a: x, b: y}", "metric, direction, margin missing"),
        ("- {id: A1, a: x, b: y, metric: m, direction: up, margin: 1}", "greater, less"),
        (
            "- {id: A1, a: x, b: y, metric: m, direction: less, margin: 1, score: lst}",
            "tail, last10, smoothed",
        ),
        (
            "- {id: A1, a: x, b: y, metric: m, direction: less, margin: much}",
            "a number of at least 0",
        ),
        (
            "- {id: A1, a: x, b: y, metric: m, direction: less, margin: 1, marign: 2}",
            "Did you mean 'margin'?",
        ),
        ("- [", "cannot be read"),
    ],
)
def test_claims_that_are_none_are_refused(tmp_path: Path, content: str, words: str) -> None:
    make_arm(tmp_path / "s", "a", BASE)
    (tmp_path / "claims.yaml").write_text(content)
    with pytest.raises(UserError) as error:
        main(
            [
                str(tmp_path / "s"),
                "--claims",
                str(tmp_path / "claims.yaml"),
                "--out",
                str(tmp_path / "out"),
            ]
        )
    assert words in str(error.value) and not (tmp_path / "out").exists()
