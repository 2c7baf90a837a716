"""One sweep from its file to its end: first the selection, then the grid."""

from __future__ import annotations

import fcntl
import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.cli.compose import parse_yaml
from fl_lightning.lab.sweep import sweep_folder as files
from fl_lightning.lab.sweep import workers
from fl_lightning.lab.sweep.grid import PlannedArm, PlannedRun, arms, by_seed, runs, seeds
from fl_lightning.lab.sweep.progress_table import ProgressTable
from fl_lightning.lab.sweep.run_queue import Queue, outcome
from fl_lightning.lab.sweep.selection import (
    Candidate,
    candidates,
    check_not_of_grid,
    choose,
    not_logged,
    on_test,
    stored,
    told,
    unequal,
    which_way,
    write_choices,
)
from fl_lightning.lab.sweep.sweep_file import Spec
from fl_lightning.lab.sweep.sweep_folder import DIVERGED, DONE, FAILED, RUNNING, WAITING
from fl_lightning.metrics import read_record

# Settings that may differ in one folder: names of a run, and places of files. A higher number of
# rounds is allowed, and the rounds are added.
_FREE = (
    "seed_everything",
    "ckpt_path",
    "trainer.default_root_dir",
    "trainer.max_epochs",
    "trainer.enable_progress_bar",
    "data.init_args.root",
    "data.init_args.download",
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

    ``states`` are the states of its runs, ``candidates`` the candidates of the selection,
    ``undecided`` the arms that could not choose, and ``lost`` those of them that never will.
    """

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec = spec
        self.folder = folder
        self.arms = arms(spec)
        self.seeds = {arm.name: seeds(spec, arm) for arm in self.arms}
        select = spec.select
        self.candidates: list[Candidate] = []
        self.chosen: dict[str, Mapping[str, Any]] = {}
        self.lost: list[str] = []
        if select is not None and select.stored is not None:
            self.chosen = stored(select.stored, self.arms)
            for arm in self.arms:
                check_not_of_grid(arm, self.chosen[arm.name])
        elif select is not None:
            self.candidates = candidates(folder, select, self.arms)
        self.states: dict[PlannedRun, str] = {}
        self.selecting = False
        self.full = False  # whether a full disk ended the selection
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
    def still_choosing(self) -> list[str]:
        """Return the undecided arms for which there is still a candidate to try."""
        return [arm for arm in self.undecided if arm not in self.lost]

    @property
    def notes(self) -> list[str]:
        """Return what a reader has to know of how the arms choose."""
        select = self.spec.select
        if select is None or not self.candidates:
            return []
        return [note for note in (on_test(select), unequal(self.candidates)) if note]

    def listed(self) -> list[PlannedRun]:
        """Return the sweep's own runs, in the grid's order, with the choices of their arms so
        far.
        """
        return by_seed([self._runs(arm) for arm in self.arms])

    def run(self, jobs: int | None) -> int | None:
        """Do everything that is not done; return the number of the signal that stopped it, else
        None.
        """
        with files.locked(self.folder / ".lock", f"sweep --out {self.folder}"):
            places = self._prepare(jobs)
            if self.candidates:
                for note in self.notes:
                    print(f"note: {note}")
                stopped = self._select(places)
                if stopped is not None or self.full:
                    self._stand()
                    return stopped
            decided = [arm for arm in self.arms if arm.name not in self.undecided]
            # The options that an arm chose are settings of its runs, so check them after the
            # selection.
            rounds = self._check([self._runs(arm) for arm in decided], len(places))
            if self.spec.select is not None:
                with self._one_of_an_array():
                    self._keep_choices()
            self._stand(rounds)
            queue = self._queue(self.states, places, rounds, str(self.folder), self.folder)
            queue.run(hold=self.undecided)
            return queue.stopped

    def run_one(self, place: str) -> int:
        """Do one run in this process, while other machines do other runs of the sweep.

        Return the exit status of ``fit``.
        """
        if self.candidates:
            files.make(self.folder)
            self._choose()
        known = {run.place: run for run in [*self.measuring, *self.listed()]}
        run = known.get(place)
        if run is None:
            raise UserError(
                f"sweep --run {place}: not a run of this sweep.{suggest(place, known)} "
                "--dry_run lists them."
            )
        self._refuse_undecided(run)
        claims = self.folder / "claims.yaml"
        claims_hash = None
        if claims.is_file():
            claims_hash = hashlib.sha256(claims.read_bytes()).hexdigest()
        with (
            files.locked(self.folder / ".lock", f"sweep --out {self.folder}", shared=True),
            files.locked(run.folder / ".sweep.lock", f"sweep --run {place}"),
        ):
            status = files.standing(run, files.read_states(self.folder))
            # A run that began with other settings is refused, even if it has finished.
            if (run.folder / "run.json").is_file():
                self._refuse_other_settings(run, self._configurations([run], 1)[0])
            if status == DONE:
                print(f"{run.folder}: is done")
                return 0
            if status == DIVERGED:
                print(f"{run.folder}: has diverged")
                return 3
            self._note(run, RUNNING)
            # However the fit ends, the other processes get the status of the run.
            code = 1
            try:
                code = workers.fit_here(run, claims_hash)
            except UserError:
                code = 2
                raise
            finally:
                self._note(run, outcome(run, code))
            return code

    def slurm(self, command: Sequence[str]) -> str:
        """Return the array script of everything that is not done; runs of the selection come first.

        ``command``: ``fl-lightning sweep FILE …``, to which a task adds ``--run PLACE``.
        """
        with files.locked(self.folder / ".lock", f"sweep --out {self.folder}"):
            at_once = len(self._prepare(None))
            if self.candidates:
                self._choose(at_once)
            self.selecting = bool(self.still_choosing)
            if not self.selecting:
                decided = [arm for arm in self.arms if arm.name not in self.undecided]
                self._check([self._runs(arm) for arm in decided], at_once)
            self._stand()
            states = self._states(_runs_of(self.ready)) if self.selecting else self.states
            files.write_states(self.folder, self.states)
        waiting = [run for run, status in states.items() if status in (WAITING, FAILED)]
        if not self.selecting:
            waiting = [run for run in waiting if run.arm not in self.undecided]
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
        first = [self._runs(arm, guess=True)[0] for arm in self.arms]
        configs = self._configurations([*first, *self._later()], len(cores))
        self._ask_which_way(first)
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

    def _ask_which_way(self, first: Sequence[PlannedRun]) -> None:
        """Ask for the better direction of the metric before hours of runs, not after them.

        Nothing is asked if no arm has a choice, or if a learner's torchmetrics metric may decide
        later.
        """
        choosing = {candidate.arm for candidate in self.candidates}
        if self.spec.select is None or len(self.candidates) == len(choosing):
            return
        directions = which_way(self.spec.select)
        metric = self.spec.select.metric
        if directions.known(metric) is None and not workers.may_tell_modes(first):
            raise UserError(
                f"sweep {self.spec.name}: select.metric: {directions.question([metric])}"
            )

    def _select(self, places: list[workers.Place]) -> int | None:
        stopped = None
        ended: dict[PlannedRun, str] = {}
        # Arms that depend on others are tried when the others have chosen.
        while stopped is None and not self.full and (groups := self._untried(ended)):
            rounds = self._check(groups, len(places))
            self._stand()
            files.write_states(self.folder, self.states)
            states = self._states(by_seed(groups), rounds)
            queue = self._queue(states, places, rounds, f"{self.folder}/select", metric=self.metric)
            if WAITING in states.values():
                queue.run()
            if queue.without_metric is not None:
                raise not_logged(str(self.metric), queue.without_metric)
            stopped = queue.stopped
            self.full = queue.full is not None
            ended |= queue.states
            before = self.chosen
            with self._one_of_an_array():
                self._decide(ended)
            for arm, choice in self.chosen.items():
                if arm not in before:
                    print(told(arm, choice, self.candidates))
        return stopped

    def _choose(self, at_once: int | None = None) -> None:
        """Choose by the runs that have ended; with ``at_once`` settings that differ from
        earlier ones are refused.
        """
        ended: dict[PlannedRun, str] = {}
        with self._one_of_an_array():
            while groups := self._untried(ended):
                if at_once is not None:
                    self._check(groups, at_once)
                ended |= self._states(by_seed(groups))
                self._decide(ended)
            self._keep_choices()

    def _untried(self, ended: Mapping[PlannedRun, str]) -> list[tuple[PlannedRun, ...]]:
        """Return the runs of each candidate that can be tried and is not among ``ended``."""
        return [candidate.runs for candidate in self.ready if candidate.runs[0] not in ended]

    def _decide(self, ended: Mapping[PlannedRun, str]) -> None:
        """Let the arms whose candidates have all ended choose, and give the choice to the arms
        after them.
        """
        assert self.spec.select is not None
        self.chosen = choose(self.folder, self.spec.select, self.candidates, ended)
        self.candidates = candidates(self.folder, self.spec.select, self.arms, self.chosen)
        lost = set[str]()
        for arm in self.undecided:
            own = [candidate for candidate in self.candidates if candidate.arm == arm]
            states = {ended.get(run) for run in _runs_of(own)}
            if states <= {DONE, DIVERGED}:
                lost.add(arm)
        # An arm that comes after a lost one has no choice to take.
        while more := {each.arm for each in self.candidates if each.after in lost} - lost:
            lost |= more
        self.lost = [arm for arm in self.undecided if arm in lost]

    def _guess(self, arm: str | None) -> dict[str, Any]:
        """Return the first value that ``arm`` may choose, and may take from the arm before it."""
        own = [candidate for candidate in self.candidates if candidate.arm == arm]
        return {**self._guess(own[0].after), **own[0].choice} if own else {}

    def _later(self) -> list[PlannedRun]:
        """Return one run of each candidate that waits for another arm's choice, with a guess at
        that choice.

        Building these runs finds errors before hours of runs.
        """
        if self.spec.select is None or self.ready == self.candidates:
            return []
        guesses = {arm.name: self._guess(arm.name) for arm in self.arms}
        guessed = candidates(self.folder, self.spec.select, self.arms, guesses)
        return [candidate.runs[0] for candidate in guessed if candidate.after is not None]

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
        rounds: Mapping[str, int | None],
        title: str,
        listed: Path | None = None,
        metric: str | None = None,
    ) -> Queue:
        table = ProgressTable(title, self.metric, rounds)
        return Queue(states, places, self._claims_hash, table, listed, metric)

    def _runs(self, arm: PlannedArm, guess: bool = False) -> list[PlannedRun]:
        choice = self.chosen.get(arm.name)
        if choice is None and guess:
            choice = self._guess(arm.name)
        return runs(self.folder, "", arm.with_options(arm.name, choice or {}), self.seeds[arm.name])

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

    def _note(self, run: PlannedRun, status: str) -> None:
        """Write one run's state to runs.csv, while other processes may do the same.

        Runs of the selection are not in runs.csv.
        """
        with self._one_of_an_array():
            listed = files.read_states(self.folder)
            states = {each: listed.get(each.place, WAITING) for each in self.listed()}
            if run in states:
                files.write_states(self.folder, {**states, run: status})

    @contextmanager
    def _one_of_an_array(self) -> Iterator[None]:
        """Within this context no other task of an array, and no other sweep, writes the common
        files.
        """
        with open(self.folder / ".runs.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

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
        try:
            before = parse_yaml((run.folder / "config.yaml").read_text(encoding="utf-8"))
        except OSError:
            self._refuse_other_hash(run, config)
            return
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            raise UserError(
                f"sweep {self.spec.name}: {run.folder / 'config.yaml'} cannot be read "
                f"({' '.join(str(error).split())[:200]}). Restore the file, give --out, or "
                "remove this run."
            ) from None
        now = _flat(config)
        then = _flat(before if isinstance(before, dict) else {})
        differ = []
        for key in {**then, **now}:
            if then.get(key) != now.get(key) and key not in _FREE:
                differ.append(key)
        rounds = then.get("trainer.max_epochs")
        asked = now.get("trainer.max_epochs")
        if isinstance(rounds, int) and isinstance(asked, int) and 0 < asked < rounds:
            differ.append("trainer.max_epochs")
        if differ:
            began = then.get(differ[0], "nothing")
            wanted = now.get(differ[0], "nothing")
            raise UserError(
                f"sweep {self.spec.name}: {run.folder} began with {differ[0]} {began}, and now it "
                f"is {wanted}. Runs with other settings belong in another folder: give --out, or "
                "remove this run."
            )

    def _refuse_other_hash(self, run: PlannedRun, config: Mapping[str, Any]) -> None:
        """Compare the hash of a config if config.yaml itself is missing."""
        from fl_lightning.lab.cli.run_record import config_hash

        then = read_record(run.folder).get("config_hash")
        if then is not None and then != config_hash(config):
            raise UserError(
                f"sweep {self.spec.name}: {run.folder} has no config.yaml, and its run.json shows "
                "that it began with other settings than these. Restore the file, give --out, or "
                "remove this run."
            )


def _runs_of(found: Sequence[Candidate]) -> list[PlannedRun]:
    its_runs: list[PlannedRun] = []
    for candidate in found:
        its_runs += candidate.runs
    return its_runs


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings and lists as one, with keys joined by dots.

    >>> _flat({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c.0': 2}
    """
    if not isinstance(node, dict | list):
        return {prefix: node}
    items = node.items() if isinstance(node, dict) else enumerate(node)
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
