"""A run's metrics as a table, and the better direction of each.

This file does not import torch, so that reading a finished run is fast.
"""

from __future__ import annotations

import copy
import csv
import gzip
import hashlib
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fl_lightning.errors import UserError, suggest
from fl_lightning.introspection.accepted import check
from fl_lightning.machine.escaping import cells, of_cells
from fl_lightning.storage.atomic_files import written_aside

Row = dict[str, str]
Column = np.ndarray[Any, np.dtype[np.float64]]

MODES = ("max", "min")
_ACCURACIES = ("acc", "accuracy")
_GREATER = set(_ACCURACIES)
_GREATER |= {"f1", "f1score", "precision", "recall", "auroc", "auc", "ap", "map", "iou", "dice"}
_GREATER |= {"psnr", "ssim", "bleu", "r2", "kappa", "mcc", "cosine"}
_LESS = {"loss", "error", "mse", "rmse", "mae", "mape", "nll", "perplexity", "ppl", "wer", "cer"}
_LESS |= {"ece", "brier", "fid", "kl", "hamming"}
_LESS_OF_OURS = re.compile(
    r"(divergence|consensus[^/]*|hessian|time|communication|cost)/|global/(gap|grad_norm)$"
)
_GREATER_OF_OURS = re.compile(r"choice/|generation/exact_match$")
_APPENDED = re.compile(
    r"(_finetuned)?(_weighted|_std|_worst10|_mean|_worst)?$"
)  # by PerClientEvaluation
_FORKED = re.compile(r"(_step|_epoch)?(/dataloader_idx_\d+)?$")  # by Lightning
_STEP = re.compile(r"_step(/dataloader_idx_\d+)?$")
# Places where the words of a class name begin.
_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def higher_is_better(name: str) -> bool:
    """Return whether greater is better for a metric, by the last word of its name.

    Reports, sweeps and fits all use this rule. Words end at ``/``, ``_``, ``-`` and ``.``; for the
    name of a class its ending decides. A suffix that PerClientEvaluation appends, such as
    ``_worst10``, is ignored. The deviation of a metric for which greater is better, such as
    ``clients/acc_std``, has no better direction: clients that differ more are not better off.

    Raises:
        UserError: the name does not show it.

    >>> names = ("val/acc", "val_MulticlassF1Score", "clients/auc_worst10")
    >>> [higher_is_better(name) for name in names]
    [True, True, True]
    >>> names = ("val/perplexity", "MeanSquaredError", "divergence/all")
    >>> [higher_is_better(name) for name in names]
    [False, False, False]
    """
    greater = _by_name(name)
    if greater is None:
        raise UserError(
            f"higher_is_better({name!r}): the name does not show which direction is better. The "
            "last word of the name decides. Greater is better for "
            f"{', '.join(sorted(_GREATER))}, rouge…; less is better for "
            f"{', '.join(sorted(_LESS))}."
        )
    return greater


def without_prefix(name: str) -> str:
    """Return a metric's name without the prefix of validation: ``val/acc`` → ``acc``."""
    return re.sub(r"^(validation|valid|val)[/_.-]", "", name)


def is_accuracy(name: str) -> bool:
    """Return whether a metric is an accuracy, by the last word of its name."""
    return any(ending in _ACCURACIES for ending in _endings(name))


def _by_name(name: str) -> bool | None:
    if _LESS_OF_OURS.match(name.lower()):
        return False
    if _GREATER_OF_OURS.match(name.lower()):
        return True
    for ending in _endings(name):
        if ending in _LESS:
            return False
        if ending in _GREATER or ending.startswith("rouge"):
            return None if name.endswith("_std") else True
    return None


def _endings(name: str) -> list[str]:
    """Endings of the last word, shortest first: ``val/BinaryF1Score`` → score, f1score, …."""
    words = list(filter(None, re.split(r"[/_.-]", _APPENDED.sub("", name))))
    last = words[-1] if words else ""
    starts = [0, *(boundary.start() for boundary in _BOUNDARY.finditer(last))]
    return [last[start:].lower() for start in reversed(starts)]


def check_mode(option: str, mode: Any) -> None:
    check(option, mode, Literal["max", "min"] | None)


def read_modes(modes: Any) -> dict[str, str]:
    """Return the ``modes`` of a run.json. Entries that are not modes are left out.

    >>> read_modes({"val/x": "max", "val/y": 3}), read_modes(None)
    ({'val/x': 'max'}, {})
    """
    entries = modes.items() if isinstance(modes, dict) else ()
    return {name: mode for name, mode in entries if mode in MODES}


def read_record(folder: Path) -> dict[str, Any]:
    """Run.json of a run's folder; empty if there is no such file or it cannot be read."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    with written_aside(folder / "run.json") as file:
        file.write((json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


def metrics_hash(folder: Path) -> str | None:
    """Return the SHA-256 of the run's metrics.csv, or of what its .gz holds; None if it has none.

    ``fit`` writes it to run.json when the run ends, and a report compares it.
    """
    try:
        return hashlib.sha256(_content(folder / "metrics.csv")).hexdigest()
    except (OSError, EOFError, zlib.error):
        return None


def comma_separated(rows: Iterable[Sequence[Any]]) -> str:
    """Return a CSV file as text, which :func:`separated` reads.

    None is an empty cell, and numbers can be read back exactly. Texts are escaped as
    :func:`~fl_lightning.machine.escaping.cells` says.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(cells, rows))
    return text.getvalue()


def separated(text: str) -> list[list[str]]:
    """Return the rows of a CSV file, with texts as they were before they were escaped.

    Raises:
        csv.Error: it is not a CSV file.
    """
    return [*map(of_cells, csv.reader(io.StringIO(text, newline="")))]


class Directions:
    """Knows the better direction of metrics: from the user, else from torchmetrics in a run, else
    from the name.

    Args:
        ask: how the user can give it, such as ``report: give --mode max or --mode min``.
        given: metric → ``"max"`` or ``"min"``, from the user.

    >>> directions = Directions("Give a mode.", {"val/mine": "min"})
    >>> directions.record({"val/loss_of_theirs": "max"})
    >>> [directions.greater(name) for name in ("val/mine", "val/loss_of_theirs", "val/loss")]
    [False, True, False]
    """

    def __init__(self, ask: str, given: Mapping[str, str | None] | None = None) -> None:
        self.ask = ask
        self.given = dict(given or {})
        # Metrics with a value below 0 in some run, for which 0 is not the worst possible value.
        self.below_zero: set[str] = set()
        self._recorded: dict[str, set[str]] = {}

    def apart(self) -> Directions:
        """Directions that share what is known of modes, now and later, but have seen no value."""
        other = copy.copy(self)
        other.below_zero = set()
        return other

    def record(self, modes: Any) -> None:
        for name, mode in read_modes(modes).items():
            self._recorded.setdefault(name, set()).add(mode)

    def known(self, metric: str, mode: str | None = None) -> bool | None:
        """Result of :meth:`greater`, or None if the user would have to give the direction."""
        word = mode or self.given.get(metric)
        if word is not None:
            return word == "max"
        recorded = self._recorded.get(metric, set())
        # If the runs' learners disagree, there is no answer, and the name must not decide.
        if len(recorded) > 1:
            return None
        return "max" in recorded if recorded else _by_name(metric)

    def greater(self, metric: str, mode: str | None = None) -> bool:
        """Return whether greater is better; ``mode``: the user's answer for only this use.

        Raises:
            UserError: it is not known.
        """
        greater = self.known(metric, mode)
        if greater is None:
            raise UserError(self.question([metric]))
        return greater

    def question(self, names: Iterable[str]) -> str:
        names = list(names)
        why = "by its name" if len(names) == 1 else "by their names"
        if any(len(self._recorded.get(name, ())) > 1 for name in names):
            why = "runs recorded both"
        return (
            f"which way is better in {', '.join(names)} is not known ({why}). {self.ask}: max "
            "where greater is better, min where less is."
        )


@dataclass
class Logged:
    """The facts about a learner's metrics that are known when it logs them.

    Args:
        modes: ``"max"`` or ``"min"`` of the torchmetrics for which it is known.
        shown: metrics with ``prog_bar=True``, in order.
    """

    modes: dict[str, str] = field(default_factory=dict)
    shown: dict[str, None] = field(default_factory=dict)

    def note(self, name: str, value: Any, prog_bar: Any = False) -> None:
        greater = getattr(value, "higher_is_better", None)
        if isinstance(greater, bool):
            self.modes[name] = MODES[not greater]
        if prog_bar:
            self.shown[name] = None

    def modes_of(self, names: Iterable[str]) -> dict[str, str]:
        """Modes, also under the names that Lightning forks from one, such as ``acc_epoch``."""
        modes = dict(self.modes)
        for name in names:
            mode = self.modes.get(_FORKED.sub("", name))
            if mode is not None:
                modes[name] = mode
        return modes

    def shown_of(self, names: Iterable[str]) -> list[str]:
        """Return the metrics that are shown, under the names that Lightning forks from one.

        If there are a step's and an epoch's value, it is the epoch's.
        """
        of_epochs = [name for name in names if not _STEP.search(name)]
        forked: list[str] = []
        for shown in self.shown:
            forked += [name for name in of_epochs if shown in (name, _FORKED.sub("", name))]
        return forked


def read_rows(
    path: Path, complete: bool = False, before: int | None = None
) -> tuple[list[str], list[Row]]:
    """Return columns and rows of a metrics.csv, or its .gz, without an incomplete last line.

    Values are text, "" if one is missing.

    Args:
        path: the file.
        complete: the run ended by itself, so the last line is complete even without a line break.
        before: only rounds before this one are needed; later rows are not read.

    Raises:
        UserError: it is missing or not such a file.
    """
    try:
        content = _content(path)
        content[: content.find(b"\n")].decode()
        # After a crash of the machine the file may contain zero bytes, which the CSV reader
        # rejects.
        text = content.decode(errors="replace").replace("\0", "\ufffd")
        text = text if complete else text[: text.rfind("\n") + 1]
        lines = separated(text)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"Cannot read {path}: {error}. The file should be a run's metrics.csv."
        ) from error
    if not lines:
        return ["round"], []
    columns = lines[0]
    rows: list[Row] = []
    for number, values in enumerate(lines[1:], start=2):
        if columns[0] == "round" and len(values) == len(columns) and values[0].isdecimal():
            rows.append(dict(zip(columns, values, strict=True)))
            continue
        # The table ends at a line that is not a row. That is an error, unless the line is the last
        # one (a killed run was writing it) or belongs to rounds that a resumed run trains again.
        latest = int(rows[-1]["round"]) if rows else -1
        needed = before is None or latest < before - 1
        torn = not complete and number == len(lines)
        if columns[0] != "round" or (needed and not torn):
            raise UserError(
                f"{path}, line {number}: not a row of metrics (a round, then {len(columns) - 1} "
                "values). Mend or remove the file."
            )
        break
    return columns, rows


def _content(path: Path) -> bytes:
    packed = path.with_name(f"{path.name}.gz")
    if packed.is_file() and not path.is_file():
        return gzip.decompress(packed.read_bytes())
    return path.read_bytes()


class Metrics(dict[str, Column]):
    """A table of metrics: ``metrics["val/acc"]`` is a column, and ``metrics.rounds`` has the
    rounds.

    A value is nan if nothing was logged, or if nan was. ``pandas.DataFrame(metrics,
    index=metrics.rounds)`` is the table as a frame.

    Args:
        rounds: the rounds, ascending.
        columns: metric → its value in each round; None if nothing was logged there.
        modes: metric → ``"max"`` or ``"min"``, as in run.json.
    """

    def __init__(
        self,
        rounds: Sequence[int],
        columns: Mapping[str, Sequence[float | None]],
        modes: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.rounds = list(rounds)
        self._directions = Directions('Metrics.best: give mode="max" or mode="min"')
        self._directions.record(modes)
        self._rows_with: dict[str, list[int]] = {}
        for name, values in columns.items():
            self[name] = np.asarray(values, dtype=np.float64)
            self._rows_with[name] = [at for at, value in enumerate(values) if value is not None]

    @classmethod
    def read(cls, path: Path, modes: Mapping[str, str] | None = None) -> Metrics:
        names, rows = read_rows(path)
        columns: dict[str, list[float | None]] = {}
        for name in names:
            if name != "round":
                columns[name] = [float(row[name]) if row[name] else None for row in rows]
        return cls([int(row["round"]) for row in rows], columns, modes)

    def __missing__(self, name: str) -> Column:
        raise KeyError(f"no metric {name!r}.{suggest(name, self)}")

    def __repr__(self) -> str:
        return f"Metrics({len(self.rounds)} rounds: {', '.join(self)})"

    def last(self, name: str) -> float:
        """Return the last logged value, which may be nan; nan if no value was logged."""
        values = self._logged(name)
        return float(values[-1]) if len(values) else math.nan

    def best(self, name: str, mode: str | None = None) -> tuple[float, int]:
        """Return the best value and the round that first reached it; (nan, -1) if no number was
        logged.

        ``mode``: ``"max"`` or ``"min"``, if neither the name nor torchmetrics shows which direction
        is better.
        """
        if np.isnan(self._logged(name)).all():
            return math.nan, -1
        check_mode("Metrics.best: mode", mode)
        best = np.nanargmax if self._directions.greater(name, mode) else np.nanargmin
        at = int(best(self[name]))
        return float(self[name][at]), self.rounds[at]

    def described(self, name: str) -> str:
        """Last value, and the best with its round if it is known which direction is better."""
        form = "{:.4f}" if is_accuracy(name) else "{:.4g}"
        last = f"last {form.format(self.last(name))}"
        if self._directions.known(name) is None:
            return last
        best, at = self.best(name)
        if math.isnan(best):
            return last
        return f"{last}, best {form.format(best)} (round {at + 1})"

    def median(self, name: str) -> float:
        """Return the median of the logged numbers; nan if no number was logged."""
        values = self._logged(name)
        values = values[~np.isnan(values)]
        return float(np.median(values)) if len(values) else math.nan

    def _logged(self, name: str) -> Column:
        values = self.get(name, np.empty(0))
        # A column that was set later has a value in every round.
        rows = self._rows_with.get(name, range(len(values)))
        return values[list(rows)]
