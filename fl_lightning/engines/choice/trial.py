"""A few real steps of real clients in copies of the learner, without a trace: what works, and how long it takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fl_lightning.engines.choice.workshop import Workshop
from fl_lightning.engines.client_optimizer import is_flat, is_plain_sgd
from fl_lightning.engines.engine import intra_op_threads
from fl_lightning.engines.random_state import RandomState
from fl_lightning.engines.replay.attributes import Attributes
from fl_lightning.engines.replay.capture import Capture
from fl_lightning.engines.stacked import Stack
from fl_lightning.engines.streams import own_stream
from fl_lightning.engines.worker import Worker
from fl_lightning.learner import buffer_values, gradient_hook

if sys.platform == "linux":
    import resource

TRIED_STEPS = 6  # one as it is, one recorded, the others replayed
SHORT_SECONDS = 0.02  # of a local step on a CPU: replaying saves about 0.1 ms
# so many of the shortest times have to lie within this factor before they decide
AGREEING, WITHIN = 3, 1.1
MOST_TIMES, MOST_SECONDS = 20, 1.0  # after which the shortest decide as they are
CALL_SECONDS = 2e-6  # of a small call of PyTorch, where the thresholds were chosen
REHEARSED_SECONDS, GPU_STEPS = 2.0, 100  # as much of a client's round is rehearsed


class Settled:
    """Times of one thing, measured until the shortest agree: a busy machine can only add to a time."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def add(self, seconds: float) -> None:
        self.times.append(seconds)

    @property
    def enough(self) -> bool:
        shortest = sorted(self.times)[:AGREEING]
        agree = len(shortest) == AGREEING and shortest[-1] <= WITHIN * shortest[0]
        return agree or len(self.times) >= MOST_TIMES or sum(self.times) > MOST_SECONDS

    @property
    def seconds(self) -> float:
        """The median of the shortest."""
        shortest = sorted(self.times)[:AGREEING]
        return shortest[len(shortest) // 2]


def settled(measure: Callable[[], float]) -> float:
    """Seconds of something, measured after a first time that does not count, until the shortest times agree."""
    measure()
    times = Settled()
    while not times.enough:
        times.add(measure())
    return times.seconds


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    call()
    return clock() - began


class Trial:
    """Steps of clients in the workshop's j-th copy of the learner."""

    def __init__(self, workshop: Workshop, j: int = 0, recorder: Capture | None = None) -> None:
        self.setting = workshop.setting
        copy, optimizer = workshop.tried(j + 1)[j]
        stream = None if recorder is None else recorder.stream
        self.copy, self.worker = (
            copy,
            Worker(workshop.trial_work, copy, optimizer, recorder, stream),
        )
        self.buffers = buffer_values(self.setting.learner, workshop.written)

    def run(self, client: int, steps: int) -> list[Tensor]:
        """Take ``steps`` steps of a client from the server's model; gives its end, its buffers and what it logged."""
        with torch.no_grad(), self.worker:
            clients = self.worker.train(self.setting.round({client: steps}, self.buffers), client)
            logs = [value for _, value in sorted(clients.logs.items())]
            return [self.copy.x.clone(), *(b.clone() for b in clients.buffers.values()), *logs]


def one_step(workshop: Workshop) -> float:
    """Seconds of a local step on one thread, without the time in which others had the processor; measured once."""
    if workshop.step_seconds is None:
        trial, client = Trial(workshop), workshop.setting.cohort.tried(0)[0]
        by_clock, of_calls, waits = Settled(), Settled(), []
        small = torch.ones(8)

        def used() -> float:
            of_calls.add(timed(lambda: [small.add(1) for _ in range(100)], time.thread_time) / 100)
            switches, began = voluntary_switches(), time.thread_time()
            by_clock.add(timed(lambda: trial.run(client, 1)))
            waits.append(voluntary_switches() > switches)
            return time.thread_time() - began

        with intra_op_threads(1):
            of_processor = settled(used)
        # one that waits each time, for a disk, say: others go on meanwhile, and a slow machine does not stretch it
        workshop.step_seconds = by_clock.seconds if all(waits) else of_processor
        workshop.slowness = 1.0 if all(waits) else of_calls.seconds / CALL_SECONDS
    return workshop.step_seconds


def step_when_quiet(workshop: Workshop) -> float:
    """Seconds of a local step where a small call of PyTorch takes ``CALL_SECONDS``.

    Neighbours that share a core's caches and units stretch both, so that thresholds are met alike beside them.
    """
    return one_step(workshop) / workshop.slowness


def voluntary_switches() -> int:
    """How often this thread waited; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def real_steps(workshop: Workshop, client: int) -> int:
    """A client's local steps in a round, or as many as are rehearsed where these take long."""
    setting = workshop.setting
    affordable = (
        int(REHEARSED_SECONDS / one_step(workshop)) if setting.w.device.type == "cpu" else GPU_STEPS
    )
    return min(setting.cohort.steps(client), max(TRIED_STEPS, affordable))


def why_not_captured(workshop: Workshop) -> str:
    """Why local steps are not to be recorded and replayed, tried on a few; empty if replays leave the same bits."""
    setting = workshop.setting
    foreign = setting.work.methods.in_steps_of_others()
    if not setting.capture:
        return "not asked for"
    if not type(setting.optimizer).__module__.startswith("torch.optim"):
        return f"{type(setting.optimizer).__name__} is not one of torch's optimizers"
    if foreign and setting.capture == "auto":
        return f"{foreign} is not a packaged method; capture=True captures it too"
    if setting.schedule is not None and setting.schedule.by_step:
        return "client_scheduler='local_steps' changes the learning rate in each step"
    if (hooks := workshop.original.hooks) is not None and hooks.of_gradients:
        return f"its {hooks.of_gradients[0]} runs in each step"
    client = setting.largest()
    reasons: list[str] = []
    found: list[list[Tensor]] = []
    stream = own_stream(setting.w)
    recorder = Capture(reasons.append, stream)
    trial = Trial(workshop, recorder=recorder)
    try:
        if (
            not setting.w.is_cuda
            and setting.capture == "auto"
            and step_when_quiet(workshop) > SHORT_SECONDS
        ):
            return "a local step takes long, and Python's share of it is small"
        steps = real_steps(workshop, client)
        for how in (None, recorder):
            trial.worker.recorder = how
            attributes = Attributes(trial.copy.learner, metrics=True, in_place=False)
            found.append(trial.run(client, steps))
            if stream is not None:
                stream.synchronize()
            if changed := attributes.changed():
                return f"its training_step changes {changed}"
    except Exception as error:  # the first round will meet it again if it is the learner's
        return f"a step fails when it is recorded ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
    finally:
        if stream is not None:
            stream.synchronize()
        recorder.forget()
        trial.copy.reset()
    if reasons:
        return reasons[0]
    if not recorder.replayed:
        return "no client has two batches of one shape"
    same = len(found[0]) == len(found[1]) and all(map(torch.equal, *found))
    return "" if same else "replays do something else than its training_step does each time"


def why_not_stacked(workshop: Workshop) -> str:
    """Why the learner, its optimizer or hooks cannot be stacked, or an empty string; a step is tried."""
    setting = workshop.setting
    if not is_flat(setting.optimizer, setting.learner):
        return f"{type(setting.optimizer).__name__} does not treat every coordinate alike"
    if setting.work.keep_optimizer_state and not is_plain_sgd(setting.optimizer):
        return "keep_optimizer_state"
    if hooked := gradient_hook(setting.learner):
        return f"its {hooked} has a hook on its gradient"
    if workshop.written:
        return f"its training_step changes the frozen parameter {workshop.written[0]}"
    if (hooks := workshop.original.hooks) is not None:
        return f"its {hooks.names[0]} takes one client's batch"
    if setting.looking:
        return f"the callback {type(setting.looking[0]).__name__} takes one client's batch"
    before = RandomState(setting.w)
    ids = setting.cohort.tried(0)
    try:
        copy = workshop.original.another(aliased=False)  # so that the learner keeps its attributes
        stack = Stack(copy, 2)
        stack.x.copy_(setting.w.detach().expand_as(stack.x))
        copy.begin(setting.work.data)
        # where only a learner that reads parameters past the stack would look
        copy.x.fill_(torch.nan)
        attributes = Attributes(copy.learner, metrics=True)
        own = {name: id(buffer) for name, buffer in copy.buffers.items()}
        with torch.no_grad():
            data = setting.work.data
            batches = [
                next(iter(data.client_batches(i, 0, 1, device=stack.x.device)))
                for i in (ids[0], ids[-1])
            ]
            finite = stack.gradient(stack.groups(list(enumerate(batches))), 0).isfinite().all()
        if not bool(finite):
            return "its loss is not finite, or reads parameters that are not its modules'"
        if changed := [
            name for name, buffer in copy.buffers.items() if own.get(name) != id(buffer)
        ]:
            return f"its training_step assigns to the buffer {changed[0]}"
        if attribute := attributes.changed():
            return f"its training_step changes {attribute}"
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"
    finally:
        before.restore()
    return ""


def replayed_seconds(workshop: Workshop) -> float:
    """Seconds of one client's local step on a GPU, replayed where it can be."""
    setting = workshop.setting
    client = setting.largest()
    recorder = Capture(lambda why: None, own_stream(setting.w))
    trial = Trial(workshop, recorder=recorder)

    def run(steps: int) -> float:
        torch.cuda.synchronize(setting.w.device)
        began = time.perf_counter()
        trial.run(client, steps)
        torch.cuda.synchronize(setting.w.device)
        return time.perf_counter() - began

    try:
        run(TRIED_STEPS)
        short = min(run(TRIED_STEPS) for _ in range(2))
        long = min(run(5 * TRIED_STEPS) for _ in range(2))
        return max(0.0, long - short) / (4 * TRIED_STEPS)
    finally:
        recorder.forget()
        trial.copy.reset()
