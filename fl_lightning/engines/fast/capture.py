"""A local step recorded once and replayed: the same kernels on the same memory, without Python.

On a GPU it is a CUDA graph; on a CPU its ATen calls, one after the other, without the interpreter's
lock. The first step of each client runs normally: it loads rows and creates the state of optimizers
and methods. The second is recorded, the rest are replayed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from fl_lightning.client.client_optimizer import ClientOptimizer
from fl_lightning.client.client_trainer import EachStep
from fl_lightning.client.flat_learner import FlatLearner
from fl_lightning.engines.engine_context import LearnerCopies
from fl_lightning.engines.fast.recording import FRESH, Recording, aten
from fl_lightning.engines.trials.batch_check import first_line
from fl_lightning.engines.trials.dry_run import DryRun, step_seconds
from fl_lightning.learner.attributes import Attributes
from fl_lightning.round.client_group import ClientGroup

SHORT_SECONDS = 0.02  # longest local step on a CPU that is recorded: replaying saves about 0.1 ms
TRIED_STEPS = 30  # steps that are replayed before round 0, and compared with as many ordinary steps
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "format", "str")
READS = ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr")
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
COPYING = (aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default)
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
        self.warn = warn
        self.stream = stream
        self.shared = shared
        self.replayed = 0
        self._works = True
        self._recorded: Recording | Graph | None = None
        self._shape: Any = None
        self._pool: Pool | None = None

    def forget(self) -> None:
        """Drop the recording: in a new round, what it holds fixed may have changed."""
        self._recorded = None

    def wait(self) -> None:
        """Wait for the device, where there is one."""
        if self.stream is not None:
            self.stream.synchronize()

    def unused(self) -> str:
        """Why nothing was replayed; empty: something was."""
        return "" if self.replayed else "no client has two batches of one shape"

    def run(
        self,
        step: Step,
        batches: Iterator[Any],
        clients: ClientGroup,
        optimizer: ClientOptimizer,
        copy: FlatLearner,
    ) -> None:
        """Take all steps of one client by ``step(batch, index)``, or as a recording has them."""
        bound = False
        first = None
        for index, batch in enumerate(batches):
            leaves, spec = flat(batch)
            shape = (spec, [laid_out(leaf, copy.x.device) for leaf in leaves])
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
        copy: FlatLearner,
    ) -> bool:
        """Take this step and record it for the next ones; False if it cannot be repeated."""
        self._recorded = None
        before = dict(copy.numbers)
        leaves = tree_leaves(batch)
        changing: list[Tensor] = []
        if self.stream is None:  # recording a graph computes nothing
            changing += [copy.x, *own.values(), *copy.buffers.values()]
            changing += [*copy.logs.totals.values(), *leaves]
        held = [tensor.clone() for tensor in changing]
        unchanged = Unchanged(clients, own, copy, before)
        copy.recording = self.stream is None
        try:
            with ValueReads() as reads:
                made = self._made(step, batch, leaves, own)
        except RuntimeError as error:
            if self.stream is None and not isinstance(error, IndexUsed):
                raise
            why = first_line(error)
            # Undo the part of the step that was done, and take the step in the usual way.
            for tensor, value in zip(changing, held, strict=True):
                tensor.copy_(value)
            copy.logged.clear()
            copy.numbers.clear()
            copy.numbers.update(before)
            step(batch, index)
        else:
            why = made.refused or unchanged.broken() or reads.seen
            made.one_client = made.one_client or clients.looked_up
            for name, number in copy.numbers.items():
                made.counted[name] = number - before.get(name, 0)
            if self.stream is not None:
                # Recording a graph computes nothing, so replay it now.
                copy.numbers.update(before)
                made.replay(leaves, copy.numbers)
        finally:
            copy.recording = False
        if why:
            self._works = False
            self.warn(why)
            return False
        self._recorded = made
        return True

    def _made(
        self, step: Step, batch: Any, leaves: list[Tensor], own: dict[str, Tensor]
    ) -> Recording | Graph:
        if self.stream is not None:
            self._pool = self._pool or Pool(self.stream)
            return Graph(step, batch, self.stream, self._pool.handle)
        recording = Recording(leaves, own)
        with recording:
            step(batch, NoIndex())
        return recording


class Unchanged:
    """Facts that a step must not change, so that a replay does the same."""

    def __init__(
        self,
        clients: ClientGroup,
        own: dict[str, Tensor],
        copy: FlatLearner,
        numbers: dict[str, int],
    ) -> None:
        self.clients = clients
        self.copy = copy
        self.given = clients.given()
        self.rows = [v for name, v in own.items() if not name.startswith("optimizer.")]
        self.numbers = numbers
        self.attributes = Attributes(copy.learner, metrics=True, values=False)
        self.buffers = [buffer.data_ptr() for buffer in copy.buffers.values()]
        clients.looked_up = False

    def broken(self) -> str:
        """What the step has not left as it was; empty: nothing."""
        clients = self.clients
        copy = self.copy
        if copy.numbers.keys() != self.numbers.keys():
            return "not every step logs the same names"
        if not same(clients.given(), self.given):
            return "a hook logs or uploads in each step"
        if not same([*clients.step_tensors().values()], self.rows):
            return "a hook gives clients another tensor in each step"
        if [buffer.data_ptr() for buffer in copy.buffers.values()] != self.buffers:
            return "training_step assigns to a buffer"
        later = Attributes(copy.learner, metrics=True, values=False)
        changed = self.attributes.changed(later)
        return f"training_step changes {changed[0]}" if changed else ""


def why_not_captured(copies: LearnerCopies) -> str:
    """Why local steps are not captured, tried on a few; empty: replays leave the same bits."""
    context = copies.context
    foreign = context.work.methods.in_steps_of_others()
    by_choice = context.capture == "auto"
    if not context.capture:
        return "not asked for"
    if context.work.accumulate > 1:
        return f"accumulate={context.work.accumulate}: a step is several batches"
    if method := context.work.methods.reduced_by:
        return f"{method} takes the gradient of each sample"
    if not type(context.optimizer).__module__.startswith("torch.optim"):
        return f"{type(context.optimizer).__name__} is not one of torch's optimizers"
    if foreign and by_choice:
        return f"{foreign} is not a packaged method; capture=True captures it too"
    if context.schedule is not None and context.schedule.by_step:
        return "client_scheduler='local_steps' changes the learning rate in each step"
    hooks = copies.original.hooks
    if hooks is not None and hooks.of_gradients:
        return f"its {hooks.of_gradients[0]} runs in each step"
    reasons: list[str] = []
    step_runner = Capture(reasons.append, own_stream(context.w))
    trial = DryRun(copies, step_runner=step_runner)
    try:
        return tried(trial, step_runner, by_choice) or "".join(reasons[:1]) or step_runner.unused()
    except Unrecordable as error:
        return str(error)
    except Exception as error:  # if the error is the learner's, the first round will meet it again
        return f"a step fails when it is recorded ({type(error).__name__}: {first_line(error)})"
    finally:
        step_runner.wait()
        step_runner.forget()
        trial.copy.reset()


def tried(trial: DryRun, step_runner: Capture, by_choice: bool) -> str:
    """Take a client's steps as they are, then captured, and say what makes these another."""
    context = trial.context
    if by_choice and not context.w.is_cuda and step_seconds(trial.copies) > SHORT_SECONDS:
        return "a local step takes long, and Python's share of it is small"
    client = context.largest()
    steps = min(context.cohort.steps_tried(client), TRIED_STEPS)
    if context.w.is_cuda:
        trial.worker.step_runner = Watched()
        trial.run(client, min(steps, 2))
        step_runner.wait()
    ends = []
    for how in (None, step_runner):
        trial.worker.step_runner = how
        before = Attributes(trial.copy.learner, metrics=True, values=False)
        ends.append(trial.run(client, steps))
        step_runner.wait()
        changed = before.changed(Attributes(trial.copy.learner, metrics=True, values=False))
        if changed:
            return f"its training_step changes {changed[0]}"
    if step_runner.replayed and not all(map(torch.equal, *ends)):
        return "replays do something else than its training_step does each time"
    return ""


class ValueReads(TorchFunctionMode):
    """Notes in ``seen`` that the values of a tensor are read in a way that no ATen call shows."""

    seen = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            self.seen = f"the values of a tensor are read ({func.__name__})"
        return func(*args, **(kwargs or {}))


class Unrecordable(RuntimeError):
    """A step does what no CUDA graph can hold."""


class Refusing(TorchDispatchMode):
    """Refuses what no CUDA graph can hold: reads of values, copies to or from a GPU, and changes on
    the CPU, such as that of Adagrad's step count.

    Raises:
        Unrecordable: at such a call, before CUDA meets it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(on_gpu, given)):
            masks = any(each.dtype in (torch.bool, torch.uint8) for each in given[1:])
            indexing = func in INDEXING
            shaped = torch.Tag.dynamic_output_shape in func.tags and not indexing
            if torch.Tag.data_dependent_output in func.tags or shaped or (indexing and masks):
                raise Unrecordable(f"a step reads values of a tensor ({func})")
        places = {on_gpu(each) for each in given}
        if kwargs.get("device") is not None:
            places.add(torch.device(kwargs["device"]).type != "cpu")
        if (func in COPYING and len(places) > 1) or (func in FRESH and True in places):
            raise Unrecordable(f"a step copies a tensor to or from the GPU ({func})")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            changes = argument.alias_info is not None and argument.alias_info.is_write
            leaves = tree_leaves(value) if changes else []
            if any(isinstance(leaf, Tensor) and not on_gpu(leaf) for leaf in leaves):
                raise Unrecordable(f"a step changes a tensor on the CPU ({func})")
        return func(*args, **kwargs)


class Watched(EachStep):
    """Takes steps as they are, within :class:`Refusing`."""

    def around(self, clients: ClientGroup, index: int, batch: Any) -> Refusing:
        return Refusing()  # type: ignore[no-untyped-call]  # torch has no types there


def on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def laid_out(leaf: Any, device: torch.device) -> Any:
    """How a batch's tensor lies in memory; None if a recording would keep its first value, because
    it is not a tensor, or lies on the CPU beside a GPU (as the lengths in a PackedSequence).
    """
    if not isinstance(leaf, Tensor) or leaf.device != device:
        return None
    return leaf.shape, leaf.stride(), leaf.dtype


def own_stream(x: Tensor) -> torch.cuda.Stream | None:
    """A stream on the GPU where x lies; None on a CPU."""
    return torch.cuda.Stream(x.device) if x.is_cuda else None


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether these are the same objects."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def flat(batch: Any) -> tuple[list[Any], Any]:
    """A batch's leaves and its structure; quick for the usual pair of tensors."""
    if type(batch) is tuple and all(isinstance(leaf, Tensor) for leaf in batch):
        return list(batch), len(batch)
    return tree_flatten(batch)


class Pool:
    """The memory of the graphs that one worker records, one after another.

    A pool ends with its last graph, and its id is not accepted again. So an empty graph keeps it
    (as in torch's own trees of graphs), and each recording takes the memory of the one before.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._keeper = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the graph is empty
            self._keeper.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            self._keeper.capture_end()


@contextmanager
def without_waits() -> Iterator[None]:
    """Within this context a call that waits for the GPU is an error, and does not reach it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Graph:
    """A step as a CUDA graph on a stream of its own.

    Raises:
        RuntimeError: something in it cannot be captured; nothing has been computed.
    """

    def __init__(self, step: Step, batch: Any, stream: torch.cuda.Stream, pool: Any) -> None:
        self.counted: dict[str, int] = {}
        self.refused = ""
        self.one_client = True
        held = tree_map(torch.clone, batch)
        self.leaves: list[Tensor] = tree_leaves(held)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # torch.cuda.graph would wait for the whole device, while other clients' steps are
            # running.
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                # A call that makes a capture invalid would leave torch's allocator in it.
                with without_waits():
                    step(held, NoIndex())
            except BaseException:
                # The step's error is the reason, whatever the end of its capture says.
                with suppress(RuntimeError):
                    self.graph.capture_end()
                raise
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
