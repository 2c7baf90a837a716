"""How claims are shown, families, what is provisional, and what chance alone would say.

Every kind of claim, of lost runs too, is held to a calculation of its own in
``studies/tests/test_results_by_hand.py``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from folders import make_arm, make_run, report

from fl_lightning.lab.report.claims import Claim
from fl_lightning.lab.report.verdicts import Evidence, judge

SEEDS, ROUNDS = range(6), 30
EFFECTS = {"base": 0.0, "up": 0.03, "same": 0.0004, "other": 0.01}


def curves(arm: str, seed: int) -> dict[str, Any]:
    """Noisy curves whose costs differ from arm to arm, some rounds without an evaluation."""
    rng = np.random.default_rng([sum(map(ord, arm)), seed])
    level = (
        0.6
        + 0.01 * seed
        + EFFECTS[arm]
        + 0.2 * np.linspace(0, 1, ROUNDS)
        + rng.normal(0, 0.003, ROUNDS)
    )
    gradients = rng.integers(5, 40, ROUNDS)
    gradients[2] = 0  # nobody took part: the cell is empty
    return {
        "val/acc": [None if t % 7 == 3 else float(v) for t, v in enumerate(level)],
        "cost/gradients": [float(g) or None for g in gradients],
        "communication/total_bytes": [float(b) for b in np.cumsum(gradients * 100)],
        **{f"consensus_relative/{name}": [float(v) for v in rng.uniform(1, 2 + place, ROUNDS)]
           for place, name in enumerate(("conv", "norm", "head"))},
        "consensus_relative/total": [99.0] * ROUNDS,
    }  # fmt: skip


def made(folder: Path, **record: Any) -> Path:
    for arm in EFFECTS:
        for seed in SEEDS:
            make_run(folder / arm / f"seed-{seed}", arm, seed, curves(arm, seed), **record)
    return folder


def written(path: Path, *claims: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(list(claims)))
    return path


GREATER: dict[str, Any] = {"metric": "val/acc", "direction": "greater", "margin": 0.0}


def test_a_claim_is_shown_with_what_its_paper_predicts(tmp_path: Path) -> None:
    rises = {"id": "rises", "a": "up", "b": "base", **GREATER, "primary": True}
    rises |= {"paper_predicts": "+3 points", "we_predict": "the same"}
    like = {"id": "like", "kind": "equivalence", "a": "same", "b": "base", "metric": "val/acc"}
    path = written(tmp_path / "c.yaml", rises, {**like, "margin": 0.01})
    found = report(tmp_path / "out", made(tmp_path / "s"), "--claims", path)
    assert [pair["a"] for pair in found["pairs"]] == ["up", "same"]
    latex = (tmp_path / "out/report.tex").read_text()
    assert not set("≈ρ±×−") & set(latex) and r"same $\approx$ base" in latex
    captions = [line for line in latex.splitlines() if line.startswith(r"\caption")]
    assert r"\begin{tabular}{p{0.3\linewidth}" in latex and max(map(len, captions)) < 120
    page = (tmp_path / "out/report.md").read_text()
    shown = "rises: up > base in val/acc (mean over last third of gradients) (primary)"
    assert shown in page and "paper: +3 points" in page


# --------------------------------------------------------------------------- what is lost, missing
# or too few


def test_a_verdict_on_who_never_arrives_is_final_once_every_run_ended(tmp_path: Path) -> None:
    for seed in range(6):
        for arm, level in (("reaches", 0.9), ("never", 0.1)):
            status = "running" if (arm, seed) == ("never", 5) else "done"
            folder = tmp_path / f"s/{arm}/seed-{seed}"
            make_run(folder, arm, seed, {"val/acc": [level] * 30}, status)
    claim = {"id": "c", "kind": "to_target", "a": "never", "b": "reaches", "metric": "val/acc"}
    claim |= {"target": 0.8, "cost": "rounds", "margin": 0.0, "direction": "less"}
    path = written(tmp_path / "c.yaml", claim)
    (said,) = report(tmp_path / "out", tmp_path / "s", "--claims", path)["claims"]
    assert (said["verdict"], said["n"], said["provisional"]) == ("inconclusive", 0, True)
    shutil.rmtree(tmp_path / "s/never/seed-5")
    make_run(tmp_path / "s/never/seed-5", "never", 5, {"val/acc": [0.1] * 30})
    (said,) = report(tmp_path / "out", tmp_path / "s", "--claims", path)["claims"]
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
    said = report(
        tmp_path / "out", tmp_path / "s", "--claims", written(tmp_path / "c.yaml", *claims)
    )["claims"]
    assert "".join(entry["verdict"][0] for entry in said) == verdicts
    assert (
        said[0]["values"] == {"0": 1.0, "1": 1.0, "2": 1.0}
        and said[0]["p"] is None
        and said[0]["low"] is None
    )


def test_a_claim_of_every_seed_counts_seeds_and_says_that_it_tests_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    make_arm(folder, "base", {s: 0.5 for s in range(3)})
    make_arm(folder, "up", {0: 0.51, 1: 0.6, 2: 0.505})
    make_arm(folder, "mixed", {0: 0.51, 1: 0.6, 2: 0.5})
    make_arm(folder, "down", {0: 0.49, 1: 0.4, 2: 0.499})
    make_arm(folder, "two", {0: 0.6, 1: 0.6})
    make_arm(folder, "alike", {s: 0.5 for s in range(3)})
    shared = {"kind": "every_seed", "metric": "val/acc", "direction": "greater"}
    margins = {"up": 0.004, "mixed": 0.004, "down": 0.004, "two": 0.004, "alike": 0.0}
    claims = [
        {"id": arm, "a": arm, "b": "base", **shared, "margin": margin}
        for arm, margin in margins.items()
    ]
    beside = {"id": "other", "a": "down", "b": "up", "metric": "val/acc", "margin": 0.0}
    claims.append({**beside, "direction": "greater"})
    said = report(tmp_path / "out", folder, "--claims", written(tmp_path / "c.yaml", *claims))[
        "claims"
    ]
    verdicts = [entry["verdict"] for entry in said]
    assert verdicts[:3] == ["reproduced", "inconclusive", "contradicted"]
    assert verdicts[3:] == ["inconclusive", "not reproduced", "inconclusive"]
    # A claim without a p takes none from the family's others.
    assert said[0]["p"] is None and said[-1]["p_holm"] == said[-1]["p"]
    page = (tmp_path / "out/report.md").read_text()
    assert "reproduced (3 seeds, no test)" in page
    assert "up > base in val/acc (mean over last third of gradients) in every seed" in page


def test_fewer_than_five_pairs_decide_nothing_and_a_family_shares_its_p(tmp_path: Path) -> None:
    claim = {"metric": "val/acc", "direction": "greater", "margin": 0.005}
    for n, verdict in ((4, "inconclusive"), (5, "reproduced")):
        make_arm(tmp_path / f"{n}", "a", {s: 0.80 + 0.001 * s for s in range(n)})
        make_arm(tmp_path / f"{n}", "b", {s: 0.70 - 0.001 * s for s in range(n)})
        written(tmp_path / f"{n}/claims.yaml", {"id": "A", "a": "a", "b": "b", **claim})
        assert report(tmp_path / f"out-{n}", tmp_path / f"{n}")["claims"][0]["verdict"] == verdict
    values = [0.03, 0.01, 0.02, 0.045, -0.005, 0.02]  # p = 0.03
    alone, six = (
        [
            said.verdict
            for said in judge(
                [(Claim(str(k), "a", "b", "m", "greater", 0.005), evidence) for k in range(n)]
            )
        ]
        for n, evidence in (
            (1, Evidence(dict(enumerate(values)))),
            (6, Evidence(dict(enumerate(values)))),
        )
    )
    assert alone == ["reproduced"] and six == ["inconclusive"] * 6


def test_verdicts_are_provisional_while_runs_of_the_family_are_missing(tmp_path: Path) -> None:
    folder = made(tmp_path / "s")
    claims = [
        {"id": "A", "a": "up", "b": "base", **GREATER},
        {"id": "B", "a": "up", "b": "none", **GREATER, "family": "f"},
        {"id": "C", "a": "up", "b": "other", **GREATER, "family": "f"},
    ]
    said = report(tmp_path / "out", folder, "--claims", written(tmp_path / "c.yaml", *claims))[
        "claims"
    ]
    assert [entry["provisional"] for entry in said] == [False, True, True]
    rows = [f"{arm},{seed},done,x" for arm in EFFECTS for seed in SEEDS]
    (folder / "runs.csv").write_text(
        "arm,seed,status,folder\n" + "\n".join([*rows, "base,9,waiting,x"]) + "\n"
    )
    said = report(tmp_path / "out", folder, "--claims", tmp_path / "c.yaml")["claims"]
    assert (
        said[0]["provisional"]
        and "reproduced, provisional" in (tmp_path / "out/report.md").read_text()
    )


# --------------------------------------------------------------------------- what chance alone
# would say


def families(
    rng: np.random.Generator,
    number: int,
    claims: list[Claim],
    mean: float,
    sd: float = 0.01,
    n: int = 8,
) -> Any:
    for _ in range(number):
        drawn = rng.normal(mean, sd, (len(claims), n))
        yield judge(
            [
                (c, Evidence(dict(enumerate(map(float, row)))))
                for c, row in zip(claims, drawn, strict=True)
            ]
        )


@pytest.mark.parametrize("over", ["beta", "layers"])
def test_a_seed_that_shows_no_trend_counts_as_one_without(tmp_path: Path, over: str) -> None:
    """Five seeds rise over nine places, seven are the same everywhere."""
    for seed in range(12):
        levels = [0.5 + 0.01 * place * (seed < 5) for place in range(9)]
        if over == "layers":
            columns = {f"consensus_relative/{place}": [x] for place, x in enumerate(levels)}
            make_run(tmp_path / f"s/a/seed-{seed}", "a", seed, columns)
            continue
        for place, x in enumerate(levels):
            folder = tmp_path / f"s/{place}/seed-{seed}"
            make_run(folder, str(place), seed, {"val/acc": [x]}, axes={"beta": str(place)})
    claim = {"id": "T", "kind": "trend", "over": over, "direction": "greater", "metric": "val/acc"}
    if over == "layers":
        claim |= {"arm": "a", "metric": "consensus_relative"}
    path = written(tmp_path / "c.yaml", claim)
    (said,) = report(tmp_path / "out", tmp_path / "s", "--claims", path)["claims"]
    assert (said["n"], said["left_out"]) == (12, 0)
    assert list(said["values"].values()) == [1.0] * 5 + [0.0] * 7


@pytest.mark.parametrize("layers, p", [(2, 2 / 2**5), (3, 2 / 6**5)])
def test_seeds_that_agree_over_a_few_layers_may_do_so_by_chance(
    tmp_path: Path, layers: int, p: float
) -> None:
    columns = {f"consensus_relative/{place}": [0.1 * place] for place in range(layers)}
    for seed in range(5):
        make_run(
            tmp_path / f"s/a/seed-{seed}",
            "a",
            seed,
            {**columns, "consensus_relative/total": [9.0]},
        )
    claim = {"id": "T", "kind": "trend", "over": "layers", "arm": "a", "direction": "greater"}
    path = written(tmp_path / "c.yaml", {**claim, "metric": "consensus_relative"})
    (said,) = report(tmp_path / "out", tmp_path / "s", "--claims", path)["claims"]
    assert said["p"] == pytest.approx(p)
    assert said["verdict"] == ("reproduced" if p < 0.05 else "inconclusive")


def test_of_families_without_effect_few_hold_a_finding() -> None:
    claims = [Claim(str(k), "a", "b", "m", "greater", 0.0) for k in range(6)]
    hits = sum(
        any(said.verdict in ("reproduced", "contradicted") for said in family)
        for family in families(np.random.default_rng(0), 2000, claims, 0.0)
    )
    assert 0.02 * 2000 < hits <= 0.06 * 2000  # Holm's 5 %, not less for being careless


def test_of_equivalences_at_the_margin_few_are_reproduced() -> None:
    claim = [Claim("E", "a", "b", "m", "greater", 0.01, kind="equivalence")]
    hits = sum(
        said.verdict == "reproduced"
        for (said,) in families(np.random.default_rng(1), 2000, claim, 0.01, 0.004)
    )
    assert 0.03 * 2000 < hits <= 0.06 * 2000
