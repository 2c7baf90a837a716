"""Every kind of claim against a calculation of its own, families and lost runs, and what chance
alone would say."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from folders import make_arm, make_run, report
from scipy import stats

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


# --------------------------------------------------------------------------- an independent
# calculation


def tail(arm: str, seed: int) -> float:
    columns = curves(arm, seed)
    spent, total = 0.0, sum(map(float, filter(None, columns["cost/gradients"])))
    kept = []
    for value, cost in zip(columns["val/acc"], columns["cost/gradients"], strict=True):
        spent += cost or 0
        if value is not None and spent > 2 / 3 * total:
            kept.append(value)
    return float(np.mean(kept))


def until(arm: str, seed: int, target: float, cost: str) -> float | None:
    """Summed by hand until the smoothed curve is there."""
    columns = curves(arm, seed)
    rounds = [t for t, v in enumerate(columns["val/acc"]) if v is not None]
    values = np.array([columns["val/acc"][t] for t in rounds])
    width = min(101, len(values) // 5)
    width -= width % 2 == 0
    if width >= 3:
        window = 0.5 * (1 - np.cos(2 * np.pi * np.arange(1, width + 1) / (width + 1)))
        values = np.convolve(values, window, "same") / np.convolve(
            np.ones_like(values), window, "same"
        )
    last = next((t for t, v in zip(rounds, values, strict=True) if v >= target), None)
    if last is None:
        return None
    if cost == "bytes":
        return float(columns["communication/total_bytes"][last])
    return (
        float(last + 1)
        if cost == "rounds"
        else float(sum(filter(None, columns["cost/gradients"][: last + 1])))
    )


def holm(p_values: dict[str, float]) -> dict[str, float]:
    corrected, highest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[name]))
        corrected[name] = highest
    return corrected


CLAIMS: list[dict[str, Any]] = [
    {
        "id": "rises",
        "a": "up",
        "b": "base",
        "direction": "greater",
        "margin": 0.005,
        "primary": True,
        "paper_predicts": "+3 points",
        "we_predict": "the same",
    },
    {"id": "like", "kind": "equivalence", "a": "same", "b": "base", "margin": 0.01},
    {
        "id": "more",
        "kind": "interaction",
        "a": "up",
        "b": "base",
        "c": "other",
        "d": "same",
        "direction": "greater",
        "margin": 0.005,
        "scale": "log_ratio",
    },
    {
        "id": "sooner",
        "kind": "to_target",
        "a": "up",
        "b": "base",
        "target": 0.72,
        "cost": "gradients",
        "direction": "less",
        "margin": 0.0,
    },
    {
        "id": "tail",
        "kind": "to_target",
        "a": "up",
        "b": "other",
        "target": {"arm": "base", "score": "tail"},
        "cost": "bytes",
        "direction": "less",
        "margin": 0.0,
        "family": "targets",
    },
    {
        "id": "layers",
        "kind": "trend",
        "arm": "base",
        "over": "layers",
        "metric": "consensus_relative",
        "direction": "greater",
        "family": "targets",
    },
]


def test_report_json_agrees_with_an_independent_calculation(tmp_path: Path) -> None:
    path = written(tmp_path / "c.yaml", *({"metric": "val/acc", **claim} for claim in CLAIMS))
    found = report(tmp_path / "out", made(tmp_path / "s"), "--claims", path)
    said = {entry["id"]: entry for entry in found["claims"]}
    scores = {arm: {seed: tail(arm, seed) for seed in SEEDS} for arm in EFFECTS}
    for arm, own in scores.items():
        assert found["arms"][arm]["scores"]["tail"]["values"] == pytest.approx(
            {str(s): v for s, v in own.items()}, abs=1e-9
        )

    def log(one: str, other: str, seed: int) -> float:
        return float(np.log(scores[one][seed] / scores[other][seed]))

    def ratio(one: str, other: str, target: dict[int, float], cost: str) -> dict[int, float]:
        pairs = {
            s: (until(one, s, target[s], cost), until(other, s, target[s], cost)) for s in SEEDS
        }
        return {
            s: float(np.log(a / b))
            for s, (a, b) in pairs.items()
            if a is not None and b is not None
        }

    def rho(seed: int) -> float:
        columns = curves("base", seed)
        means = [
            np.mean(columns[f"consensus_relative/{name}"]) for name in ("conv", "norm", "head")
        ]
        return float(stats.spearmanr([0, 1, 2], means).statistic)

    wanted = {
        "rises": {s: scores["up"][s] - scores["base"][s] for s in SEEDS},
        "like": {s: scores["same"][s] - scores["base"][s] for s in SEEDS},
        "more": {s: log("up", "base", s) - log("other", "same", s) for s in SEEDS},
        "sooner": ratio("up", "base", dict.fromkeys(SEEDS, 0.72), "gradients"),
        "tail": ratio("up", "other", scores["base"], "bytes"),
        "layers": {s: rho(s) for s in SEEDS},
    }
    p_values = {}
    for name, values in wanted.items():
        entry, numbers = said[name], list(values.values())
        test = stats.ttest_1samp(numbers, 0.0)
        low, high = test.confidence_interval(0.95)
        assert entry["values"] == pytest.approx({str(s): v for s, v in values.items()}, abs=1e-9), (
            name
        )
        assert (entry["n"], entry["left_out"]) == (len(numbers), 6 - len(numbers))
        assert (entry["mean"], entry["low"], entry["high"]) == pytest.approx(
            (np.mean(numbers), low, high), abs=1e-9
        )
        one_sided = (
            stats.ttest_1samp(numbers, -0.01, alternative="greater").pvalue,
            stats.ttest_1samp(numbers, 0.01, alternative="less").pvalue,
        )
        p_values[name] = float(max(one_sided) if name == "like" else test.pvalue)
    first = ("rises", "like", "more", "sooner")
    corrected = {
        **holm({n: p_values[n] for n in first}),
        **holm({n: p_values[n] for n in ("tail", "layers")}),
    }
    for name in wanted:
        assert (said[name]["p"], said[name]["p_holm"]) == pytest.approx(
            (p_values[name], corrected[name]), abs=1e-9
        )
    assert {n: said[n]["verdict"] for n in first} == dict.fromkeys(first, "reproduced")
    assert [(pair["a"], pair["p_holm"]) for pair in found["pairs"]] == [
        ("up", said["rises"]["p_holm"]), ("same", said["like"]["p_holm"]),
    ]  # fmt: skip
    assert (said["rises"]["kind"], said["rises"]["family"], said["rises"]["primary"]) == (
        "difference",
        None,
        True,
    )
    assert said["layers"]["family"] == "targets" and said["layers"]["kind"] == "trend"
    latex = (tmp_path / "out/report.tex").read_text()
    assert not set("≈ρ±×−") & set(latex) and r"same $\approx$ base" in latex
    captions = [line for line in latex.splitlines() if line.startswith(r"\caption")]
    assert r"\begin{tabular}{p{0.3\linewidth}" in latex and max(map(len, captions)) < 120
    page = (tmp_path / "out/report.md").read_text()
    assert (
        "rises: up > base in val/acc (mean over last third of gradients) (primary)" in page
        and "paper: +3 points" in page
    )


# --------------------------------------------------------------------------- what is lost, missing
# or too few


def test_a_diverged_run_supports_no_likeness_and_no_interaction(tmp_path: Path) -> None:
    for arm in ("a", "b", "d"):
        make_arm(
            tmp_path / "s",
            arm,
            {s: 0.7 + 0.001 * s + (0.1 + 0.001 * (s % 2)) * (arm == "a") for s in range(7)},
        )
    make_arm(tmp_path / "s", "c", {s: 0.7 + 0.001 * s for s in range(6)})
    make_run(tmp_path / "s/c/seed-6", "c", 6, {"val/acc": [0.7]}, "diverged")
    claims = [
        {
            "id": "gain",
            "kind": "interaction",
            "a": "a",
            "b": "b",
            "c": "c",
            "d": "d",
            "direction": "greater",
            "margin": 0.01,
            "metric": "val/acc",
        },
        {
            "id": "like",
            "kind": "equivalence",
            "a": "c",
            "b": "d",
            "margin": 0.01,
            "metric": "val/acc",
        },
        {
            "id": "real",
            "kind": "equivalence",
            "a": "b",
            "b": "d",
            "margin": 0.01,
            "metric": "val/acc",
        },
    ]
    said = report(
        tmp_path / "out", tmp_path / "s", "--claims", written(tmp_path / "c.yaml", *claims)
    )["claims"]
    assert [(entry["verdict"], entry["n"]) for entry in said] == [
        ("inconclusive", 6),
        ("inconclusive", 6),
        ("reproduced", 7),
    ]


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


def test_who_never_arrives_is_left_out_and_proves_no_claim_of_being_cheaper(tmp_path: Path) -> None:
    quick, slow, never = [0.9] * 30, [0.1] * 20 + [0.9] * 10, [0.1] * 30
    for seed in range(6):
        make_run(
            tmp_path / f"s/quick/seed-{seed}", "quick", seed, {"val/acc": quick if seed else never}
        )
        late = [0.1] * (seed % 2) + slow
        make_run(tmp_path / f"s/slow/seed-{seed}", "slow", seed, {"val/acc": late[:30]})
        make_run(
            tmp_path / f"s/never/seed-{seed}",
            "never",
            seed,
            {"val/acc": late[:30] if seed else never},
        )
    shared = {
        "kind": "to_target",
        "metric": "val/acc",
        "target": 0.8,
        "cost": "rounds",
        "margin": 0.0,
    }
    claims = [
        {"id": "cheaper", "a": "quick", "b": "slow", "direction": "less", **shared},
        {
            "id": "dearer",
            "a": "never",
            "b": "quick",
            "direction": "greater",
            **shared,
            "family": "f",
        },
    ]
    made_ = report(
        tmp_path / "out", tmp_path / "s", "--claims", written(tmp_path / "c.yaml", *claims)
    )["claims"]
    assert [(e["verdict"], e["n"], e["left_out"]) for e in made_] == [
        ("inconclusive", 5, 1),
        ("inconclusive", 5, 1),
    ]
    claims[0]["a"], claims[0]["b"] = (
        "slow",
        "never",
    )  # both ways: the one that is not claimed to be cheaper never arrives
    claims[1] = {**claims[1], "a": "never", "b": "slow"}
    for seed in range(6):
        (tmp_path / f"s/slow/seed-{seed}/metrics.csv").write_text(
            "round,val/acc\n" + "".join(f"{t},0.9\n" for t in range(30))
        )
    written(tmp_path / "c.yaml", *claims)
    made_ = report(tmp_path / "out", tmp_path / "s", "--claims", tmp_path / "c.yaml")["claims"]
    assert [(e["verdict"], e["n"], e["left_out"]) for e in made_] == [
        ("reproduced", 5, 1),
        ("reproduced", 5, 1),
    ]


@pytest.mark.parametrize("direction, verdicts", [("greater", "rcni"), ("less", "crni")])
def test_divergence_is_claimed_in_every_seed(tmp_path: Path, direction: str, verdicts: str) -> None:
    make_arm(tmp_path / "s", "calm", {s: 1.0 for s in range(3)}, "divergence/all")
    make_arm(tmp_path / "s", "tenfold", {0: 10.0, 1: 50.0}, "divergence/all")
    make_run(tmp_path / "s/tenfold/seed-2", "tenfold", 2, {"divergence/all": [1.0]}, "diverged")
    make_arm(tmp_path / "s", "double", {s: 2.0 for s in range(3)}, "divergence/all")
    make_arm(tmp_path / "s", "mixed", {0: 9.9, 1: 10.1, 2: 1.0}, "divergence/all")
    make_arm(tmp_path / "s", "few", {0: 99.0, 1: 99.0}, "divergence/all")
    claims = [
        {
            "id": arm,
            "kind": "diverges",
            "arm": arm,
            "against": "calm",
            "metric": "divergence/all",
            "direction": direction,
        }
        for arm in ("tenfold", "double", "mixed", "few")
    ]
    said = report(
        tmp_path / "out", tmp_path / "s", "--claims", written(tmp_path / "c.yaml", *claims)
    )["claims"]
    assert "".join(entry["verdict"][0] for entry in said) == verdicts
    assert (
        said[0]["values"] == {"0": 1.0, "1": 1.0, "2": 1.0}
        and said[0]["p"] is None
        and said[0]["low"] is None
    )


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
        {
            "id": "A",
            "a": "up",
            "b": "base",
            "metric": "val/acc",
            "direction": "greater",
            "margin": 0.0,
        },
        {
            "id": "B",
            "a": "up",
            "b": "none",
            "metric": "val/acc",
            "direction": "greater",
            "margin": 0.0,
            "family": "f",
        },
        {
            "id": "C",
            "a": "up",
            "b": "other",
            "metric": "val/acc",
            "direction": "greater",
            "margin": 0.0,
            "family": "f",
        },
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
