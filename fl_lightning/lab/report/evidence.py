"""The runs' measurements for a claim: a number for each seed that its arms share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.report.claims import Claim
from fl_lightning.lab.report.runs import Found, ReportedRun
from fl_lightning.lab.report.scores import has_lost, over_time, reached, score_of
from fl_lightning.lab.report.verdicts import Evidence

# seed → the finished run of an arm.
Seeds = Mapping[int, ReportedRun]


def named(claim: Claim, names: Mapping[str, str]) -> Claim:
    """Return ``claim`` with the report's names of its arms."""
    if not names or (claim.kind == "trend" and claim.over != "layers"):
        return claim
    fields = ("a", "b", "c", "d", "arm", "against", "target_arm")
    arms = {key: getattr(claim, key) for key in fields}
    return replace(claim, **{key: names.get(arm, arm) for key, arm in arms.items()})


def logged(found: Found, metric: str) -> bool:
    """Return whether any run measured it, finite or not. If no run did, no run has lost in it."""
    return any(not np.isnan(run.column(metric)).all() for run in found.runs)


def evidence(claim: Claim, found: Found, notes: list[str]) -> Evidence:
    """Return the runs' evidence about ``claim``; remarkable facts are added to ``notes``.

    Args:
        claim: claim with its arms in the report's names.
        found: the runs of the claim's own sweeps.

    Raises:
        UserError: two runs that form a pair had different partitions, or a trend is over something
            that is not an axis.
    """
    # Only runs that ended by themselves are evidence, whether they finished or diverged.
    arms = {name: _finished(found, name) for name in claim.arms}
    for name in claim.arms:
        if name not in found.arms:
            hint = suggest(name, found.arms) or f" The arms are: {', '.join(found.arms)}."
            notes.append(
                f"Claim {claim.id} is about the arm {name}, but this arm has no run.{hint}"
            )
    if claim.kind == "trend" and claim.over != "layers":
        made = _trend_over_axis(claim, found, notes)
    elif claim.kind == "trend":
        made = _trend_over_layers(arms[claim.arm], claim)
    elif claim.kind == "diverges":
        made = _diverges(claim, arms)
    else:
        made = _contrast(claim, arms, found, notes)
    if claim.arms:
        # If every run has ended and one of each pair never reached the target, there will be no
        # more evidence.
        nothing = not made.values and not made.left_out
        made.incomplete = nothing or _missing(claim.arms, found)
    return made


def absent(found: Found, metric: str) -> str:
    """Return a note that no run has ``metric``."""
    hint = suggest(metric, found.metrics)
    return f"No run logs {metric}, so it gives no scores.{hint}"


def _finished(found: Found, arm: str) -> dict[int, ReportedRun]:
    return {run.seed: run for run in found.arms.get(arm, []) if run.finished}


def _missing(arms: Sequence[str], found: Found) -> bool:
    """Return whether a seed of one of the arms is not finished in all of them."""
    seeds = {run.seed for run in found.runs if run.arm in arms}
    seeds |= {int(seed) for arm, seed, _ in found.waiting if arm in arms and seed.isdecimal()}
    return any(seeds - set(_finished(found, arm)) for arm in arms)


# -------------------------------------------------------------- contrasts of two or four arms


def _contrast(claim: Claim, arms: Mapping[str, Seeds], found: Found, notes: list[str]) -> Evidence:
    """Return a − b; for an interaction (a − b) − (c − d); for a target the log ratio of the
    costs.
    """
    sides = [(claim.a, claim.b)]
    if claim.kind == "interaction":
        sides.append((claim.c, claim.d))
    for one, other in sides:
        for seed in sorted(arms[one].keys() & arms[other].keys()):
            _refuse_other_partition(arms[one][seed], arms[other][seed])
        _note_unpaired(one, other, arms, notes)
    names = list(dict.fromkeys(sum(sides, ())))
    # If no run logs the metric, a diverged run has not lost in it either.
    if not logged(found, claim.metric):
        notes.append(absent(found, claim.metric))
        return Evidence()
    made = Evidence()
    left_out: list[str] = []
    for seed in sorted(set.intersection(*(set(arms[name]) for name in names))):
        runs = {name: arms[name][seed] for name in names}
        values = {name: _value(claim, run, arms) for name, run in runs.items()}
        differences = [between(claim.scale, values[one], values[other]) for one, other in sides]
        known = [difference for difference in differences if difference is not None]
        whole = len(known) == len(sides)
        contrast = sum(s * p for s, p in zip((1, -1), known, strict=False)) if whole else None
        made.take(seed, contrast, *_speaks(claim, runs, values))
        if not whole:
            left_out.append(str(seed))
    if left_out:
        reason = "diverged, or has a score that is not finite or has no log"
        if claim.kind == "to_target":
            reason = "never reaches the target"
        which = f"{' − '.join(names)} in {claim.metric}, seed {', '.join(left_out)}"
        notes.append(f"{which}: left out, because a run {reason}.")
    return made


def _speaks(
    claim: Claim, runs: Mapping[str, ReportedRun], values: Mapping[str, float | None]
) -> tuple[bool, bool]:
    """Return whether a seed that is left out would count against the claim, and whether for it.

    An arm that has lost is worse than any value, and one that never reached the target costs more.
    """
    if claim.kind == "to_target":
        gone = [name for name in runs if values[name] is None]
        greater: bool | None = False
    else:
        gone = [name for name, run in runs.items() if has_lost(run, claim.metric, claim.score)]
        greater = next(iter(runs.values())).directions.known(claim.metric, claim.mode)
    if not gone:
        # A ratio has no log if a value is 0 or below, and the seed may speak for either side.
        no_log = claim.scale == "log_ratio" and _not_positive(values.values())
        return no_log, no_log
    if claim.kind == "equivalence":
        return True, False
    worst = {True: -1, False: 1, None: 0}[greater]
    claimed = 1 if claim.direction == "greater" else -1
    signs = ((claim.a, 1), (claim.b, -1), (claim.c, -1), (claim.d, 1))
    ends = [claimed * sign * worst for name, sign in signs if name in gone]
    return min(ends) <= 0, max(ends) >= 0


def _not_positive(scores: Iterable[float | None]) -> bool:
    return any(score is not None and score <= 0 for score in scores)


def _value(claim: Claim, run: ReportedRun, arms: Mapping[str, Seeds]) -> float | None:
    """Return a run's score, or its cost until the target."""
    mode = claim.mode or None
    if claim.kind != "to_target":
        # Only a plain difference uses the score 0 of a run that has lost.
        plain = claim.kind in ("difference", "every_seed")
        lost = has_lost(run, claim.metric, claim.score) and not plain
        return None if lost else score_of(run, claim.metric, claim.score, mode)
    target: float | None = claim.target
    if claim.target_arm:
        other = arms[claim.target_arm].get(run.seed)
        target = _score_if_done(other, claim.metric, claim.target_score)
    if target is None:
        return None
    spent = reached(run, claim.metric, target, mode)[claim.cost]
    return None if spent is None else float(spent)


def _score_if_done(run: ReportedRun | None, metric: str, score: str) -> float | None:
    if run is None or run.status != "done" or has_lost(run, metric, score):
        return None
    return score_of(run, metric, score)


def between(scale: str, a: float | None, b: float | None) -> float | None:
    """Return a − b, or the log of a / b; None if a value is missing or has no log."""
    if a is None or b is None:
        return None
    # A score of 0, which a run that has lost may have, cannot be part of a ratio.
    if scale == "log_ratio":
        return math.log(a / b) if a > 0 and b > 0 else None
    return a - b


def _note_unpaired(one: str, other: str, arms: Mapping[str, Seeds], notes: list[str]) -> None:
    for name, partner in ((one, other), (other, one)):
        if unpaired := sorted(arms[name].keys() - arms[partner].keys()):
            which = f"{name}, seed {', '.join(map(str, unpaired))}"
            notes.append(f"{which}: no pair, because {partner} has no such finished run.")


def _refuse_other_partition(a: ReportedRun, b: ReportedRun) -> None:
    ours = a.record.get("partition_hash")
    theirs = b.record.get("partition_hash")
    if ours != theirs:
        raise UserError(
            f"report: {a.folder} and {b.folder} both have seed {a.seed} but other partitions of "
            f"the data ({ours} and {theirs}), so they are not a pair: the difference could come "
            "from the split and not from the method. Compare runs with the same --data options and "
            "seed."
        )


# ------------------------------------------------------------------------ divergence, trends


def _diverges(claim: Claim, arms: Mapping[str, Seeds]) -> Evidence:
    """Return 1 for a seed if ``arm`` has lost or scores ``factor`` times what ``against`` does."""
    made = Evidence()
    for seed, run in sorted(arms[claim.arm].items()):
        other = arms[claim.against].get(seed)
        if other is not None:
            _refuse_other_partition(run, other)
        # A claim of divergence needs no second arm.
        if has_lost(run, claim.metric, claim.score):
            made.values[seed] = 1.0
            continue
        ours = _score_if_done(run, claim.metric, claim.score)
        theirs = _score_if_done(other, claim.metric, claim.score)
        least = None if theirs is None else claim.factor * theirs
        # The arm did not diverge, which speaks against a claim that it does.
        lost = other is not None and other.finished and claim.direction != "less"
        made.take(seed, None if ours is None or least is None else float(ours >= least), lost)
    return made


def _trend_over_layers(runs: Seeds, claim: Claim) -> Evidence:
    """Return Spearman's ρ of each seed between a layer's place and its consensus, averaged over
    rounds.
    """
    made = Evidence()
    for seed, run in sorted(runs.items()):
        layers = [name for name in run.columns if name.startswith(f"{claim.metric}/")]
        lost = run.status == "diverged" or any(has_lost(run, layer) for layer in layers)
        # The curve of such a run ends early, at values that say nothing about layers.
        made.take(seed, None if lost else over_layers(run, claim.metric), lost, won=lost)
    same = made.values.values()
    if same and max(same) - min(same) < 1e-9:
        # Over few layers seeds may agree by chance, and t would be certain.
        made.places = min(len(_layer_means(runs[seed], claim.metric)) for seed in made.values)
    return made


def over_layers(run: ReportedRun, metric: str, without: Sequence[str] = ()) -> float | None:
    """Return Spearman's ρ between the place of a layer and its ``metric``, averaged over rounds.

    ``without``: layers that are left out.
    """
    means = _layer_means(run, metric, without)
    return spearman(range(len(means)), means)


def _layer_means(run: ReportedRun, metric: str, without: Sequence[str] = ()) -> list[float]:
    left_out = [f"{metric}/{name}" for name in ("total", *without)]
    layers = [name for name in run.columns if name.startswith(f"{metric}/")]
    means = [over_time([run], layer) for layer in layers if layer not in left_out]
    return [mean for mean in means if mean is not None]


def _trend_over_axis(claim: Claim, found: Found, notes: list[str]) -> Evidence:
    """Return Spearman's ρ of each seed between the values of an axis and the scores there."""
    if not any(claim.over in run.axes for run in found.runs):
        axes: dict[str, str] = {}
        for run in found.runs:
            axes |= run.axes
        known = f"The axes are: {', '.join(axes) or 'none'}"
        notes.append(
            f"Claim {claim.id} is a trend over {claim.over}, but no sweep has this axis. {known}."
        )
        return Evidence(incomplete=True)
    runs = [run for run in found.runs if _on_axis(claim, run)]
    if not runs:
        notes.append(f"Claim {claim.id} is about the method {claim.arm}, but it has no run.")
        return Evidence(incomplete=True)
    places = _places(list(dict.fromkeys(run.axes[claim.over] for run in runs)))
    arms = dict.fromkeys(run.arm for run in runs)
    _refuse_other_axes(claim, found, list(arms), len(places))
    made = Evidence(places=len(places))
    for seed in sorted({run.seed for run in runs}):
        at_value = {run.axes[claim.over]: run for run in runs if run.seed == seed and run.finished}
        made.incomplete |= len(at_value) < len(places)
        points = []
        for value, run in at_value.items():
            score = _score_if_done(run, claim.metric, claim.score)
            if score is not None:
                points.append((places[value], score))
        # A part of the axis gives no trend: its ρ could have either sign.
        whole = len(points) == len(places)
        rho = spearman([x for x, _ in points], [y for _, y in points]) if whole else None
        lost = any(has_lost(run, claim.metric, claim.score) for run in at_value.values())
        made.take(seed, rho, lost, won=lost)
    # The value of an arm without runs may be unknown.
    waiting = [arm for arm, _, _ in found.waiting if arm in arms or arm not in found.arms]
    made.incomplete |= not made.values or bool(waiting)
    return made


def _on_axis(claim: Claim, run: ReportedRun) -> bool:
    """Return whether the run has a value of the axis, with the claim's method if it names one."""
    if claim.over not in run.axes:
        return False
    return claim.over == "method" or not claim.arm or run.axes.get("method") == claim.arm


def _refuse_other_axes(claim: Claim, found: Found, arms: Sequence[str], values: int) -> None:
    """Refuse runs that differ in more than the axis of the trend."""
    methods = {run.axes.get("method") for run in found.runs}
    unnamed = len(methods) > 1 and not claim.arm and claim.over != "method"
    if unnamed or len(arms) > values:
        raise UserError(
            f"report: claim {claim.id} is a trend over {claim.over}, but several arms have the "
            f"same value of it ({', '.join(arms)}). Sweep only this axis, or give as arm one of "
            f"the methods {', '.join(sorted(map(str, methods)))}."
        )


def _places(values: Sequence[str]) -> dict[str, float]:
    """Return a number for each value of an axis: the value itself if all are numbers, else its
    index in the grid.

    >>> _places(["10", "2"]), _places(["iid", "skewed"])
    ({'10': 10.0, '2': 2.0}, {'iid': 0.0, 'skewed': 1.0})
    """
    try:
        return {value: float(value) for value in values}
    except ValueError:
        return {value: float(place) for place, value in enumerate(values)}


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's ρ, with the mean rank for ties; None with fewer than two places ``x``.

    It is 0 if all ``y`` are equal: they show no trend.

    >>> spearman([1, 2, 3], [1.0, 4.0, 9.0]), spearman([1, 2], [3.0, 3.0]), spearman([1], [3.0])
    (1.0, 0.0, None)
    """
    if len(set(x)) < 2:
        return None
    if len(set(y)) < 2:
        return 0.0
    # A second of imports, which only claims of a trend need.
    from scipy.stats import spearmanr

    return float(spearmanr(x, y).statistic)
