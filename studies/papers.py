"""The papers' small twins, re-made: ``python -m studies.papers
{all,quick,full,keep,unpack,page,check}``.

``all`` runs every sweep of the protocol in its order, and takes up what a stop has left; ``quick``
runs P1, P2 and P5 with five seeds, 60 rounds, the learning rates that were kept, and the arms that
claims are about. Both write to
``runs/papers`` and say how their verdicts compare with those of ``studies/results``, which they
never touch. ``keep`` adds what has ended there to the tables in ``studies/results``; a row of which
runs are missing waits in ``studies/results/unfinished``. ``unpack`` makes folders of runs from all
these tables, in ``runs/papers/all``, where ``all`` goes on. ``page`` makes ``studies/results.md``
of the tables, with every number behind it in ``studies/results_tables.md``, and ``check`` holds
them to the protocol. ``full`` runs the papers' whole tables. Data:
FL_LIGHTNING_DATA, else fetched.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.lab.cli.compose import packaged, parse_yaml
from studies.kept import OF_A_SWEEP, UNFINISHED, keep_rows, read, unpack, unpacked
from studies.papers_text import filled, parted, without_a_claim

RESULTS = Path("studies/results")
PUBLISHED = Path(__file__).parent / "published"  # what the papers printed
PAGE = Path("studies/results.md")
TABLES = "results_tables.md"  # beside the page
OUT = Path("runs/papers")
ROWS = {  # in the order in which they run
    "P1, P3, P9": "fedinit/table3-fashionmnist-dir0.1-100-small",
    "P2": "fedinit/controls-fashionmnist-dir0.1-100-small",
    "P4": "fedinit/stability-fashionmnist-dir0.1-100-small",
    "P5, B3": "fedsmoo/table8-fashionmnist-path3-100-small",
    "P6": "fedsmoo/hessian-fashionmnist-dir0.1-100-small",
    "P7, P8": "fedals/table2-cifar10-shards-5-small",
    "HAR": "fedinit/table3-har-subjects-21-small",
    "C5": "fedals/table1-shakespeare-parts-5-small",
    "D1": "fedinit/table8-fashionmnist-dir0.1-100-small",
    "D3": "fedals/theorem1-fashionmnist-iid-small",
    "A8": "fedinit/table1-fashionmnist-splits-100-small",
    "T1": "fedinit/table1-fashionmnist-dir0.1-100-small",
    "A6": "fedinit/figure1-fashionmnist-dir0.1-100-small",
    "A7-models, A7-updates": "fedinit/table2-fashionmnist-dir0.1-100-small",
    "C2": "fedals/table1-cifar10-iid-5-small",
    "C4": "fedals/table1-cifar10-shards-5-small",
    "L1": "fedinit/table3-cifar10-dir0.1-100-small",
    "L2": "fedsmoo/table8-cifar10-path3-100-small",
    "O1": "methods/optimizers-shakespeare-parts-5-small",
    "P10": "fedals/table1-cifar10-shards-5-long-small",
}
FIRST = "protocol-1"
# the rows that a later protocol added
LATER = {"A7-models, A7-updates": "protocol-2", "P10": "protocol-3", "O1": "protocol-4"}
QUICK = ("P1, P3, P9", "P2", "P5, B3")
CUT = ("seed_everything=[20,21,22,23,24]", "trainer.max_epochs=60")
INTERVAL = ("mean", "low", "high", "n")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what ``argv`` asks for; the status of the last sweep that did not end well, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.papers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("what", choices=["all", "quick", "full", "keep", "unpack", "page", "check"])
    parser.add_argument("--dry_run", action="store_true", help="all, quick: list what would run")
    parser.add_argument("--jobs", help="all, quick: runs at once")
    parser.add_argument(
        "--rows", nargs="*", default=list(ROWS), choices=ROWS, help="all: these alone"
    )
    given = parser.parse_args(argv)
    more = [
        *(["--dry_run"] if given.dry_run else []),
        *(["--jobs", given.jobs] if given.jobs else []),
    ]
    status = 0
    if given.what == "full":
        names = [
            name for name in packaged() if name.startswith("experiment/") and name.endswith("-full")
        ]
        for name in sorted(names):
            status = (
                subprocess.call([sys.executable, "-m", "fl_lightning", *sweep(name, "full"), *more])
                or status
            )
        return status
    if given.what == "keep":
        return keep_rows(OUT / "all", RESULTS)
    if given.what == "unpack":
        unpack(RESULTS, OUT / "all")
        unpack(RESULTS / UNFINISHED, OUT / "all")
        return 0
    if given.what == "page":
        return page(RESULTS, PAGE)
    if given.what == "check":
        found = objections(RESULTS)
        print("\n".join(found) or "every run is the protocol's")
        return int(bool(found))
    for row in QUICK if given.what == "quick" else given.rows:
        command = sweep(ROWS[row], given.what)
        if (
            given.what == "quick"
            and row != "P1, P3, P9"
            and not any("select.from" in part for part in command)
        ):
            print(
                f"{row}: no learning rates are kept in {RESULTS}: they are chosen first, "
                "which takes longer"
            )
        print(f"{row}: {' '.join(command)}", flush=True)
        status = subprocess.call([sys.executable, "-m", "fl_lightning", *command, *more]) or status
    if not given.dry_run:
        report(sweeps(OUT / given.what), OUT / given.what / "report")
        compare(RESULTS / "report.json", OUT / given.what / "report/report.json")
    return status


def sweep(name: str, what: str) -> list[str]:
    """The command of one sweep, from data that are there or are fetched."""
    stem = name.rpartition("/")[2]
    file = f"experiment/{name.removeprefix('experiment/')}"
    command = [
        "sweep",
        str(cut(file)) if what == "quick" else file,
        "--out",
        str(OUT / what / stem),
    ]
    root = os.environ.get("FL_LIGHTNING_DATA")
    text = "shakespeare" in name or "multinli" in name  # what is read, one gets oneself
    command += (
        [f"data.init_args.root={root}"]
        if root
        else []
        if text
        else ["data.init_args.download=true"]
    )
    if what == "quick":
        command += CUT
        column = 1 + OF_A_SWEEP.index("selections.yaml")
        stored = {row[0]: row[column] for row in read(RESULTS / "sweeps.csv")}
        if chosen := stored.get(stem):
            file_of_rates = OUT / "quick" / f"{stem}.selections.yaml"
            file_of_rates.write_text(chosen, "utf-8")
            command.append(f"select.from={file_of_rates}")
    return command


def cut(name: str) -> Path:
    """The packaged sweep with those arms alone that a claim is about: others decide no verdict."""
    file = Path(str(packaged()[name]))
    document = parse_yaml(file.read_text("utf-8"))
    claims = file.with_name(document["claims"])
    claimed: set[Any] = set()
    for claim in parse_yaml(claims.read_text("utf-8")):
        claimed.update(claim[key] for key in ("a", "b", "c", "d", "arm", "against") if key in claim)
    methods = document["grid"]["method"]
    document["grid"]["method"] = [method for method in methods if method["name"] in claimed]
    document["claims"] = str(claims)
    made = OUT / "quick" / file.name
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), "utf-8")
    return made


def sweeps(folder: Path) -> list[Path]:
    """The sweeps in ``folder`` of which a run has begun, in the order of the rows."""
    order = [name.rpartition("/")[2] for name in ROWS.values()]
    found = [
        path.parent
        for path in folder.glob("*/sweep.yaml")
        if any(path.parent.glob("*/seed-*/run.json"))
    ]
    return sorted(
        found,
        key=lambda path: (order.index(path.name) if path.name in order else len(order), path.name),
    )


def report(
    folders: Sequence[Path], out: Path, labels: Mapping[str, str] | None = None, *more: str
) -> int:
    """One report over ``folders``; ``labels``: what arms are called, ``more``: options."""
    from fl_lightning.lab.report.report_command import main as write
    from studies.printed import Printed

    options = list(more)
    for arm, text in (labels or {}).items():
        options += ["--label", f"{arm}={text}"]
    printed = Printed(sorted(PUBLISHED.glob("*.yaml")))
    status = write([*map(str, folders), "--out", str(out), *options], printed.tables)
    printed.add_to(out / "report.json")
    return status


def labels_of(folders: Sequence[Path], labels: Path) -> dict[str, str]:
    """What the arms of these sweeps are called, of a file ``{sweep: {arm: text}}``.

    An arm that two sweeps have is called ``<sweep>/<arm>`` by the report.
    """
    if not labels.is_file():
        return {}
    by_sweep = parse_yaml(labels.read_text("utf-8"))
    held: dict[str, set[str]] = {}
    for folder in folders:
        held[folder.name] = {path.parent.name for path in folder.glob("*/seed-*")}
    texts = {}
    for sweep, arms in held.items():
        others: set[str] = set()
        others.update(*(names for name, names in held.items() if name != sweep))
        for arm, text in by_sweep.get(sweep, {}).items():
            if arm in arms:
                texts[f"{sweep}/{arm}" if arm in others else arm] = text
    return texts


# --------------------------------------------------------------------------- the page


def page(results: Path, target: Path) -> int:
    """``studies/results.md``: the findings in words, the claims' verdicts, and what has no runs
    yet.

    The report's other tables over what is kept are beside it.
    """
    with unpacked(results) as made:
        return page_of(sweeps(made), results, target)


def page_of(folders: Sequence[Path], results: Path, target: Path) -> int:
    """The page over these sweeps' ``folders``, with the texts that are in ``results``."""
    from PIL import Image

    text = "# The papers, re-made on a small machine\n\n"
    text += (
        "Generated by `make results`; [protocol.md](protocol.md) says what was fixed before "
        "the runs.\n"
    )
    if (results / "protocol.txt").is_file():
        commits = (f"{commit} {tag}" for tag, commit in protocols(results).items())
        text += f"The protocol's commit: {', '.join(commits)}.\n"
    if folders:
        with tempfile.TemporaryDirectory() as made:
            out = Path(made)
            # The runs shared their machine with other work, which lengthens their seconds.
            labels = labels_of(folders, results / "labels.yaml")
            if report(folders, out, labels, "--no_seconds", "--figures", "png"):
                return 1
            # The page names the folders that the runs have within the tables.
            for file in (out / "report.json", out / "report.md"):
                named = file.read_text("utf-8").replace(str(folders[0].parent), str(results))
                file.write_text(named, "utf-8")
            said = json.loads((out / "report.json").read_text("utf-8"))
            seen = observed(folders, results / "observed.yaml")
            below = (out / "report.md").read_text("utf-8").partition("\n")[2]
            shutil.copy(out / "report.json", results / "report.json")
            shutil.rmtree(results / "figures", ignore_errors=True)
            (results / "figures").mkdir(parents=True)
            for figure in (out / "figures").glob("*.png"):
                # A picture of lines needs few colours, and takes a third of the place with them.
                with Image.open(figure) as drawn:
                    few = drawn.convert("RGB").quantize(48)
                few.save(results / "figures" / figure.name, optimize=True)
        findings = results / "findings.md"
        if findings.is_file():
            known = {**said, "claims": [*said["claims"], *seen]}
            text += "\n" + filled(findings.read_text("utf-8"), known)
        text += "\n" + scope(folders, said)
        below = below.replace("](figures/", f"]({results.name}/figures/")
        here, beside = parted(below)
        text += f"{here}\nAll other tables, and each run: [tables]({TABLES}).\n"
        text += without_a_claim(seen)
        title = "# The papers, re-made on a small machine: all tables\n\n"
        made_by = f"Generated by `make results`. What they show: [results]({target.name}).\n"
        target.with_name(TABLES).write_text(f"{title}{made_by}\n{beside}", "utf-8")
    begun = {folder.name for folder in folders}
    absent = {row: name for row, name in ROWS.items() if name.rpartition("/")[2] not in begun}
    rows = ""
    for name in absent.values():
        for claim in claims_of(name):
            rows += (
                f"| {claim['id']} | {claim['paper_predicts']} | {claim['we_predict']} | "
                f"`{name}` |\n"
            )
    if rows:
        text += "\n## No runs yet\n\n<details><summary>{} rows</summary>\n\n".format(
            rows.count("\n")
        )
        text += "| claim | the paper predicts | we predict | sweep |\n|---|---|---|---|\n"
        text += f"{rows}\n</details>\n"
    target.write_text(text, "utf-8")
    print(f"→ {target}")
    return 0


def observed(folders: Sequence[Path], entries: Path) -> list[dict[str, Any]]:
    """What the runs show where no claim was made, each entry with mean, low, high and n.

    An entry has the arms a and b, or only a, which gives a level. Its number of a seed is a
    metric's ``score``, the ``tail`` if none is named. With ``gradients`` it is the mean over the
    last third of that many local gradients. With ``until`` it is what was spent of that until
    ``target``'s tail was reached. With ``over: layers`` it is the rank correlation of layers'
    places and values, but for the layers of ``without``. ``plus`` names a metric whose score is
    added, and ``times_square_of`` one by whose squared score the number is multiplied.
    ``scale: log_ratio`` compares by a factor.
    """
    from fl_lightning.lab.report.evidence import between, over_layers
    from fl_lightning.lab.report.intervals import paired
    from fl_lightning.lab.report.runs import find
    from fl_lightning.lab.report.scores import reached, score_of, summed, tail_of

    if not entries.is_file():
        return []
    arms = find(folders).arms

    def number(entry: Mapping[str, Any], arm: str, seed: int) -> float | None:
        run = next(run for run in arms[arm] if run.seed == seed)
        if "over" in entry:
            return over_layers(run, entry["metric"], entry["without"])
        if "gradients" in entry:
            spent = summed(run, "cost/gradients")
            return tail_of(run, entry["metric"], spent, entry["gradients"])
        if "until" not in entry:
            asked = [entry.get(key) for key in ("metric", "plus", "times_square_of")]
            score = entry.get("score", "tail")
            value, added, factor = (score_of(run, of, score) if of else None for of in asked)
            if value is None:
                return None
            value += 0 if added is None else added
            return value if factor is None else value * factor**2
        target = number({"metric": entry["metric"]}, entry["target"], seed)
        if target is None:
            return None
        reached_at = reached(run, entry["metric"], target)[entry["until"]]
        return None if reached_at is None else float(reached_at)

    made = []
    for entry in parse_yaml(entries.read_text("utf-8")):
        sides = [entry[side] for side in ("a", "b") if side in entry]
        seeds = set.intersection(*({run.seed for run in arms[arm]} for arm in sides))
        values = []
        for seed in sorted(seeds):
            numbers = [number(entry, arm, seed) for arm in sides]
            pair = len(numbers) > 1
            value = between(entry.get("scale", ""), *numbers) if pair else numbers[0]
            values += [] if value is None else [value]
        interval = paired(values)
        row = {**entry, **{key: getattr(interval, key) for key in INTERVAL}}
        if "over" in entry:  # no correlation is beyond ± 1
            row |= {"low": max(-1.0, interval.low), "high": min(1.0, interval.high)}
        made.append(row)
    return made


def scope(folders: Sequence[Path], said: Mapping[str, Any]) -> str:
    """How much of the protocol is judged so far, and what its runs came from."""
    from fl_lightning.lab.report.report_tables import machines

    every = [claim for name in ROWS.values() for claim in claims_of(name)]
    predicted = {claim["id"]: claim["paper_predicts"] for claim in every}
    verdicts = Counter(claim["verdict"] for claim in said["claims"])
    judged = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items()))
    runs = [
        json.loads(path.read_text("utf-8"))
        for folder in folders
        for path in folder.glob("*/seed-*/run.json")
    ]
    days = sorted(str(run.get("started"))[:10] for run in runs)
    commits = sorted({str(run.get("commit"))[:9] for run in runs})
    versions = {f"{name} {v}" for run in runs for name, v in run["versions"].items()}
    ours = sum(
        claim["verdict"] == "reproduced" and not of_a_paper(predicted.get(claim["id"], ""))
        for claim in said["claims"]
    )
    count = len(said["claims"])
    whole = f"All {count}" if count == len(every) else f"So far {count} of {len(every)}"
    sweeps = f"{len(folders)} of {len(ROWS)}" if len(folders) < len(ROWS) else f"{len(folders)}"
    return (
        f"**{whole} claims are judged** ({judged}; "
        f"{ours} of those reproduced are predictions of our own, which no paper makes), from "
        f"{len(runs)} runs of {sweeps} sweeps, made from {days[0]} to "
        f"{days[-1]}, at {', '.join(commits)}, with {', '.join(sorted(versions))}.\n"
        f"{machines(runs)} Other work ran on it meanwhile, so no seconds are compared.\n"
        "`val/acc` and `val/loss` are measured on the test set. Intervals cover the seeds: initial "
        "weights, split, participants and batches. Rows share their seeds, and some their "
        "settings: equal runs stand in several rows, so verdicts of different rows are not "
        "independent.\n"
    )


def of_a_paper(predicts: str) -> bool:
    """Whether a paper says so, by what the protocol notes as its prediction."""
    ours = ("nothing", "no such rival", "not alike", "no prediction", "no difference")
    return not predicts.startswith(ours)


def claims_of(name: str) -> list[dict[str, Any]]:
    """The claims of a packaged sweep."""
    file = Path(str(packaged()[f"experiment/{name}"])).with_suffix(".claims.yaml")
    return list(parse_yaml(file.read_text("utf-8")))


def objections(results: Path) -> list[str]:
    """What speaks against the runs in ``results``, held to the commits that ``protocol.txt`` there
    names: each row to that of the protocol that it came with.

    Each run, also those that selected, began after that commit, in a clean checkout of it or of a
    later one with the same configs, with the protocol's sweep file and claims. It is a run of the
    protocol, none is silently absent, and no seed that selected is reported.
    """
    with unpacked(results) as made:
        return objections_to(sweeps(made), results)


def objections_to(folders: Sequence[Path], results: Path) -> list[str]:
    """What speaks against the runs in the sweeps' ``folders``, by ``results``' protocol.txt."""
    commits = protocols(results)
    objected = []
    for folder in folders:
        row, name = next(item for item in ROWS.items() if item[1].rpartition("/")[2] == folder.name)
        tag = LATER.get(row, FIRST)
        if tag not in commits:
            objected.append(f"{folder.name}: {tag} is not in {results / 'protocol.txt'}")
            continue
        protocol = commits[tag]
        with (folder / "runs.csv").open(encoding="utf-8", newline="") as file:
            listed = {f"{row['arm']}/seed-{row['seed']}" for row in csv.DictReader(file)}
        planned = set(places(name))
        kept = places_in(folder, "*/seed-*")
        selecting = places_in(folder, "select/*/*/seed-*")
        reported = {place.rpartition("/")[2] for place in planned}
        about = [(place, "is no run of the protocol") for place in kept - planned]
        about += [(place, "is absent and not listed") for place in planned - kept - listed]
        about += [(p, "selects by a reported seed") for p in selecting if Path(p).name in reported]
        sweep_file = git("show", f"{protocol}:configs/experiment/{name}.yaml", strip=False)
        text = (folder / "sweep.yaml").read_text("utf-8")
        if text.startswith(sweep_file):
            overrides = text.removeprefix(sweep_file).strip().removeprefix("# over it: ").split()
            other = [each for each in overrides if not each.startswith("data.init_args.root=")]
            about += [("sweep.yaml", f"was run with {override}") for override in other]
        else:
            about.append(("sweep.yaml", "is not the protocol's"))
        claims = git("show", f"{protocol}:configs/experiment/{name}.claims.yaml", strip=False)
        stated = hashlib.sha256(claims.encode()).hexdigest()
        for place in (kept & planned) | selecting:
            run = json.loads((folder / place / "run.json").read_text("utf-8"))
            about += [(place, what) for what in of_a_run(run, protocol, name)]
            if place in kept and run["claims_hash"] != stated:
                about.append((place, "had other claims"))
        objected += [f"{folder.name}/{place}: {what}" for place, what in sorted(about)]
    return objected


def protocols(results: Path) -> dict[str, str]:
    """Tag → commit, of the lines of ``protocol.txt``."""
    lines = (results / "protocol.txt").read_text("utf-8").splitlines()
    return {tag: commit for commit, tag in map(str.split, lines)}


def of_a_run(run: Mapping[str, Any], protocol: str, name: str) -> list[str]:
    """What speaks against one run of a packaged sweep, by its run.json."""
    started = datetime.fromisoformat(str(run["started"]).replace("Z", "+00:00"))
    started = started.replace(tzinfo=started.tzinfo or timezone.utc)
    early = ["began before the protocol"] if started <= made_at(protocol) else []
    return early + of_sources(str(run["commit"]), protocol, name)


@cache
def of_sources(commit: str, protocol: str, name: str) -> list[str]:
    """What speaks against the sources that a run of a packaged sweep came from."""
    if commit.endswith("-dirty") or not descends(commit, protocol):
        return [f"ran from {commit}"]
    if git("diff", "--name-only", protocol, commit, "--", *frozen(name)):
        return [f"ran from {commit}, whose configs are others"]
    return []


def frozen(name: str) -> list[str]:
    """The files of a packaged sweep: its own, its claims, and the configs that it names."""
    from fl_lightning.lab.sweep.grid import arms
    from fl_lightning.lab.sweep.sweep_file import read_spec

    named: set[str] = set()
    for arm in arms(read_spec(f"experiment/{name}")):
        named.update(arm.configs)
    own = [f"experiment/{name}", f"experiment/{name}.claims"]
    return [f"configs/{config}.yaml" for config in [*own, *sorted(named)]]


@cache
def made_at(commit: str) -> datetime:
    """When a commit was made."""
    return datetime.fromisoformat(git("show", "-s", "--format=%cI", commit))


def places_in(folder: Path, pattern: str) -> set[str]:
    """The folders of runs within ``folder``, such as ``<arm>/seed-<s>``."""
    runs = folder.glob(f"{pattern}/run.json")
    return {path.parent.relative_to(folder).as_posix() for path in runs}


def places(name: str) -> list[str]:
    """``<arm>/seed-<s>`` of every run that a packaged sweep has."""
    from fl_lightning.lab.sweep.grid import arms
    from fl_lightning.lab.sweep.sweep_file import read_spec

    spec = read_spec(f"experiment/{name}")
    return [f"{arm.name}/seed-{seed}" for arm in arms(spec) for seed in spec.seeds or []]


def descends(commit: str, ancestor: str) -> bool:
    """Whether ``commit`` is ``ancestor`` or has it among its own."""
    command = ["git", "merge-base", "--is-ancestor", ancestor, commit]
    return subprocess.run(command, capture_output=True).returncode == 0


def git(*command: str, strip: bool = True) -> str:
    """What git says."""
    said = subprocess.run(["git", *command], capture_output=True, text=True, check=True).stdout
    return said.strip() if strip else said


def compare(committed: Path, ours: Path) -> None:
    """Print the verdicts of ``ours`` beside the committed ones."""
    if not ours.is_file():
        return
    then = _verdicts(committed) if committed.is_file() else {}
    for claim, verdict in _verdicts(ours).items():
        before = then.get(claim, "no committed verdict")
        print(f"{claim}: {verdict}" + ("" if verdict == before else f" (committed: {before})"))


def _verdicts(path: Path) -> dict[str, str]:
    return {
        claim["id"]: claim["verdict"] for claim in json.loads(path.read_text("utf-8"))["claims"]
    }


if __name__ == "__main__":
    raise SystemExit(main())
