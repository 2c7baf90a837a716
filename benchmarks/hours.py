"""``python -m benchmarks.hours``: one long run of SCAFFOLD with a million registered clients.

In each round 100 clients take part, nearly all of them new. Rows of clients lie on disk, and a
checkpoint is written after every round. It prints, and draws over the rounds: seconds and processor
seconds per round, memory, the size of the run's folder beside that of the live rows, open files and
threads. It exits with 1 if memory passes 4 GiB, if the last rounds take over a tenth more processor
seconds than the first ones after the start, if the folder is larger than twice the live rows, or
if open files or threads grow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.scaling import Configuration, point

MEMORY = 4096  # MiB
WINDOW = 20  # rounds that are compared


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hours", description=__doc__)
    parser.add_argument("--clients", type=int, default=10**6)
    parser.add_argument("--participants", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=10**4)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--json", type=Path, default=Path("hours.json"))
    given = parser.parse_args()
    wanted = Configuration(
        "rounds",
        clients=given.clients,
        participants=given.participants,
        parameters=given.parameters,
        rounds=given.rounds,
    )
    facts = point(wanted)
    given.json.write_text(json.dumps(facts))
    draw(facts, wanted, given.json.with_suffix(".png"))
    return told(facts, wanted)


def live_rows(facts: dict[str, Any], wanted: Configuration, rounds: int) -> float:
    """MiB of the rows that clients have after so many rounds, if each takes part with equal
    chance."""
    share = 1 - (1 - wanted.participants / wanted.clients) ** rounds
    return float(wanted.clients * share * facts["parameters"] * 4 / 2**20)


def told(facts: dict[str, Any], wanted: Configuration) -> int:
    """Print what was found; 1 if a promise is broken."""
    # The first rounds warm up.
    first = statistics.median(facts["cpu_each"][10 : 10 + WINDOW])
    last = statistics.median(facts["cpu_each"][-WINDOW:])
    rows = live_rows(facts, wanted, wanted.rounds)
    open_files = facts["open_files"][10:]
    threads = facts["threads"][10:]
    lines = {
        f"memory at most {max(facts['resident']):.0f} MiB": max(facts["resident"]) < MEMORY,
        f"processor seconds per round: {first:.3f} after the start, {last:.3f} at the end, "
        f"{last / first:.2f} x": last < 1.1 * first,
        f"disk {facts['disk'][-1]:.0f} MiB, live rows {rows:.0f} MiB": facts["disk"][-1] < 2 * rows,
        f"open files {min(open_files)} to {max(open_files)}": open_files[-1] <= open_files[0],
        f"threads {min(threads)} to {max(threads)}": threads[-1] <= threads[0],
    }
    for line, kept in lines.items():
        print(f"{line}{'' if kept else ': TOO MUCH'}")
    return int(not all(lines.values()))


def draw(facts: dict[str, Any], wanted: Configuration, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, 4, figsize=(15, 3.2))
    seconds, memory, disk, counts = places
    seconds.plot(facts["seconds"], linewidth=0.5, label="seconds")
    seconds.plot(facts["cpu_each"], linewidth=0.5, label="processor seconds, with checkpoint")
    seconds.set_ylim(0, 3 * statistics.median(facts["cpu_each"]))
    memory.plot(facts["resident"], label="resident, MiB")
    memory.set_ylim(0, 1.3 * max(facts["resident"]))
    marks = [10 * k for k in range(1, len(facts["disk"]) + 1)]
    disk.plot(marks, facts["disk"], label="the run's folder, MiB")
    rows = [live_rows(facts, wanted, rounds) for rounds in marks]
    disk.plot(marks, rows, "--", label="live rows, MiB")
    counts.plot(facts["open_files"], label="open files")
    counts.plot(facts["threads"], label="threads")
    counts.set_ylim(0)
    for place in places:
        place.set_xlabel("round")
        place.grid(alpha=0.3)
        place.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
