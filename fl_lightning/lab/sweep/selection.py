"""The choices of each arm before its runs, such as a learning rate, with their own seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import UserError, suggest
from fl_lightning.introspection.accepted import check
from fl_lightning.lab.cli.compose import plain_yaml, prepare, text_of
from fl_lightning.lab.report import runs as reading
from fl_lightning.lab.report.scores import SCORES, has_lost, score_of
from fl_lightning.lab.sweep.grid import PlannedArm, PlannedRun, part_of, runs, value_name
from fl_lightning.lab.sweep.sweep_file import ROUNDS, Selection, as_list, check_known
from fl_lightning.lab.sweep.sweep_folder import DIVERGED, DONE
from fl_lightning.metrics import Directions, comma_separated, read_rows
from fl_lightning.storage.atomic_files import written_aside

# Score a candidate as a report compares arms.
SCORE = SCORES[0]


@dataclass(frozen=True)
class Candidate:
    """One possible choice (option → value) of an arm, and the runs that measure it.

    ``taken``: the choice of the arm ``after``, which the runs also have; empty before it has
    chosen.
    """

    arm: str
    choice: Mapping[str, Any]
    runs: tuple[PlannedRun, ...]
    after: str | None = None
    taken: Mapping[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> dict[str, Any]:
        """Return all options of the arm's runs if this candidate is chosen."""
        return {**self.taken, **self.choice}


def candidates(
    sweep: Path,
    select: Selection,
    arms: Sequence[PlannedArm],
    chosen: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Candidate]:
    """Return every candidate of every arm; the runs lie in
    ``<sweep>/select/<arm>/<values>/seed-<s>``.

    An option of a method, such as ``method.beta``, is chosen by the arms whose methods have it.
    ``chosen``: the choices of arms so far, for the arms that come after them.

    Raises:
        UserError: no arm has the option, the grid sets it, or an arm that is named does not exist
            or has no candidates.
    """
    names = [arm.name for arm in arms]
    check_known("select.arms: ", select.arms, names)
    options: dict[str, Mapping[str, Sequence[Any]]] = {}
    for arm in arms:
        options[arm.name] = {key: tried for key, tried in select.over.items() if _has(arm, key)}
    for key in select.over:
        if not any(key in own for own in options.values()):
            raise UserError(
                f"select.over.{key}: no arm has a method with this option. Give an option that a "
                "method has, or leave it out."
            )
    options |= select.arms
    for arm in arms:
        check_not_of_grid(arm, options[arm.name])
    having = [name for name, own in options.items() if own]
    for name, before in select.after.items():
        check_known(f"select.arms.{name}.after: ", [before], having)
    made = []
    folders = set[str]()
    for arm in arms:
        over = options[arm.name]
        if not over:
            continue
        after = select.after.get(arm.name)
        taken = (chosen or {}).get(after or "", {})
        held_out = {**_shorter(arm, select), "data.val_fraction": select.val_fraction}
        for values in itertools.product(*over.values()):
            choice = dict(zip(over, values, strict=True))
            name = f"{arm.name}/{'_'.join(map(value_name, values))}"
            measuring = arm.with_options(name, {**taken, **choice, **held_out})
            if measuring.name in folders:
                raise UserError(
                    f"select: two candidates of {arm.name} have the folder select/{name}, whose "
                    "name contains only their values. Give the candidates different values, and "
                    "not only different keys, or make them arms of the grid with their own names."
                )
            folders.add(measuring.name)
            its_runs = runs(sweep, "select/", measuring, select.seeds)
            made.append(Candidate(arm.name, choice, tuple(its_runs), after, taken))
    return made


def check_not_of_grid(arm: PlannedArm, chosen: Iterable[str]) -> None:
    """Refuse a choice that would replace a value of the grid, after which the arm is named.

    Raises:
        UserError: it names the option.
    """
    for key in chosen:
        if key in arm.of_grid:
            raise UserError(
                f"select: {key} is chosen for {arm.name}, but the grid sets it, so the arm would "
                "not have the value of its name. Leave it out of the grid or of select."
            )


def _shorter(arm: PlannedArm, select: Selection) -> dict[str, int]:
    """Return the rounds of a candidate, if they differ from the arm's own.

    An arm keeps its share of the rounds.
    """
    if select.rounds is None:
        return {}
    rounds = part_of(select.rounds, arm.share)
    full = arm.options.get(ROUNDS)
    return {ROUNDS: min(rounds, full) if isinstance(full, int) and full > 0 else rounds}


def on_test(select: Selection) -> str:
    """Return a note if the metric is measured on samples that ``val_fraction`` does not hold
    out, else "".
    """
    if not on_test_samples(select.metric):
        return ""
    return (
        f"note: select.metric {select.metric}: it is measured on the clients' test samples, of "
        "which select.val_fraction holds out none. So the arms' own scores on such samples may be "
        "too good. A metric val/… chooses on training data that is held out"
    )


def stored(path: Path, arms: Sequence[PlannedArm]) -> dict[str, Mapping[str, Any]]:
    """Return the choices of ``arms`` in another sweep, from its selections.yaml.

    Raises:
        UserError: it is not such a file, or it lacks an arm.
    """
    document = plain_yaml(text_of(path, f"select.from {path}"), f"select.from {path}")
    check(f"select.from {path}: the choices", document, dict)
    for arm, choice in document.items():
        check(f"select.from {path}: {arm}", choice, dict)
    check_known(f"select.from {path}: the choice of ", [arm.name for arm in arms], document)
    return {arm.name: document[arm.name] for arm in arms}


def on_test_samples(metric: str) -> bool:
    """Return whether a metric is measured on the clients' test samples.

    >>> on_test_samples("clients/acc_worst10"), on_test_samples("val/acc")
    (True, False)
    """
    return metric.startswith(("clients/", "domains/"))


def end_of(values: Sequence[Any], value: Any) -> str:
    """Return "least" or "largest" if ``value`` is that of three numbers or more, else "".

    >>> end_of([0.03, 0.1, 0.3], 0.3), end_of([0.03, 0.1, 0.3], 0.1), end_of([0.1, 0.3], 0.3)
    ('largest', '', '')
    """
    numbers = {each for each in values if type(each) in (int, float)}
    others = any(type(each) not in (int, float) for each in values)
    if others or len(numbers) < 3 or value not in (min(numbers), max(numbers)):
        return ""
    return "least" if value == min(numbers) else "largest"


def write_choices(sweep: Path, chosen: Mapping[str, Mapping[str, Any]]) -> None:
    """Write selections.yaml: arm → {option: value}."""
    plain = {arm: dict(choice) for arm, choice in chosen.items()}
    with written_aside(sweep / "selections.yaml") as file:
        file.write(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode())


def choose(
    sweep: Path | None,
    select: Selection,
    found: Sequence[Candidate],
    states: Mapping[PlannedRun, str],
) -> dict[str, Mapping[str, Any]]:
    """Return arm → its best choice, by the mean score over the seeds.

    An arm is left out if one of its runs has not ended, or is not among ``states``. If ``sweep`` is
    given, all scores are written to ``<sweep>/select.csv``.

    Raises:
        UserError: a done run did not log the metric, or its better direction is not known.
    """
    directions = which_way(select)
    ended: dict[PlannedRun, reading.ReportedRun] = {}
    apart: dict[str, Directions] = {}
    # Read all candidates before scoring the first: any of them may show which direction is better.
    # Only the runs of its own arm give the score of a lost run, because other arms may end after
    # this one has chosen.
    for candidate in found:
        of_arm = apart.setdefault(candidate.arm, directions.apart())
        for run in candidate.runs:
            if states.get(run) in (DONE, DIVERGED):
                ended[run] = reading.read_run(run.folder, of_arm)
    scored = [(_mean(candidate, select, states, ended), candidate) for candidate in found]
    best: dict[str, Candidate] = {}
    for arm in dict.fromkeys(candidate.arm for candidate in found):
        own = [(mean, candidate) for mean, candidate in scored if candidate.arm == arm]
        if any(mean is None for mean, _ in own):
            continue
        known = [(mean, each) for mean, each in own if mean is not None and not math.isnan(mean)]
        # Ask for the direction only if there is a choice; among equals the first wins.
        if len(known) > 1:
            sign = -1 if directions.greater(select.metric) else 1
            # Among equal scores, a measured 0 ranks before the 0 of a lost run.
            known.sort(key=lambda each: (sign * each[0], _losses(each[1], select, ended)))
        if known:
            best[arm] = known[0][1]
    if sweep is not None:
        _write_scores(sweep, select.metric, scored, best)
    return {arm: candidate.whole for arm, candidate in best.items()}


def not_logged(metric: str, run: PlannedRun) -> UserError:
    """Return the error of a run that did not log the metric by which candidates are compared."""
    known = [name for name in read_rows(run.folder / "metrics.csv")[0] if name != "round"]
    return UserError(
        f"select.metric {metric}: {run.folder} did not log it.{suggest(metric, known)} "
        f"Logged: {', '.join(known)}. Give one of these."
    )


def _write_scores(
    sweep: Path,
    metric: str,
    scored: Sequence[tuple[float | None, Candidate]],
    best: Mapping[str, Candidate],
) -> None:
    """Write select.csv: one row per candidate."""
    keys: dict[str, None] = {}
    for _, candidate in scored:
        keys |= dict.fromkeys(candidate.whole)
    rows: list[list[Any]] = [["arm", *keys, f"{metric} ({SCORE})", "runs", "chosen"]]
    for mean, candidate in scored:
        score = "" if mean is None or math.isnan(mean) else repr(mean)
        values = [candidate.whole.get(key, "") for key in keys]
        # An empty cell is an option that the arm does not choose.
        values = ["null" if value is None else value for value in values]
        chosen = "yes" if best.get(candidate.arm) is candidate else ""
        rows.append([candidate.arm, *values, score, len(candidate.runs), chosen])
    with written_aside(sweep / "select.csv") as file:
        file.write(comma_separated(rows).encode())


def which_way(select: Selection) -> Directions:
    """Return the better direction of the metric, before any run recorded it."""
    return Directions("Give select.mode", {select.metric: select.mode})


def told(arm: str, choice: Mapping[str, Any], found: Sequence[Candidate]) -> str:
    """Return the choice of ``arm`` among ``found`` in words.

    It names options from another arm, and values at an end of those that were tried, because a
    better value may lie beyond.
    """
    own = [candidate for candidate in found if candidate.arm == arm]
    texts = []
    for key, value in choice.items():
        tried = [candidate.choice[key] for candidate in own if key in candidate.choice]
        remark = "" if tried else f" as {own[0].after}"
        if end := end_of(tried, value):
            remark = f", the {end} that was tried"
        texts.append(f"{key} {value}{remark}")
    return f"{arm} chose {', '.join(texts)}"


def _has(arm: PlannedArm, key: str) -> bool:
    section, _, name = key.partition(".")
    if section != "method":
        return True
    # These import torch, which --help should not wait for.
    from fl_lightning.lab.cli.classes import method_class, parameters

    items = prepare("fit", arm.argv()).config.get("method") or []
    owners = [method_class(item) for item in as_list(items)]
    return any(name.split(".")[0] in (owner.__name__, *parameters(owner)) for owner in owners)


def _losses(
    candidate: Candidate, select: Selection, ended: Mapping[PlannedRun, reading.ReportedRun]
) -> int:
    """Return how many of its runs have lost."""
    return sum(has_lost(ended[run], select.metric, SCORE) for run in candidate.runs)


def _mean(
    candidate: Candidate,
    select: Selection,
    states: Mapping[PlannedRun, str],
    ended: Mapping[PlannedRun, reading.ReportedRun],
) -> float | None:
    """Return the mean score; NaN if a lost run has none; None if a run has not ended."""
    if any(states.get(run) not in (DONE, DIVERGED) for run in candidate.runs):
        return None
    scores = []
    for run in candidate.runs:
        measured = ended[run]
        score = score_of(measured, select.metric, SCORE)
        if score is None and not has_lost(measured, select.metric, SCORE):
            raise not_logged(select.metric, run)
        # The run has lost, and has no worst number: its candidate cannot win.
        scores.append(math.nan if score is None else score)
    return sum(scores) / len(scores)
