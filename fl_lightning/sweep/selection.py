"""What each arm chooses before its runs, such as a learning rate: on held-out data, with seeds of its own."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.compose import plain_yaml, prepare
from fl_lightning.errors import UserError, suggest
from fl_lightning.metrics import Directions
from fl_lightning.report import runs as reading
from fl_lightning.report.scores import SCORES, score_of
from fl_lightning.storage.files import written_aside
from fl_lightning.sweep.folder import DIVERGED, DONE
from fl_lightning.sweep.grid import Arm, Run, part_of, runs, value_name
from fl_lightning.sweep.spec import ROUNDS, Selection

SCORE = SCORES[0]  # as a report compares by


@dataclass(frozen=True)
class Candidate:
    """One choice that an arm has, and the runs that measure it."""

    arm: str
    choice: Mapping[str, Any]  # option → value
    runs: tuple[Run, ...]


def candidates(sweep: Path, select: Selection, arms: Sequence[Arm]) -> list[Candidate]:
    """Every choice of every arm; the runs lie in ``<sweep>/select/<arm>/<values>/seed-<s>``.

    An option of a method, such as ``method.beta``, is chosen by the arms whose methods have it.

    Raises:
        UserError: no arm has it, or an arm that there is none of has candidates of its own.
    """
    found = []
    names = [arm.name for arm in arms]
    for name in select.arms:
        if name not in names:
            raise UserError(
                f"select.arms.{name}: no arm of the grid.{suggest(name, names)} Arms: {', '.join(names)}."
            )
    options = {arm.name: [key for key in select.over if _has(arm, key)] for arm in arms}
    for key in select.over:
        if not any(key in own for own in options.values()):
            raise UserError(
                f"select.over.{key}: no method of any arm has it. Give an option of one, or leave it out."
            )
    for arm in arms:
        over = select.arms.get(arm.name, {key: select.over[key] for key in options[arm.name]})
        for values in itertools.product(*over.values()) if over else ():
            choice = dict(zip(over, values, strict=True))
            name = f"{arm.name}/{'_'.join(map(value_name, values))}"
            measured = arm.with_options(
                name, {**choice, **_shorter(arm, select), "data.val_fraction": select.val_fraction}
            )
            found.append(
                Candidate(arm.name, choice, tuple(runs(sweep, "select/", measured, select.seeds)))
            )
    return found


def _shorter(arm: Arm, select: Selection) -> dict[str, int]:
    """The rounds of a candidate, where they are others than the arm's own; an arm keeps its share of them."""
    if select.rounds is None:
        return {}
    rounds, own = part_of(select.rounds, arm.share), arm.options.get(ROUNDS)
    return {ROUNDS: min(rounds, own) if isinstance(own, int) and own > 0 else rounds}


def unequal(found: Sequence[Candidate]) -> str | None:
    """Said where arms choose from unequal numbers of candidates: who tries more is favoured."""
    counts = Counter(candidate.arm for candidate in found)
    if len(set(counts.values())) < 2:
        return None
    return f"arms choose from unequal numbers of candidates: {', '.join(f'{arm} {n}' for arm, n in counts.items())}"


def stored(path: Path, arms: Sequence[Arm]) -> dict[str, Mapping[str, Any]]:
    """What ``arms`` chose in another sweep, as its selections.yaml has it.

    Raises:
        UserError: it is none, or an arm is not in it.
    """
    try:
        document = plain_yaml(path.read_text(encoding="utf-8"), f"select.from {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"select.from {path}: cannot be read ({error}).") from None
    if not isinstance(document, dict) or not all(
        isinstance(choice, dict) for choice in document.values()
    ):
        raise UserError(
            f"select.from {path}: a mapping is expected, arm: {{option: value}}, as a sweep writes it."
        )
    for arm in arms:
        if arm.name not in document:
            there = ", ".join(map(str, document))
            raise UserError(
                f"select.from {path}: it has no choice of {arm.name}. It has: {there or 'none'}."
            )
    return {arm.name: document[arm.name] for arm in arms}


def write_choices(sweep: Path, chosen: Mapping[str, Mapping[str, Any]]) -> None:
    """Write selections.yaml: arm → {option: value}."""
    plain = {arm: dict(choice) for arm, choice in chosen.items()}
    with written_aside(sweep / "selections.yaml") as file:
        file.write(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode())


def choose(
    sweep: Path, select: Selection, found: Sequence[Candidate], states: Mapping[Run, str]
) -> dict[str, Mapping[str, Any]]:
    """Arm → its best choice, by the mean score over the seeds; arms of which a run has not ended are left out.

    All scores are written to ``<sweep>/select.csv``.

    Raises:
        UserError: a run that is done did not log the metric, or nobody says which way it is better.
    """
    directions = which_way(select)
    ended = [
        run for candidate in found for run in candidate.runs if states[run] in (DONE, DIVERGED)
    ]
    # all, before the first is scored
    read = {run: reading.read_run(run.folder, directions) for run in ended}
    means = [_mean(candidate, select, states, read) for candidate in found]
    best: dict[str, Mapping[str, Any]] = {}
    for arm in dict.fromkeys(candidate.arm for candidate in found):
        own = [(mean, c) for mean, c in zip(means, found, strict=True) if c.arm == arm]
        if any(mean is None for mean, _ in own):
            continue
        scored = [(mean, c) for mean, c in own if mean is not None and not math.isnan(mean)]
        if len(scored) > 1:  # of equals the first
            better = 1 if directions.greater(select.metric) else -1
            scored.sort(key=lambda each: -better * (each[0] or 0.0))
        if scored:
            best[arm] = scored[0][1].choice
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = list(dict.fromkeys(key for candidate in found for key in candidate.choice))
    writer.writerow(["arm", *keys, f"{select.metric} ({SCORE})", "runs", "chosen"])
    for mean, c in zip(means, found, strict=True):
        value = "" if mean is None or math.isnan(mean) else repr(mean)
        values = [c.choice.get(key, "") for key in keys]
        writer.writerow(
            [c.arm, *values, value, len(c.runs), "yes" if best.get(c.arm) is c.choice else ""]
        )
    with written_aside(sweep / "select.csv") as file:
        file.write(text.getvalue().encode())
    return best


def which_way(select: Selection) -> Directions:
    """Which way the metric is better, before any run recorded it."""
    return Directions("Give select.mode", {select.metric: select.mode})


def at_the_end(values: Sequence[Any], value: Any) -> str:
    """A remark where ``value`` is the least or the largest of three numbers or more: a better one may lie beyond.

    >>> at_the_end([0.03, 0.1, 0.3], 0.3), at_the_end([0.03, 0.1, 0.3], 0.1)
    (', the largest that was tried', '')
    """
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < max(3, len(values)) or value not in (min(numbers), max(numbers)):
        return ""
    return f", the {'least' if value == min(numbers) else 'largest'} that was tried"


def _has(arm: Arm, key: str) -> bool:
    section, _, name = key.partition(".")
    if section != "method":
        return True
    # they bring torch, which --help need not wait for
    from fl_lightning.cli.method_options import method_class
    from fl_lightning.cli.parsing_errors import parameters

    items = prepare("fit", arm.argv()).config.get("method") or []
    owners = [method_class(item) for item in (items if isinstance(items, list) else [items])]
    return any(name.split(".")[0] in (owner.__name__, *parameters(owner)) for owner in owners)


def _mean(
    candidate: Candidate,
    select: Selection,
    states: Mapping[Run, str],
    ended: Mapping[Run, reading.Run],
) -> float | None:
    """The mean score; NaN where a run diverged and less is better; None where a run has not ended."""
    if any(states[run] not in (DONE, DIVERGED) for run in candidate.runs):
        return None
    scores = []
    for run in candidate.runs:
        read = ended[run]
        score = score_of(read, select.metric, SCORE)
        if score is None and states[run] == DONE:
            known = [name for name in read.columns if name != "round"]
            raise UserError(
                f"select.metric {select.metric}: {run.folder} did not log it.{suggest(select.metric, known)} "
                f"Logged: {', '.join(known)}."
            )
        scores.append(math.nan if score is None else score)
    return sum(scores) / len(scores)
