"""Names of arms in tables and figures: ``report --label ARM=TEXT``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.report.claims import Claim
from fl_lightning.lab.report.summary import Summary
from fl_lightning.lab.report.verdicts import Comparison

_OF_CLAIMS = ("a", "b", "c", "d", "arm", "against", "target_arm")


def labels_of(texts: Sequence[str], arms: Sequence[str]) -> dict[str, str]:
    """Return arm → its label, from ``ARM=TEXT``.

    Raises:
        UserError: there is no such arm, or two arms would have the same name.
    """
    labels: dict[str, str] = {}
    for text in texts:
        arm, equals, label = text.partition("=")
        if not equals or not label.strip():
            raise UserError(f"report --label {text}: give ARM=TEXT, such as fedavg=FedAvg.")
        if arm not in arms:
            known = ", ".join(arms)
            raise UserError(
                f"report --label {text}: there is no arm {arm!r}; there are {known[:300]}."
                f"{suggest(arm, arms)}"
            )
        labels[arm] = label.strip()
    shown = [labels.get(arm, arm) for arm in arms]
    twice = [label for label in shown if shown.count(label) > 1]
    if twice:
        raise UserError(
            f"report --label: two arms would be called {twice[0]!r}; give each arm its own name."
        )
    return labels


def relabelled(summary: Summary, labels: Mapping[str, str]) -> Summary:
    """Return the report with these labels; its numbers do not change."""
    if not labels:
        return summary

    def called(arm: str) -> str:
        return labels.get(arm, arm)

    def claimed(claim: Claim) -> Claim:
        names: dict[str, Any] = {part: called(getattr(claim, part)) for part in _OF_CLAIMS}
        return replace(claim, **names)

    def compared(found: Comparison) -> Comparison:
        return replace(found, claim=claimed(found.claim))

    arms = {}
    for name, arm in summary.arms.items():
        runs = [replace(run, arm=called(name)) for run in arm.runs]
        arms[called(name)] = replace(arm, name=called(name), runs=runs)
    settings = {}
    for setting, members in summary.settings.items():
        settings[setting] = {method: called(arm) for method, arm in members.items()}
    runs = [replace(run, arm=called(run.arm)) for run in summary.found.runs]
    return replace(
        summary,
        arms=arms,
        pairs=[compared(pair) for pair in summary.pairs],
        verdicts=[compared(verdict) for verdict in summary.verdicts],
        found=replace(summary.found, runs=runs),
        settings=settings,
    )
