"""The numbers of a report, calculated again from the tables of its runs, without our own code.

Written from the texts (docs/report.md, studies/protocol.md), not from the code that follows them
too: it imports nothing of ours, so that a slip of either shows as a difference.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import product, starmap
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from studies.tests.by_hand_statistics import (
    Interval,
    Number,
    by_chance,
    holm,
    interval,
    p_equivalent,
    p_two_sided,
    rank_correlation,
)

GREATER = {
    "acc", "accuracy", "f1", "f1score", "precision", "recall", "auroc", "auc", "ap", "map", "iou",
    "dice", "psnr", "ssim", "bleu", "r2", "kappa", "mcc", "cosine",
}  # fmt: skip
ENDED = ("done", "diverged")
FEWEST_PAIRS = 5
FEWEST_SEEDS_COUNTED = 3
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Run:
    """One run: its record, and its columns with NaN where nothing was measured."""

    folder: Path
    record: dict[str, Any]
    columns: dict[str, list[float]]

    @property
    def arm(self) -> str:
        return str(self.record["arm"] or self.record["title"])

    @property
    def seed(self) -> int:
        return int(self.record["seed"])

    @property
    def diverged(self) -> bool:
        return bool(self.record["status"] == "diverged")

    @property
    def ended(self) -> bool:
        return self.record["status"] in ENDED

    @cached_property
    def spent(self) -> np.ndarray:
        """Gradients evaluated up to and with each row; without that column a round costs one."""
        if "cost/gradients" not in self.columns:
            return np.array(self.columns["round"]) + 1
        cells = np.array(self.columns["cost/gradients"])
        return np.cumsum(np.where(np.isfinite(cells), cells, 0.0))

    def evaluated(self, metric: str) -> list[int]:
        """The rows that have a value of ``metric``."""
        return [row for row, x in enumerate(self.columns.get(metric, [])) if math.isfinite(x)]

    def curve(self, metric: str) -> list[float]:
        return [self.columns[metric][row] for row in self.evaluated(metric)]


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, packed by xz or plain."""
    raw = path.read_bytes()
    text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()
    return list(csv.DictReader(io.StringIO(text, newline="")))


def read_runs(sweep: Path) -> list[Run]:
    """The runs in the tables of a sweep, those that selected too."""
    cells = {}
    for row in read_table(sweep / "curves.csv.xz"):
        curve = [float(cell) if cell else math.nan for cell in row["cells"].split(" ")]
        cells[row["run"], row["metric"]] = curve
    runs = []
    for row in read_table(sweep / "runs.csv.xz"):
        place = row["folder"]
        columns = {name: cells[place, name] for name in json.loads(row["columns"])}
        runs.append(Run(Path(place), json.loads(row["run.json"]), columns))
    return runs


# Scores of one run.


def tail(run: Run, metric: str, gradients: Number = None) -> Number:
    """The mean over the last third of so many gradients, or of the run's."""
    end = run.spent[-1] if gradients is None else gradients
    rows = [row for row in run.evaluated(metric) if run.spent[row] <= end]
    if not rows:
        return None
    late = [row for row in rows if 3 * run.spent[row] > 2 * end]
    return float(np.mean([run.columns[metric][row] for row in late or rows[-1:]]))


def smooth(values: Sequence[float]) -> np.ndarray:
    """The curve under a Hanning window whose ends are not 0, renormalised where it hangs over."""
    a = np.array(values)
    width = min(101, len(a) // 5)
    width -= width % 2 == 0
    if width < 3:
        return a
    window = np.hanning(width + 2)[1:-1]
    smoothed = np.empty(len(a))
    for i in range(len(a)):
        below = max(0, i - width // 2)
        above = min(len(a), i + width // 2 + 1)
        weights = window[below - i + width // 2 : above - i + width // 2]
        smoothed[i] = (weights * a[below:above]).sum() / weights.sum()
    return smoothed


def of_curve(score: Callable[[list[float]], float]) -> Callable[[Run, str], Number]:
    """A score of the values in their order; None without any."""

    def number(run: Run, metric: str) -> Number:
        values = run.curve(metric)
        return float(score(values)) if values else None

    return number


def smoothed_best(run: Run, metric: str) -> Number:
    """The best of the last 50 of the smoothed curve."""
    values = run.curve(metric)
    if not values:
        return None
    best = max if greater_is_better(metric, [run]) else min
    return float(best(smooth(values)[-50:]))


SCORES: dict[str, Callable[[Run, str], Number]] = {
    "tail": tail,
    "last10": of_curve(lambda values: np.mean(values[-10:])),
    "smoothed": smoothed_best,
    "last": of_curve(lambda values: values[-1]),
    "max": of_curve(max),
}


def greater_is_better(metric: str, runs: Iterable[Run], mode: str | None = None) -> bool:
    said = [run.record.get("modes", {}).get(metric) for run in runs]
    known = [mode, *said]
    for word in known:
        if word is not None:
            return bool(word == "max")
    return re.split(r"[/_.-]", metric)[-1].lower() in GREATER


def score(run: Run, metric: str, name: str, greater: bool) -> Number:
    """A diverged run scores 0 where greater is better, and has no score elsewhere."""
    if run.diverged:
        return 0.0 if greater else None
    return SCORES[name](run, metric)


def arrival(run: Run, metric: str, target: float, greater: bool) -> int | None:
    """The row at which the smoothed curve is first at the target."""
    if run.diverged or metric not in run.columns:
        return None
    for row, value in zip(run.evaluated(metric), smooth(run.curve(metric)), strict=True):
        if (value >= target) if greater else (value <= target):
            return row
    return None


def cost_until(run: Run, row: int, cost: str) -> float:
    if cost == "gradients":
        return float(run.spent[row])
    if cost == "bytes":
        return run.columns["communication/total_bytes"][row]
    return run.columns["round"][row] + 1


# Claims.


class Sweeps:
    """The runs of sweeps with one and the same claims, and those claims."""

    def __init__(self, results: Path, sweeps: Sequence[dict[str, str]]) -> None:
        self.sweeps = sweeps
        self.names = [row["sweep"] for row in sweeps]
        found = [run for name in self.names for run in read_runs(results / name)]
        self.runs = [run for run in found if run.folder.parts[0] != "select"]
        self.text = sweeps[0]["claims.yaml"].encode()
        self.claims: list[dict[str, Any]] = yaml.safe_load(self.text)
        self.arms: dict[str, dict[int, Run]] = {}
        for run in self.runs:
            self.arms.setdefault(run.arm, {})[run.seed] = run

    @property
    def changed(self) -> bool | None:
        recorded = {run.record["claims_hash"] for run in self.runs} - {None}
        return hashlib.sha256(self.text).hexdigest() not in recorded if recorded else None

    @cached_property
    def seeds(self) -> set[int]:
        """The seeds that the sweep is to make, as its file and its list of runs have them."""
        planned = {run.seed for run in self.runs}
        for sweep in self.sweeps:
            rows = csv.DictReader(sweep["runs.csv"].splitlines())
            planned |= {int(row["seed"]) for row in rows}
            planned |= set(yaml.safe_load(sweep["sweep.yaml"])["grid"]["seed_everything"])
        return planned

    def ended(self, arms: Iterable[str]) -> list[int]:
        """The seeds of which each of these arms has a run that ended."""
        rows = [self.arms.get(arm, {}) for arm in arms]
        return [s for s in sorted(self.seeds) if all(s in row and row[s].ended for row in rows)]

    def swept(self, claim: dict[str, Any]) -> list[str]:
        """The arms of a trend over an axis."""
        chosen = []
        for arm, runs in self.arms.items():
            axes = next(iter(runs.values())).record.get("axes") or {}
            if claim["over"] in axes and claim.get("arm", axes.get("method")) == axes.get("method"):
                chosen.append(arm)
        return chosen

    def arms_of(self, claim: dict[str, Any]) -> list[str]:
        if claim.get("kind") == "trend" and claim["over"] != "layers":
            return self.swept(claim)
        names = [claim[key] for key in ("a", "b", "c", "d", "arm", "against") if key in claim]
        if isinstance(claim.get("target"), dict):
            names.append(claim["target"]["arm"])
        return list(dict.fromkeys(names))


@dataclass
class Evidence:
    """The value of each seed that counts, how many do not, and what these would have shown.

    ``lost``: one of them would have counted against the claim; ``won``: one would have for it.
    """

    values: dict[int, float]
    left_out: int = 0
    lost: bool = False
    won: bool = False

    def add(self, seed: int, value: Number, lost: bool, won: bool = False) -> None:
        if value is not None:
            self.values[seed] = value
        else:
            self.left_out += 1
            self.lost, self.won = self.lost or lost, self.won or won


def contrast(a: Number, b: Number, logarithmic: bool) -> Number:
    if a is None or b is None:
        return None
    if not logarithmic:
        return a - b
    return math.log(a / b) if a > 0 and b > 0 else None


def differences(claim: dict[str, Any], sweeps: Sweeps) -> Evidence:
    """Of the kinds difference, every_seed, equivalence and interaction."""
    arms = [claim[key] for key in ("a", "b", "c", "d") if key in claim]
    metric = claim["metric"]
    greater = greater_is_better(metric, sweeps.runs, claim.get("mode"))
    plain = claim.get("kind", "difference") in ("difference", "every_seed")
    logarithmic = claim.get("scale") == "log_ratio"
    evidence = Evidence({})
    for seed in sweeps.ended(arms):
        runs = [sweeps.arms[arm][seed] for arm in arms]
        found = [score(run, metric, claim.get("score", "tail"), greater) for run in runs]
        lost, won = False, False
        # The first and the fourth arm are to be higher in a claim of "greater", the others lower.
        for run, high in zip(runs, (True, False, False, True), strict=False):
            claimed_high = high == (claim.get("direction") == "greater")
            lost = lost or (run.diverged and claimed_high == greater)
            won = won or (run.diverged and claimed_high != greater)
        gone = lost or won
        if not gone and logarithmic and any(x is not None and x <= 0 for x in found):
            lost, won = True, True
        if gone and claim.get("kind") == "equivalence":
            lost, won = True, False
        value = contrast(found[0], found[1], logarithmic) if plain or not gone else None
        if value is not None and len(found) == 4:
            other = contrast(found[2], found[3], logarithmic)
            value = None if other is None else value - other
        evidence.add(seed, value, lost, won)
    return evidence


def costs(claim: dict[str, Any], sweeps: Sweeps) -> Evidence:
    """Of the kind to_target: log of a's cost over b's, until each is at the target.

    A run that diverged never arrives, which is against the claim that it is the cheaper one.
    """
    metric = claim["metric"]
    target = claim["target"]
    greater = greater_is_better(metric, sweeps.runs, claim.get("mode"))
    cheaper = 0 if claim["direction"] == "less" else 1
    evidence = Evidence({})
    for seed in sweeps.ended(sweeps.arms_of(claim)):
        runs = [sweeps.arms[claim[key]][seed] for key in ("a", "b")]
        level: Number = target if not isinstance(target, dict) else None
        if isinstance(target, dict):
            model = sweeps.arms[target["arm"]][seed]
            level = None if model.diverged else SCORES[target["score"]](model, metric)
        if level is None:
            evidence.add(seed, None, lost=True, won=True)
            continue
        rows = [arrival(run, metric, level, greater) for run in runs]
        spent = [
            None if row is None else cost_until(run, row, claim["cost"])
            for run, row in zip(runs, rows, strict=True)
        ]
        cost = contrast(spent[0], spent[1], logarithmic=True)
        evidence.add(seed, cost, lost=rows[cheaper] is None, won=rows[1 - cheaper] is None)
    return evidence


def means_of_layers(run: Run, metric: str, without: Sequence[str] = ()) -> list[float]:
    """Each layer's mean over rounds, where it was measured."""
    hidden = {f"{metric}/{name}" for name in ("total", *without)}
    names = [name for name in run.columns if name.startswith(metric + "/") and name not in hidden]
    return [float(np.mean(curve)) for curve in map(run.curve, names) if curve]


def correlation_with_depth(run: Run, metric: str, without: Sequence[str] = ()) -> Number:
    """Spearman's ρ between a layer's place and its metric's mean over rounds."""
    means = means_of_layers(run, metric, without)
    return rank_correlation(range(len(means)), means)


def trend_over_layers(claim: dict[str, Any], sweeps: Sweeps) -> Evidence:
    evidence = Evidence({})
    for seed in sweeps.ended([claim["arm"]]):
        run = sweeps.arms[claim["arm"]][seed]
        rho = None if run.diverged else correlation_with_depth(run, claim["metric"])
        evidence.add(seed, rho, lost=run.diverged, won=run.diverged)
    return evidence


def trend_over_axis(claim: dict[str, Any], sweeps: Sweeps) -> Evidence:
    """Spearman's ρ of each seed between the axis and the score; a part of the axis has none."""
    arms = sweeps.arms_of(claim)
    evidence = Evidence({})
    for seed in sorted(set().union(*(sweeps.arms[arm] for arm in arms))):
        rows = [sweeps.arms[arm][seed] for arm in arms if seed in sweeps.arms[arm]]
        runs = [run for run in rows if run.ended]
        lost = any(run.diverged for run in runs)
        scores = [SCORES[claim.get("score", "tail")](run, claim["metric"]) for run in runs]
        known = [x for x in scores if x is not None]
        places = [float(run.record["axes"][claim["over"]]) for run in runs]
        whole = len(known) == len(arms) and not lost
        evidence.add(seed, rank_correlation(places, known) if whole else None, lost, lost)
    return evidence


def places(claim: dict[str, Any], sweeps: Sweeps, values: Sequence[float]) -> float:
    """The values of a trend's axis; the layers where all seeds have one and the same ρ."""
    if claim["over"] != "layers":
        return len(sweeps.arms_of(claim))
    if not math.isclose(min(values), max(values), abs_tol=1e-9):
        return math.inf
    runs = [sweeps.arms[claim["arm"]][seed] for seed in sweeps.ended([claim["arm"]])]
    return min(len(means_of_layers(run, claim["metric"])) for run in runs if not run.diverged)


def trends(claim: dict[str, Any], sweeps: Sweeps) -> Evidence:
    over_layers = claim["over"] == "layers"
    return (trend_over_layers if over_layers else trend_over_axis)(claim, sweeps)


def divergences(claim: dict[str, Any], sweeps: Sweeps) -> Evidence:
    """1 where the arm diverged, or has at least ``factor`` times the other's metric; else 0."""
    evidence = Evidence({})
    for seed in sweeps.ended([claim["arm"]]):
        run = sweeps.arms[claim["arm"]][seed]
        other = sweeps.arms.get(claim["against"], {}).get(seed)
        value: Number = 1.0 if run.diverged else None
        own = SCORES[claim.get("score", "tail")](run, claim["metric"])
        level: Number = None
        if other is not None and other.record["status"] == "done":
            level = SCORES[claim.get("score", "tail")](other, claim["metric"])
        if value is None and own is not None and level is not None:
            value = float(own >= claim.get("factor", 10) * level)
        calm = other is not None and other.ended and claim.get("direction") != "less"
        evidence.add(seed, value, lost=calm)
    return evidence


EVIDENCE = {"to_target": costs, "trend": trends, "diverges": divergences}
COUNTED = ("diverges", "every_seed")


def verdict_of_divergence(claim: dict[str, Any], values: Sequence[float]) -> str:
    wanted = 0.0 if claim.get("direction") == "less" else 1.0
    as_claimed = sum(value == wanted for value in values)
    if as_claimed == len(values):
        return "reproduced"
    return "not reproduced" if as_claimed else "contradicted"


def verdict_of_seeds(claim: dict[str, Any], values: Sequence[float]) -> str:
    """By how many seeds reach the margin, and how many are on the other side of 0."""
    signed = [-value if claim["direction"] == "less" else value for value in values]
    reached = sum(0 < value >= claim["margin"] for value in signed)
    if reached in (0, len(signed)):
        opposite = "contradicted" if max(signed) < 0 else "not reproduced"
        return "reproduced" if reached else opposite
    return "inconclusive"


def verdict(claim: dict[str, Any], evidence: Evidence, p: Number, margin: float) -> str:
    """The verdict that the values give, if no seed that is left out would speak against it."""
    given = verdict_of_values(claim, evidence, p, margin)
    hidden = evidence.lost if given == "reproduced" else evidence.won
    return "inconclusive" if hidden else given


def verdict_of_values(claim: dict[str, Any], evidence: Evidence, p: Number, margin: float) -> str:
    """By the rules in their order; ``p`` is Holm's."""
    values = list(evidence.values.values())
    if claim.get("kind") in COUNTED and len(values) < FEWEST_SEEDS_COUNTED:
        return "inconclusive"
    if claim.get("kind") == "diverges":
        return verdict_of_divergence(claim, values)
    if claim.get("kind") == "every_seed":
        return verdict_of_seeds(claim, values)
    if len(values) < FEWEST_PAIRS or p is None:
        return "inconclusive"
    found = interval(values)
    assert found.mean is not None and found.low is not None and found.high is not None
    if claim.get("kind") == "equivalence":
        if p < 0.05:
            return "reproduced"
        outside = found.low > margin or found.high < -margin
        return "contradicted" if outside else "inconclusive"
    less = claim["direction"] == "less"
    mean = -found.mean if less else found.mean
    low = -found.high if less else found.low
    high = -found.low if less else found.high
    if low > 0 and p < 0.05 and mean >= margin:
        return "reproduced"
    if high < 0 and p < 0.05:
        return "contradicted"
    return "not reproduced" if high < margin else "inconclusive"


def calculated_claims(sweeps: Sweeps) -> dict[str, dict[str, Any]]:
    """What report.json is to say of each claim, by its id."""
    rows: dict[str, dict[str, Any]] = {}
    families: dict[Any, list[str]] = {}
    for claim in sweeps.claims:
        kind = claim.get("kind", "difference")
        evidence = EVIDENCE.get(kind, differences)(claim, sweeps)
        values = list(evidence.values.values())
        margin = claim.get("margin", 0.0)
        p = p_two_sided(values)
        if kind == "equivalence":
            p = p_equivalent(values, margin)
        if kind == "trend" and p is not None:
            p = max(p, by_chance(values, places(claim, sweeps, values)))
        found = interval(values)
        if kind in COUNTED:
            p = None
        if kind == "diverges":
            found = Interval(found.mean, found.sd, None, None)
        rows[claim["id"]] = {
            "claim": claim, "evidence": evidence, "interval": found, "kind": kind, "p": p,
            "margin": margin, "n": len(values), "values": evidence.values,
            "left_out": evidence.left_out, "family": claim.get("family"),
            "primary": claim.get("primary", False), "changed": sweeps.changed,
            "mean": found.mean, "low": found.low, "high": found.high, "id": claim["id"],
        }  # fmt: skip
        if kind == "equivalence":
            inner = interval(values, percent=90)
            rows[claim["id"]] |= {"low_90": inner.low, "high_90": inner.high}
        if theirs := printed_differences(claim, sweeps.names):
            rows[claim["id"]]["published"] = theirs
        families.setdefault(claim.get("family"), []).append(claim["id"])
    for ids in families.values():
        members = [rows[name] for name in ids]
        incomplete = any(is_incomplete(row["claim"], row["evidence"], sweeps) for row in members)
        for row, p in zip(members, holm([row["p"] for row in members]), strict=True):
            row["p_holm"] = p
            row["provisional"] = incomplete
            row["verdict"] = verdict(row["claim"], row["evidence"], p, row["margin"])
    for row in rows.values():
        if row["kind"] == "diverges":  # it has a factor
            row["margin"] = None
    return rows


def first_matching(name: str, patterns: Iterable[str]) -> str | None:
    """The first of the patterns that a name matches."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def printed_differences(claim: dict[str, Any], sweeps: Sequence[str]) -> dict[str, Number]:
    """Source → what a paper printed for a less what it printed for b, or the log of their ratio.

    The sweep is the packaged one whose file has its name.
    """
    if claim.get("kind", "difference") not in ("difference", "every_seed", "equivalence"):
        return {}
    files: list[Path] = []
    for sweep in sweeps:
        files += ROOT.glob(f"studies/configs/**/{sweep}.yaml")
    places = [path.relative_to(ROOT / "studies/configs").with_suffix("") for path in files]
    names = [f"experiment/{place.as_posix()}" for place in places]
    found: dict[str, Number] = {}
    for table in printed_tables():
        about = any(starmap(fnmatchcase, product(names, table["configs"])))
        if not about or table["metric"] != claim["metric"]:
            continue
        printed = table["arms"]
        rows = [first_matching(claim[arm], printed) for arm in "ab"]
        if rows[0] is None or rows[1] is None or rows[0] == rows[1]:
            continue
        numbers = [printed[row][0] for row in rows if row is not None]
        value = contrast(*numbers, claim.get("scale") == "log_ratio")
        if value is not None and value not in found.values():
            found[table["source"]] = value
    return found


@cache
def printed_tables() -> list[dict[str, Any]]:
    """The papers' tables; their files are long, and many claims ask for them."""
    files = sorted(ROOT.glob("studies/published/*.yaml"))
    return [table for path in files for table in yaml.safe_load(path.read_text())]


def is_incomplete(claim: dict[str, Any], evidence: Evidence, sweeps: Sweeps) -> bool:
    nothing = not evidence.values and not evidence.left_out
    return nothing or set(sweeps.ended(sweeps.arms_of(claim))) != sweeps.seeds


def calculated_arm(
    runs: Iterable[Run], metric: str, greater: bool, targets: Sequence[str]
) -> dict[str, Any]:
    """What report.json is to say of an arm."""
    by_seed = {run.seed: run for run in runs}
    ended = {seed: run for seed, run in by_seed.items() if run.ended}
    arm: dict[str, Any] = {
        "n": len(ended),
        "diverged": sum(run.diverged for run in ended.values()),
        "unfinished": len(by_seed) - len(ended),
        "scores": {},
        "rounds_to": {target: {} for target in targets},
        "bytes_to": {target: {} for target in targets},
        "seconds_to": {target: {} for target in targets},
    }
    for name in SCORES:
        values = {seed: score(run, metric, name, greater) for seed, run in ended.items()}
        found = interval([x for x in values.values() if x is not None])
        arm["scores"][name] = {"mean": found.mean, "sd": found.sd, "values": values}
    for target in targets:
        for seed, run in ended.items():
            row = arrival(run, metric, float(target), greater)
            bytes_known = row is not None and "communication/total_bytes" in run.columns
            clock = run.columns.get("time/round")
            rounds = None if row is None else cost_until(run, row, "rounds")
            sent = cost_until(run, row or 0, "bytes") if bytes_known else None
            seconds = None if row is None or clock is None else sum(clock[: row + 1])
            arm["rounds_to"][target][seed] = rounds
            arm["bytes_to"][target][seed] = sent
            arm["seconds_to"][target][seed] = seconds
    return arm


def grouped(results: Path) -> list[Sweeps]:
    """The sweeps in the tables of a folder; those with the same claims are one."""
    groups: dict[str, list[dict[str, str]]] = {}
    for row in read_table(results / "sweeps.csv"):
        groups.setdefault(row["claims.yaml"], []).append(row)
    return [Sweeps(results, sweeps) for sweeps in groups.values()]
