"""The claims from before the runs, as claims.yaml states them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from fl_lightning.errors import UserError, suggest
from fl_lightning.introspection.accepted import FiniteFloat, NonNegativeFloat, check
from fl_lightning.lab.cli.compose import plain_yaml, text_of
from fl_lightning.lab.report.runs import Found, ReportedRun
from fl_lightning.lab.report.scores import FORMS, SCORES

# Kind → the keys that it needs, besides id and metric, and the further keys that it accepts.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "difference": (("a", "b", "direction", "margin"), ("scale",)),
    "every_seed": (("a", "b", "direction", "margin"), ("scale",)),
    "equivalence": (("a", "b", "margin"), ("scale", "direction")),
    "interaction": (("a", "b", "c", "d", "direction", "margin"), ("scale",)),
    "to_target": (("a", "b", "direction", "margin", "target", "cost"), ("scale",)),
    "trend": (("direction", "over"), ("arm", "margin")),
    "diverges": (("arm", "against"), ("direction", "margin", "factor")),
}
# The kinds that compare two arms with each other.
OF_TWO_ARMS = ("difference", "every_seed", "equivalence")
_OF_ALL = ("id", "metric", "kind", "score", "mode", "primary")
_TEXTS = ("text", "family", "paper_predicts", "we_predict")
# What keys accept besides any text.
_ACCEPTED: dict[str, Any] = {
    "score": Literal["tail", "last10", "smoothed", "last", "max"],
    "direction": Literal["greater", "less"],
    "scale": Literal["difference", "log_ratio"],
    "kind": Literal[tuple(KINDS)],
    "cost": Literal["rounds", "bytes", "gradients"],
    "mode": Literal["max", "min"],
    "primary": bool,
    "margin": NonNegativeFloat,
    "factor": NonNegativeFloat,
    "target": FiniteFloat | dict[str, Any],
}


@dataclass(frozen=True)
class Claim:
    """``a`` is ``direction`` than ``b`` by at least ``margin``.

    The ``score`` of ``metric`` is compared, paired by seed. ``kind`` says if something else is
    claimed. Arms have the names that the report uses. ``text`` is the claim in words, for the
    reader. ``target_arm``: the arm whose score with the same seed is the target.
    """

    id: str
    a: str
    b: str
    metric: str
    direction: str
    margin: float
    score: str = SCORES[0]
    scale: str = "difference"
    # Which direction is better, max or min, decides the value of a diverged run; "" leaves it to
    # the metric.
    mode: str = ""
    text: str = ""
    kind: str = "difference"
    c: str = ""
    d: str = ""
    arm: str = ""
    against: str = ""
    target: float = math.nan
    target_arm: str = ""
    target_score: str = SCORES[0]
    cost: str = ""
    over: str = ""
    factor: float = 10.0
    family: str | None = None
    primary: bool = False
    paper_predicts: str = ""
    we_predict: str = ""

    @property
    def unit(self) -> str:
        """Return the unit of its numbers: differences of the metric, log ratios, or plain
        numbers.
        """
        # The ρ of a trend and the share of diverged seeds have no unit.
        return "number" if self.kind in ("trend", "diverges") else self.scale

    @property
    def arms(self) -> tuple[str, ...]:
        """Return the arms of the claim; none for a trend over an axis, whose ``arm`` is a
        method.
        """
        if self.kind == "trend":
            return (self.arm,) if self.over == "layers" else ()
        named = (self.a, self.b, self.c, self.d, self.arm, self.against, self.target_arm)
        return tuple(dict.fromkeys(name for name in named if name))


@dataclass(frozen=True)
class ClaimsFile:
    """A claims.yaml; ``stated`` are the hashes that runs recorded when they started.

    ``names`` maps an arm's name in the claims to the report's name. ``group``: the group of the
    sweeps to which the claims belong; "": the claims are about all runs.
    """

    path: Path
    claims: tuple[Claim, ...]
    hash: str
    stated: tuple[str, ...]
    names: Mapping[str, str]
    group: str = ""

    @property
    def changed(self) -> bool | None:
        """Return whether the file differs from every one that runs recorded; None: no run
        recorded one.
        """
        if not self.stated:
            return None
        return self.hash not in self.stated


def gather(found: Found, given: Path | None) -> list[ClaimsFile]:
    """Return the claims of the file ``given``; without one, the claims of the sweeps.

    Raises:
        UserError: the file does not hold claims, or two different files share an id.
    """
    if given is not None:
        return [read_claims(given, found.runs)]
    files: dict[str, ClaimsFile] = {}
    for sweep in found.sweeps:
        if sweep.claims is None:
            continue
        # Sweeps with the same claims are one, each with its copy of the file.
        if sweep.group not in files:
            file = read_claims(sweep.claims, found.of(sweep.group).runs)
            files[sweep.group] = replace(file, names=sweep.names, group=sweep.group)
    ids: dict[str, Path] = {}
    for file in files.values():
        for claim in file.claims:
            if ids.setdefault(claim.id, file.path) != file.path:
                raise UserError(
                    f"report: {ids[claim.id]} and {file.path} both have a claim {claim.id!r}. "
                    "Report the sweeps one by one, or give the claims that are meant: "
                    "--claims FILE."
                )
    return list(files.values())


def read_claims(path: Path, runs: Iterable[ReportedRun]) -> ClaimsFile:
    """Return the claims in ``path``, and which claims ``runs`` recorded.

    Raises:
        UserError: the file cannot be read, or an entry lacks a key or has an unknown one; the error
            names the key and what is accepted.
    """
    where = f"--claims {path}"
    entries = plain_yaml(text_of(path, where), where)
    check(f"{where}: claims", entries, list)
    claims = tuple(_claim(where, number, entry) for number, entry in enumerate(entries, start=1))
    for one, other in combinations(claims, 2):
        if one.id == other.id:
            raise UserError(f"{where}: two claims have the id {one.id!r}. An id names one claim.")
        if one.primary and other.primary and one.family == other.family:
            raise UserError(
                f"{where}: {one.id} and {other.id} are both the primary claim of their family. A "
                "family has at most one."
            )
    stated = (run.record.get("claims_hash") for run in runs)
    own = hashlib.sha256(path.read_bytes()).hexdigest()
    return ClaimsFile(path, claims, own, tuple(str(h) for h in stated if h), {})


def _claim(file: str, number: int, entry: Any) -> Claim:
    where = f"{file}, claim {number}"
    check(where, entry, dict)
    for key, value in entry.items():
        check(f"{where}: {key}", value, _ACCEPTED.get(key, Any))
    kind = entry.get("kind", "difference")
    needed = ("id", "metric", *KINDS[kind][0])
    if kind == "trend" and entry.get("over") == "layers":
        needed += ("arm",)
    known = (*_OF_ALL, *_TEXTS, *KINDS[kind][0], *KINDS[kind][1])
    for key in entry:
        if key not in known:
            raise UserError(
                f"{where}: the key {key!r} is not known in a claim of kind {kind}."
                f"{suggest(str(key), known)} Known: {', '.join(known)}."
            )
    if missing := [key for key in needed if entry.get(key) is None]:
        raise UserError(
            f"{where}: {', '.join(missing)} missing. "
            f"Every claim of kind {kind} has {', '.join(needed)}."
        )
    fields: dict[str, Any] = {"a": "", "b": "", "direction": "greater", "margin": 0.0}
    kinds: dict[str, Any] = {"margin": float, "factor": float, "primary": bool}
    for key, value in entry.items():
        if key == "target":
            fields |= _target(where, value)
        elif value is not None:
            # The name of an arm may look like a number.
            fields[key] = kinds.get(key, str)(value)
    # Costs differ by factors, so compare their logarithms.
    if kind == "to_target":
        fields["scale"] = "log_ratio"
    if kind == "trend" and fields["over"] == "layers":
        fields["metric"] = fields["metric"].rstrip("/")
        check(f"{where}: metric", fields["metric"], Literal[tuple(f.rstrip("/") for f in FORMS)])
    return Claim(**fields)


def _target(where: str, target: Any) -> dict[str, Any]:
    """Return the fields of a target: a number, or the score of another arm."""
    if not isinstance(target, dict):
        return {"target": float(target)}
    score = target.get("score", SCORES[0])
    if set(target) - {"arm", "score"} or not target.get("arm") or score not in SCORES:
        raise UserError(
            f"{where}: target {str(target)[:80]}: a number is expected, or "
            f"{{arm: ARM, score: SCORE}} with a score of {', '.join(SCORES)}."
        )
    return {"target": math.nan, "target_arm": str(target["arm"]), "target_score": score}
