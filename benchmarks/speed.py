"""``python -m benchmarks.speed``: seconds a round of ours, a bare PyTorch loop and the peers that
are installed.

All do the same work on the same client arrays, interleaved in one run; medians, and ratios to the
bare loop at its best number of threads, which are taken pair by pair. A JSON file with all
repetitions is written beside the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.bare import prepared
from benchmarks.peers import PEERS, Peer, peers
from benchmarks.workloads import WORKLOADS, Ours, local_steps_timed
from fl_lightning import callbacks
from fl_lightning.machine.processes import usable_cores

Round = Callable[[], tuple[float, float]]
ENGINES = ("sequential", "concurrent", "stacked", "auto")


def timed(round: Callable[[], float]) -> Round:
    """A round that gives its mean loss, with its seconds."""

    def timed_round() -> tuple[float, float]:
        began = time.perf_counter()
        loss = round()
        return time.perf_counter() - began, loss

    return timed_round


def contenders(
    name: str, engines: list[str], cores: int, accelerator: str, others: bool
) -> tuple[dict[str, Round], list[Ours]]:
    work = WORKLOADS[name]
    on_cpu = accelerator == "cpu"
    found: dict[str, Round] = {}
    if on_cpu:
        loops = {
            f"bare, {n} thread{'s' * (n > 1)}": Peer("bare", n) for n in sorted({1, min(2, cores)})
        }
        found |= peers(work, {**loops, **(PEERS if others else {})})
    else:
        found["bare"] = timed(prepared(work, "cuda"))
    runs = []
    for engine in engines:
        run = Ours(work, engine, own_methods(name), accelerator=accelerator)
        runs.append(run)
        found[engine] = run.round
    return found, runs


def measure(
    name: str,
    engines: list[str],
    repetitions: int,
    cores: int,
    accelerator: str = "cpu",
    others: bool = True,
) -> dict[str, Any]:
    """Of one workload, by contender.

    All seconds, their median, the ratio to the bare loop, the last loss.
    """
    rounds, runs = contenders(name, engines, cores, accelerator, others)
    seconds: dict[str, list[float]] = {who: [] for who in rounds}
    losses: dict[str, list[float]] = {who: [] for who in rounds}
    for repetition in range(repetitions + 1):
        for who, round in rounds.items():
            took, loss = round()
            losses[who].append(loss)
            if repetition:  # the first is a warm-up
                seconds[who].append(took)
    for run in runs:
        run.close()
    engines_used = dict(zip(engines, (run.module.engine_facts for run in runs), strict=True))
    yardstick = min(
        (w for w in rounds if w.startswith("bare")), key=lambda w: statistics.median(seconds[w])
    )
    return {
        who: {
            "seconds": seconds[who],
            "median": statistics.median(seconds[who]),
            "ratio": statistics.median(
                b / s for b, s in zip(seconds[yardstick], seconds[who], strict=True)
            ),
            "loss": losses[who][-1],
            "engine": engines_used.get(who, {}),
        }
        for who in rounds
    }


def outside_of_steps(name: str, rounds: int) -> tuple[float, float]:
    """The shares of a round that make batches, and that neither do so nor are local steps.

    Clients train one after the other.
    """
    run = Ours(WORKLOADS[name], "sequential", own_methods(name))
    shares = []
    with local_steps_timed() as watched:
        for _ in range(rounds + 1):
            watched.steps = watched.reading = 0.0
            seconds, _ = run.round()
            shares.append((watched.reading / seconds, watched.steps / seconds))
    run.close()
    reading, steps = (statistics.median(column) for column in zip(*shares[1:], strict=True))
    return reading, 1 - steps - reading


def own_methods(name: str) -> list[Any]:
    return [getattr(callbacks, method)() for method in WORKLOADS[name].methods]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; none: all")
    parser.add_argument("--engines", default="sequential,concurrent,stacked,auto", help="by commas")
    parser.add_argument(
        "--accelerator",
        default="cpu",
        choices=["cpu", "gpu"],
        help="peers take part on a CPU alone",
    )
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path("speed.json"))
    given = parser.parse_args()
    if unknown := sorted(set(given.workloads) - set(WORKLOADS)):
        parser.error(f"unknown workload {unknown[0]}; known are {', '.join(WORKLOADS)}")
    engines = given.engines.split(",")
    if unknown := sorted(set(engines) - set(ENGINES)):
        parser.error(f"unknown engine {unknown[0]!r}; known are {', '.join(ENGINES)}")
    if given.accelerator == "gpu" and not torch.cuda.is_available():
        parser.error("no CUDA GPU is here")
    cores = usable_cores()
    results: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {cores} cores, torch "
        f"{torch.__version__}"
    }
    for name in given.workloads or WORKLOADS:
        results[name] = measure(
            name, engines, given.repetitions, cores, given.accelerator, not given.without_peers
        )
        print(f"\n{name}{'':22}seconds a round   × the bare loop's speed   training loss")
        for who, result in results[name].items():
            used = result["engine"]
            taken = " ".join(
                used[k]
                for k in ("engine", "workers", "memory", "capture")
                if k in used and who == "auto"
            )
            line = f"  {who:24}{result['median']:10.3f}{result['ratio']:20.2f}"
            line += f"{result['loss']:22.4f}   {taken}"
            print(line.rstrip(), flush=True)
        if given.accelerator == "cpu":
            reading, rest = outside_of_steps(name, min(3, given.repetitions))
            results[name]["outside local steps"] = {"reading": reading, "rest": rest}
            print(
                f"  of a round {100 * reading:.1f} % is reading and {100 * rest:.1f} % all else "
                "that is outside local steps (copies, sums)"
            )
        given.json.write_text(json.dumps(results, indent=1))
    print(f"\nAll repetitions: {given.json}")


if __name__ == "__main__":
    main()
