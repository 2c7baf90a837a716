"""Claims made before the runs: planted effects and their verdicts, families, what is provisional,
and what chance alone would say.

Every kind of claim, of lost runs too, is held to a calculation of its own in
``studies/tests/test_results_by_hand.py``.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from folders import make_arm, make_run, report

from fl_lightning.errors import UserError
from fl_lightning.lab.report.claims import Claim
from fl_lightning.lab.report.report_command import main
from fl_lightning.lab.report.verdicts import Evidence, judge

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


def claim(id: str, a: str = "up", b: str = "base", **other: Any) -> dict[str, Any]:
    given = {"metric": "val/acc", "direction": "greater", "margin": 0.005}
    return {"id": id, "a": a, "b": b, **given, **other}


def write(path: Path, *claims: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(list(claims)))
    return path


def effects(folder: Path, **record: Any) -> Path:
    make_arm(folder, "base", BASE, **record)
    for arm, differences in EFFECTS.items():
        levels = {seed: BASE[seed] + d for seed, d in enumerate(differences)}
        make_arm(folder, arm, levels, **record)
    return folder


def judged(tmp_path: Path, folder: Path, *claims: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What report.json says of these claims; report.md is beside it."""
    path = write(tmp_path / "c.yaml", *claims)
    said: list[dict[str, Any]] = report(tmp_path / "out", folder, "--claims", path)["claims"]
    return said


def page(tmp_path: Path) -> str:
    return (tmp_path / "out/report.md").read_text()


def test_four_planted_effects_give_the_four_verdicts(tmp_path: Path) -> None:
    effects(tmp_path / "s")
    write(tmp_path / "s/claims.yaml", *(claim(arm, arm, score="last10") for arm in EFFECTS))
    found = report(tmp_path / "out", tmp_path / "s")
    assert {said["id"]: said["verdict"] for said in found["claims"]} == VERDICTS
    pairs = [tuple(pair[key] for key in ("a", "b", "metric", "score")) for pair in found["pairs"]]
    assert pairs == [(arm, "base", "val/acc", "last10") for arm in EFFECTS]


def test_an_edited_or_a_removed_file_of_claims_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "s/claims.yaml", claim("A", margin=0.03))
    stated = hashlib.sha256(path.read_bytes()).hexdigest()
    effects(tmp_path / "s", claims_hash=stated)
    (said,) = report(tmp_path / "out", tmp_path / "s")["claims"]
    assert (said["changed"], said["verdict"]) == (False, "not reproduced")
    write(path, claim("A", margin=0.01))  # after the runs: the margin that would fit
    (said,) = report(tmp_path / "out", tmp_path / "s")["claims"]
    assert (said["changed"], said["verdict"]) == (True, "reproduced")
    assert "edited after the runs started" in (tmp_path / "out/report.html").read_text()
    path.unlink()
    report(tmp_path / "out", tmp_path / "s")
    assert "25 runs, such as" in page(tmp_path) and "claims.yaml was removed" in page(tmp_path)


def test_what_cannot_be_judged_is_inconclusive(tmp_path: Path) -> None:
    effects(tmp_path / "s")
    make_arm(tmp_path / "s", "zero", {0: 0.0, 1: 0.5, 2: -0.1})
    claims = [
        claim("metric", "up", metric="val/f1"),
        claim("arm", "upp"),
        claim("zero", "zero", scale="log_ratio"),
    ]
    path = write(tmp_path / "c.yaml", *claims)
    found = report(tmp_path / "out", tmp_path / "s", "--claims", path)
    said = [(each["verdict"], each["n"]) for each in found["claims"]]
    assert said == [("inconclusive", 0), ("inconclusive", 0), ("inconclusive", 1)]
    assert found["claims"][2]["mean"] == pytest.approx(math.log(0.5 / 0.71), abs=1e-9)
    assert [pair["p_holm"] for pair in found["pairs"]] == [None, None, None]
    assert "Did you mean 'up'?" in page(tmp_path)


def test_two_sweeps_bring_their_own_claims(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_arm(tmp_path / name, f"{name}-a", BASE)
        make_arm(tmp_path / name, f"{name}-b", BASE)
        write(tmp_path / name / "claims.yaml", claim(name, f"{name}-a", f"{name}-b"))
    found = report(tmp_path / "out", tmp_path / "one", tmp_path / "two")
    assert [said["id"] for said in found["claims"]] == ["one", "two"]
    assert found["pairs"][0]["p"] == 1 and found["pairs"][0]["sd"] == 0  # no difference at all


def test_a_claim_is_shown_with_what_its_paper_predicts(tmp_path: Path) -> None:
    told = {"primary": True, "paper_predicts": "+3 points", "we_predict": "the same"}
    like = {"id": "like", "kind": "equivalence", "a": "flat", "b": "base", "metric": "val/acc"}
    judged(tmp_path, effects(tmp_path / "s"), {**like, "margin": 0.01}, claim("rises", **told))
    latex = (tmp_path / "out/report.tex").read_text()
    assert not set("≈ρ±×−") & set(latex) and r"flat $\approx$ base" in latex
    captions = [line for line in latex.splitlines() if line.startswith(r"\caption")]
    assert r"\begin{tabular}{p{0.3\linewidth}" in latex and max(map(len, captions)) < 120
    shown = "rises: up > base in val/acc (mean over last third of gradients) (primary)"
    text = page(tmp_path)
    assert text.index(shown) < text.index("like: flat ≈ base") and "paper: +3 points" in text


# ------------------------------------------------------------- what is lost, missing or too few


def test_a_verdict_on_who_never_arrives_is_final_once_every_run_ended(tmp_path: Path) -> None:
    for seed in range(6):
        for arm, level in (("reaches", 0.9), ("never", 0.1)):
            status = "running" if (arm, seed) == ("never", 5) else "done"
            folder = tmp_path / f"s/{arm}/seed-{seed}"
            make_run(folder, arm, seed, {"val/acc": [level] * 30}, status)
    until = {"kind": "to_target", "target": 0.8, "cost": "rounds", "direction": "less"}
    (said,) = judged(tmp_path, tmp_path / "s", claim("c", "never", "reaches", **until))
    assert (said["verdict"], said["n"], said["provisional"]) == ("inconclusive", 0, True)
    shutil.rmtree(tmp_path / "s/never/seed-5")
    make_run(tmp_path / "s/never/seed-5", "never", 5, {"val/acc": [0.1] * 30})
    (said,) = judged(tmp_path, tmp_path / "s", claim("c", "never", "reaches", **until))
    assert (said["verdict"], said["left_out"], said["provisional"]) == ("inconclusive", 6, False)


@pytest.mark.parametrize("direction, verdicts", [("greater", "rcni"), ("less", "crni")])
def test_divergence_is_claimed_in_every_seed(tmp_path: Path, direction: str, verdicts: str) -> None:
    make_arm(tmp_path / "s", "calm", {s: 1.0 for s in range(3)}, "divergence/all")
    make_arm(tmp_path / "s", "tenfold", {0: 10.0, 1: 50.0}, "divergence/all")
    make_run(tmp_path / "s/tenfold/seed-2", "tenfold", 2, {"divergence/all": [1.0]}, "diverged")
    make_arm(tmp_path / "s", "double", {s: 2.0 for s in range(3)}, "divergence/all")
    make_arm(tmp_path / "s", "mixed", {0: 9.9, 1: 10.1, 2: 1.0}, "divergence/all")
    make_arm(tmp_path / "s", "few", {0: 99.0, 1: 99.0}, "divergence/all")
    shared = {"kind": "diverges", "against": "calm", "metric": "divergence/all"}
    arms = ("tenfold", "double", "mixed", "few")
    claims = [{"id": arm, "arm": arm, "direction": direction, **shared} for arm in arms]
    said = judged(tmp_path, tmp_path / "s", *claims)
    assert "".join(entry["verdict"][0] for entry in said) == verdicts
    assert said[0]["values"] == {"0": 1.0, "1": 1.0, "2": 1.0}
    assert said[0]["p"] is None and said[0]["low"] is None


def test_a_claim_of_every_seed_counts_seeds_and_says_that_it_tests_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    make_arm(folder, "base", {s: 0.5 for s in range(3)})
    levels = {
        "up": ({0: 0.51, 1: 0.6, 2: 0.505}, 0.004, "reproduced"),
        "mixed": ({0: 0.51, 1: 0.6, 2: 0.5}, 0.004, "inconclusive"),
        "down": ({0: 0.49, 1: 0.4, 2: 0.499}, 0.004, "contradicted"),
        "two": ({0: 0.6, 1: 0.6}, 0.004, "inconclusive"),
        "alike": ({s: 0.5 for s in range(3)}, 0.0, "not reproduced"),
    }
    claims = []
    for arm, (of_seeds, margin, _) in levels.items():
        make_arm(folder, arm, of_seeds)
        claims.append(claim(arm, arm, kind="every_seed", margin=margin))
    said = judged(tmp_path, folder, *claims, claim("other", "down", "up"))
    assert [entry["verdict"] for entry in said[:-1]] == [verdict for *_, verdict in levels.values()]
    # A claim without a p takes none from the family's others.
    assert said[0]["p"] is None and said[-1]["p_holm"] == said[-1]["p"]
    assert "reproduced (3 seeds, no test)" in page(tmp_path)
    assert "(mean over last third of gradients) in every seed" in page(tmp_path)


def test_fewer_than_five_pairs_decide_nothing_and_a_family_shares_its_p(tmp_path: Path) -> None:
    for n, verdict in ((4, "inconclusive"), (5, "reproduced")):
        make_arm(tmp_path / f"{n}", "up", {s: 0.80 + 0.001 * s for s in range(n)})
        make_arm(tmp_path / f"{n}", "base", {s: 0.70 - 0.001 * s for s in range(n)})
        assert judged(tmp_path, tmp_path / f"{n}", claim("A"))[0]["verdict"] == verdict
    values = [0.03, 0.01, 0.02, 0.045, -0.005, 0.02]  # p = 0.03
    evidence = Evidence(dict(enumerate(values)))
    for n, verdict in ((1, "reproduced"), (6, "inconclusive")):
        family = [(Claim(str(k), "a", "b", "m", "greater", 0.005), evidence) for k in range(n)]
        assert [said.verdict for said in judge(family)] == [verdict] * n


def test_verdicts_are_provisional_while_runs_of_the_family_are_missing(tmp_path: Path) -> None:
    folder = effects(tmp_path / "s")
    claims = [claim("A"), claim("B", b="none", family="f"), claim("C", b="flat", family="f")]
    said = judged(tmp_path, folder, *claims)
    assert [entry["provisional"] for entry in said] == [False, True, True]
    rows = [f"{arm},{seed},done,x\n" for arm in ("base", *EFFECTS) for seed in BASE]
    (folder / "runs.csv").write_text(f"arm,seed,status,folder\n{''.join(rows)}base,9,waiting,x\n")
    assert judged(tmp_path, folder, *claims)[0]["provisional"]
    assert "reproduced, provisional" in page(tmp_path)


# ---------------------------------------------------------------------------------------- trends


@pytest.mark.parametrize("over", ["beta", "layers"])
@pytest.mark.parametrize(
    "places, seeds, rising, p",
    [
        (9, 12, 5, None),  # seven seeds are the same everywhere, and count as without a trend
        (2, 5, 5, 2 / 2**5),  # over few places seeds may agree by chance
        (3, 5, 5, 2 / 6**5),
    ],
)
def test_seeds_that_agree_over_few_places_may_do_so_by_chance(
    tmp_path: Path, over: str, places: int, seeds: int, rising: int, p: float | None
) -> None:
    for seed in range(seeds):
        levels = [0.5 + 0.01 * place * (seed < rising) for place in range(places)]
        if over == "layers":
            columns = {f"consensus_relative/{place}": [x] for place, x in enumerate(levels)}
            columns["consensus_relative/total"] = [99.0]
            make_run(tmp_path / f"s/a/seed-{seed}", "a", seed, columns)
            continue
        for place, x in enumerate(levels):
            folder = tmp_path / f"s/{place}/seed-{seed}"
            make_run(folder, str(place), seed, {"val/acc": [x]}, axes={"beta": str(place)})
    given = {"id": "T", "kind": "trend", "over": over, "direction": "greater", "metric": "val/acc"}
    if over == "layers":
        given |= {"arm": "a", "metric": "consensus_relative"}
    (said,) = judged(tmp_path, tmp_path / "s", given)
    assert (said["n"], said["left_out"]) == (seeds, 0)
    assert list(said["values"].values()) == [1.0] * rising + [0.0] * (seeds - rising)
    if p is not None:
        assert said["p"] == pytest.approx(p)
        assert said["verdict"] == ("reproduced" if p < 0.05 else "inconclusive")


# -------------------------------------------------------------------- what chance alone would say


def families(number: int, claims: list[Claim], mean: float, sd: float, n: int = 8) -> Any:
    rng = np.random.default_rng(0)
    for _ in range(number):
        drawn = rng.normal(mean, sd, (len(claims), n)).tolist()
        rows = [Evidence(dict(enumerate(row))) for row in drawn]
        yield judge(list(zip(claims, rows, strict=True)))


# ----------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "content, words",
    [
        ("id: A1", "it has to be a list"),
        ("- [", "not valid YAML"),
        ("- {a: x}", "id, metric, b, direction, margin missing"),
        ("- {kind: trnd}", "kind='trnd' is not accepted"),
        ("- {direction: up}", "direction='up' is not accepted"),
        ("- {score: lst}", "Did you mean 'last'"),
        ("- {margin: much}", "a number from 0"),
        ("- {primary: 'yes'}", "true or false"),
        ("- {marign: 2}", "Did you mean 'margin'?"),
        ("- {id: A, metric: m, a: x, b: y, kind: interaction, direction: less, margin: 0}", "c, d"),
        ("- {kind: to_target, target: {arm: ''}, cost: rounds, id: A, metric: m, a: x, b: y, "
         "direction: less, margin: 0}", "{arm: A"),
        ("- {kind: equivalence, over: layers}", "'over' is not known in a claim of kind equiv"),
        ("- {kind: trend, over: layers, id: A, metric: m, direction: less}", "arm missing"),
        ("- &c {id: A, metric: m, a: x, b: y, direction: less, margin: 0}\n- *c", "two claims"),
        ("- {id: A, metric: m, a: x, b: y, direction: less, margin: 0, primary: true}\n"
         "- {id: B, metric: m, a: x, b: y, direction: less, margin: 0, primary: true}",
         "A and B are both the primary claim"),
    ],
)  # fmt: skip
def test_claims_that_are_none_are_refused(tmp_path: Path, content: str, words: str) -> None:
    make_arm(tmp_path / "s", "a", BASE)
    (tmp_path / "c.yaml").write_text(content)
    argv = [tmp_path / "s", "--claims", tmp_path / "c.yaml", "--out", tmp_path / "out"]
    with pytest.raises(UserError) as error:
        main(list(map(str, argv)))
    assert words in str(error.value) and not (tmp_path / "out").exists()
