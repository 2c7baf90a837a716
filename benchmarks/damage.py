"""``python -m benchmarks.damage {flips,disk,memory}``: what a run does when its files or its
machine are damaged.

``flips``: bytes of a finished run's and a finished sweep's files are changed one at a time, in
checkpoints, segments of clients' rows, their indices, run.json, config.yaml and the sweep's tables.
Then the run goes on for two rounds, and ``report`` reads it. Each change has to be refused in a
paragraph without a traceback, or to leave the bits of a run that nothing happened to.
``disk``: a tmpfs of its own fills up, becomes read-only or is slow while a run writes into it, at
each kind of file that a run writes (as root).
``memory``: RLIMIT_AS ends the memory of a process while its clients train.
After ``disk`` and ``memory`` the run is started again with room, and has to leave the bits of a run
that nothing happened to. Each command prints a table, and exits with 1 if something else happened.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import resource
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.soak import COMMON, PATIENCE, Attempt, in_a_process, kill, waited
from fl_lightning.__main__ import main as command
from fl_lightning.client.local_step import LocalStep
from fl_lightning.lab.cli import run_record
from fl_lightning.lab.cli.run_folder import RunEvents
from fl_lightning.record.metrics_csv import MetricsCSV
from fl_lightning.storage import segments
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO

METHOD = ["-c", "method/scaffold", "-c", "method/ri", "--model.engine", "sequential"]
RUN = [*COMMON, *METHOD]
SWEEP = """configs: [base, data/digits, trainer/cpu]
fixed: {trainer.max_epochs: 2, trainer.enable_progress_bar: false, model.participation: 0.5}
grid:
  method: [{name: fedavg, configs: [method/fedavg]}, {name: fedinit, configs: [method/ri]}]
  seed_everything: [0]
"""
# what is flipped: a pattern below the folder of the run or of the sweep
KINDS = {
    "checkpoint": "run/checkpoints/last.ckpt",
    "segment": "run/state/**/*.safetensors",
    "index": "run/state/**/*.safetensors",
    "run.json": "run/run.json",
    "config.yaml": "run/config.yaml",
    "sweep's tables": "sweep/*.*",
    "run.json in a sweep": "sweep/*/seed-0/run.json",
    "config.yaml in a sweep": "sweep/*/seed-0/config.yaml",
    "metrics.csv in a sweep": "sweep/*/seed-0/metrics.csv",
}


def started(argv: list[str], log: Path, before: Callable[[], None] | None = None) -> int:
    """Start a command in a forked process, whose text goes to ``log``; the process."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        torch.set_num_threads(1)
        if before is not None:
            before()
        status = int(command(argv) or 0)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(bool(error.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def ended(child: int) -> int:
    """The status of a started command; one that takes too long is killed."""
    statuses = waited(Attempt([child], [], time.monotonic()), time.monotonic() + PATIENCE)
    if statuses is not None:
        return statuses[0]
    kill(child)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def called(argv: list[str], log: Path, before: Callable[[], None] | None = None) -> int:
    return ended(started(argv, log, before))


def told(log: Path) -> str:
    """The last paragraph of what a command wrote."""
    text = log.read_text(errors="replace")
    return text.strip().rpartition("\n\n")[2][-700:]


def broken(log: Path) -> bool:
    return "Traceback (most recent call last)" in log.read_text(errors="replace")


class Flips:
    """Flips in copies of one run and one sweep."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder = folder
        self.draw = draw
        self.log = folder / "log.txt"
        self.whole = folder / "whole"
        self.whole.mkdir()
        self.run(self.whole / "run", 6)
        (folder / "sweep.yaml").write_text(SWEEP)
        self.sweep = ["sweep", str(folder / "sweep.yaml"), "--out"]
        if called([*self.sweep, str(self.whole / "sweep")], self.log):
            raise SystemExit(self.log.read_text())
        undisturbed = folder / "undisturbed"
        shutil.copytree(self.whole, undisturbed, symlinks=True)
        self.run(undisturbed / "run", 8)
        self.expected = in_a_process(undisturbed / "run")
        self.reports = self.reported(undisturbed)

    def run(self, folder: Path, rounds: int) -> int:
        """Start the run, or go on with it, as its folder says."""
        exists = (folder / "config.yaml").exists()
        argv = ["fit", str(folder)] if exists else [*RUN, "--trainer.default_root_dir", str(folder)]
        return called([*argv, "--trainer.max_epochs", str(rounds)], self.log)

    def reported(self, there: Path) -> tuple[str, str]:
        """The tables that ``report`` writes of the sweep, and its notes; empty if it refuses."""
        sweep = there / "sweep"
        if called(["report", str(sweep)], self.log):
            return "", ""
        text = self.log.read_text(errors="replace").replace(str(there), "")
        notes = [line for line in text.splitlines() if line.startswith("note:")]
        tables = [(sweep / name).read_text() for name in ("report.csv", "curves.csv")]
        return "".join(tables).replace(str(there), ""), "\n".join(notes)

    def flip(self, kind: str) -> tuple[str, str]:
        """Change one byte of a kind of file, and see; the outcome and where it was."""
        there = self.folder / "flipped"
        shutil.rmtree(there, ignore_errors=True)
        shutil.copytree(self.whole, there, symlinks=True)
        files = [path for path in sorted(there.glob(KINDS[kind])) if path.is_file()]
        files = [path for path in files if path.stat().st_size and not path.is_symlink()]
        path = self.draw.choice(files)
        content = bytearray(path.read_bytes())
        # A segment's index is its header, whose length is its first eight bytes.
        index = 8 + int.from_bytes(content[:8], "little")
        place = self.draw.randrange(index if kind == "index" else len(content))
        old = content[place]
        content[place] = self.other(old, kind)
        path.unlink()
        path.write_bytes(content)
        where = f"{path.relative_to(there)}, byte {place}: {old} to {content[place]}"
        if "sweep" in kind:
            return self.read_again(there), where
        status = self.run(there / "run", 8)
        if broken(self.log):
            return "TRACEBACK", where
        if status:
            return "refused", where
        found = in_a_process(there / "run")
        if "refused" in found:
            return "refused once it is read", where
        return ("harmless" if found == self.expected else "SILENTLY WRONG"), where

    def other(self, byte: int, kind: str) -> int:
        """Another byte; in half of a text's, a digit for a digit and a letter for a letter."""
        if kind not in ("checkpoint", "segment", "index") and self.draw.random() < 0.5:
            for alike in (string.digits, string.ascii_lowercase):
                if chr(byte) in alike:
                    return ord(self.draw.choice(alike.replace(chr(byte), "")))
        return byte ^ self.draw.randrange(1, 256)

    def read_again(self, there: Path) -> str:
        """Read the sweep, go on with it, and read it again."""
        before = self.reported(there)
        if broken(self.log):
            return "TRACEBACK"
        status = called([*self.sweep, str(there / "sweep")], self.log)
        if broken(self.log):
            return "TRACEBACK"
        if not before[0] or status:
            return "refused"
        if before[0] == self.reports[0] == self.reported(there)[0]:
            return "harmless"
        return "noted" if before[1] != self.reports[1] else "SILENTLY WRONG"


def flips(given: argparse.Namespace, folder: Path) -> int:
    draw = random.Random(given.seed)
    trial = Flips(folder, draw)
    found: dict[str, Counter[str]] = {kind: Counter() for kind in given.only}
    bad = []
    for number in range(given.number):
        kind = given.only[number % len(given.only)]
        outcome, where = trial.flip(kind)
        found[kind][outcome] += 1
        if outcome.isupper():
            bad.append(f"{outcome}: {where}\n    {told(trial.log)}")
            print(bad[-1], flush=True)
        elif given.verbose:
            print(f"{outcome}: {where}\n    {told(trial.log)}", flush=True)
    for kind, outcomes in found.items():
        print(f"{kind}: " + ", ".join(f"{n} {outcome}" for outcome, n in outcomes.items()))
    return int(bool(bad))


@contextmanager
def tmpfs(folder: Path) -> Iterator[None]:
    """Within this context the folder is a file system of 64 MiB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def of_a_run(folder: Path, log: Path, *more: str) -> dict[str, str]:
    """The bits of a run that nothing happened to."""
    if called([*RUN, "--trainer.default_root_dir", str(folder), *more], log):
        raise SystemExit(log.read_text())
    return in_a_process(folder)


def compared(name: str, folder: Path, expected: dict[str, str], log: Path, *more: str) -> str:
    """Start again, with room, and compare; what was wrong."""
    if called([*RUN, "--trainer.default_root_dir", str(folder), *more], log):
        return f"{name}: it does not go on: {told(log)}"
    return "" if in_a_process(folder) == expected else f"{name}: it went on to other bits"


def disk(given: argparse.Namespace, folder: Path) -> int:
    """Fill the disk, make it read-only or slow, where a run writes a file of each kind."""
    draw = random.Random(given.seed)
    log = folder / "log.txt"
    expected = of_a_run(folder / "undisturbed", log)
    met: dict[str, Counter[str]] = {}
    wrong = []
    ways = [(way, place) for place in WRITERS for way in ("full", "read-only")]
    ways += [("slow", "")] + [("nearly full", "")] * 5
    for number in range(given.number):
        way, place = ways[number % len(ways)]
        name = f"{way} {place}".strip()
        mounted = folder / f"disk-{number}"
        with tmpfs(mounted):
            run = mounted / "run"
            start = [*RUN, "--trainer.default_root_dir", str(run)]
            status = damaged(start, mounted, way, place, draw, log)
            if broken(log):
                wrong.append(f"TRACEBACK, {name}: {told(log)}")
            said = place_of(told(log)) if status else "(none, it came to its end)"
            met.setdefault(name, Counter())[said] += 1
            if given.verbose:
                print(f"{name}: status {status}: {told(log)}", flush=True)
            wrong += filter(None, [compared(name, run, expected, log)])
    for name, files in met.items():
        print(f"{name:22} {', '.join(f'{n} × {what}' for what, n in files.items())}")
    print("\n".join(wrong) or "every run went on to the bits of one that nothing happened to")
    return int(bool(wrong))


# The function that writes each kind of file.
WRITERS: dict[str, tuple[Any, str]] = {
    "checkpoint": (AtomicCheckpointIO, "save_checkpoint"),
    "segment": (segments, "write"),
    "metrics": (MetricsCSV, "_rewrite"),
    "events": (RunEvents, "log_metrics"),
    "run.json": (run_record, "write_record"),
}


def damaged(
    start: list[str], mounted: Path, way: str, place: str, draw: random.Random, log: Path
) -> int:
    """Start a run, or go on with one, whose disk is damaged on its way; the run's status."""
    if way == "nearly full":
        if called([*start, "--trainer.max_epochs", "2"], log):
            raise SystemExit(log.read_text())
        # A run writes small files first, and a tmpfs has pages of 4,096 bytes.
        left = draw.randrange(draw.choice([1, 4_097, 30_000, 200_000, 1_500_000]))
        fill(mounted, left)
        status = called(start, log)
    elif way == "slow":
        status = called(start, log, slow)
    else:
        harm = fill if way == "full" else only_read
        visit = draw.randint(1, 3)
        # It cannot become read-only while TensorBoard's file is open.
        more = ["--trainer.logger", "false"] if way == "read-only" and place != "events" else []
        status = called([*start, *more], log, lambda: at(place, visit, lambda: harm(mounted)))
    subprocess.run(["mount", "-o", "remount,rw", mounted], check=True)
    (mounted / "ballast").unlink(missing_ok=True)
    return status


def at(place: str, visit: int, harm: Callable[[], None]) -> None:
    """Call ``harm`` just before that kind of file is written for the ``visit``-th time."""
    owner, name = WRITERS[place]
    function = getattr(owner, name)
    visits = 0

    def watched(*arguments: Any, **given: Any) -> Any:
        nonlocal visits
        visits += 1
        if visits == visit:
            harm()
        return function(*arguments, **given)

    setattr(owner, name, watched)


def fill(mounted: Path, left: int = 0) -> None:
    room = os.statvfs(mounted)
    (mounted / "ballast").write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - left)))


def only_read(mounted: Path) -> None:
    """Make a disk read-only, which the system refuses while a file is open for writing."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            place = os.readlink(f"/proc/self/fd/{number}")
            if place.startswith(f"{mounted}/"):
                reading = os.open(place, os.O_RDONLY)
                os.dup2(reading, number)
                os.close(reading)
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)


def slow() -> None:
    """Let each fsync take a third of a second longer, as on a slow disk."""
    kept = os.fsync

    def later(file: Any) -> None:
        time.sleep(1 / 3)
        kept(file)

    os.fsync = later  # type: ignore[assignment]


def place_of(text: str) -> str:
    """The file that a refusal names, without its folder and numbers."""
    if "TensorBoard's events" in text:
        return "events"
    found = re.search(r"Cannot write (\S+?)[:\s]|(\S+) is not writable", text)
    if found is None:
        return text[-80:]
    name = Path(found[1] or found[2]).name
    return re.sub(r"\d+(\.\d+)*", "…", name)


def memory(given: argparse.Namespace, folder: Path) -> int:
    """End the memory of a process at a drawn step of its clients."""
    draw = random.Random(given.seed)
    log = folder / "log.txt"
    # Batches that are large enough for the allocator to ask the system for memory.
    wide = ["--model.learner.init_args.network", "MLP"]
    wide += ["--model.learner.init_args.network.init_args.sizes", "[64,6000,600,10]"]
    expected = of_a_run(folder / "undisturbed", log, *wide)
    met: Counter[str] = Counter()
    wrong = []
    for number in range(given.number):
        run = folder / f"run-{number}"
        steps = draw.randrange(20, 120)

        def limited(steps: int = steps) -> None:
            step = LocalStep.__call__
            taken = 0

            def counted(*arguments: object, **more: object) -> object:
                nonlocal taken
                taken += 1
                if taken == steps:
                    pages = int(Path("/proc/self/statm").read_text().split()[0])
                    size = pages * resource.getpagesize()
                    resource.setrlimit(resource.RLIMIT_AS, (size, size))
                return step(*arguments, **more)  # type: ignore[arg-type]

            LocalStep.__call__ = counted  # type: ignore[assignment, method-assign]

        status = called([*RUN, "--trainer.default_root_dir", str(run), *wide], log, limited)
        text = told(log)
        if broken(log) or not status:
            wrong.append(f"after {steps} steps: status {status}: {text}")
        met[text[:160].replace(str(run), "RUN")] += 1
        name = f"after {steps} steps"
        wrong += filter(None, [compared(name, run, expected, log, *wide)])
        shutil.rmtree(run)
    for text, n in met.items():
        print(f"{n} × {text}")
    print("\n".join(wrong) or "every run went on to the bits of one that nothing happened to")
    return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.damage", description=__doc__)
    kinds = {"flips": flips, "disk": disk, "memory": memory}
    parser.add_argument("what", choices=list(kinds))
    parser.add_argument("--number", type=int, help="of trials (200 flips, 40, 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=KINDS, help="flips: in")
    parser.add_argument("--verbose", action="store_true", help="print each refusal")
    given = parser.parse_args()
    given.number = given.number or {"flips": 200, "disk": 40, "memory": 10}[given.what]
    folder = Path(tempfile.mkdtemp(prefix="damage-"))
    gc.freeze()
    status = kinds[given.what](given, folder)
    if not status:
        shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
