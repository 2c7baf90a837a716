"""The texts of the page on the papers, which ``python -m studies.papers page`` puts together."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def factor(log: float) -> str:
    """A factor, with two decimals, or with three digits.

    >>> factor(0.3), factor(math.log(11_931)), factor(math.log(97_360_119))
    ('1.35', '11,900', '97,400,000')
    """
    value = math.exp(log)
    return f"{value:.2f}" if value < 50 else f"{float(f'{value:.3g}'):,.0f}"


def points(share: float) -> str:
    """A difference of shares in points of a hundred; 0 has no sign.

    >>> points(0.0123), points(-0.00001)
    ('+1.23', '0.00')
    """
    text = f"{100 * share:+.2f}"
    return "0.00" if float(text) == 0 else text


UNITS: dict[str, Callable[[float], str]] = {
    "points": points,
    "factor": factor,
    "percent": lambda value: f"{100 * value:.2f}",
    "plain": lambda value: f"{value:.3f}",
    "signed": lambda value: f"{value:+.2f}",
    "signed3": lambda value: f"{value:+.3f}",
}
# The sections of a report that the page has itself; the others are beside it.
ON_THE_PAGE = ("Claims",)


def parted(report: str) -> tuple[str, str]:
    """A report in Markdown: what the page has of it, with the lines before its first section, and
    its other sections."""
    before, *sections = report.split("\n## ")
    here = [s for s in sections if s.partition("\n")[0] in ON_THE_PAGE]
    beside = [s for s in sections if s not in here]
    return (
        before + "".join(f"\n## {section}" for section in here),
        "".join(f"## {section}\n" for section in beside),
    )


def without_a_claim(seen: Sequence[Mapping[str, Any]]) -> str:
    """The table of what was observed."""
    if not seen:
        return ""
    text = (
        "\n## Seen without a claim\n\nChosen after the runs had been seen: intervals alone, no "
        "verdicts, no correction for their number. By seed, over the last third of gradients "
        "where nothing else is said.\n\n"
        f"<details><summary>{len(seen)} rows</summary>\n\n"
        "| | | 95 % interval | n |\n|---|---|---|---|\n"
    )
    for row in seen:
        unit = UNITS[row["unit"]]
        mean, low, high = (unit(row[key]).replace("-", "−") for key in ("mean", "low", "high"))
        text += f"| {row['id']}: {row['text']} | {mean} | {low} to {high} | {row['n']} |\n"
    return f"{text}\n</details>\n"


def filled(text: str, said: Mapping[str, Any]) -> str:
    """``text`` with ``{P1-helps.mean}``, ``{P1-helps.verdict}`` and the like from a report.json.

    ``{P1-helps.mean:points}`` is in points of a hundred, ``{P3-all.mean:factor}`` is e to the power
    of it, ``{fedinit-0.15.tail:percent}`` an arm's mean of that score.

    >>> said = {"claims": [{"id": "A", "verdict": "reproduced", "mean": 0.03421}]}
    >>> filled("{A.verdict}: {A.mean}, {A.mean:points} points, {A.mean:factor} times", said)
    'reproduced: +0.0342, +3.42 points, 1.03 times'
    """
    rows = {claim["id"]: claim for claim in said["claims"]}
    for name, arm in said.get("arms", {}).items():
        rows[name] = {score: of["mean"] for score, of in arm["scores"].items()}

    def value(match: re.Match[str]) -> str:
        number = rows[match["row"]][match["field"]]
        if match["unit"] is not None:
            return UNITS[match["unit"]](number).replace("-", "−")
        return f"{number:+.3g}".replace("-", "−") if isinstance(number, float) else str(number)

    return re.sub(r"\{(?P<row>[^{}]+)\.(?P<field>\w+)(:(?P<unit>\w+))?\}", value, text)
