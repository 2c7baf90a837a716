"""The result of a check: it holds, it fails (with reason and hint), or it does not apply."""

from __future__ import annotations

import textwrap
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from fl_lightning.machine.lightning import FABRIC, pl

RUN = "a run of three rounds"  # the first check, without which the others say nothing


class Failed(Exception):
    """An invariant does not hold.

    Args:
        reason: what the check found.
        hint: the usual cause, and what to do.
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


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
    """The contracts of one method; ``print(report)`` shows a table.

    If a contract fails, it has the reason and a hint.
    """

    method: str
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """Whether none fails."""
        return all(check.verdict != "fails" for check in self.checks)

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        if self.checks[0].name == RUN and self.checks[0].verdict == "fails":
            lines = [f"{self.method}: nothing was checked, because {RUN} fails", ""]
            return "\n".join(lines + _wrapped("what: ", self.checks[0].reason))
        failed = sum(check.verdict == "fails" for check in self.checks)
        outcome = "all contracts hold" if self.ok else f"{failed} of {len(self.checks)} fail"
        lines = [f"{self.method}: {outcome}", ""]
        width = max(len(check.name) for check in self.checks)
        # Print a reason only once, at the first check that fails for it.
        first: dict[str, str] = {}
        for check in self.checks:
            fails = check.verdict == "fails"
            aside = check.reason if check.verdict == "n/a" else ""
            if fails and first.setdefault(check.reason, check.name) != check.name:
                aside = f"as {first[check.reason]!r}"
            line = f"  {check.verdict:<5}  {check.name:<{width}}"
            if aside:
                line += f"  ({aside})"
            lines.append(line.rstrip())
            if fails and not aside:
                lines += _wrapped("what: ", check.reason)
                if check.hint:
                    lines += _wrapped("hint: ", check.hint)
        lines += [
            "",
            "Not checked: whether the rule is the one you mean. A wrong sign or factor keeps every "
            "contract;",
            "compare a few rounds with your own oracle, or see that a problem with a known optimum "
            "is solved.",
        ]
        return "\n".join(lines)


def _wrapped(label: str, text: str) -> list[str]:
    head = f"{'':9}{label}"
    return textwrap.wrap(text, 100, initial_indent=head, subsequent_indent=" " * len(head))


def where(error: BaseException) -> str:
    """Return an error's text, with the innermost line of a callback.

    For example ``RuntimeError: … (anchor.py, line 12, on_local_gradient)``.
    """
    ours = Path(__file__).parents[2]
    # Stack frames of the frameworks do not help the author of a method.
    theirs = [Path(str(module.__file__)).parent for module in (torch, pl, FABRIC)]
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        # A packaged method counts as a user's callback; other code of this package does not.
        core = ours in path.parents and ours / "callbacks" not in path.parents
        if path.is_file() and not core and not any(root in path.parents for root in theirs):
            place = f" ({path.name}, line {frame.lineno}, {frame.name})"
    text = str(error).strip().split("\n")[0] or "no message"
    return f"{type(error).__name__}: {text}{place}"
