"""The committed results, and made-up runs of every kind of claim, against a calculation of its own.

``by_hand.py`` beside this is that calculation; it knows nothing of the project's code.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import lzma
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fl_lightning.lab.report.runs import find
from fl_lightning.lab.report.summary import summarise
from studies.kept import pack
from studies.tests import by_hand, by_hand_statistics
from studies.tests.by_hand import Sweeps
from tests.report.folders import make_run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies/results"
PAGE = ROOT / "studies/results.md"
FOREIGN = {"numpy", "scipy", "yaml"}
PAIRED = ("difference", "every_seed", "equivalence")
# Fields that some claims of report.json have.
OPTIONAL = {"low_90", "high_90", "published"}


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15)
    return bool(a == b)


def differing(found: Any, expected: Any, where: str = "") -> Iterator[str]:
    """Each place of the two trees that is not alike; keys of ``found`` may be numbers."""
    if not isinstance(expected, dict):
        if not alike(found, expected):
            yield f"{where}: by hand {found!r}, in the report {expected!r}"
        return
    named = {str(key): value for key, value in found.items()}
    for key in sorted({*named, *expected}):
        if key not in named or key not in expected:
            side = "in the report" if key in expected else "by hand"
            yield f"{where}/{key}: only {side}"
            continue
        yield from differing(named[key], expected[key], f"{where}/{key}")


def shown_arms(groups: list[Sweeps]) -> dict[str, Sweeps]:
    """Each arm's name in the report: with its sweep's where two sweeps have an arm of that name."""
    names = [arm for group in groups for arm in group.arms]
    shown = {}
    for group in groups:
        for arm in group.arms:
            twice = names.count(arm) > 1
            shown[f"{group.names[0]}/{arm}" if twice else arm] = group
    return shown


def objections(
    written: dict[str, Any],
    groups: list[Sweeps],
    targets: tuple[str, ...] = (),
    greater: bool = True,
) -> list[str]:
    """Where report.json says something else than the calculation."""
    found = []
    shown = shown_arms(groups)
    if set(shown) != set(written["arms"]):
        found.append(f"arms: by hand {sorted(shown)}, in the report {sorted(written['arms'])}")
    for name, group in shown.items():
        runs = group.arms[name.rsplit("/", 1)[-1]].values()
        expected = dict(written["arms"][name])
        listed = expected.pop("runs")
        if len(listed) != len(runs):
            found.append(f"{name}: {len(listed)} runs listed, {len(runs)} in the folder")
        mine = by_hand.calculated_arm(runs, written["metric"], greater, targets)
        found += differing(mine, expected, name)
    rows: dict[str, dict[str, Any]] = {}
    for group in groups:
        rows.update(by_hand.calculated_claims(group))
    if set(rows) != {claim["id"] for claim in written["claims"]}:
        found.append("the report's claims are not those of the files")
    pairs = iter(written["pairs"])
    for claim in written["claims"]:
        row = rows[claim["id"]]
        if "published" in claim:
            theirs = {gain["source"]: gain["mean"] for gain in claim["published"]}
            claim = {**claim, "published": theirs}
        mine = {key: row.get(key) for key in {*claim, *(row.keys() & OPTIONAL)}}
        found += differing(mine, claim, claim["id"])
        if row["kind"] not in PAIRED:
            continue
        pair: dict[str, Any] = next(pairs, {})
        mine = {key: row[key] for key in ("n", "mean", "low", "high", "p", "p_holm")}
        mine["sd"] = row["interval"].sd
        mine["metric"] = row["claim"]["metric"]
        mine["score"] = row["claim"].get("score", "tail")
        ends = {key: pair.get(key, "").rsplit("/", 1)[-1] for key in ("a", "b")}
        found += differing(
            {**mine, "a": row["claim"]["a"], "b": row["claim"]["b"]},
            {**pair, **ends},
            f"pair of {claim['id']}",
        )
    if next(pairs, None) is not None:
        found.append("the report has more pairs than claims of a pair")
    return found


# Runs made up, for the kinds of which no run is committed.

ROUNDS = 35
LAYERS = ("stem", "body.0", "body.1", "head")
SWEPT = "model.local_epochs"
# Arms and about where their accuracy ends.
MADE = {"base": 0.8, "good": 0.84, "same": 0.801, "bad": 0.77}
STEPS = {"k1": 0.78, "k5": 0.8, "k10": 0.79, "k20": 0.83}


def made_columns(rng: np.random.Generator, level: float) -> dict[str, list[float | None]]:
    """Noisy curves around ``level``; costs differ from round to round, some cells are empty."""
    rise = level * (1 - 0.6 * np.exp(-np.arange(ROUNDS) / 8))
    gradients = rng.integers(1, 9, ROUNDS) * 40
    accuracy = rise + rng.normal(0, 0.004, ROUNDS)
    columns: dict[str, list[float | None]] = {
        "val/acc": [None if t % 6 == 2 else float(x) for t, x in enumerate(accuracy)],
        "val/loss": [float(x) for x in 2 - 2 * accuracy],
        "divergence/all": [float(x) for x in np.exp(rng.normal(2 * level, 0.1, ROUNDS))],
        "global/gap": [float(x) if t % 10 == 9 else None for t, x in enumerate(accuracy - 0.65)],
        "cost/gradients": [None if t == 4 else float(x) for t, x in enumerate(gradients)],
        "communication/total_bytes": [float(x) for x in np.cumsum(gradients) * 7.5],
        "time/round": [float(x) for x in rng.uniform(0.1, 0.9, ROUNDS)],
    }
    for form in ("consensus", "consensus_relative"):
        for place, layer in enumerate(LAYERS):
            cells = rng.normal(1 + 0.2 * place * level, 0.35 * level, ROUNDS)
            columns[f"{form}/{layer}"] = [float(x) for x in cells]
        columns[f"{form}/total"] = [9.0] * ROUNDS
    return columns


def made_sweep(
    folder: Path, arms: dict[str, float], seeds: range, statuses: dict[tuple[str, int], str]
) -> None:
    """A sweep; ``statuses`` are those of the runs that are not done, or ``absent``."""
    claims = (folder / "claims.yaml").read_bytes()
    for place, (arm, level) in enumerate(arms.items()):
        for seed in seeds:
            status = statuses.get((arm, seed), "done")
            if status == "absent":
                continue
            rng = np.random.default_rng([seed, place, len(folder.name)])
            columns = made_columns(rng, level + float(rng.normal(0, 0.008)))
            axes = {"method": "fedavg", SWEPT: int(arm[1:])} if arm[0] == "k" else {"method": arm}
            make_run(
                folder / arm / f"seed-{seed}", arm, seed, columns, status,
                axes=axes, claims_hash=hashlib.sha256(claims).hexdigest(),
            )  # fmt: skip
    rows = [f"{arm},{seed},waiting,-" for arm in arms for seed in seeds]
    (folder / "runs.csv").write_text("\n".join(["arm,seed,status,folder", *rows]) + "\n")
    grid = {"method": list(arms), "seed_everything": list(seeds)}
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"configs": ["base"], "grid": grid}))


def claims_of_every_kind(prefix: str) -> list[dict[str, Any]]:
    """Claims that together have each kind, scale, direction, cost and score of the protocol."""
    claims: list[dict[str, Any]] = []

    def claim(family: str | None, **keys: Any) -> None:
        given = {} if family is None else {"family": f"{prefix}-{family}"}
        claims.append({"id": f"{prefix}-{len(claims)}", **given, **keys})

    accuracy = {"metric": "val/acc", "score": "tail"}
    divergence = {"metric": "divergence/all", "score": "tail", "scale": "log_ratio"}
    ab = {"a": "good", "b": "base"}
    claim("P", **ab, **accuracy, direction="greater", margin=0.005, primary=True)
    claim("P", **ab, **accuracy, direction="less", margin=0)
    claim("P", a="same", b="base", **accuracy, direction="greater", margin=0.005)
    claim("P", a="same", b="base", **accuracy, direction="greater", margin=0.05)
    claim("P", a="bad", b="base", **accuracy, direction="less", margin=0.01)
    claim("D", **ab, **divergence, direction="less", margin=0)
    claim("D", **ab, **divergence, direction="greater", margin=0.01)
    claim("E", kind="equivalence", a="same", b="base", **accuracy, margin=0.01)
    claim("E", kind="equivalence", **ab, **accuracy, margin=0.005)
    claim("E", kind="equivalence", a="same", b="base", **divergence, margin=0.05)
    claim("E", kind="equivalence", a="bad", b="same", **divergence, margin=0.11)
    for margin in (0, 0.005, 0.05):
        claim("S", kind="every_seed", **ab, **accuracy, direction="greater", margin=margin)
        claim("S", kind="every_seed", **ab, **divergence, direction="less", margin=margin)
    abcd = {**ab, "c": "same", "d": "bad"}
    claim("I", kind="interaction", **abcd, **accuracy, direction="greater", margin=0.005)
    clear = {**ab, "c": "same", "d": "base"}
    claim("I", kind="interaction", **clear, **accuracy, direction="greater", margin=0.005)
    claim("I", kind="interaction", **abcd, **divergence, direction="less", margin=0)
    for cost in ("rounds", "bytes", "gradients"):
        target = {"arm": "base", "score": "tail"}
        keys = {"kind": "to_target", "metric": "val/acc", "margin": 0, "cost": cost}
        claim("T", **ab, **keys, target=target, direction="less")
        claim("T", a="bad", b="base", **keys, target=target, direction="greater")
        claim("T", a="bad", b="good", **keys, target=0.76, direction="less")
    for metric in ("consensus", "consensus_relative"):
        layers = {"kind": "trend", "over": "layers", "metric": metric}
        claim("L", **layers, arm="good", direction="greater")
        claim("L", **layers, arm="bad", direction="less", margin=0.1)
    for factor in (1.05, 10):
        pair = {"kind": "diverges", "metric": "divergence/all", "factor": factor}
        claim("V", **pair, arm="good", against="base")
        claim("V", **pair, arm="good", against="base", direction="less")
        claim("V", **pair, arm="bad", against="good", direction="less")
    for score in ("last10", "smoothed", "last", "max"):
        claim(None, **ab, metric="val/acc", score=score, direction="greater", margin=0.005)
    claim(None, **ab, metric="val/loss", score="tail", direction="less", margin=0.005)
    claim(None, **ab, metric="global/gap", score="tail", direction="less", margin=0)
    return claims


def made_folder(folder: Path, statuses: dict[tuple[str, int], str], seeds: range) -> list[Path]:
    """Two sweeps, one of arms and one over an axis, as the protocol has them."""
    over = {"kind": "trend", "over": SWEPT, "score": "tail"}
    trends = [
        {"id": "X-acc", "metric": "val/acc", "direction": "greater", **over},
        {"id": "X-gap", "metric": "global/gap", "direction": "less", **over, "family": "X"},
        {"id": "X-all", "metric": "divergence/all", "direction": "greater", **over, "family": "X"},
    ]
    made = ((folder / "x", MADE, claims_of_every_kind("A")), (folder / "axis", STEPS, trends))
    for sweep, levels, claims in made:
        sweep.mkdir(parents=True)
        (sweep / "claims.yaml").write_text(yaml.safe_dump(claims, sort_keys=False))
        made_sweep(sweep, levels, seeds, statuses)
    return [sweep for sweep, *_ in made]


LOST = {
    "none": {},
    "diverged": {("good", 22): "diverged", ("k5", 21): "diverged"},
    "diverged base": {("base", 20): "diverged", ("bad", 21): "diverged", ("bad", 20): "diverged"},
    "going on": {("good", 25): "running", ("bad", 24): "absent", ("k20", 23): "failed"},
    "one more seed": {(arm, 20): "absent" for arm in (*MADE, *STEPS)},
    "of one arm": {("good", 21): "stopped", ("k1", 22): "absent", ("k1", 21): "diverged"},
}  # fmt: skip


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("seeds", [range(20, 28), range(20, 23)], ids=["8 seeds", "3 seeds"])
def test_every_kind_of_claim_is_what_a_calculation_by_hand_gives(
    lost: str, seeds: range, tmp_path: Path
) -> None:
    sweeps = made_folder(tmp_path / "runs", LOST[lost], seeds)
    targets = ("0.75", "0.8")
    written = json.loads(json.dumps(summarise(find(sweeps), targets=targets).to_json()))
    pack(tmp_path / "runs", tmp_path / "tables")
    found = objections(written, by_hand.grouped(tmp_path / "tables"), targets)
    assert not found, "\n".join(found)


def test_arms_of_one_name_in_two_sweeps_and_a_metric_of_which_less_is_better(
    tmp_path: Path,
) -> None:
    lost = {("good", 23): "diverged", ("base", 26): "diverged"}
    for name, prefix in (("x", "A"), ("yy", "B")):
        (tmp_path / name).mkdir()
        claims = yaml.safe_dump(claims_of_every_kind(prefix), sort_keys=False)
        (tmp_path / name / "claims.yaml").write_text(claims)
        made_sweep(tmp_path / name, MADE, range(20, 28), lost)
    found = find([tmp_path / "x", tmp_path / "yy"])
    written = json.loads(json.dumps(summarise(found, "val/loss", ("0.5",)).to_json()))
    assert "x/good" in written["arms"]
    pack(tmp_path, tmp_path / "tables")
    wrong = objections(written, by_hand.grouped(tmp_path / "tables"), ("0.5",), greater=False)
    assert not wrong, "\n".join(wrong)


# The committed results.


def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "report.json").read_text())
    return found


def test_every_committed_number_is_what_a_calculation_by_hand_gives() -> None:
    written = committed()
    found = objections(written, by_hand.grouped(RESULTS))
    assert not found, "\n".join(found)


def test_a_number_that_is_changed_by_a_millionth_is_objected_to() -> None:
    written = committed()
    groups = by_hand.grouped(RESULTS)
    arm = next(iter(written["arms"]))
    seed = next(iter(written["claims"][0]["values"]))
    kinds = [claim["kind"] for claim in written["claims"]]
    likeness = kinds.index("equivalence")
    places = (
        ("arms", arm, "scores", "tail", "mean"),
        ("arms", arm, "scores", "smoothed", "values", seed),
        ("pairs", 0, "sd"),
        ("claims", 0, "high"),
        ("claims", 0, "p"),
        ("claims", 0, "p_holm"),
        ("claims", 0, "values", seed),
        ("claims", 0, "published", 0, "mean"),
        ("claims", likeness, "low_90"),
    )
    for *path, key in places:
        changed = copy.deepcopy(written)
        part: Any = changed
        for step in path:
            part = part[step]
        part[key] *= 1 + 1e-6
        assert objections(changed, groups), f"{path} {key} was changed, and nothing noticed"


def test_a_run_that_is_changed_changes_what_is_calculated(tmp_path: Path) -> None:
    written = committed()
    shutil.copytree(RESULTS, tmp_path / "results")
    path = next((tmp_path / "results").glob("*/curves.csv.xz"))
    lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("val/acc,"))
    lines[place] = lines[place].rpartition(" ")[0] + " "
    path.write_bytes(lzma.compress("\n".join(lines).encode()))
    assert objections(written, by_hand.grouped(tmp_path / "results"))


PLACE = re.compile(r"\{([^{}]+)\.(\w+)(?::(\w+))?\}")
NUMBER = r"([+\-\u2212]?\d[\d,]*(?:\.\d+)?)"
VERDICT = r"((?:not )?reproduced|contradicted|inconclusive)(, provisional)?"


def misquoted(findings: str, page: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    """The numbers and verdicts of the page's findings that are not those calculated.

    ``findings`` names them, as ``{claim.mean:points}``; around them the page has the same words.
    """
    places = list(PLACE.finditer(findings))
    words = [re.escape(part) for part in PLACE.split(findings)[:: PLACE.groups + 1]]
    pattern = words[0]
    for place, following in zip(places, words[1:], strict=True):
        pattern += (VERDICT if place[2] == "verdict" else NUMBER) + following
    said = re.search(pattern.rstrip("\\\n"), page)
    if said is None:
        return ["the page does not have the sentences of findings.md"]
    texts = iter(said.groups())
    wrong = []
    for claim, key, form in (place.groups() for place in places):
        row = rows[claim]
        text = next(texts)
        if key == "verdict":
            provisional = next(texts) is not None
            right = (text, provisional) == (row["verdict"], row["provisional"])
        else:
            value = row[key]
            value = value * 100 if form in ("points", "percent") else value
            value = math.exp(value) if form == "factor" else value
            last = 10.0 ** -len(text.partition(".")[2])
            if form == "factor" and value >= 50:  # three digits
                last = 10.0 ** (math.floor(math.log10(value)) - 2)
            shown = float(text.replace("\u2212", "-").replace(",", ""))
            right = abs(value - shown) <= 0.5 * last * (1 + 1e-9)
        if not right:
            wrong.append(f"{claim}.{key}: the page says {text}, by hand it is {row[key]}")
    return wrong


def observed(arms: dict[str, dict[int, by_hand.Run]], file: Path) -> dict[str, dict[str, Any]]:
    """What ``observed.yaml`` asks for, by its id; ``arms`` have the report's names."""
    rows = {}
    for entry in yaml.safe_load(file.read_text()):
        sides = [arms[entry[side]] for side in ("a", "b") if side in entry]
        values = []
        for seed in sorted(set.intersection(*map(set, sides))):
            target = None
            if "until" in entry:
                target = by_hand.tail(arms[entry["target"]][seed], entry["metric"])
            numbers = [observed_of(side[seed], entry, target) for side in sides]
            value = numbers[0]
            if len(numbers) > 1:
                value = by_hand.contrast(*numbers, "scale" in entry)
            values += [] if value is None else [value]
        found = by_hand.interval(values)
        ends = [found.low, found.high]
        if "over" in entry:
            ends = [max(-1, found.low), min(1, found.high)]
        rows[entry["id"]] = {"mean": found.mean, "low": ends[0], "high": ends[1]}
    return rows


def observed_of(run: by_hand.Run, entry: dict[str, Any], target: float | None) -> float | None:
    """The number of one run that an entry is about."""
    metric = entry["metric"]
    if "over" in entry:
        return by_hand.correlation_with_depth(run, metric, entry["without"])
    if "gradients" in entry:
        return by_hand.tail(run, metric, entry["gradients"])
    if "until" not in entry:
        score = by_hand.SCORES[entry.get("score", "tail")]
        number = score(run, metric)
        if "plus" in entry:
            number += score(run, entry["plus"])
        if "times_square_of" in entry:
            number *= score(run, entry["times_square_of"]) ** 2
        return number
    row = by_hand.arrival(run, metric, target or 0.0, True)
    return None if row is None else by_hand.cost_until(run, row, entry["until"])


def test_every_number_of_the_findings_is_a_calculated_one_rounded() -> None:
    committed()
    rows: dict[str, dict[str, Any]] = {}
    groups = by_hand.grouped(RESULTS)
    for group in groups:
        rows.update(by_hand.calculated_claims(group))
    for arm, group in shown_arms(groups).items():
        runs = group.arms[arm.rsplit("/", 1)[-1]].values()
        calculated = by_hand.calculated_arm(runs, "val/acc", True, ())
        rows[arm] = {score: of["mean"] for score, of in calculated["scores"].items()}
    named = shown_arms(groups)
    arms = {arm: group.arms[arm.rsplit("/", 1)[-1]] for arm, group in named.items()}
    seen = observed(arms, RESULTS / "observed.yaml")
    rows |= seen
    findings = (RESULTS / "findings.md").read_text()
    page = PAGE.read_text()
    assert not misquoted(findings, page, rows)
    # Every place is looked at: one digit or verdict that is changed is found.
    first = next(match for match in PLACE.finditer(findings) if match[3] == "points")
    value = rows[first[1]][first[2]] * 100
    shown = f"{value:+.2f} points"
    assert shown in page
    assert misquoted(findings, page.replace(shown, f"{value + 0.01:+.2f} points", 1), rows)


def test_the_calculation_imports_nothing_of_the_project() -> None:
    names = []
    for file in (by_hand.__file__, by_hand_statistics.__file__):
        for node in ast.walk(ast.parse(Path(file).read_text())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or ".")
    roots = {name.split(".")[0] for name in {*names} - {by_hand_statistics.__name__}}
    assert roots <= FOREIGN | set(sys.stdlib_module_names)
