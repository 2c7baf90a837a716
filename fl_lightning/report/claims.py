"""What was claimed before the runs, and what they say about it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.compose import parse_yaml
from fl_lightning.errors import UserError, suggest
from fl_lightning.metrics import MODES
from fl_lightning.report.runs import Found, Run
from fl_lightning.report.scores import SCORES

_CHOICES = {
    "score": SCORES, "direction": ("greater", "less"), "scale": ("difference", "log_ratio"), "mode": MODES,
}  # fmt: skip
_REQUIRED = ("id", "a", "b", "metric", "direction", "margin")
_KNOWN = (*_REQUIRED, "score", "scale", "mode", "text")


@dataclass(frozen=True)
class Claim:
    """``a`` is ``direction`` than ``b`` by at least ``margin``: in ``score`` of ``metric``, paired by seed."""

    id: str
    a: str
    b: str
    metric: str
    direction: str
    margin: float
    score: str = "last10"
    scale: str = "difference"
    mode: str = ""  # max or min: which way is better, for what a diverged run has; "": by the metric
    text: str = ""  # the claim in words, for the reader


@dataclass(frozen=True)
class ClaimsFile:
    """A claims.yaml; ``stated`` are the hashes that runs recorded when they started."""

    path: Path
    claims: tuple[Claim, ...]
    hash: str
    stated: tuple[str, ...]

    @property
    def changed(self) -> bool | None:
        """Whether the file is another than any that a run recorded; None: none did."""
        return self.hash not in self.stated if self.stated else None


def gather(found: Found, given: Path | None) -> list[ClaimsFile]:
    """The file ``given``; without one, those of the sweeps.

    Raises:
        UserError: a file that is none of claims, or one id in two different files.
    """
    if given is not None:
        return [read_claims(given, found.runs)]
    files: list[ClaimsFile] = []
    for sweep in found.sweeps:
        if sweep.claims is not None:
            own = [run for run in found.runs if run.folder in sweep.runs]
            read = read_claims(sweep.claims, own)
            twin = next((i for i, file in enumerate(files) if file.hash == read.hash), None)
            if twin is None:
                files.append(read)
            else:  # one claim over several sweeps, each with its copy
                files[twin] = ClaimsFile(read.path, read.claims, read.hash, (*files[twin].stated, *read.stated))
    ids: dict[str, Path] = {}
    for file in files:
        for claim in file.claims:
            if claim.id in ids:
                raise UserError(
                    f"report: {ids[claim.id]} and {file.path} both have a claim {claim.id!r}. Report the sweeps one by "
                    "one, or give the claims that are meant: --claims FILE."
                )
            ids[claim.id] = file.path
    return files


def read_claims(path: Path, runs: Iterable[Run]) -> ClaimsFile:
    """The claims in ``path``, and which claims ``runs`` recorded.

    Raises:
        UserError: it cannot be read, or an entry lacks a key or has an unknown one, named with what is accepted.
    """
    try:
        data = path.read_bytes()
        entries = parse_yaml(data.decode())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--claims {path}: cannot be read ({' '.join(str(error).split())}).") from None
    if not isinstance(entries, list):
        raise UserError(f"--claims {path}: a list of claims is expected, each with {', '.join(_REQUIRED)}.")
    claims = tuple(_claim(path, number, entry) for number, entry in enumerate(entries, start=1))
    for claim in claims:
        if sum(other.id == claim.id for other in claims) > 1:
            raise UserError(f"--claims {path}: two claims have the id {claim.id!r}. An id names one claim.")
    stated = (run.record.get("claims_hash") for run in runs)
    return ClaimsFile(path, claims, hashlib.sha256(data).hexdigest(), tuple(str(h) for h in stated if h))


def _claim(path: Path, number: int, entry: Any) -> Claim:
    where = f"--claims {path}, claim {number}"
    if not isinstance(entry, dict):
        raise UserError(f"{where}: a mapping is expected, with {', '.join(_REQUIRED)}.")
    for key in entry:
        if key not in _KNOWN:
            raise UserError(f"{where}: the key {key!r} is not known.{suggest(key, _KNOWN)} Known: {', '.join(_KNOWN)}.")
    missing = [key for key in _REQUIRED if entry.get(key) is None]
    if missing:
        raise UserError(f"{where}: {', '.join(missing)} missing. Every claim has {', '.join(_REQUIRED)}.")
    for key, accepted in _CHOICES.items():
        if key in entry and entry[key] not in accepted:
            raise UserError(f"{where}: {key} {entry[key]!r} is not known. Accepted: {', '.join(accepted)}.")
    margin = entry["margin"]
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < math.inf:
        raise UserError(f"{where}: margin {margin!r}: a number of at least 0 is expected, in the metric's own unit.")
    texts = {key: str(value) for key, value in entry.items() if key != "margin"}
    return Claim(**texts, margin=float(margin))


def differences(claim: Claim, values: Sequence[tuple[float | None, float | None]]) -> list[float | None]:
    """a - b (or the log of a / b) of each pair of scores; None where it has none."""
    found: list[float | None] = []
    for a, b in values:
        if a is None or b is None:
            found.append(None)
        elif claim.scale == "log_ratio":
            found.append(math.log(a / b) if a > 0 and b > 0 else None)
        else:
            found.append(a - b)
    return found


def verdict(
    direction: str, margin: float, mean: float | None, low: float | None, high: float | None, lost: bool = False
) -> str:
    """What a paired interval says about a claim.

    Args:
        direction: of the claim; "less" turns mean and interval round.
        margin: what counts as an effect.
        mean, low, high: of a - b; None where there were too few pairs.
        lost: a pair was left out because a run of it diverged: nothing is reproduced then.

    >>> verdict("greater", 0.005, 0.02, 0.01, 0.03), verdict("less", 0.005, 0.02, 0.01, 0.03)
    ('reproduced', 'contradicted')
    >>> verdict("greater", 0.005, 0.001, -0.001, 0.003), verdict("greater", 0.005, 0.01, -0.01, 0.03)
    ('not reproduced', 'inconclusive')
    """
    if mean is None or low is None or high is None:
        return "inconclusive"
    if direction == "less":
        mean, low, high = -mean, -high, -low
    if low > 0 and mean >= margin:
        return "inconclusive" if lost else "reproduced"
    if high < 0:
        return "contradicted"
    return "not reproduced" if high < margin else "inconclusive"
