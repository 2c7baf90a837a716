"""A few real steps of real clients in copies of the learner, leaving no trace: what works, and how long it takes."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.engines.choice.workshop import Workshop, channels_last
from fl_lightning.engines.client_optimizer import is_flat, is_plain_sgd
from fl_lightning.engines.engine import intra_op_threads
from fl_lightning.engines.learner_copy import Convert
from fl_lightning.engines.random_state import RandomState
from fl_lightning.engines.replay.attributes import Attributes
from fl_lightning.engines.replay.capture import Capture
from fl_lightning.engines.stacked import Stack
from fl_lightning.engines.streams import own_stream
from fl_lightning.engines.worker import Worker
from fl_lightning.learner import buffer_values

TRIED_STEPS = 6  # one as it is, one recorded, the others replayed
SHORT_SECONDS = 0.02  # of a local step on a CPU: replaying saves about 0.1 ms
CHANNELS_LAST = ", channels last"
MEASURED_SECONDS = 0.03  # of each kind, each time
TINY_SECONDS = 0.02  # rounds of less local work are not worth measuring, and the choice would be left to noise
AGREEING, WITHIN = 3, 1.1  # so many of the shortest times have to lie within this factor before they decide
MOST_TIMES, MOST_SECONDS = 40, 3.0  # of one kind, after which the shortest decide as they are


class Settled:
    """Times of one thing, until the shortest agree: others on the machine can only add to a time."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def add(self, seconds: float) -> None:
        self.times.append(seconds)

    @property
    def enough(self) -> bool:
        shortest = sorted(self.times)[:AGREEING]
        agree = len(shortest) == AGREEING and shortest[-1] <= WITHIN * shortest[0]
        return (
            agree or len(self.times) >= MOST_TIMES or (len(self.times) >= AGREEING and sum(self.times) > MOST_SECONDS)
        )

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


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Trial:
    """Steps of clients in the workshop's j-th copy of the learner."""

    def __init__(self, workshop: Workshop, j: int = 0, recorder: Capture | None = None) -> None:
        self.setting = workshop.setting
        copy, optimizer = workshop.copies(j + 1)[j]
        stream = None if recorder is None else recorder.stream
        self.copy, self.worker = copy, Worker(workshop.trial_work, copy, optimizer, recorder, stream)
        copy.follow(self.setting.learner)
        self.buffers = buffer_values(self.setting.learner)

    def run(self, client: int, steps: int) -> list[Tensor]:
        """So many steps of a client from the server's model: where it ends, its buffers, and what was logged."""
        with torch.no_grad(), self.worker:
            clients = self.worker.train(self.setting.round({client: steps}, self.buffers), client)
            logs = [value for _, value in sorted(clients.logs.items())]
            return [self.copy.x.clone(), *(b.clone() for b in clients.buffers.values()), *logs]


@dataclass(frozen=True)
class Obstacle:
    """Why clients cannot train side by side; ``in_attributes``: the learner keeps something, which a buffer could."""

    reason: str
    in_attributes: bool = False


def obstacle_beside(workshop: Workshop) -> Obstacle | None:
    """What one step draws from the process's random generators, or changes; these are left as they were."""
    setting, trial = workshop.setting, Trial(workshop)
    before = RandomState(setting.w)
    client = setting.participants(0)[0]
    try:
        list(setting.work.data.client_batches(client, 0, 1, device=setting.w.device))
        if before.drawn_since():
            return Obstacle("its data set draws random numbers when a batch is read")
        attributes = Attributes(trial.copy.learner)
        trial.run(client, 1)
        if before.drawn_since():
            return Obstacle("its training_step draws random numbers (dropout, say)")
        changed = attributes.changed()
        if not changed:
            return None
        return Obstacle(f"its training_step changes {changed}, which goes on from client to client", in_attributes=True)
    finally:
        before.restore()
        trial.copy.reset()


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
    if not setting.w.is_cuda and setting.capture == "auto":
        trial = Trial(workshop)
        once = settled(lambda: timed(lambda: trial.run(client, 1)))
        if once > SHORT_SECONDS:
            return f"a local step takes {once:.2g} s, of which Python's share is small"
    reasons: list[str] = []
    found: list[list[Tensor]] = []
    stream = own_stream(setting.w)
    recorder = Capture(reasons.append, stream)
    trial = Trial(workshop, recorder=recorder)
    try:
        for how in (None, recorder):
            trial.worker.recorder = how
            attributes = Attributes(trial.copy.learner, metrics=True, in_place=False)
            found.append(trial.run(client, TRIED_STEPS))
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
    if (hooks := workshop.original.hooks) is not None:
        return f"its {hooks.names[0]} takes one client's batch"
    before = RandomState(setting.w)
    ids = setting.participants(0)
    try:
        copy = workshop.original.another()  # so that the learner keeps its attributes
        stack = Stack(copy, 2)
        stack.x.copy_(setting.w.detach().expand_as(stack.x))
        copy.x.fill_(torch.nan)  # where only a learner that reads parameters past the stack would look
        attributes = Attributes(copy.learner, metrics=True)
        own = {name: id(buffer) for name, buffer in copy.buffers.items()}
        with torch.no_grad():
            data = setting.work.data
            batches = [next(iter(data.client_batches(i, 0, 1, device=stack.x.device))) for i in (ids[0], ids[-1])]
            finite = stack.gradient(stack.groups(list(enumerate(batches))), 0).isfinite().all()
        if not bool(finite):
            return "its loss is not finite, or reads parameters that are not its modules'"
        if changed := [name for name, buffer in copy.buffers.items() if own.get(name) != id(buffer)]:
            return f"its training_step assigns to the buffer {changed[0]}"
        if attribute := attributes.changed():
            return f"its training_step changes {attribute}"
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"
    finally:
        before.restore()
    return ""


def makespan(lengths: Iterable[float], workers: int) -> float:
    """How long the busiest of the workers is busy, longest first."""
    busy = [0.0] * workers
    for length in sorted(lengths, reverse=True):
        heapq.heappush(busy, heapq.heappop(busy) + length)
    return max(busy)


def step_seconds(workshop: Workshop, number: int, captured: bool) -> dict[str, float] | None:
    """Seconds of a local step on one thread: one client ``alone``, or ``beside`` as many others as ``number`` allows.

    Beside others, steps are replayed where ``captured`` says that they will be; what methods do is left out.
    Both also with channels-last images where the learner has convolutions. None where a round's steps take less than
    ``TINY_SECONDS``.
    """
    setting = workshop.setting
    ids, in_round = setting.participants(0), sum(setting.lengths())
    trials = [Trial(workshop, j) for j in range(number)]
    plain = [trial.copy.convert for trial in trials]
    formats: dict[str, list[Convert | None]] = {"": plain}
    if setting.convolutions:
        formats[CHANNELS_LAST] = [channels_last(convert) for convert in plain]
    times: dict[str, Settled] = {}
    with ThreadPoolExecutor(number, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        recorders = {name: [Capture(lambda why: None) if captured else None for _ in trials] for name in formats}

        def use(name: str) -> None:
            for trial, convert in zip(trials, formats[name], strict=True):
                trial.copy.convert = convert

        def alone(name: str, steps: int) -> float:
            trials[0].worker.recorder = None
            with intra_op_threads(1):
                return timed(lambda: trials[0].run(ids[0], steps)) / steps

        def beside(name: str, steps: int) -> float:
            for trial, recorder in zip(trials, recorders[name], strict=True):
                trial.worker.recorder = recorder
            jobs = [(trial, ids[j % len(ids)]) for j, trial in enumerate(trials)]
            return timed(lambda: list(pool.map(lambda job: job[0].run(job[1], steps), jobs))) / steps

        try:
            once = settled(lambda: alone("", 1))
            if once * in_round < TINY_SECONDS:
                return None
            steps = max(1, min(50, int(MEASURED_SECONDS / once)))
            kinds = {"alone": alone, "beside": beside}
            for name in list(formats):
                use(name)
                try:
                    for measure in kinds.values():
                        measure(name, 3 if captured else 1)  # a warm-up; of three the second is recorded
                except RuntimeError:
                    if not name:
                        raise
                    del formats[name]  # a learner that asks for a view of contiguous memory
                else:
                    times.update({kind + name: Settled() for kind in kinds})
            while not all(of.enough for of in times.values()):
                for name in formats:
                    use(name)
                    for kind, measure in kinds.items():
                        times[kind + name].add(measure(name, steps))
        finally:
            for trial, convert in zip(trials, plain, strict=True):
                trial.copy.convert = convert
                trial.copy.reset()
    return {kind: of.seconds for kind, of in times.items()}


def replayed_seconds(workshop: Workshop) -> dict[str, float]:
    """Seconds of one client's local step on a GPU, replayed where it can be, with images in each memory format."""
    setting, client = workshop.setting, workshop.setting.largest()
    stream = own_stream(setting.w)
    copy = workshop.copies(1)[0][0]
    plain = copy.convert
    formats = {"": plain, CHANNELS_LAST: channels_last(plain)} if setting.convolutions else {"": plain}

    def run(trial: Trial, steps: int) -> float:
        torch.cuda.synchronize(setting.w.device)
        began = time.perf_counter()
        trial.run(client, steps)
        torch.cuda.synchronize(setting.w.device)
        return time.perf_counter() - began

    found = {}
    try:
        for name, convert in formats.items():
            copy.convert, recorder = convert, Capture(lambda why: None, stream)
            trial = Trial(workshop, recorder=recorder)
            run(trial, TRIED_STEPS)
            short, long = (min(run(trial, steps) for _ in range(2)) for steps in (TRIED_STEPS, 5 * TRIED_STEPS))
            found[name] = max(0.0, long - short) / (4 * TRIED_STEPS)
            recorder.forget()
    finally:
        copy.convert = plain
        copy.reset()
    return found
