"""``python -m benchmarks.scaling``: SCAFFOLD's seconds and bytes against clients, participants,
parameters, processes.

Each configuration is a run in a process of its own, so that its peak memory is its own, in a run
folder of its own with a checkpoint every ``--checkpoint-every`` rounds. At most
``--rows-in-memory`` clients' rows stay in memory; the others lie in the run folder's segments and
are read from there when their client takes part again.

With many registered clients nearly every participant is new and has no row yet to read. So on the
axis of clients, the largest configuration is run once more with participants drawn from
``--returning`` of its clients alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Configuration:
    """A run to be measured; ``returning``.

    Participants are drawn from so many clients (0: from all).
    """

    axis: str
    clients: int = 10_000
    returning: int = 0
    participants: int = 10
    parameters: int = 10_000
    processes: int = 1
    rounds: int = 100
    checkpoint_every: int = 1
    rows_in_memory: int = 100


VALUES = {
    "clients": [10**k for k in range(2, 7)],
    "participants": [1, 10, 100, 1000],
    "parameters": [10**k for k in range(3, 7)],
    "processes": [1, 2],
}
COLUMNS = {  # of the table: key -> (heading, width, format); MB are 2^20 bytes
    "clients": ("clients", 10, ","),
    "returning": ("returning", 10, ","),
    "participants": ("participants", 13, ","),
    "parameters": ("parameters", 11, ","),
    "processes": ("processes", 10, ""),
    "round": ("round s", 9, ".4f"),
    "round_late": ("last 1/10", 10, ".4f"),
    "whole": ("with ckpt s", 12, ".4f"),
    "whole_late": ("last 1/10", 10, ".4f"),
    "cpu": ("cpu s", 8, ".4f"),
    "cpu_late": ("last 1/10", 10, ".4f"),
    "peak_mb": ("peak MB", 8, ".1f"),
    "grown_mb": ("grown MB", 9, ".1f"),
    "disk_mb": ("disk MB", 8, ".1f"),
    "segments": ("segments", 9, ""),
    "start": ("start s", 8, ".1f"),
}


def point(wanted: Configuration) -> dict[str, Any]:
    """Measure in a process of its own (and those that it starts), in a folder that is removed
    afterwards."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        folder = Path(name)
        command = [
            sys.executable,
            "-m",
            "benchmarks.scaling_point",
            json.dumps(asdict(wanted)),
            name,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        every = [json.loads(path.read_text()) for path in sorted(folder.glob("facts-*.json"))]
        files = [path for path in (folder / "run").rglob("*") if path.is_file()]
        return {
            **asdict(wanted),
            **every[0],
            "cpu": sum(facts["cpu"] for facts in every),
            "cpu_late": sum(facts["cpu_late"] for facts in every),
            "peak_mb": sum(facts["peak_mb"] for facts in every),
            "grown_mb": sum(facts["grown_mb"] for facts in every),
            "disk_mb": sum(path.stat().st_size for path in files) / 2**20,
            "segments": sum(path.suffix == ".safetensors" for path in files),
        }


def plot(points: list[dict[str, Any]], path: Path) -> None:
    """A row for each axis: seconds, memory and disk against it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = list(dict.fromkeys(p["axis"] for p in points))
    seconds = {
        "round": "round",
        "round_late": "round, last tenth",
        "whole": "with checkpoint",
        "cpu": "CPU time of that",
    }
    panels = [
        ("seconds a round", seconds),
        ("MiB", {"peak_mb": "peak memory without imports"}),
        ("MiB", {"disk_mb": "run folder on disk"}),
    ]
    figure, grid = pyplot.subplots(len(axes), 3, figsize=(12, 3.2 * len(axes)), squeeze=False)
    for row, along in zip(grid, axes, strict=True):
        chosen = sorted(
            (p for p in points if p["axis"] == along and not p["returning"]), key=lambda p: p[along]
        )
        again = [p for p in points if p["axis"] == along and p["returning"]]
        for place, (unit, lines) in zip(row, panels, strict=True):
            for key, label in lines.items():
                (drawn,) = place.plot(
                    [p[along] for p in chosen], [p[key] for p in chosen], "o-", label=label
                )
                place.plot(
                    [p[along] for p in again],
                    [p[key] for p in again],
                    "x",
                    color=drawn.get_color(),
                    markersize=9,
                )
            if again:
                place.plot([], [], "kx", label=f"{again[0]['returning']:,} of them take part")
            if along == "processes":
                place.set_xticks([p[along] for p in chosen])
            else:
                place.set_xscale("log")
            if along in ("participants", "parameters"):
                place.set_yscale("log")
            else:
                place.set_ylim(0, 1.5 * max(p[key] for p in chosen + again for key in lines))
            place.set_xlabel("registered clients" if along == "clients" else along)
            place.set_ylabel(unit)
            place.grid(alpha=0.3)
            place.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def compare(points: list[dict[str, Any]]) -> None:
    """Of the axis of clients: the largest against the one that is nearest to as many clients as
    return."""
    clients = [p for p in points if p["axis"] == "clients"]
    for p in clients:
        if not p["returning"]:
            continue
        few = min(
            (q for q in clients if not q["returning"]),
            key=lambda q: abs(q["clients"] - p["returning"]),
        )
        many = next(q for q in clients if q["clients"] == p["clients"] and not q["returning"])
        for what, q in (("", many), (f", {p['returning']:,} take part", p)):
            ratios = ", ".join(
                f"{key} {q[key] / few[key]:.2f}" for key in ("round", "whole", "cpu", "peak_mb")
            )
            print(f"{q['clients']:,} clients{what}, as a multiple of {few['clients']:,}: {ratios}")


def configurations(given: argparse.Namespace) -> list[Configuration]:
    found = []
    for axis in VALUES if given.axis == "all" else [given.axis]:
        shared = Configuration(
            axis,
            rounds=given.rounds,
            checkpoint_every=given.checkpoint_every,
            rows_in_memory=given.rows_in_memory,
        )
        runs = [replace(shared, **{axis: value}) for value in given.values or VALUES[axis]]
        if axis == "clients" and runs[-1].clients > given.returning:
            runs.append(replace(runs[-1], returning=given.returning))
        found += runs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--axis", choices=[*VALUES, "all"], default="all")
    parser.add_argument(
        "--values", type=int, nargs="+", help="along the axis, ascending, instead of its usual ones"
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        default=1,
        help="rounds; the command line writes every round",
    )
    parser.add_argument("--rows-in-memory", type=int, default=100)
    parser.add_argument("--returning", type=int, default=1000)
    parser.add_argument(
        "--json", type=Path, default=Path("scaling.json"), help="the plot goes beside it, as .png"
    )
    given = parser.parse_args()
    if given.rounds < 2 or given.checkpoint_every < 1:
        parser.error("--rounds: at least 2 (the first warms up); --checkpoint-every: at least 1")
    if given.values and given.axis == "all":
        parser.error("--values needs one --axis")
    points: list[dict[str, Any]] = []
    print(f"{given.rounds} rounds each, a checkpoint every {given.checkpoint_every}")
    print("".join(f"{heading:>{width}}" for heading, width, _ in COLUMNS.values()), flush=True)
    for wanted in configurations(given):
        points.append(point(wanted))
        print(
            "".join(
                f"{points[-1][key]:>{width}{form}}" for key, (_, width, form) in COLUMNS.items()
            ),
            flush=True,
        )
        given.json.write_text(json.dumps(points, indent=1))
    compare(points)
    plot(points, given.json.with_suffix(".png"))
    print(f"{given.json}, {given.json.with_suffix('.png')}")


if __name__ == "__main__":
    main()
