"""What a check says: it holds, it does not (with reason and hint), or it does not apply."""

from __future__ import annotations

import textwrap
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from fl_lightning.lightning import FABRIC, pl


class Failed(Exception):
    """An invariant does not hold.

    Args:
        reason: what was seen.
        hint: what usually causes it, and what to do.
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


class NotApplicable(Exception):
    """An invariant does not apply to this method, for the reason given."""


@dataclass(frozen=True)
class Check:
    """One row of a report: ``verdict`` is ``"holds"``, ``"fails"`` or ``"n/a"``."""

    name: str
    verdict: str
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True)
class CheckReport:
    """The contracts of one method; ``print(report)`` shows a table, with reason and hint where one fails."""

    method: str
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """Whether none fails."""
        return all(check.verdict != "fails" for check in self.checks)

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        failed = sum(check.verdict == "fails" for check in self.checks)
        lines = [
            f"{self.method}: {'all contracts hold' if self.ok else f'{failed} of {len(self.checks)} fail'}",
            "",
        ]
        width = max(len(check.name) for check in self.checks)
        told = dict[str, str]()  # reason -> the first that failed by it
        for check in self.checks:
            aside = check.reason if check.verdict == "n/a" else ""
            if check.verdict == "fails" and told.setdefault(check.reason, check.name) != check.name:
                aside = f"as {told[check.reason]!r}"
            lines.append(
                f"  {check.verdict:<5}  {check.name:<{width}}{f'  ({aside})' if aside else ''}".rstrip()
            )
            if check.verdict == "fails" and not aside:
                lines += _wrapped("what: ", check.reason) + (
                    _wrapped("hint: ", check.hint) if check.hint else []
                )
        lines += [
            "",
            "Not checked: whether the rule is the one you mean. A wrong sign or factor keeps every contract;",
            "compare a few rounds with your own oracle, or see that a problem with a known optimum is solved.",
        ]
        return "\n".join(lines)


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, 100, initial_indent=f"{'':9}{label}", subsequent_indent=" " * (9 + len(label))
    )


def where(error: BaseException) -> str:
    """An error with the innermost line of a callback: ``RuntimeError: … (anchor.py, line 12, on_local_gradient)``."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(__file__).parents[1]
    theirs = [Path(str(module.__file__)).parent for module in (torch, pl, FABRIC)]
    for frame in reversed(frames):
        path = Path(frame.filename)
        core = ours in path.parents and ours / "callbacks" not in path.parents
        if path.is_file() and not core and not any(root in path.parents for root in theirs):
            place = f" ({path.name}, line {frame.lineno}, {frame.name})"
            break
    else:
        place = ""
    text = str(error).strip().split("\n")[0] or "no message"
    return f"{type(error).__name__}: {text}{place}"
