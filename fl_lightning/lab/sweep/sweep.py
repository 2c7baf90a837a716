"""One sweep from its file to its end: first the selection, then the grid."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.errors import UserError
from fl_lightning.introspection.init_args import differences, flat
from fl_lightning.lab.cli.compose import plain_yaml, text_of
from fl_lightning.lab.sweep import sweep_folder as files
from fl_lightning.lab.sweep import workers
from fl_lightning.lab.sweep.grid import PlannedArm, PlannedRun, arms, by_seed, runs, seeds
from fl_lightning.lab.sweep.run_queue import ProgressTable, Queue
from fl_lightning.lab.sweep.selection import (
    Candidate,
    candidates,
    check_not_of_grid,
    choose,
    not_logged,
    on_test,
    stored,
    told,
    which_way,
    write_choices,
)
from fl_lightning.lab.sweep.sweep_file import Spec, check_known
from fl_lightning.lab.sweep.sweep_folder import DIVERGED, DONE, FAILED, WAITING
from fl_lightning.metrics import read_record

# Settings that may differ in one folder: names of a run, and places of files. A higher number of
# rounds is allowed, and the rounds are added.
_FREE = (
    "seed_everything",
    "ckpt_path",
    "trainer.default_root_dir",
    "trainer.max_epochs",
    "trainer.enable_progress_bar",
    "data.root",
    "data.download",
)

# One array job, with one task per run.
_SLURM = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --output={out}/slurm-%A_%a.log
# Time, partition, cores and GPUs are your cluster's: add them here, or give them to sbatch.
# Submit it in the folder where it was written.
# A task that is requeued goes on from its last checkpoint.
runs=(
{runs}
)
exec {command} --run "${{runs[$SLURM_ARRAY_TASK_ID]}}"
"""


class Sweep:
    """A grid of runs in ``folder``.

    ``states`` are the states of its runs, ``candidates`` the candidates of the selection, and
    ``undecided`` the arms that could not choose.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec = spec
        self.folder = folder
        self.arms = arms(spec)
        self.seeds = {arm.name: seeds(spec, arm) for arm in self.arms}
        select = spec.select
        self.candidates: list[Candidate] = []
        self.chosen: dict[str, Mapping[str, Any]] = {}
        if select is not None and select.stored is not None:
            self.chosen = stored(select.stored, self.arms)
            for arm in self.arms:
                check_not_of_grid(arm, self.chosen[arm.name])
        elif select is not None:
            self.candidates = candidates(folder, select, self.arms)
            # Ask for the better direction before hours of runs, if an arm has a choice.
            if len(self.candidates) > len({candidate.arm for candidate in self.candidates}):
                which_way(select).greater(select.metric)
        self.states: dict[PlannedRun, str] = {}
        self.selecting = False
        self.metric = select.metric if select else None
        self._claims_hash: str | None = None
        # The complete configuration of each run that was built.
        self._configs: dict[PlannedRun, dict[str, Any]] = {}

    @property
    def measuring(self) -> list[PlannedRun]:
        """Return the runs that measure candidates."""
        return _runs_of(self.candidates)

    @property
    def ready(self) -> list[Candidate]:
        """Return the candidates that can be tried, because the arm before theirs has chosen."""
        first = [None, *self.chosen]
        return [candidate for candidate in self.candidates if candidate.after in first]

    @property
    def undecided(self) -> list[str]:
        """Return the arms that had to choose and could not."""
        had = {candidate.arm for candidate in self.candidates}
        return [arm.name for arm in self.arms if arm.name in had and arm.name not in self.chosen]

    @property
    def trying(self) -> list[PlannedRun]:
        """Return the runs that measure candidates, can be made, and have not ended."""
        states = self._states(_runs_of(self.ready))
        return [run for run, status in states.items() if status not in (DONE, DIVERGED)]

    @property
    def note(self) -> str:
        """Return what a reader has to know of how the arms choose; often nothing."""
        return on_test(self.spec.select) if self.spec.select and self.candidates else ""

    def listed(self) -> list[PlannedRun]:
        """Return the sweep's own runs, in the grid's order, with the choices of their arms so
        far.
        """
        return by_seed([self._runs(arm) for arm in self.arms])

    def run(self, jobs: int | None) -> int | None:
        """Do everything that is not done; return the number of the signal that stopped it, else
        None.
        """
        with files.locked(self.folder):
            places = self._prepare(jobs)
            if self.candidates:
                if self.note:
                    print(self.note)
                stopped = self._select(places)
                if stopped is not None:
                    self._stand()
                    return stopped
            decided = [arm for arm in self.arms if arm.name not in self.undecided]
            # The options that an arm chose are settings of its runs, so check them after the
            # selection.
            rounds = self._check([self._runs(arm) for arm in decided], len(places))
            if self.spec.select is not None:
                self._keep_choices()
            self._stand(rounds)
            queue = self._queue(self.states, places, str(self.folder), self.folder)
            queue.run(hold=self.undecided)
            return queue.stopped

    def run_one(self, place: str) -> int:
        """Do one run in this process, while other machines do other runs of the sweep.

        Return the exit status of ``fit``.
        """
        if self.candidates:
            # Several tasks may choose at once, so they leave the files to the sweep.
            self._choose(write=False)
        known = {run.place: run for run in [*self.measuring, *self.listed()]}
        check_known("sweep --run: ", [place], known)
        run = known[place]
        self._refuse_undecided(run)
        claims = self.folder / "claims.yaml"
        claims_hash = None
        if claims.is_file():
            claims_hash = hashlib.sha256(claims.read_bytes()).hexdigest()
        # A run that began with other settings is refused, even if it has finished.
        if (run.folder / "run.json").is_file():
            self._refuse_other_settings(run, self._configurations([run], 1)[0])
        status = files.standing(run, {})
        if status in (DONE, DIVERGED):
            print(f"{run.folder}: {status}")
            return 0 if status == DONE else 3
        return workers.fit_here(run, claims_hash)

    def slurm(self, command: Sequence[str]) -> str:
        """Return the array script of everything that is not done; runs of the selection come first.

        ``command``: ``fl-lightning sweep FILE …``, to which a task adds ``--run PLACE``.
        """
        with files.locked(self.folder):
            at_once = len(self._prepare(None))
            if self.candidates:
                self._choose(at_once)
            waiting = self.trying
            self.selecting = bool(waiting)
            if not self.selecting:
                decided = [arm for arm in self.arms if arm.name not in self.undecided]
                self._check([self._runs(arm) for arm in decided], at_once)
            self._stand()
            files.write_states(self.folder, self.states)
        for run, status in self.states.items():
            if not self.selecting and status in (WAITING, FAILED) and run.arm not in self.undecided:
                waiting.append(run)
        if not waiting:
            raise UserError(f"sweep --slurm: all runs of {self.folder} are done.")
        return _SLURM.format(
            name=shlex.quote(self.spec.stem),
            out=self.folder,
            last=len(waiting) - 1,
            runs="\n".join(f"  {shlex.quote(run.place)}" for run in waiting),
            command=shlex.join(command),
        )

    # ----------------------------------------------------------------------- steps

    def _prepare(self, jobs: int | None) -> list[workers.Place]:
        """Build every arm once, and divide the machine among the workers."""
        workers.warm()
        cores = workers.usable_cores()
        gpus = workers.usable_gpus()
        configs = self._configurations([self._runs(arm)[0] for arm in self.arms], len(cores))
        trainers = [config.get("trainer") or {} for config in configs]
        # If all runs use the CPU, leave the GPUs to other work.
        if all(trainer.get("accelerator") == "cpu" for trainer in trainers):
            gpus = []
        devices = 1
        for trainer in trainers:
            asked = trainer.get("devices")
            if isinstance(asked, int) and asked > 0:
                devices = max(devices, asked)
        most = max(len(self.listed()), len(self.measuring))
        return workers.places(jobs, devices, cores, gpus, most)

    def _select(self, places: list[workers.Place]) -> int | None:
        stopped = None
        ended: dict[PlannedRun, str] = {}
        # Arms that depend on others are tried when the others have chosen.
        while stopped is None and (groups := self._untried(ended)):
            rounds = self._check(groups, len(places))
            self._stand()
            files.write_states(self.folder, self.states)
            states = self._states(by_seed(groups), rounds)
            queue = self._queue(states, places, f"{self.folder}/select", metric=self.metric)
            if WAITING in states.values():
                queue.run()
            if queue.without_metric is not None:
                raise not_logged(str(self.metric), queue.without_metric)
            stopped = queue.stopped
            ended |= queue.states
            before = self.chosen
            self._decide(ended)
            for arm, choice in self.chosen.items():
                if arm not in before:
                    print(told(arm, choice, self.candidates))
        return stopped

    def _choose(self, at_once: int | None = None, write: bool = True) -> None:
        """Choose by the runs that have ended; with ``at_once`` settings that differ from
        earlier ones are refused.
        """
        ended: dict[PlannedRun, str] = {}
        while groups := self._untried(ended):
            if at_once is not None:
                self._check(groups, at_once)
            ended |= self._states(by_seed(groups))
            self._decide(ended, write)
        if write:
            self._keep_choices()

    def _untried(self, ended: Mapping[PlannedRun, str]) -> list[tuple[PlannedRun, ...]]:
        """Return the runs of each candidate that can be tried and is not among ``ended``."""
        return [candidate.runs for candidate in self.ready if candidate.runs[0] not in ended]

    def _decide(self, ended: Mapping[PlannedRun, str], write: bool = True) -> None:
        """Let the arms whose candidates have all ended choose, and give the choice to the arms
        after them.
        """
        assert self.spec.select is not None
        folder = self.folder if write else None
        self.chosen = choose(folder, self.spec.select, self.candidates, ended)
        self.candidates = candidates(self.folder, self.spec.select, self.arms, self.chosen)

    def _refuse_undecided(self, run: PlannedRun) -> None:
        """Refuse a run whose settings depend on a choice that an arm has not made yet."""
        missing = run.arm if run.arm in self.undecided else None
        for candidate in self.candidates:
            if run in candidate.runs and candidate not in self.ready:
                missing = candidate.after
        if missing is not None:
            raise UserError(
                f"sweep --run {run.place}: {missing} has not chosen yet. The runs of that arm "
                "under select come first."
            )

    def _keep_choices(self) -> None:
        """Write the choices of the decided arms, for other sweeps to use."""
        decided = [arm.name for arm in self.arms if arm.name not in self.undecided]
        write_choices(self.folder, {name: self.chosen.get(name, {}) for name in decided})

    def _queue(
        self,
        states: dict[PlannedRun, str],
        places: list[workers.Place],
        title: str,
        listed: Path | None = None,
        metric: str | None = None,
    ) -> Queue:
        table = ProgressTable(title, self.metric)
        return Queue(states, places, self._claims_hash, table, listed, metric)

    def _runs(self, arm: PlannedArm) -> list[PlannedRun]:
        choice = self.chosen.get(arm.name, {})
        return runs(self.folder, "", arm.with_options(arm.name, choice), self.seeds[arm.name])

    def _states(
        self, its_runs: Sequence[PlannedRun], rounds: Mapping[str, int | None] | None = None
    ) -> dict[PlannedRun, str]:
        """Return the states of runs; with ``rounds`` at a start, failed runs are continued."""
        listed = files.read_states(self.folder)
        asked = rounds or {}
        states = {run: files.standing(run, listed, asked.get(run.place)) for run in its_runs}
        if rounds is not None:
            for run, status in states.items():
                if status == FAILED:
                    states[run] = WAITING
        return states

    def _stand(self, rounds: Mapping[str, int | None] | None = None) -> None:
        """Note the states of the sweep's own runs; with ``rounds`` at a start."""
        self.states = self._states(self.listed(), rounds)

    def _check(self, groups: Sequence[Sequence[PlannedRun]], at_once: int) -> dict[str, int | None]:
        """Return place → rounds asked for.

        This refuses runs that began with other settings, else it writes the sweep's files.
        """
        configs = self._configurations([group[0] for group in groups], at_once)
        rounds: dict[str, int | None] = {}
        for group, config in zip(groups, configs, strict=True):
            asked = (config.get("trainer") or {}).get("max_epochs")
            for run in group:
                rounds[run.place] = asked if isinstance(asked, int) and asked > 0 else None
                self._refuse_other_settings(run, config)
        self._claims_hash = files.keep_files(self.folder, self.spec, self.arms)
        return rounds

    def _configurations(self, its_runs: Sequence[PlannedRun], at_once: int) -> list[dict[str, Any]]:
        """Return the whole configuration of each run; each is built once."""
        new = [run for run in its_runs if run not in self._configs]
        if new:
            self._configs.update(zip(new, workers.configurations(new, at_once), strict=True))
        return [self._configs[run] for run in its_runs]

    def _refuse_other_settings(self, run: PlannedRun, config: Mapping[str, Any]) -> None:
        """Refuse a run that began, or was made elsewhere, with other settings that affect it."""
        if not read_record(run.folder):
            return
        file = run.folder / "config.yaml"
        where = f"sweep {self.spec.name}: {file}"
        before = plain_yaml(text_of(file, where), where)
        now = flat("", config)
        then = flat("", before if isinstance(before, dict) else {})
        differ = [name for name, *_ in differences(then, now) if name not in _FREE]
        rounds = then.get("trainer.max_epochs")
        asked = now.get("trainer.max_epochs")
        if isinstance(rounds, int) and isinstance(asked, int) and 0 < asked < rounds:
            differ.append("trainer.max_epochs")
        if differ:
            began, wanted = (each.get(differ[0], "nothing") for each in (then, now))
            raise UserError(
                f"sweep {self.spec.name}: {run.folder} began with {differ[0]} {began}, and now it "
                f"is {wanted}. Runs with other settings belong in another folder: give --out, or "
                "remove this run."
            )


def _runs_of(found: Sequence[Candidate]) -> list[PlannedRun]:
    its_runs: list[PlannedRun] = []
    for candidate in found:
        its_runs += candidate.runs
    return its_runs
