"""Processes of a sweep: forked from one that has imported everything, and gone when it is."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from fl_lightning.cli.compose import parse_yaml, prepare
from fl_lightning.errors import UserError
from fl_lightning.sweep.folder import DIVERGED, DONE, make, record
from fl_lightning.sweep.grid import Run

# As prctl.h has it.
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Place:
    """What one worker has of the machine.

    ``cores`` are their numbers, ``gpus`` names (None: as the environment says).
    """

    cores: frozenset[int]
    gpus: str | None = None


def warm() -> None:
    """Import what every run needs.

    It starts no thread and touches no GPU, so what is forked afterwards starts clean.
    """
    # A run imports these late, on its way.
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import fl_lightning.cli.commands  # noqa: F401

    gc.collect()
    # The workers' collectors leave these pages alone, so they stay shared.
    gc.freeze()
    # At the end they are to be collected: bindings print what is left of them.
    atexit.register(gc.unfreeze)


def usable_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def usable_gpus() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES of the GPUs; a process of its own asks for them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")

    def count() -> int:
        import torch

        return torch.cuda.device_count()

    number = int(_answers([count])[0])
    if visible:
        return [name.strip() for name in visible.split(",")][:number]
    return [str(gpu) for gpu in range(number)]


def places(
    jobs: int | None,
    devices: int,
    cores: Sequence[int],
    gpus: Sequence[str],
    most: int | None = None,
) -> list[Place]:
    """A place for each worker: GPUs where there are any, shares of the cores always.

    Args:
        jobs: how many; None: as many as there are GPUs, else cores, for runs of ``devices`` each.
        most: as many runs as there are; more workers would only keep cores from them.
        devices: processes, and GPUs, of one run.
        cores: to share; neighbours stay together, and more workers than cores take turns.
        gpus: to share; empty: none.

    >>> [sorted(place.cores) for place in places(None, 1, [0, 1, 2, 3], [])]
    [[0], [1], [2], [3]]
    >>> [(sorted(place.cores), place.gpus) for place in places(None, 1, [0, 1, 2, 3], ["0", "1"])]
    [([0, 1], '0'), ([2, 3], '1')]
    >>> [sorted(place.cores) for place in places(3, 1, [0, 1], [])]
    [[0], [1], [0]]
    """
    # More workers than runs would only keep cores from them.
    number = jobs or max(1, len(gpus or cores) // devices)
    number = min(number, most or number)
    made = []
    for worker in range(number):
        first = worker * len(cores) // number
        last = (worker + 1) * len(cores) // number
        share = cores[first:last]
        if len(cores) < number:
            share = [cores[worker % len(cores)]]
        # Runs may take turns at GPUs, too.
        numbers = range(worker * devices, worker * devices + min(devices, len(gpus)))
        names = ",".join(gpus[gpu % len(gpus)] for gpu in numbers)
        made.append(Place(frozenset(share), names or None))
    return made


def start(run: Run, place: Place, claims_hash: str | None) -> int:
    """Fork a worker that is ``fl-lightning fit`` for this run, and give its process id.

    Its output goes to the run's log.txt.
    """
    make(run.folder)
    parent = os.getpid()
    pid = _fork()
    if pid == 0:
        _leave(partial(_fit, run, place, claims_hash, parent))
    return pid


def fit_here(run: Run, claims_hash: str | None) -> int:
    """Be ``fl-lightning fit`` for ``run`` in this process, and give its exit status."""
    from fl_lightning.cli.commands import run as fit

    # Lightning's launcher starts further processes by this command line.
    sys.argv = [sys.argv[0], "fit", *run.argv]
    prepared = prepare("fit", list(run.argv))
    prepared.arm = run.arm
    prepared.claims_hash = claims_hash
    prepared.axes = dict(run.axes)
    return fit("fit", prepared)


def rehearse(runs: Sequence[Run], at_once: int) -> list[dict[str, Any]]:
    """The whole configuration of each run, parsed and built in processes of their own.

    Nothing is trained or written.

    Raises:
        UserError: what is wrong with the first run that cannot be.
    """
    number = max(1, min(at_once, len(runs)))
    shares = [runs[n::number] for n in range(number)]
    answers = _answers([partial(_build, share) for share in shares])
    outcomes: list[dict[str, Any]] = [{}] * len(runs)
    for n, answer in enumerate(answers):
        outcomes[n::number] = answer
    for run, outcome in zip(runs, outcomes, strict=True):
        if "error" in outcome:
            raise UserError(f"{run.place}: {outcome['error']}")
    return [outcome["config"] for outcome in outcomes]


def _build(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The configuration of each run, or the error that keeps it from being built."""
    from fl_lightning.cli.cli import FederatedCLI

    _silence()
    outcomes: list[dict[str, Any]] = []
    for run in runs:
        try:
            cli = FederatedCLI("fit", prepare("fit", _to_build(run)))
            outcomes.append({"config": parse_yaml(cli._config_text())})
        except UserError as error:
            outcomes.append({"error": str(error)})
        except Exception:
            outcomes.append({"error": traceback.format_exc().strip().split("\n")[-1]})
    return outcomes


def _silence() -> None:
    """Close this forked process's ears and mouth: what is built may ask and print."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


def may_tell_modes(runs: Sequence[Run]) -> bool:
    """Whether a learner of these runs has a torchmetrics metric that says which way is better."""

    def build() -> bool:
        from fl_lightning.aggregation.metric_states import tells_mode
        from fl_lightning.cli.cli import FederatedCLI

        _silence()
        clis = (FederatedCLI("fit", prepare("fit", _to_build(run))) for run in runs)
        return any(tells_mode(cli.model.learner) for cli in clis)

    return bool(_answers([build])[0])


def _to_build(run: Run) -> list[str]:
    """The arguments by which a run can be built.

    A run that has ended and was kept without checkpoints takes no fit in its own folder.
    """
    if record(run).get("status") not in (DONE, DIVERGED):
        return list(run.argv)
    elsewhere = f"--trainer.default_root_dir={run.folder / 'rehearsal'}"
    return [*run.argv, elsewhere, "--ckpt_path=null"]


# --------------------------------------------------------------------------- forking


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork()


def _leave(work: Callable[[], int]) -> None:
    """End this forked process with the status of ``work``.

    Exit hooks run, as loggers may need them.
    """
    status = 1
    try:
        status = work()
    except UserError as error:
        print(f"fl-lightning: {error}", file=sys.stderr)
        status = 2
    except SystemExit as error:
        status = 0 if error.code is None else 1
        if isinstance(error.code, int):
            status = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            atexit._run_exitfuncs()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _end_with(parent: int) -> None:
    """Be killed when the parent ends, however it does; a run goes on from its last checkpoint."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before this process asked to follow it.
    if os.getppid() != parent:
        os._exit(137)


def _fit(run: Run, place: Place, claims_hash: str | None, parent: int) -> int:
    _end_with(parent)
    # A Ctrl-C is for the sweep, which tells its workers.
    os.setsid()
    # The sweep's own handlers are inherited by the fork.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A run asks nothing and prints into its log, also from processes that it starts itself.
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(run.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target, descriptor in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(target, descriptor)
    if place.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpus
    os.sched_setaffinity(0, place.cores)
    _share_threads(len(place.cores))
    return fit_here(run, claims_hash)


def _share_threads(number: int) -> None:
    """Use as many threads within an operation as cores.

    Where OMP_NUM_THREADS is set it holds, as it does for ``fit``.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return
    # These are for the processes that the run starts itself.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(number))
    import torch

    torch.set_num_threads(number)


def _answers(questions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Ask each question in a process of its own, at the same time; answers are plain data."""
    processes = []
    parent = os.getpid()
    for question in questions:
        reading, writing = os.pipe()
        pid = _fork()
        if pid == 0:
            os.close(reading)
            _leave(partial(_tell, question, writing, parent))
        # Else the pipe would not end when its process does.
        os.close(writing)
        processes.append((pid, reading))
    answers = []
    for pid, reading in processes:
        with open(reading, encoding="utf-8") as file:
            text = file.read()
        _, status = os.waitpid(pid, 0)
        if not text:
            raise UserError(
                f"sweep: a helper process ended with status {os.waitstatus_to_exitcode(status)}."
            )
        answers.append(json.loads(text))
    return answers


def _tell(question: Callable[[], Any], writing: int, parent: int) -> int:
    _end_with(parent)
    with open(writing, "w", encoding="utf-8") as file:
        file.write(json.dumps(question(), default=str))
    return 0
