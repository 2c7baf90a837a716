"""Timing a few real steps of real clients in copies of the learner, which leaves no trace."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fl_lightning.client_optimizer import ClientOptimizer
from fl_lightning.engines.attributes import Attributes
from fl_lightning.engines.capture import Capture
from fl_lightning.engines.local import RandomState, local_steps
from fl_lightning.engines.replica import Convert, Replica, buffer_values
from fl_lightning.engines.sequential import intra_op_threads
from fl_lightning.engines.streams import Slot, own_stream
from fl_lightning.methods import Methods
from fl_lightning.rounds import Clients

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

Copy = tuple[Replica, ClientOptimizer]
TRIED_STEPS = 6  # one as it is, one recorded, the others replayed
SHORT_SECONDS = 0.02  # of a local step on a CPU: replaying saves about 0.1 ms
CHANNELS_LAST = ", channels last"
MEASURED_SECONDS = 0.03  # of each kind, each time
MEASURED_PART = 0.1  # of a round, spent on it where the noise of three times would decide
TINY_SECONDS = 0.02  # rounds of less local work are not worth measuring, and the choice would be left to noise


def channels_last(convert: Convert | None) -> Convert:
    """With images (four dimensions, floating point) in channels-last memory, which some convolutions prefer."""

    def change(leaf: Any) -> Any:
        image = isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.is_floating_point()
        return leaf.contiguous(memory_format=torch.channels_last) if image else leaf

    def converted(learner: Any, batch: Any) -> Any:
        return tree_map(change, batch if convert is None else convert(learner, batch))

    return converted


def makespan(lengths: Iterable[float], workers: int) -> float:
    """How long the busiest of the workers is busy, longest first."""
    busy = [0.0] * workers
    for length in sorted(lengths, reverse=True):
        heapq.heappush(busy, heapq.heappop(busy) + length)
    return max(busy)


def draws(module: FederatedModule, replica: Replica, optimizer: ClientOptimizer) -> str:
    """Why clients cannot train side by side: what one step draws from the process's random generators, or changes.

    Empty where nothing does; the generators are left as they were.
    """
    before = RandomState(replica.x)
    client = module.participants(0)[0]
    try:
        batches = list(module.data.client_batches(client, 0, 1, device=replica.x.device))
        if before.moved():
            return "its data set draws random numbers when a batch is read"
        prepare(module, replica, optimizer)
        attributes = Attributes(replica.learner)
        with torch.no_grad():
            local_steps(replica, None, iter(batches), optimizer, Methods([]), None)  # type: ignore[arg-type]
        if before.moved():
            return "its training_step draws random numbers (dropout, say)"
        changed = attributes.changed()
        return f"its training_step changes {changed}, which goes on from client to client" if changed else ""
    finally:
        before.restore()
        replica.reset()


def uncapturable(module: FederatedModule, replica: Replica, optimizer: ClientOptimizer) -> str:
    """Why local steps cannot be recorded and replayed, tried on a few; empty if replays leave the same bits."""
    client = max(module.participants(0), key=module.data.batches_per_epoch)
    if not replica.x.is_cuda and module.capture == "auto":
        prepare(module, replica, optimizer)
        batches = list(module.data.client_batches(client, 0, 1))
        with torch.no_grad():
            once = timed(lambda: local_steps(replica, None, iter(batches), optimizer, Methods([]), None, draws=False))  # type: ignore[arg-type]
        if once > SHORT_SECONDS:
            return f"a local step takes {once:.2g} s, of which Python's share is small"
    reasons: list[str] = []
    found: list[list[Tensor]] = []
    stream = own_stream(replica.x)
    capture = Capture(reasons.append, stream)
    try:
        for how in (None, capture):
            prepare(module, replica, optimizer)
            attributes = Attributes(replica.learner, metrics=True, in_place=False)
            batches = module.data.client_batches(client, 0, TRIED_STEPS, device=replica.x.device)
            with torch.no_grad(), Slot(replica, optimizer, how, stream):
                clients = Clients(None, [client], replica.x)  # type: ignore[arg-type]
                local_steps(replica, clients, batches, optimizer, Methods([]), None, draws=False, capture=how)
                found.append([replica.x.clone(), *(b.clone() for b in replica.buffers.values())])
                found[-1] += [value for _, value in sorted(replica.take_logs().items())]
            if stream is not None:
                stream.synchronize()
            if changed := attributes.changed():
                return f"its training_step changes {changed}"
    except Exception as error:  # the first round will meet it again if it is the learner's
        return f"a step fails when it is recorded ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
    finally:
        if stream is not None:
            stream.synchronize()
        capture.forget()
        replica.reset()
    if reasons:
        return reasons[0]
    if not capture.replayed:
        return "no client has two batches of one shape"
    same = len(found[0]) == len(found[1]) and all(map(torch.equal, *found))
    return "" if same else "replays do something else than its training_step does each time"


def prepare(module: FederatedModule, replica: Replica, optimizer: ClientOptimizer) -> None:
    replica.follow(module.learner)
    replica.x.copy_(module.global_vector.detach())
    replica.load_buffers(buffer_values(module.learner))
    optimizer.begin(1.0, None)
    replica.reset()


def step_seconds(module: FederatedModule, copies: list[Copy], in_round: int, capture: bool) -> dict[str, float] | None:
    """Seconds of a local step on one thread: one client ``alone``, or ``beside`` as many others as copies.

    Beside others, steps are replayed where ``capture`` says that they will be; what methods do is left out.
    Both also with channels-last images where the learner has convolutions. None where a round's ``in_round`` steps
    take less than ``TINY_SECONDS``.
    """
    ids = module.participants(0)
    plain = [replica.convert for replica, _ in copies]
    formats: dict[str, list[Convert | None]] = {"": plain}
    if has_convolutions(module):
        formats[CHANNELS_LAST] = [channels_last(convert) for convert in plain]
    found: dict[str, list[float]] = {}
    with ThreadPoolExecutor(len(copies), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        recorded = {name: [Capture(lambda why: None) if capture else None for _ in copies] for name in formats}

        def some(j: int, steps: int, how: Capture | None = None) -> None:
            (replica, optimizer), client = copies[j], ids[j % len(ids)]
            with torch.no_grad():
                batches = module.data.client_batches(client, 0, steps, device=replica.x.device)
                clients = Clients(None, [client], replica.x)  # type: ignore[arg-type]
                local_steps(replica, clients, batches, optimizer, Methods([]), None, draws=False, capture=how)

        def alone(steps: int) -> float:
            with intra_op_threads(1):
                return timed(lambda: some(0, steps)) / steps

        def beside(steps: int, how: list[Capture | None]) -> float:
            return timed(lambda: list(pool.map(some, range(len(copies)), [steps] * len(copies), how))) / steps

        def use(name: str) -> None:
            for (replica, _), convert in zip(copies, formats[name], strict=True):
                replica.convert = convert

        for replica, optimizer in copies:
            prepare(module, replica, optimizer)
        try:
            alone(1)
            first = alone(1)
            if first * in_round < TINY_SECONDS:
                return None
            steps = max(1, min(50, int(MEASURED_SECONDS / first)))
            kinds = 2 * len(formats) * steps
            times = max(3, min(7, int(MEASURED_PART * in_round / kinds)))
            for repeat in range(1 + times):  # the first is a warm-up
                for name in list(formats):
                    use(name)
                    try:
                        number = steps if repeat else 3 if capture else 1  # of which the second is recorded
                        both = alone(number), beside(number, recorded[name])
                    except RuntimeError:
                        if not name:
                            raise
                        del formats[name]  # a learner that asks for a view of contiguous memory
                        continue
                    if repeat:
                        found.setdefault("alone" + name, []).append(both[0])
                        found.setdefault("beside" + name, []).append(both[1])
        finally:
            for (replica, _), convert in zip(copies, plain, strict=True):
                replica.convert = convert
                replica.reset()
    return {name: min(values) for name, values in found.items()}


def replayed_seconds(module: FederatedModule, replica: Replica, optimizer: ClientOptimizer) -> dict[str, float]:
    """Seconds of one client's local step on a GPU, replayed where it can be, with images in each memory format."""
    client = max(module.participants(0), key=module.data.batches_per_epoch)
    plain = replica.convert
    formats = {"": plain, CHANNELS_LAST: channels_last(plain)} if has_convolutions(module) else {"": plain}
    device = replica.x.device
    stream = own_stream(replica.x)

    def run(capture: Capture, steps: int) -> float:
        prepare(module, replica, optimizer)
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        batches = module.data.client_batches(client, 0, steps, device=device)
        with torch.no_grad(), Slot(replica, optimizer, capture, stream):
            clients = Clients(None, [client], replica.x)  # type: ignore[arg-type]
            local_steps(replica, clients, batches, optimizer, Methods([]), None, draws=False, capture=capture)
        torch.cuda.synchronize(device)
        return time.perf_counter() - began

    found = {}
    try:
        for name, convert in formats.items():
            replica.convert, capture = convert, Capture(lambda why: None, stream)
            run(capture, TRIED_STEPS)
            short, long = (min(run(capture, steps) for _ in range(2)) for steps in (TRIED_STEPS, 5 * TRIED_STEPS))
            found[name] = max(0.0, long - short) / (4 * TRIED_STEPS)
            capture.forget()
    finally:
        replica.convert = plain
        replica.reset()
    return found


def has_convolutions(module: FederatedModule) -> bool:
    return any(isinstance(part, nn.Conv2d) for part in module.learner.modules())


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
