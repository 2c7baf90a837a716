"""What the runs measured of a claim: a number for each seed that its arms share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fl_lightning.errors import UserError, suggest
from fl_lightning.report.claims import Claim
from fl_lightning.report.runs import Column, Found, Run
from fl_lightning.report.scores import measured, reached, score_of
from fl_lightning.report.verdicts import Evidence

Seeds = Mapping[int, Run]  # finished runs of an arm


def named(claim: Claim, names: Mapping[str, str]) -> Claim:
    """``claim`` with the report's names of its arms."""
    if not names or (claim.kind == "trend" and claim.over != "layers"):
        return claim
    fields = ("a", "b", "c", "d", "arm", "against", "target_arm")
    return replace(
        claim, **{key: names.get(getattr(claim, key), getattr(claim, key)) for key in fields}
    )


def logged(found: Found, metric: str) -> bool:
    """Whether any run measured it; where none did, nobody has lost in it."""
    return any(len(measured(run, metric)[0]) for run in found.runs)


def evidence(claim: Claim, found: Found, notes: list[str]) -> Evidence:
    """What the runs say about ``claim``; what stands out is added to ``notes``.

    Args:
        claim: its arms in the report's names.
        found: the runs of the claim's own sweeps.

    Raises:
        UserError: two runs that are to be paired saw other partitions, or a trend is over what is no axis.
    """
    arms = {name: _finished(found, name) for name in claim.arms}
    for name in claim.arms:
        if name not in found.arms:
            hint = suggest(name, found.arms) or f" There are: {', '.join(found.arms)}."
            add(notes, f"Claim {claim.id} is about the arm {name}, of which there is no run.{hint}")
    if claim.kind == "trend" and claim.over != "layers":
        made = _trend_over_axis(claim, found, notes)
    elif claim.kind == "trend":
        made = _trend_over_layers(arms[claim.arm], claim)
    elif claim.kind == "diverges":
        made = _diverges(claim, arms)
    else:
        made = _contrast(claim, arms, found, notes)
    if claim.arms:
        made.incomplete = not made.values or _missing(claim.arms, found)
    return made


def add(notes: list[str], note: str) -> None:
    """One note says a thing once."""
    if note not in notes:
        notes.append(note)


def absent(found: Found, metric: str) -> str:
    """A note that no run has ``metric``."""
    names = dict.fromkeys(name for run in found.runs for name in run.columns if name != "round")
    return f"No run logs {metric}, so nothing is scored by it.{suggest(metric, names)}"


def _finished(found: Found, arm: str) -> dict[int, Run]:
    return {run.seed: run for run in found.arms.get(arm, []) if run.finished}


def _missing(arms: Sequence[str], found: Found) -> bool:
    """Whether a seed that one of the arms has, or is to have, is not finished in all of them."""
    seeds = {run.seed for run in found.runs if run.arm in arms}
    seeds |= {int(seed) for arm, seed, _ in found.waiting if arm in arms and seed.isdecimal()}
    return any(seeds - set(_finished(found, arm)) for arm in arms)


# --------------------------------------------------------------------------- contrasts of two or four arms


def _contrast(claim: Claim, arms: Mapping[str, Seeds], found: Found, notes: list[str]) -> Evidence:
    """a − b, of an interaction (a − b) − (c − d); of a target the log ratio of what was spent until then."""
    sides = [(claim.a, claim.b), *([(claim.c, claim.d)] if claim.kind == "interaction" else [])]
    for one, other in sides:
        for seed in sorted(arms[one].keys() & arms[other].keys()):
            _refuse_other_partition(arms[one][seed], arms[other][seed])
        _tell_alone(one, other, arms, notes)
    seeds = sorted(set.intersection(*(set(arms[name]) for name in dict.fromkeys(sum(sides, ())))))
    if not logged(found, claim.metric):
        add(notes, absent(found, claim.metric))
        return Evidence()
    made = Evidence()
    for seed in seeds:
        runs = {name: arms[name][seed] for side in sides for name in side}
        values = {name: _value(claim, run, arms) for name, run in runs.items()}
        parts = [_between(claim.scale, values[one], values[other]) for one, other in sides]
        value = (
            None
            if None in parts
            else sum(p * s for p, s in zip(parts, (1, -1), strict=False) if p is not None)
        )
        if value is not None:
            made.values[seed] = value
            continue
        made.left_out += 1
        diverged = any(run.status == "diverged" for run in runs.values())
        cheaper = claim.a if claim.direction == "less" else claim.b
        made.lost |= values[cheaper] is None if claim.kind == "to_target" else diverged
        why = (
            "never arrives"
            if claim.kind == "to_target"
            else "diverged, so it has no score to compare"
        )
        why = why if diverged or claim.kind == "to_target" else "has no score to compare"
        add(notes, f"{' − '.join(runs)} in {claim.metric}: a run with seed {seed} {why}.")
    return made


def _value(claim: Claim, run: Run, arms: Mapping[str, Seeds]) -> float | None:
    """A run's score, or what it spent until the target."""
    if claim.kind != "to_target":
        lost = run.status == "diverged" and claim.kind != "difference"
        return None if lost else score_of(run, claim.metric, claim.score, claim.mode or None)
    target: float | None = claim.target
    if claim.target_arm:
        other = arms[claim.target_arm].get(run.seed)
        aimed = other is not None and other.status == "done"
        target = (
            score_of(other, claim.metric, claim.target_score)
            if other is not None and aimed
            else None
        )
    spent = (
        None
        if target is None
        else reached(run, claim.metric, target, claim.mode or None)[claim.cost]
    )
    return None if spent is None else float(spent)


def _between(scale: str, a: float | None, b: float | None) -> float | None:
    """a − b, or the log of a / b; None where it has none."""
    if a is None or b is None:
        return None
    if scale == "log_ratio":
        return math.log(a / b) if a > 0 and b > 0 else None
    return a - b


def _tell_alone(one: str, other: str, arms: Mapping[str, Seeds], notes: list[str]) -> None:
    for name, partner in ((one, other), (other, one)):
        if alone := sorted(arms[name].keys() - arms[partner].keys()):
            numbers, which = ", ".join(map(str, alone)), "seed" if len(alone) == 1 else "seeds"
            add(
                notes,
                f"{which.capitalize()} {numbers} of {name}: no finished run of {partner} to pair with.",
            )


def _refuse_other_partition(a: Run, b: Run) -> None:
    ours, theirs = (run.record.get("partition_hash") for run in (a, b))
    if ours != theirs:
        raise UserError(
            f"report: {a.folder} and {b.folder} both have seed {a.seed} but other partitions of the data ({ours} and "
            f"{theirs}), so they are no pair: the split, not the method, could make the difference. Compare runs with "
            "the same --data options and seed."
        )


# --------------------------------------------------------------------------- divergence, trends


def _diverges(claim: Claim, arms: Mapping[str, Seeds]) -> Evidence:
    """1 of a seed where ``arm`` diverged, or scores ``factor`` times what ``against`` does, else 0."""
    made = Evidence()
    for seed, run in sorted(arms[claim.arm].items()):
        other = arms[claim.against].get(seed)
        if other is not None:
            _refuse_other_partition(run, other)
        if run.status == "diverged":
            made.values[seed] = 1.0
            continue
        ours, theirs = (
            None if it is None or it.status != "done" else score_of(it, claim.metric, claim.score)
            for it in (run, other)
        )
        if ours is not None and theirs is not None:
            made.values[seed] = float(ours >= claim.factor * theirs)
        else:
            made.left_out += 1
    return made


def _trend_over_layers(runs: Seeds, claim: Claim) -> Evidence:
    """Spearman's ρ of each seed between a layer's place and its consensus, averaged over rounds."""
    made = Evidence()
    for seed, run in sorted(runs.items()):
        names = [
            n
            for n in run.columns
            if n.startswith(f"{claim.metric}/") and n != f"{claim.metric}/total"
        ]
        columns = [run.columns[name][np.isfinite(run.columns[name])] for name in names]
        means = [float(column.mean()) for column in columns if len(column)]
        rho = None if run.status == "diverged" else spearman(range(len(means)), means)
        _take(made, seed, rho, run.status == "diverged")
    return made


def _trend_over_axis(claim: Claim, found: Found, notes: list[str]) -> Evidence:
    """Spearman's ρ of each seed between the values of an axis and the scores there."""
    methods = {run.axes.get("method") for run in found.runs}
    runs = [
        run for run in found.runs
        if claim.over in run.axes and (claim.over == "method" or not claim.arm or run.axes.get("method") == claim.arm)
    ]  # fmt: skip
    if not any(claim.over in run.axes for run in found.runs):
        axes = dict.fromkeys(key for run in found.runs for key in run.axes)
        add(
            notes,
            f"Claim {claim.id} is a trend over {claim.over}, which no sweep's grid has: {', '.join(axes)}.",
        )
        return Evidence(incomplete=True)
    if not runs:
        add(notes, f"Claim {claim.id} is about the method {claim.arm}, of which there is no run.")
        return Evidence(incomplete=True)
    if len(methods) > 1 and not claim.arm and claim.over != "method":
        raise UserError(
            f"report: claim {claim.id} is a trend over {claim.over}, and several methods were swept: give the value of "
            f"method as arm ({', '.join(sorted(str(method) for method in methods))})."
        )
    places = _places(list(dict.fromkeys(run.axes[claim.over] for run in runs)))
    arms = dict.fromkeys(run.arm for run in runs)
    if len(arms) > len(places):
        raise UserError(
            f"report: claim {claim.id} is a trend over {claim.over}, and several arms have one value of it "
            f"({', '.join(arms)}). Sweep nothing else beside it, or name the method as arm."
        )
    made = Evidence()
    for seed in sorted({run.seed for run in runs}):
        scored = {run.axes[claim.over]: run for run in runs if run.seed == seed and run.finished}
        diverged = any(run.status == "diverged" for run in scored.values())
        made.incomplete |= len(scored) < len(places)
        scores = [
            None if r.status == "diverged" else score_of(r, claim.metric, claim.score)
            for r in scored.values()
        ]
        known = [score for score in scores if score is not None]
        whole = len(known) == len(places)
        _take(made, seed, spearman([places[v] for v in scored], known) if whole else None, diverged)
    # an arm without any run may be at a value that is not known here
    made.incomplete |= not made.values or any(
        arm in arms or arm not in found.arms for arm, _, _ in found.waiting
    )
    return made


def _take(made: Evidence, seed: int, rho: float | None, diverged: bool) -> None:
    if rho is None:
        made.left_out += 1
        made.lost |= diverged
    else:
        made.values[seed] = rho


def _places(values: Sequence[str]) -> dict[str, float]:
    """Where each value of an axis lies: numbers as they are, others in the grid's order.

    >>> _places(["10", "2"]), _places(["iid", "skewed"])
    ({'10': 10.0, '2': 2.0}, {'iid': 0.0, 'skewed': 1.0})
    """
    try:
        return {value: float(value) for value in values}
    except ValueError:
        return {value: float(place) for place, value in enumerate(values)}


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's ρ, ties with their mean rank; None where it is not defined.

    >>> spearman([1, 2, 3], [1.0, 4.0, 9.0]), spearman([1, 2], [3.0, 3.0])
    (1.0, None)
    """
    if len(x) < 2:
        return None
    a, b = (_ranks(np.asarray(side, dtype=float)) for side in (x, y))
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return max(-1.0, min(1.0, float(a @ b) / size)) if size else None


def _ranks(values: Column) -> Column:
    """From 1 on; equal values have the mean of their places."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Column = (last - (counts - 1) / 2)[where]
    return ranks
