"""``python -m benchmarks.soak_sites`` (a part of ``make soak``): kill processes of runs over sites
at random times, and check that each run ends with the bits of its simulation.

A victim is a site's process, a site's node, the server's process, or the link with all that is
connected to it. Flower starts a site's process again by itself, and this program starts the others
again. The table has one row per victim and one column per round. ``make test-flower`` installs
Flower, which this program needs.
"""

from __future__ import annotations

import argparse
import gc
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.deploy.flower_runs import Federation, Study

VICTIMS = ("site", "node", "server", "link")
ROUNDS = 10
KILLS_OF_A_RUN = 8  # then it may end


class Run:
    """One run over three sites, whose processes are killed."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder = folder
        self.draw = draw
        self.federation = Federation(folder)
        self.study = Study(folder, self.federation, ["method/scaffold", "method/ri"], ROUNDS)
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        self.name = f"run-{self.starts}"
        self.over = self.study.go_on(self.name)

    def killed(self, kills: int) -> Counter[tuple[str, int]]:
        """Kill so many times, or less if the run ends before; by victim and round."""
        done: Counter[tuple[str, int]] = Counter()
        self.study.write()
        self.study.simulate()
        self.study.open()
        self.start()
        while done.total() < kills:
            # While it starts, or in one of the next rounds.
            until = self.study.rounds_done() + self.draw.choice([0, 1, 1, 2])
            while self.over.poll() is None and self.study.rounds_done() < until:
                time.sleep(0.01)
            time.sleep(self.draw.uniform(0, 3))
            if self.over.poll() is not None:
                break
            victim = self.draw.choice(VICTIMS)
            if self.kill(victim):
                done[victim, self.study.rounds_done()] += 1
        self.study.finish(self.over, self.name)
        return done

    def kill(self, victim: str) -> bool:
        """Whether there was something to kill."""
        site = self.draw.choice(list(self.study.sites))
        if victim == "node":
            self.federation.end(site)
            self.study.node(site)
        elif victim == "link":
            for name in ("link", *self.study.sites, self.name):
                self.federation.end(name)
            self.study.open()
            self.start()
        else:
            try:
                if victim == "site":
                    self.federation.kill("site", str(self.folder / site))
                    return True
                self.federation.kill_server()
            except AssertionError:  # it has not started yet
                return False
            self.federation.wait("the server's end", lambda: self.over.poll() is not None)
            if self.study.rounds_done() < ROUNDS:
                self.start()
        return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak_sites", description=__doc__)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-sites-"))
    done: Counter[tuple[str, int]] = Counter()
    runs = 0
    gc.freeze()
    while done.total() < given.kills:
        run = Run(folder / f"run-{runs}", draw)
        try:
            done += run.killed(min(KILLS_OF_A_RUN, given.kills - done.total()))
        finally:
            run.federation.close()
        runs += 1
    columns = range(ROUNDS + 1)
    print("killed " + " ".join(f"{t:>3}" for t in columns))
    for victim in VICTIMS:
        print(f"{victim:6} " + " ".join(f"{done[victim, t]:>3}" for t in columns))
    print(f"{runs} runs ended with the bits of their simulations")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
