"""Processes of a sweep: they are forked from one that has imported everything, and end with it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from typing import Any

from fl_lightning.errors import UserError
from fl_lightning.lab.cli.compose import parse_yaml, prepare
from fl_lightning.lab.sweep.grid import PlannedRun
from fl_lightning.lab.sweep.sweep_folder import make
from fl_lightning.machine.escaping import plain_lines
from fl_lightning.metrics import read_record

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Place:
    """The part of the machine that one worker has.

    ``cores`` are the numbers of its cores, ``gpus`` names (None: as the environment says).
    """

    cores: frozenset[int]
    gpus: str | None = None


def warm() -> None:
    """Import what every run needs.

    It starts no thread and touches no GPU, so that processes forked afterwards start clean.
    """
    # A run would import these late, so import them before the fork.
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import fl_lightning.lab.cli.lightning_commands  # noqa: F401


def usable_cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def usable_gpus() -> list[str]:
    """Return names of the GPUs for CUDA_VISIBLE_DEVICES; a separate process asks for them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    (number,) = _answers(_count_gpus, [0])
    if visible:
        return [name.strip() for name in visible.split(",")][:number]
    return [str(gpu) for gpu in range(number)]


def _count_gpus(_: int) -> int:
    import torch

    return torch.cuda.device_count()


def places(
    jobs: int | None,
    devices: int,
    cores: Sequence[int],
    gpus: Sequence[str],
    most: int | None = None,
) -> list[Place]:
    """Return a place for each worker: GPUs if there are any, and always shares of the cores.

    Args:
        jobs: number of workers; None: as many as there are GPUs, else cores, for runs of
            ``devices`` each.
        most: number of runs; more workers would only take cores from them.
        devices: number of processes, and of GPUs, of one run.
        cores: cores to divide; neighbours stay together, and more workers than cores take turns.
        gpus: GPUs to divide; empty: none.

    >>> [sorted(place.cores) for place in places(None, 1, [0, 1, 2, 3], [])]
    [[0], [1], [2], [3]]
    >>> [(sorted(place.cores), place.gpus) for place in places(None, 1, [0, 1, 2, 3], ["0", "1"])]
    [([0, 1], '0'), ([2, 3], '1')]
    >>> [sorted(place.cores) for place in places(3, 1, [0, 1], [])]
    [[0], [1], [0]]
    """
    # More workers than runs would only take cores from the runs.
    number = jobs or max(1, len(gpus or cores) // devices)
    number = min(number, most or number)
    made = []
    for worker in range(number):
        first = worker * len(cores) // number
        last = (worker + 1) * len(cores) // number
        share = cores[first:last]
        if len(cores) < number:
            share = [cores[worker % len(cores)]]
        # Several runs may share a GPU, too.
        numbers = range(worker * devices, worker * devices + min(devices, len(gpus)))
        names = ",".join(gpus[gpu % len(gpus)] for gpu in numbers)
        made.append(Place(frozenset(share), names or None))
    return made


def start(run: PlannedRun, place: Place, claims_hash: str | None) -> ForkProcess:
    """Fork a worker that runs ``fl-lightning fit`` for this run.

    The output of the process goes to the run's log.txt.
    """
    make(run.folder)
    worker = _FORK.Process(target=_fit, args=(run, place, claims_hash, os.getpid()))
    worker.start()
    return worker


def fit_here(run: PlannedRun, claims_hash: str | None) -> int:
    """Run ``fl-lightning fit`` for ``run`` in this process, and return its exit status."""
    from fl_lightning.lab.cli.lightning_commands import run as fit

    # Lightning's launcher starts further processes with this command line.
    sys.argv = [sys.argv[0], "fit", *run.argv]
    prepared = prepare("fit", list(run.argv))
    prepared.record = {"arm": run.arm, "claims_hash": claims_hash, "axes": dict(run.axes)}
    return fit("fit", prepared)


def configurations(runs: Sequence[PlannedRun], at_once: int) -> list[dict[str, Any]]:
    """Return the whole configuration of each run, parsed and built in separate processes.

    Nothing is trained or written.

    Raises:
        UserError: it says what is wrong with the first run that cannot be built.
    """
    configs = []
    for run, outcome in zip(runs, _answers(_build, runs, at_once), strict=True):
        if isinstance(outcome, str):
            raise UserError(f"{run.place}: {outcome}")
        configs.append(outcome)
    return configs


def _build(run: PlannedRun) -> dict[str, Any] | str:
    """Return the configuration of a run, or the error that prevents building it."""
    try:
        from fl_lightning.lab.cli.cli import CommandCLI

        config = parse_yaml(CommandCLI("fit", prepare("fit", _to_build(run))).config_text())
    except UserError as error:
        return str(error)
    except Exception:
        return traceback.format_exc().strip().split("\n")[-1]
    return dict(config)


def _to_build(run: PlannedRun) -> list[str]:
    """Return the arguments with which a run can be built.

    A run that has begun is built outside of its folder. It may have been kept without checkpoints,
    and where its arm has yet to choose, ``run`` has another value than the run's checkpoint.
    """
    if not read_record(run.folder):
        return list(run.argv)
    elsewhere = f"--trainer.default_root_dir={run.folder / 'rehearsal'}"
    return [*run.argv, elsewhere, "--ckpt_path=null"]


# --------------------------------------------------------------------------- forking


def _fit(run: PlannedRun, place: Place, claims_hash: str | None, parent: int) -> None:
    from fl_lightning.machine.device_memory import end_with_parent

    end_with_parent(parent)
    # A Ctrl-C goes only to the sweep, which stops its workers.
    os.setsid()
    # The fork has inherited the sweep's own handlers.
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A run reads no input and prints into its log, and so do the processes that it starts.
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(run.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target, descriptor in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(target, descriptor)
    if place.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpus
    os.sched_setaffinity(0, place.cores)
    _share_threads(len(place.cores))
    try:
        sys.exit(fit_here(run, claims_hash))
    except UserError as error:
        print(plain_lines(f"fl-lightning: {error}"), file=sys.stderr)
        sys.exit(2)
    finally:
        # A forked process would skip exit functions, which loggers may need.
        with suppress(Exception):
            atexit._run_exitfuncs()


def _share_threads(number: int) -> None:
    """Use as many threads within an operation as cores, or fewer if OMP_NUM_THREADS says so."""
    import torch

    from fl_lightning.machine.processes import limit_threads

    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(number)
    elif lowered := limit_threads(number):
        print(f"note: {lowered}")
    # These variables are for processes that the run starts itself.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(torch.get_num_threads())


def _answers(question: Callable[[Any], Any], about: Sequence[Any], at_once: int = 1) -> list[Any]:
    """Return the answers to a question about each of these, computed in as many separate
    processes.
    """
    number = max(1, min(at_once, len(about)))
    with ProcessPoolExecutor(number, _FORK, _begin_helper, (os.getpid(),)) as pool:
        return list(pool.map(question, about))


def _begin_helper(parent: int) -> None:
    """Close this forked process's input and output, because code that is built may ask and
    print.
    """
    from fl_lightning.machine.device_memory import end_with_parent

    end_with_parent(parent)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
