"""``concurrent`` in processes: clients side by side in workers that are forked from the run.

Each worker trains one client at a time on one intra-op thread, in its own copy of the learner that
the fork made, with its own random generators. So clients may draw random numbers, and leave the
bits of the sequential engine on one thread, whatever the number of workers.

Workers live for one round. The workers' memory already holds the model, the data and clients' rows,
without copying or pickling; each worker sends back only its clients' results.
"""

from __future__ import annotations

import fcntl
import gc
import math
import os
import pickle
import signal
import stat
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from fl_lightning.aggregation.update_accumulator import UpdateAccumulator
from fl_lightning.client.client_trainer import ClientTrainer
from fl_lightning.client.copy_sync import LARGE_BYTES
from fl_lightning.client.trainer_view import Lent
from fl_lightning.engines.engine import Collect
from fl_lightning.engines.engine_context import EngineContext
from fl_lightning.engines.sequential import Sequential
from fl_lightning.engines.threads import largest_first
from fl_lightning.errors import UserError
from fl_lightning.learner.attributes import Contents, facts_of
from fl_lightning.machine.device_memory import end_with_parent
from fl_lightning.machine.processes import opened_in_each
from fl_lightning.round.context import Round

# A worker that has a client but uses no processor time for so many seconds is considered stuck.
STUCK = 300.0
LOOK = 5.0  # seconds between two checks of the workers' processor time
# Number of clients assigned to a worker at a time: it begins the next while the last result is
# received.
AHEAD = 2

Leaf = tuple[int, int]  # position in the sum, client


class WorkerEnded(UserError, RuntimeError):
    """A worker process ended, or stopped going on, before its client was trained."""


@dataclass
class Child:
    """A worker process, as its parent knows it."""

    pid: int
    connection: Connection
    tasks: deque[Leaf] = field(default_factory=deque)
    used: float = 0.0  # processor seconds at the last check
    since: float = 0.0  # time of the last check at which `used` had grown


class Forked:
    """Trains a round's clients in ``number`` processes that are forked from this one.

    Args:
        worker: trains in the learner itself: in each process this is another copy of it.
        number: of processes, at most one per client.
        note: takes what the user should know.
    """

    def __init__(self, worker: ClientTrainer, number: int, note: Callable[[str], None]) -> None:
        self.worker = worker
        self.number = number
        self._note = note
        self._children: list[Child] = []
        self._alone = False  # whether clients train in the run's own process from now on
        self._fork_seconds = 0.0  # the shortest time that a fork took
        self._client_seconds = 0.0  # mean seconds over the latest clients
        self._waiting: deque[Leaf] = deque()  # clients that no worker has yet

    def train(
        self,
        round: Round,
        leaves: list[tuple[int, int]],
        collect: Collect,
        client_done: Callable[[], None],
    ) -> None:
        # A data set may have opened a file after the engine was chosen, for example in validation.
        if not self._alone and (files := open_files()):
            self._alone = True
            self._note(
                f"clients train one after the other from round {round.t} on, to the same bits, "
                f"because {files[0]} is open for reading now"
            )
        if self._alone:
            self.one_after_the_other().train(round, leaves, collect, client_done)
            return
        # `collect` also gives a client's results, without adding them to the sum.
        assert isinstance(collect, UpdateAccumulator)
        self._waiting = deque(largest_first(round, leaves))
        try:
            for _ in range(self._worth(len(leaves))):
                child = self._forked(round, collect)
                self._children.append(child)
                # The worker begins while the next one is forked.
                self._give(child)
            self._hand_out()
            while busy := [child for child in self._children if child.tasks]:
                for child in self._ready(busy):
                    self._take(child, round, collect)
                    if self._alone:
                        break
                    self._hand_out()
                    client_done()
                if self._alone:
                    # In the order of the cohort: the error of the first client that fails is
                    # raised, whichever worker was quicker.
                    left = list(self._waiting)
                    for child in busy:
                        left.extend(child.tasks)
                    self.close()
                    self.one_after_the_other().train(round, sorted(left), collect, client_done)
            for child in self._children:
                # A worker that was killed after its last client has left nothing undone.
                with suppress(BrokenPipeError, ConnectionResetError):
                    child.connection.send(None)
                os.waitpid(child.pid, 0)
            self._children = []
        finally:
            self.close()

    def close(self) -> None:
        """End the workers that still run."""
        for child in self._children:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child.pid, 0)
            child.connection.close()
        self._children = []

    def one_after_the_other(self) -> Sequential:
        """The engine that leaves the same bits without processes."""
        return Sequential(self.worker, threads=1)

    def _forked(self, round: Round, collect: UpdateAccumulator) -> Child:
        ours, theirs = Pipe()
        parent = os.getpid()
        # Otherwise every process would write the content of these buffers.
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns that the fork does not have the parent's threads. A client does not need
            # them.
            warnings.simplefilter("ignore", DeprecationWarning)
            began = time.perf_counter()
            pid = os.fork()
        if pid:
            took = time.perf_counter() - began
            self._fork_seconds = min(self._fork_seconds or took, took)
            theirs.close()
            return Child(pid, ours, since=time.monotonic())
        # No code of the parent may run on in the worker: neither an exception nor an exit hook.
        try:
            ours.close()
            for other in self._children:
                other.connection.close()
            end_with_parent(parent)
            self._serve(round, theirs, collect)
        except BaseException:
            os._exit(1)
        finally:
            os._exit(0)

    def _serve(self, round: Round, connection: Connection, collect: UpdateAccumulator) -> None:
        """In a worker: train the clients that are handed out, until there are no more."""
        # The run handles Ctrl-C and the end of a job: it lets its workers finish, or ends them.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        # The garbage collector would copy the memory of every object that it visits.
        gc.freeze()
        torch.set_num_threads(1)
        methods = self.worker.work.methods.callbacks
        contents = Contents(self.worker.copy.learner, versions=True, most=LARGE_BYTES)
        before = facts_of(methods, contents, {})
        present = self.worker.copy.present
        present.silent = True
        with torch.no_grad(), self.worker.copy.tied(round.evaluated):
            while (client := connection.recv()) is not None:
                answer: Any
                present.lent = lent = Lent()
                began = time.perf_counter()
                with warnings.catch_warnings(record=True) as told:
                    try:
                        answer = collect.result_of(self.worker.train(round, client))
                    except Exception as error:
                        answer = Refused(
                            f"client {client} failed in a worker process in round {round.t} "
                            f"({type(error).__name__}: {error})"
                        )
                after = facts_of(methods, contents, before)
                changed = [name for name in after if after[name] != before.get(name)]
                if isinstance(answer, Refused):
                    pass
                elif changed:
                    answer = Refused(
                        f"{changed[0]} is changed in a hook that takes clients, which a worker "
                        "process would lose. Declare such a value (ClientState, Upload, "
                        "clients.log)"
                    )
                elif lent.reached:
                    answer = Refused(
                        f"training_step writes to {lent.reached}, which a worker process would "
                        "lose. Use self.log"
                    )
                texts = [(str(w.message), w.category, w.filename, w.lineno) for w in told]
                sys.stdout.flush()
                sys.stderr.flush()
                seconds = time.perf_counter() - began
                send(connection, (answer, texts, collect.changed, seconds))

    def _hand_out(self) -> None:
        """Give each idle worker a client, and a second one while there are many."""
        for tasks in range(AHEAD):
            for child in self._children:
                if len(child.tasks) > tasks or len(self._waiting) <= tasks * self.number:
                    continue
                self._give(child)

    def _give(self, child: Child) -> None:
        leaf = self._waiting.popleft()
        child.tasks.append(leaf)
        # the worker has ended; reading from its pipe will report that
        with suppress(BrokenPipeError, ConnectionResetError):
            child.connection.send(leaf[1])

    def _worth(self, clients: int) -> int:
        """How many workers to fork for so many clients; bits do not depend on it.

        Workers are forked one after the other. Where each takes f seconds to fork and clients take
        S together, n of them need S/n + f (n+1)/2: least at the square root of 2 S/f.
        """
        most = min(self.number, clients)
        if not self._client_seconds:
            return most
        best = math.sqrt(2 * clients * self._client_seconds / self._fork_seconds)
        # A round without clients needs no worker.
        return min(most, max(1, round(best)))

    def _ready(self, busy: list[Child]) -> list[Child]:
        """The workers that have something to say; waits for the first one."""
        by_connection = {child.connection: child for child in busy}
        while True:
            ready = wait(list(by_connection), timeout=LOOK)
            if ready:
                return [by_connection[connection] for connection in ready]  # type: ignore[index]
            for child in busy:
                self._check_goes_on(child)

    def _check_goes_on(self, child: Child) -> None:
        used = seconds_used(child.pid)
        now = time.monotonic()
        if used is None or used != child.used:
            child.used = used or 0.0
            child.since = now
        elif now - child.since > STUCK:
            raise WorkerEnded(
                f"the worker process of client {child.tasks[0][1]} has not used the processor for "
                f"{STUCK:.0f} s: something in the learner, the data or a callback waits for a "
                "thread or a lock that a forked process does not have. Use --model.engine "
                "sequential, in which clients train one after the other in the run's own process."
            )

    def _take(self, child: Child, round: Round, collect: UpdateAccumulator) -> None:
        """Receive a client's results from its worker."""
        (leaf, client) = child.tasks[0]
        try:
            answer, told, changed, seconds = received(child.connection)
        except (EOFError, OSError):  # it ended between two messages, or within one
            self._children.remove(child)
            raise WorkerEnded(how_it_ended(child.pid, client, round.t)) from None
        child.since = time.monotonic()
        known = self._client_seconds or seconds
        self._client_seconds = 0.9 * known + 0.1 * seconds
        for text, category, file, line in told:
            registry = sys.modules[__name__].__dict__.setdefault("__warningregistry__", {})
            warnings.warn_explicit(text, category, file, line, registry=registry)
        if isinstance(answer, Refused):
            self._alone = True
            self._note(
                f"{answer.text}. So clients train one after the other in the run's own process, to "
                "the same bits"
            )
            return
        child.tasks.popleft()
        collect.changed |= changed
        collect(leaf, answer)


def why_not_forked(context: EngineContext) -> str:
    """Why workers cannot be processes that are forked from the run; empty if they can."""
    if sys.platform != "linux":
        return f"processes are forked on Linux, and this is {sys.platform}"
    if context.w.device.type != "cpu" or torch.cuda.is_initialized():
        return "a process that uses a GPU cannot be forked"
    if getattr(context.work.data, "reads_ahead", False):
        return "the data are read ahead by processes of their own (num_workers)"
    if files := open_files():
        return (
            f"{files[0]} is open for reading, and processes that are forked would read it at one "
            "common position"
        )
    return ""


def open_files() -> list[str]:
    """The regular files that this process has opened for reading only.

    A forked process shares their positions: what one reads, another one misses.
    """
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            mode = os.stat(f"/proc/self/fd/{descriptor}").st_mode
            flags = fcntl.fcntl(int(descriptor), fcntl.F_GETFL)
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # this descriptor was the listing's own, and is closed again
        # A file that is also written is a log or a lock.
        only_read = flags & os.O_ACCMODE == os.O_RDONLY
        if name in opened_in_each:
            continue
        if stat.S_ISREG(mode) and only_read and int(descriptor) > 2 and not _of_a_program(name):
            names.append(name)
    return names


def _of_a_program(name: str) -> bool:
    """Tell whether an open file is the system's, of an installed package, a font, or deleted."""
    if name.startswith(("/proc/", "/sys/")):  # for example a thread that watches memory
        return True
    python = tuple(os.path.join(prefix, "lib", "") for prefix in (sys.prefix, sys.base_prefix))
    installed = "-packages/" in name or name.startswith(python)
    return installed or name.endswith((" (deleted)", ".ttf", ".ttc", ".otf", ".afm", ".pfb"))


@dataclass(frozen=True)
class Refused:
    """A client that a worker could not train, or only with losses, with the reason.

    If the learner itself is at fault, the run's own process meets its error, whole.
    """

    text: str


def how_it_ended(pid: int, client: int, t: int) -> str:
    """The note about a worker that ended in round t while it trained a client."""
    status = os.waitpid(pid, 0)[1]
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    how = f"was ended by {signal.Signals(number).name}" if number else "ended"
    memory = ""
    if number == signal.SIGKILL:
        memory = ", perhaps because the machine ran out of memory: try fewer --model.workers"
    return (
        f"the worker process that trained client {client} in round {t} {how}{memory}. Nothing of "
        "the round was kept; the run goes on from its last checkpoint."
    )


def seconds_used(pid: int) -> float | None:
    """Seconds of the processor that a process has used; None where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Pickler(pickle.Pickler):
    """Hands the memory of tensors over beside the pickle, which would copy it twice."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.is_quantized:
            return NotImplemented
        flat = obj.detach().cpu().contiguous().view(-1).view(torch.uint8)
        memory: Any = flat.numpy()
        return _tensor, (pickle.PickleBuffer(memory), obj.dtype, tuple(obj.shape))


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not memory:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def send(connection: Connection, value: Any) -> None:
    """Send a value whose tensors' memory follows it."""
    buffers: list[pickle.PickleBuffer] = []
    head = BytesIO()
    _Pickler(head, protocol=5, buffer_callback=buffers.append).dump(value)
    raw = [buffer.raw() for buffer in buffers]
    connection.send([len(part) for part in raw])
    connection.send_bytes(head.getbuffer())
    for part in raw:
        if len(part):
            connection.send_bytes(part)


def received(connection: Connection) -> Any:
    """What :func:`send` sent from the other end; tensors have memory of their own."""
    sizes = connection.recv()
    head = connection.recv_bytes()
    buffers = [bytearray(size) for size in sizes]
    for buffer in buffers:
        if buffer:
            connection.recv_bytes_into(buffer)
    return pickle.loads(head, buffers=buffers)
