"""A local step recorded once and replayed: the same kernels on the same memory, without the learner's Python.

On a GPU it is a CUDA graph; on a CPU its ATen calls, one after the other, without the interpreter's lock. The first
step of each client runs as it is: it loads rows and makes what optimizers and methods need. The second is recorded,
the rest are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from fl_lightning.engines.client_optimizer import ClientOptimizer
from fl_lightning.engines.learner_copy import LearnerCopy
from fl_lightning.engines.replay.attributes import Attributes
from fl_lightning.engines.replay.recording import Recording
from fl_lightning.round.group import ClientGroup

COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "format", "str")
Step = Callable[[Any, Any], None]


class IndexUsed(RuntimeError):
    """``training_step`` looked at ``batch_idx``, whose value a replay would repeat."""


class NoIndex:
    """Takes the place of ``batch_idx`` while a step is recorded: any use of it is refused."""

    def _refuse(self, *_: object) -> NoReturn:
        raise IndexUsed("training_step uses batch_idx")

    __getattr__ = _refuse
    for _name in dir(int):
        if _name[:2] == "__" and (_name not in dir(object) or _name[2:-2] in COMPARED):
            vars()[_name] = _refuse


class Capture:
    """Replays steps of the clients that one worker trains one after the other.

    Args:
        warn: called with the reason when a step turns out not to be replayable.
        stream: the worker's, on a GPU; recordings are CUDA graphs there.
        shared: whether a recording of one client may be replayed for others.
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        stream: torch.cuda.Stream | None = None,
        shared: bool = True,
    ) -> None:
        self.warn, self.stream, self.shared = warn, stream, shared
        self.replayed = 0
        self._works = True
        self._recorded: Recording | Graph | None = None
        self._shape: Any = None
        self._pool = None if stream is None else torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        """Drop the recording: in a new round, what it holds fixed may have changed."""
        self._recorded = None

    def run(
        self,
        step: Step,
        batches: Iterator[Any],
        clients: ClientGroup,
        optimizer: ClientOptimizer,
        copy: LearnerCopy,
    ) -> None:
        """All steps of one client: ``step(batch, index)``."""
        bound, first = False, None
        for index, batch in enumerate(batches):
            leaves, spec = flat(batch)
            shape = (
                spec,
                [(v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else None for v in leaves],
            )
            if index == 0:
                first = shape
            elif not bound and self._works and shape == first and None not in shape[1]:
                own = {**clients.step_tensors(), **optimizer.tensors()}
                known = self._recorded if self.shared and shape == self._shape else None
                bound = known is not None and known.bind(own)
                if not bound:
                    self._shape = shape
                    bound = self._record(step, batch, index, own, clients, copy)
                    continue
            if bound and shape == self._shape:
                assert self._recorded is not None
                self._recorded.replay(leaves, copy.numbers)
                self.replayed += 1
            else:
                step(batch, index)

    def _record(
        self,
        step: Step,
        batch: Any,
        index: int,
        own: dict[str, Tensor],
        clients: ClientGroup,
        copy: LearnerCopy,
    ) -> bool:
        """Take this step and record it for the next ones; False if it cannot be repeated."""
        made: Recording | Graph
        self._recorded, before = None, dict(copy.numbers)
        leaves, numbers = tree_leaves(batch), copy.numbers
        changing = [copy.x, *own.values(), *copy.buffers.values(), *copy.sums.values(), *leaves]
        copies = [tensor.clone() for tensor in changing]
        given, kept = clients.given(), Attributes(copy.learner, metrics=True, in_place=False)
        buffers = [buffer.data_ptr() for buffer in copy.buffers.values()]
        clients.looked_up = False
        try:
            with ValueReads() as reads:
                if self.stream is None:
                    recording = Recording(leaves, own)
                    with recording:
                        step(batch, NoIndex())
                    why, made = recording.refused, recording
                else:
                    why, made = "", Graph(step, batch, self.stream, self._pool)
        except RuntimeError as error:
            if self.stream is None and not isinstance(error, IndexUsed):
                raise
            why = str(error).strip().splitlines()[0]
            # what was done so far is undone
            for tensor, held in zip(changing, copies, strict=True):
                tensor.copy_(held)
            copy.logged.clear()
            numbers.clear()
            numbers.update(before)
            step(batch, index)
        else:
            if numbers.keys() != before.keys():
                why = why or "not every step logs the same names"
            if not same(clients.given(), given):
                why = why or "a hook logs or uploads in each step"
            if not same(
                [*clients.step_tensors().values()],
                [v for k, v in own.items() if not k.startswith("optimizer.")],
            ):
                why = why or "a hook gives clients another tensor in each step"
            if [buffer.data_ptr() for buffer in copy.buffers.values()] != buffers:
                why = why or "training_step assigns to a buffer"
            if changed := kept.changed():
                why = why or f"training_step changes {changed}"
            why = why or reads.seen
            made.one_client = made.one_client or clients.looked_up
            made.counted = {name: number - before.get(name, 0) for name, number in numbers.items()}
            if self.stream is not None:  # while it was recorded nothing was computed
                numbers.update(before)
                made.replay(leaves, numbers)
        if why:
            self._works = False
            self.warn(why)
            return False
        self._recorded = made
        return True


class ValueReads(TorchFunctionMode):
    """Notes in ``seen`` that the values of a tensor are read in a way that no ATen call shows."""

    seen = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in (
            "numpy",
            "tolist",
            "__array__",
            "__dlpack__",
            "data_ptr",
        ):
            self.seen = f"the values of a tensor are read ({func.__name__})"
        return func(*args, **(kwargs or {}))


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether these are the same objects."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def flat(batch: Any) -> tuple[list[Any], Any]:
    """A batch's leaves and its structure; quick for the usual pair of tensors."""
    if type(batch) is tuple and all(isinstance(leaf, Tensor) for leaf in batch):
        return list(batch), len(batch)
    return tree_flatten(batch)


class Graph:
    """A step as a CUDA graph on a stream of its own.

    Raises:
        RuntimeError: something in it cannot be captured; nothing has been computed.
    """

    def __init__(self, step: Step, batch: Any, stream: torch.cuda.Stream, pool: Any) -> None:
        self.counted: dict[str, int] = {}
        self.one_client = True
        held = tree_map(torch.clone, batch)
        self.leaves: list[Tensor] = tree_leaves(held)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # not torch.cuda.graph, which waits for the whole device: other clients' steps are under way
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                step(held, NoIndex())
            finally:
                self.graph.capture_end()

    def bind(self, own: dict[str, Tensor]) -> bool:
        """Addresses are fixed: another client is recorded anew."""
        return False

    def replay(self, leaves: list[Tensor], numbers: dict[str, int]) -> None:
        """The step once more, on this batch."""
        for held, leaf in zip(self.leaves, leaves, strict=True):
            held.copy_(leaf, non_blocking=True)
        self.graph.replay()
        for name, number in self.counted.items():
            numbers[name] += number
