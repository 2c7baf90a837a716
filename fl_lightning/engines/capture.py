"""A local step recorded once and replayed: the same kernels on the same memory, without the learner's Python.

On a GPU a CUDA graph; on a CPU the list of ATen calls. The first step of each client runs as it is: it brings in rows
and makes what optimizers and methods need. The second is recorded, the others are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

if TYPE_CHECKING:
    from fl_lightning.client_optimizer import ClientOptimizer
    from fl_lightning.rounds import Clients

aten = torch.ops.aten
SAME = (aten.detach.default, aten.alias.default)
FRESH = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
NOT_CAPTURED = "local steps are not captured, and run one by one: "

COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "format", "str")
Step = Callable[[Any, Any], None]


class IndexUsed(RuntimeError):
    """``training_step`` looked at ``batch_idx``, whose value a replay would repeat."""


class NoIndex:
    """Stands for ``batch_idx`` while a step is recorded: whatever is done with it is refused."""

    def _refuse(self, *_: object) -> NoReturn:
        raise IndexUsed("training_step uses batch_idx")

    __getattr__ = _refuse
    for _name in dir(int):
        if _name[:2] == "__" and (_name not in dir(object) or _name[2:-2] in COMPARED):
            vars()[_name] = _refuse


class Capture:
    """Replays steps of the clients that one replica trains one after the other.

    Args:
        warn: told why a step cannot be replayed, when it turns out that it cannot.
        stream: on a GPU, of the replica; recordings are CUDA graphs there.
    """

    def __init__(self, warn: Callable[[str], None], stream: torch.cuda.Stream | None = None) -> None:
        self.warn, self.stream = warn, stream
        self.replayed = 0
        self._works = True
        self._recorded: Recording | Graph | None = None
        self._shape: Any = None
        self._pool = None if stream is None else torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        """A new round: what a recording holds fixed may have changed."""
        self._recorded = None

    def run(
        self,
        step: Step,
        batches: Iterator[Any],
        clients: Clients,
        optimizer: ClientOptimizer,
        numbers: dict[str, int],
    ) -> None:
        """All steps of one client: ``step(batch, index)``, which counts up ``numbers`` in Python."""
        bound, first = False, None
        for index, batch in enumerate(batches):
            leaves, spec = flat(batch)
            shape = spec, [(v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else None for v in leaves]
            if index == 0:
                first = shape
            elif not bound and self._works and shape == first and None not in shape[1]:
                own = {**clients.tensors(), **optimizer.tensors()}
                bound = shape == self._shape and self._recorded is not None and self._recorded.bind(own)
                if not bound:
                    self._shape, clients.looked_up = shape, False
                    bound = self._record(step, batch, index, own, numbers)
                    if self._recorded is not None:
                        self._recorded.one_client = clients.looked_up
                    continue
            if bound and shape == self._shape:
                assert self._recorded is not None
                self._recorded.replay(leaves, numbers)
                self.replayed += 1
            else:
                step(batch, index)

    def _record(self, step: Step, batch: Any, index: int, own: dict[str, Tensor], numbers: dict[str, int]) -> bool:
        """Take this step, and hold it for the next ones; False if it cannot be repeated."""
        made: Recording | Graph
        self._recorded, before = None, dict(numbers)
        leaves = tree_leaves(batch)
        try:
            if self.stream is None:
                recording = Recording(leaves, own)
                with recording:
                    step(batch, NoIndex())
                why, made = recording.refused, recording
            else:
                why, made = "", Graph(step, batch, self.stream, self._pool)
            if numbers.keys() != before.keys():
                why = why or "not every step logs the same names"
        except (IndexUsed, torch.AcceleratorError) as error:
            why = str(error).strip().splitlines()[0]
            numbers.clear()
            numbers.update(before)
            step(batch, index)
        else:
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


def flat(batch: Any) -> tuple[list[Any], Any]:
    """A batch's leaves and how they are put together; quick for the usual pair of tensors."""
    if type(batch) is tuple and all(isinstance(leaf, Tensor) for leaf in batch):
        return list(batch), len(batch)
    return tree_flatten(batch)


class Recording(TorchDispatchMode):
    """The ATen calls within, as a function of the batch's leaves and of the tensors that were there before.

    Args:
        leaves: of the batch.
        own: tensors that :meth:`bind` replaces by others of the same layout.
    """

    def __init__(self, leaves: list[Tensor], own: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused = ""
        self.counted: dict[str, int] = {}
        self.one_client = False
        self._names = {id(leaf): f"b{j}" for j, leaf in enumerate(leaves)}
        self._arguments = list(self._names.values())
        self._storages = {tensor.untyped_storage().data_ptr(): name for name, tensor in own.items()}
        self._fixed: dict[tuple[int, int], str] = {}
        self._values: dict[str, Any] = {}
        self._held: list[Any] = []  # so that no id is given twice
        self._calls: list[tuple[list[str], list[str], str]] = []
        self._run: Callable[..., None] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        self._held.append((given, out))
        self._check(func, given)
        made = any(id(a) in self._names for a in given)
        if func in SAME or (func.is_view and not made):
            if made:
                self._names[id(out)] = self._names[id(given[0])]
            return out  # of a tensor that stays, a view stays
        if func in FRESH:
            func, args, kwargs = aten.clone.default, (args[0],), {}
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        uses: list[str] = []
        call = self._call(func, args, kwargs, uses)
        names: list[str] = []
        for o in outs:
            if isinstance(o, Tensor) and not any(o is a for a in given):
                self._names[id(o)] = f"t{len(self._held)}_{len(names)}"
                names.append(self._names[id(o)])
            else:
                names.append("_")
        target = ",".join(names) + ("," if isinstance(out, (list, tuple)) else "")
        self._calls.append((names, uses, f"{target} = {call}" if names else call))
        return out

    def _check(self, func: Any, given: list[Tensor]) -> None:
        if torch.Tag.data_dependent_output in func.tags:
            self.refused = f"{func} reads a value, which may differ from step to step"
        elif torch.Tag.dynamic_output_shape in func.tags:
            integers = func is aten.index.Tensor and not any(a.dtype in (torch.bool, torch.uint8) for a in given[1:])
            if not integers:
                self.refused = f"the shape of {func}'s result may differ from step to step"

    def _call(self, func: Any, args: Any, kwargs: Any, uses: list[str]) -> str:
        texts = [self._text(a, uses) for a in args] + [f"{k}={self._text(v, uses)}" for k, v in kwargs.items()]
        return f"{self._constant(func)}({', '.join(texts)})"

    def _text(self, value: Any, uses: list[str]) -> str:
        if isinstance(value, Tensor):
            name = self._names.get(id(value)) or self._there(value)
            uses.append(name)
            return name
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._text(v, uses) for v in value)}]"
        return repr(value) if value is None or isinstance(value, (bool, int)) else self._constant(value)

    def _there(self, tensor: Tensor) -> str:
        """A tensor that was there before; parameters may be tied elsewhere later, so where it lies now counts."""
        key = id(tensor), tensor.data_ptr()
        if key not in self._fixed:
            self._fixed[key] = self._constant(tensor.detach())
        return self._fixed[key]

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._values)}"
        self._values[name] = value
        return name

    def _compiled(self) -> Callable[..., None]:
        """The calls as one Python function; each tensor is given free after its last use."""
        last = {name: j for j, (_, uses, _) in enumerate(self._calls) for name in uses}
        lines = []
        for j, (names, uses, call) in enumerate(self._calls):
            lines.append(call)
            ends = {n for n in (*uses, *names) if n.startswith("t") and last.get(n, j) == j}
            lines += [" = ".join(sorted(ends)) + " = None"] if ends else []
        code = f"def replay({', '.join(self._arguments)}):\n " + "\n ".join(lines)
        exec(compile(code, "<recorded local step>", "exec"), self._values)  # made of names and numbers alone
        self._fixed_own = {
            name: (self._storages[at], value.shape, value.stride(), value.storage_offset())
            for name, value in self._values.items()
            if isinstance(value, Tensor) and (at := value.untyped_storage().data_ptr()) in self._storages
        }
        self._held, self._names, self._calls = [], {}, []
        return self._values["replay"]  # type: ignore[no-any-return]

    def bind(self, own: dict[str, Tensor]) -> bool:
        """From here on with these tensors; False if some are missing, or it holds for one client alone."""
        if self._run is None:
            self._run = self._compiled()
        if self.one_client or not {whose for whose, *_ in self._fixed_own.values()} <= own.keys():
            return False
        for name, (whose, shape, stride, offset) in self._fixed_own.items():
            self._values[name] = own[whose].detach().as_strided(shape, stride, offset)
        return True

    def replay(self, leaves: list[Tensor], numbers: dict[str, int]) -> None:
        """The step once more, on this batch."""
        if self._run is None:
            self._run = self._compiled()
        self._run(*leaves)
        for name, number in self.counted.items():
            numbers[name] += number


class Graph:
    """A step as a CUDA graph on a stream of its own.

    Raises:
        torch.AcceleratorError: something in it cannot be captured; nothing was computed.
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
