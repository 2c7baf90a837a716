"""``python -m benchmarks.checkouts OLD NEW bits|time|memory``: do two checkouts do the same, and as
fast?

bits: small runs of many methods and settings, by each engine, in one process and in two, whole and
resumed in the middle; by hashes of all that they leave. time: seconds a round, the checkouts'
rounds in turn, and OLD's once more in another process, which shows the noise. memory: the peak of a
run with 10⁷ parameters. Each checkout runs in processes of its own.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORKLOADS = ("loop", "W1", "W4-scaffold", "W4-fedsmoo", "W5")
ENGINES = ("auto", "captured", "sequential")
METHODS = (("FedAvg", "sequential"), ("FedSMOO", "sequential"), ("FedSMOO", "captured"))
LEGEND = (
    "/2: in two processes; +: stopped after two rounds and resumed; refused: by both, or as "
    "told above."
)
Found = dict[str, dict[str, dict[str, Any]]]  # composition, kind: items, or refused, or failed


class Worker:
    """A script of this folder in a process of its own, with a checkout's code."""

    def __init__(
        self, script: str, checkout: Path, arguments: Sequence[object], folder: Path
    ) -> None:
        self.log = Path(tempfile.mkstemp(suffix=".log", dir=folder)[1])
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PL_", "FL_"))
        }
        environment |= {
            "PYTHONPATH": str(checkout),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        pipe, command = subprocess.PIPE, [sys.executable, str(HERE / script), *map(str, arguments)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=checkout,
                env=environment,
                stdin=pipe,
                stdout=pipe,
                stderr=log,
                text=True,
            )
        atexit.register(self.process.terminate)  # where another one failed

    def say(self, line: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """What the worker's next line says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise SystemExit(f"{self.process.args}\nfailed: {self.log.read_text()[-3000:]}")
        return json.loads(line)


def bits(old: Path, new: Path, patterns: Sequence[str], folder: Path) -> dict[str, Found]:
    """What the checkouts found, side by side."""
    workers = {}
    for who, checkout in {"old": old, "new": new}.items():
        (folder / who).mkdir()
        workers[who] = Worker("bits.py", checkout, [folder / who, *patterns], folder)
    return {who: worker.hear() for who, worker in workers.items()}


def verdict(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, str]:
    """One word on two runs, and more where there is more to say."""
    if "items" in old and "items" in new:
        ours, theirs = ({**one["items"], "engine": one["engine"]} for one in (old, new))
        # the new one may log more
        names = [name for name in ours if ours[name] != theirs.get(name)]
        # what is left first, then what was logged
        names.sort(key=lambda name: name.startswith("round "))
        more = f" and {len(names) - 6} more of {len(ours)}" if len(names) > 6 else ""
        return ("DIFFERENT", ", ".join(names[:6]) + more) if names else ("same", "")
    said = [
        next(f"{what}: {one[what]}" for what in ("failed", "refused", "items") if what in one)
        for one in (old, new)
    ]
    said = [text if not text.startswith("items") else "it ran" for text in said]
    told = f"old {said[0]}" if said[0] == said[1] else f"old {said[0]}\n      new {said[1]}"
    if "refused" in old and "refused" in new:
        return "refused", "" if said[0] == said[1] else told
    return ("FAILED" if "failed" in old and "failed" in new else "DIFFERENT"), told


def show(title: str, old: Found, new: Found) -> dict[str, dict[str, str]]:
    """Print the table of verdicts, and return it."""
    kinds = list(next(iter(old.values())))
    print(f"\n{title:24}" + "".join(f"{kind:>14}" for kind in kinds))
    verdicts: dict[str, dict[str, str]] = {}
    notes = []
    for composition in old:
        row = verdicts[composition] = {}
        for kind in kinds:
            row[kind], more = verdict(old[composition][kind], new[composition][kind])
            if more:
                notes.append(f"  {composition}, {kind}: {row[kind]}: {more}")
        print(f"{composition:24}" + "".join(f"{row[kind]:>14}" for kind in kinds), flush=True)
    words = Counter(word for row in verdicts.values() for word in row.values())
    print(
        f"{sum(words.values())} runs: "
        + ", ".join(f"{n} {word}" for word, n in words.most_common())
    )
    for note in notes:
        print(note)
    return verdicts


def trained(found: Found) -> None:
    """By kind: which engine trained, and how often.

    An engine asked for may hand over to another.
    """
    for kind in next(iter(found.values())):
        runs = Counter(kinds[kind].get("engine", "refused or failed") for kinds in found.values())
        print(f"  {kind:14} " + "; ".join(f"{n} {engine}" for engine, n in runs.most_common()))


def digests(found: Found) -> dict[str, dict[str, str]]:
    """One SHA-256 a run."""
    return {
        composition: {
            kind: hashlib.sha256(json.dumps(sorted(run["items"].items())).encode()).hexdigest()
            for kind, run in kinds.items()
            if "items" in run
        }
        for composition, kinds in found.items()
    }


def compare_bits(
    old: Path, new: Path, given: argparse.Namespace, folder: Path
) -> tuple[dict[str, Any], bool]:
    found = bits(old, new, given.only, folder)
    tables = {"bits": show("old against new", found["old"], found["new"])}
    print(LEGEND + " Who trained, in the new one:")
    trained(found["new"])
    alike = {
        word for table in tables.values() for row in table.values() for word in row.values()
    } <= {
        "same",
        "refused",
    }
    return {"verdicts": tables, "sha256": {who: digests(of) for who, of in found.items()}}, alike


def seconds_in_turn(
    checkouts: dict[str, Path], arguments: Sequence[object], turns: int, folder: Path
) -> dict[str, Any]:
    """Wall and CPU seconds of each turn but the first, by checkout.

    All processes live on, one computes at a time.
    """
    workers: dict[str, Worker] = {}
    for who, checkout in checkouts.items():
        workers[who] = Worker("rounds.py", checkout, ["time", *arguments, turns], folder)
        workers[who].hear()  # it is ready, and measures no engine any more
    taken: dict[str, list[tuple[float, float]]] = {who: [] for who in checkouts}
    order = list(checkouts)
    for turn in range(turns):
        for who in order[turn % len(order) :] + order[: turn % len(order)]:
            workers[who].say()
            taken[who].append(workers[who].hear())
    for worker in workers.values():
        worker.say()
    results = {}
    for who, worker in workers.items():
        wall, cpu = zip(*taken[who][1:], strict=True)
        results[who] = {"wall": wall, "cpu": cpu, **worker.hear()}
    return results


def compare_time(
    old: Path, new: Path, given: argparse.Namespace, folder: Path
) -> tuple[dict[str, Any], bool]:
    checkouts = {"old": old, "new": new, "again": old}
    print(
        "Seconds a turn: medians. Ratios turn by turn: median (quartiles); of the fastest "
        "turns; of CPU time, median."
    )
    print(
        f"'again' is OLD in another process: the noise.\n{'':24}{'old':>9}{'new':>9}   "
        f"{'new / old':39}again / old"
    )
    results: dict[str, Any] = {}
    for name in given.only or WORKLOADS:
        for engine in given.engines:
            found = seconds_in_turn(checkouts, [name, engine], given.repetitions + 1, folder)
            results[f"{name}, {engine}"] = found
            medians = "".join(
                f"{statistics.median(found[who]['wall']):9.4f}" for who in ("old", "new")
            )
            ratios = "".join(f"{ratio(found[who], found['old']):39}" for who in ("new", "again"))
            engines = list(dict.fromkeys(found[who]["engine"] for who in checkouts))
            same = "same bits" if found["old"]["w"] == found["new"]["w"] else "OTHER BITS"
            print(
                f"{name + ', ' + engine:24}{medians}   {ratios}{same}; {' / '.join(engines)}",
                flush=True,
            )
    return results, True


def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    wall, cpu = (
        [a / b for a, b in zip(ours[what], theirs[what], strict=True)] for what in ("wall", "cpu")
    )
    low, middle, high = (
        statistics.quantiles(wall, n=4, method="inclusive") if len(wall) > 1 else wall * 3
    )
    fastest = min(ours["wall"]) / min(theirs["wall"])
    return f"{middle:.3f} ({low:.3f} to {high:.3f}); {fastest:.3f}; {statistics.median(cpu):.3f}"


def compare_memory(
    old: Path, new: Path, given: argparse.Namespace, folder: Path
) -> tuple[dict[str, Any], bool]:
    print(
        "peak resident memory of ten clients over what the process held before, in vectors of "
        "D numbers"
    )
    results: dict[str, Any] = {}
    for method, engine in METHODS:
        for who, checkout in {"old": old, "new": new}.items():
            found = Worker("rounds.py", checkout, ["memory", method, engine], folder).hear()
            vectors = found["bytes"] / (4 * found["parameters"])
            results.setdefault(f"{method}, {engine}", {})[who] = {**found, "vectors": vectors}
        of = results[f"{method}, {engine}"]
        line = "   ".join(
            f"{who} {one['vectors']:6.1f} ({one['bytes'] / 1e6:,.0f} MB)" for who, one in of.items()
        )
        print(f"{method + ', ' + engine:24}{line}", flush=True)
    return results, True


COMPARE: dict[
    str, Callable[[Path, Path, argparse.Namespace, Path], tuple[dict[str, Any], bool]]
] = {
    "bits": compare_bits,
    "time": compare_time,
    "memory": compare_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkouts", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("what", choices=list(COMPARE))
    parser.add_argument(
        "--only", nargs="+", default=[], help="bits: patterns of compositions; time: workloads"
    )
    parser.add_argument("--repetitions", type=int, default=10, help="time: turns after the warm-up")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=ENGINES, help="time: which of them"
    )
    parser.add_argument("--out", type=Path, help="write all that was found there, as JSON")
    given = parser.parse_args()
    if given.repetitions < 1:
        parser.error("--repetitions has to be at least 1")
    checkouts = [given.old.resolve(), given.new.resolve()]
    for checkout in checkouts:
        if not (checkout / "fl_lightning" / "__init__.py").is_file():
            parser.error(
                f"{checkout} is no checkout of this repository: it has no package fl_lightning"
            )
    if given.what == "time" and (unknown := [name for name in given.only if name not in WORKLOADS]):
        parser.error(f"unknown workload {unknown[0]}; known are {', '.join(WORKLOADS)}")
    with tempfile.TemporaryDirectory() as folder:
        results, alike = COMPARE[given.what](*checkouts, given, Path(folder))
    if given.out:
        given.out.write_text(json.dumps(results, indent=1))
    sys.exit(0 if alike else "There are differences.")


if __name__ == "__main__":
    main()
