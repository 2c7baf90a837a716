"""The claims from before the runs, as claims.yaml states them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.cli.compose import parse_yaml
from fl_lightning.lab.report.runs import Found, ReportedRun
from fl_lightning.lab.report.scores import FORMS, SCORES
from fl_lightning.metrics import MODES

# Kind → the keys that it needs, besides id and metric.
KINDS: dict[str, tuple[str, ...]] = {
    "difference": ("a", "b", "direction", "margin"),
    "every_seed": ("a", "b", "direction", "margin"),
    "equivalence": ("a", "b", "margin"),
    "interaction": ("a", "b", "c", "d", "direction", "margin"),
    "to_target": ("a", "b", "direction", "margin", "target", "cost"),
    "trend": ("direction", "over"),
    "diverges": ("arm", "against"),
}
# The kinds that compare two arms with each other.
OF_TWO_ARMS = ("difference", "every_seed", "equivalence")
COSTS = ("rounds", "bytes", "gradients")
_CHOICES = {
    "score": SCORES,
    "direction": ("greater", "less"),
    "scale": ("difference", "log_ratio"),
    "kind": tuple(KINDS),
    "cost": COSTS,
    "mode": MODES,
}
_TEXTS = ("text", "family", "paper_predicts", "we_predict")
_ANY = ("id", "metric", "kind", "score", "mode", "primary", *_TEXTS)
# Kind → further keys that it accepts.
_MORE: dict[str, tuple[str, ...]] = {
    "difference": ("scale",),
    "every_seed": ("scale",),
    "equivalence": ("scale", "direction"),
    "interaction": ("scale",),
    "to_target": ("scale",),
    "trend": ("arm", "margin"),
    "diverges": ("direction", "margin", "factor"),
}
# Keys with numbers, and their smallest accepted values.
_NUMBERS = {"margin": 0.0, "factor": 0.0, "target": -math.inf}


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

    ``names`` maps an arm's name in the claims to the report's name. ``folders``: the run folders of
    the sweeps to which the claims belong; empty: the claims are about all runs.
    """

    path: Path
    claims: tuple[Claim, ...]
    hash: str
    stated: tuple[str, ...]
    names: Mapping[str, str]
    folders: tuple[Path, ...] = ()

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
        runs = [run for run in found.runs if run.folder in sweep.runs]
        file = replace(read_claims(sweep.claims, runs), names=sweep.names, folders=sweep.runs)
        # One claim may be about several sweeps, each with its copy of the file.
        if first := files.get(file.hash):
            file = replace(
                file,
                stated=first.stated + file.stated,
                names={**first.names, **file.names},
                folders=first.folders + file.folders,
            )
        files[file.hash] = file
    ids: dict[str, Path] = {}
    for file in files.values():
        for claim in file.claims:
            if claim.id in ids:
                raise UserError(
                    f"report: {ids[claim.id]} and {file.path} both have a claim {claim.id!r}. "
                    "Report the sweeps one by one, or give the claims that are meant: "
                    "--claims FILE."
                )
            ids[claim.id] = file.path
    return list(files.values())


def read_claims(path: Path, runs: Iterable[ReportedRun]) -> ClaimsFile:
    """Return the claims in ``path``, and which claims ``runs`` recorded.

    Raises:
        UserError: the file cannot be read, or an entry lacks a key or has an unknown one; the error
            names the key and what is accepted.
    """
    try:
        data = path.read_bytes()
        entries = parse_yaml(data.decode())
    except (OSError, UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(
            f"--claims {path}: cannot be read ({' '.join(str(error).split())})."
        ) from None
    if not isinstance(entries, list):
        raise UserError(f"--claims {path}: a list of claims is expected, each with id and metric.")
    claims = tuple(_claim(path, number, entry) for number, entry in enumerate(entries, start=1))
    for claim in claims:
        if sum(other.id == claim.id for other in claims) > 1:
            raise UserError(
                f"--claims {path}: two claims have the id {claim.id!r}. An id names one claim."
            )
        primary = [other.id for other in claims if other.primary and other.family == claim.family]
        if len(primary) > 1:
            raise UserError(
                f"--claims {path}: {' and '.join(primary)} are both the primary claim of their "
                "family. A family has at most one."
            )
    stated = (run.record.get("claims_hash") for run in runs)
    return ClaimsFile(
        path, claims, hashlib.sha256(data).hexdigest(), tuple(str(h) for h in stated if h), {}
    )


def _claim(path: Path, number: int, entry: Any) -> Claim:
    where = f"--claims {path}, claim {number}"
    if not isinstance(entry, dict):
        raise UserError(f"{where}: a mapping is expected, with id, metric and what its kind needs.")
    _check_keys(where, entry)
    kind = entry.get("kind", "difference")
    fields: dict[str, Any] = {"a": "", "b": "", "direction": "greater", "margin": 0.0}
    fields |= {key: str(value) for key, value in entry.items() if value is not None}
    for key in _NUMBERS:
        of_an_arm = key == "target" and isinstance(entry.get(key), dict)
        if key in entry and not of_an_arm:
            fields[key] = _number(where, key, entry[key])
    fields |= _target(where, entry.get("target"))
    primary = entry.get("primary", False)
    if not isinstance(primary, bool):
        raise UserError(f"{where}: primary {primary!r}: true or false is expected.")
    fields["primary"] = primary
    # Costs differ by factors, so compare their logarithms.
    if kind == "to_target":
        fields["scale"] = "log_ratio"
    if kind == "trend" and fields["over"] == "layers":
        fields["metric"] = _form(where, fields["metric"])
    return Claim(**fields)


def _check_keys(where: str, entry: Mapping[str, Any]) -> None:
    """Refuse unknown choices and keys, and an entry that lacks a key of its kind."""
    for key, accepted in _CHOICES.items():
        if key in entry and entry[key] not in accepted:
            raise UserError(
                f"{where}: {key} {entry[key]!r} is not known. Accepted: {', '.join(accepted)}."
            )
    kind = entry.get("kind", "difference")
    required = ("id", *KINDS[kind][:2], "metric", *KINDS[kind][2:])
    known = (*_ANY, *KINDS[kind], *_MORE[kind])
    for key in entry:
        if key not in known:
            hint = suggest(str(key), known)
            raise UserError(
                f"{where}: the key {key!r} is not known in a claim of kind {kind}.{hint} "
                f"Known: {', '.join(known)}."
            )
    # YAML can write half of a surrogate pair, which could not be encoded in a report.
    try:
        "".join(map(str, entry.values())).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{where}: it holds text that cannot be written to a file (a lone surrogate)."
        ) from None
    missing = [key for key in required if entry.get(key) is None]
    if kind == "trend" and entry.get("over") == "layers" and not entry.get("arm"):
        missing.append("arm")
    if missing:
        raise UserError(
            f"{where}: {', '.join(missing)} missing. "
            f"Every claim of kind {kind} has {', '.join(required)}."
        )


def _number(where: str, key: str, value: Any) -> float:
    # A bool is an int in Python, so check the exact type.
    if type(value) not in (int, float) or not _NUMBERS[key] <= value < 1e300:
        accepted = "a number" if key == "target" else "a number of at least 0"
        unit = ""
        if key == "margin":
            unit = ", in the metric's own unit"
        raise UserError(f"{where}: {key} {value!r}: {accepted} is expected{unit}.")
    return float(value)


def _target(where: str, target: Any) -> dict[str, Any]:
    """Return the fields of a target that is another arm's score."""
    if not isinstance(target, dict):
        return {}
    score = target.get("score", SCORES[0])
    if set(target) - {"arm", "score"} or not target.get("arm") or score not in SCORES:
        raise UserError(
            f"{where}: target {str(target)[:80]}: a number is expected, or "
            f"{{arm: ARM, score: SCORE}} with a score of {', '.join(SCORES)}."
        )
    return {"target": math.nan, "target_arm": str(target["arm"]), "target_score": score}


def _form(where: str, metric: str) -> str:
    """Return the form of the consensus by layer for a trend over layers."""
    forms = [form.rstrip("/") for form in FORMS]
    if metric.rstrip("/") not in forms:
        raise UserError(f"{where}: metric {metric!r}: over layers it is one of {', '.join(forms)}.")
    return metric.rstrip("/")
