"""The ATen calls of a piece of code, recorded once, as a function that repeats them.

Sequences of calls become TorchScript functions, which do not hold the interpreter's lock. If that
is not possible, Python makes the calls. In both cases they are the same calls on the same memory,
so they give the same bits.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
ALIGNED = 64  # alignment of new tensors in bytes
VIEWS = (aten.t.default, aten.view.default)
SAME = (aten.detach.default, aten.alias.default)
FRESH = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
# the repr of these objects is valid code
WRITTEN = (torch.dtype, torch.memory_format, torch.layout)


@dataclass
class Call:
    """``names = function(text)``; ``uses`` are the names in the text."""

    names: list[str]
    uses: list[str]
    function: Any
    text: str
    scripted: bool
    alone: bool = False  # whether a result that is a list has one name
    given: list[Tensor] = field(default_factory=list)
    out: Any = None

    def line(self, function: str) -> str:
        """Return the call as code, by a name of the function."""
        call = f"{function}({self.text})"
        return f"{', '.join(self.names)}{',' * self.alone} = {call}" if self.names else call


class Recording(TorchDispatchMode):
    """The ATen calls within this context, as a function of the batch and of tensors that existed
    before.

    ``refused`` says why the calls may differ the next time; it is empty if they cannot.

    Args:
        leaves: tensors of the batch.
        own: tensors that :meth:`bind` replaces by another client's, of the same layout.
    """

    def __init__(self, leaves: list[Tensor], own: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self.refused = ""
        self.counted: dict[str, int] = {}
        self.one_client = False
        self._names = {id(leaf): f"b{j}" for j, leaf in enumerate(leaves)}
        self._arguments = list(self._names.values())
        if len(self._arguments) < len(leaves):
            self.refused = "a batch holds one tensor twice"
        self._storages = {tensor.untyped_storage().data_ptr(): name for name, tensor in own.items()}
        self._fixed: dict[tuple[int, int], str] = {}
        self._values: dict[str, Any] = {}
        self._held: list[Any] = []  # keeps the objects alive, so that no id is given twice
        self._calls: list[Call] = []
        self._run: Callable[..., None] | None = None
        # Names of values that are views of a tensor in `own` → which tensor, and where in it.
        self._fixed_own: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        try:
            return out if func.namespace == "profiler" else self._note(func, args, kwargs, out)
        except Exception as error:  # the error is one of recording: the step itself goes on
            self.refused = f"{func} cannot be recorded ({type(error).__name__})"
            return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        self._held.append((given, out))
        self._check(func, given)
        made = any(id(a) in self._names for a in given)
        if func in SAME or (func.is_view and not made):
            if made:
                self._names[id(out)] = self._names[id(given[0])]
            # A view of a fixed tensor is fixed, too.
            return out
        if func in FRESH:
            func = aten.clone.default
            args = args[:1]
            kwargs = {}
        several = isinstance(out, list | tuple)
        outs = list(out) if several else [out]
        uses: list[str] = []
        texts = [self._text(a, uses) for a in args]
        texts += [f"{name}={self._text(v, uses)}" for name, v in kwargs.items()]
        names: list[str] = []
        for o in outs:
            if isinstance(o, Tensor) and not any(o is a for a in given):
                self._names[id(o)] = f"t{len(self._held)}_{len(names)}"
                names.append(self._names[id(o)])
            else:
                names.append("_")
        alone = several and len(names) == 1
        constants = [self._values[name] for name in uses if name[0] == "c"]
        known = all(isinstance(value, Tensor | float) for value in constants)
        # TorchScript would not notice that tensors in a list change.
        scripted = known and not alone and not changes_lists(func)
        self._calls.append(Call(names, uses, func, ", ".join(texts), scripted, alone, given, out))
        return out

    def _check(self, func: Any, given: list[Tensor]) -> None:
        if torch.Tag.data_dependent_output in func.tags:
            self.refused = f"{func} reads a value, which may differ from step to step"
        elif torch.Tag.dynamic_output_shape in func.tags:
            masks = [a.dtype in (torch.bool, torch.uint8) for a in given[1:]]
            if func is not aten.index.Tensor or any(masks):
                self.refused = f"the shape of {func}'s result may differ from step to step"

    def _text(self, value: Any, uses: list[str]) -> str:
        """Return the name of a value in the code; tensors and floats are passed in under a name."""
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._text(v, uses) for v in value)}]"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if value is None or isinstance(value, (bool, int, str, *WRITTEN)):
            return repr(value)
        known = self._names.get(id(value))
        name = known or (self._there(value) if isinstance(value, Tensor) else self._constant(value))
        uses.append(name)
        return name

    def _there(self, tensor: Tensor) -> str:
        """Return the name of a tensor that existed before."""
        # Parameters may be tied differently later, so the key includes the present memory address.
        key = id(tensor), tensor.data_ptr()
        if key not in self._fixed:
            self._fixed[key] = self._constant(tensor.detach())
        return self._fixed[key]

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._values)}"
        self._values[name] = value
        return name

    def _compiled(self) -> Callable[..., None]:
        """Return the calls as one function; each tensor is freed after its last use."""
        self._save_copies()
        pieces: list[Call] = []
        start = 0
        while start < len(self._calls):
            end = start
            while end < len(self._calls) and self._calls[end].scripted:
                end += 1
            piece = self._script(start, end) if end > start else None
            pieces += [piece] if piece is not None else self._calls[start : max(end, start + 1)]
            start = max(end, start + 1)
        last: dict[str, int] = {}
        for j, piece in enumerate(pieces):
            last.update(dict.fromkeys(piece.uses, j))
        lines = ["pass"]
        for j, piece in enumerate(pieces):
            lines.append(piece.line(self._constant(piece.function)))
            names = {name for name in (*piece.uses, *piece.names) if name.startswith("t")}
            ends = sorted(name for name in names if last.get(name, j) == j)
            if ends:
                lines.append(" = ".join(ends) + " = None")
        self._values["torch"] = torch
        code = f"def replay({', '.join(self._arguments)}):\n " + "\n ".join(lines)
        # The code consists only of names and numbers.
        exec(compile(code, "<recorded local step>", "exec"), self._values)
        for name, value in self._values.items():
            whose = isinstance(value, Tensor) and self._owner(value)
            if whose:
                place = value.shape, value.stride(), value.storage_offset()
                self._fixed_own[name] = whose, *place
        self._held = []
        self._names = {}
        self._calls = []
        replay: Callable[..., None] = self._values["replay"]
        return replay

    def _save_copies(self) -> None:
        """Write matrix products directly to where they are only copied to, as gradients are."""
        made_by: dict[str, int] = {}
        uses = Counter[str]()
        # For each storage: the call, and the first and last byte that it touches.
        touched: dict[int, list[tuple[int, int, int]]] = {}
        for j, call in enumerate(self._calls):
            made_by.update(dict.fromkeys(call.names, j))
            uses.update(call.uses)
            for t in call.given:
                if t.layout is not torch.strided:
                    return
                touched.setdefault(t.untyped_storage().data_ptr(), []).append((j, *reach(t)))
        unneeded: set[int] = set()
        for j, copy in enumerate(self._calls):
            if copy.function is not aten.copy_.default or copy.uses[0] not in self._values:
                continue
            there, copied = copy.given
            name = copy.uses[-1]
            views = []
            at = made_by.get(name, j)
            # A product may be transposed or viewed before it is copied.
            while uses[name] == 1 and self._calls[at].function in VIEWS:
                views.append(at)
                name = self._calls[at].uses[0]
                at = made_by.get(name, j)
            product = self._calls[at]
            is_product = product.function is aten.mm.default and uses[name] == 1
            if not is_product or not alike(there, copied, product.out):
                continue
            storage = there.untyped_storage().data_ptr()
            begin, end = reach(there)
            meanwhile = any(at <= k < j and begin < b and a < end for k, a, b in touched[storage])
            if meanwhile or storage in self._storages:
                continue
            into = self._constant(there.detach().view(product.out.shape))
            text = f"{product.text}, out={into}"
            self._calls[at] = Call(["_"], [*product.uses, into], aten.mm.out, text, True)
            touched[storage].append((at, begin, end))
            unneeded.update(views, [j])
        self._calls = [call for j, call in enumerate(self._calls) if j not in unneeded]

    def _script(self, start: int, end: int) -> Call | None:
        """Return consecutive calls as one TorchScript function; None if it cannot be compiled."""
        made: dict[str, None] = {}
        used: dict[str, None] = {}
        lines = []
        for call in self._calls[start:end]:
            made.update(dict.fromkeys(call.names))
            used.update(dict.fromkeys(call.uses))
            lines.append(call.line("torch.ops." + call.function._schema.name.replace("::", ".")))
        later: set[str] = set()
        for call in self._calls[end:]:
            later.update(call.uses)
        needed = [name for name in used if name not in made]
        given = sorted(later.intersection(made))
        typed = ", ".join(f"{name}: {self._type(name)}" for name in needed)
        lines.append(f"return {', '.join(given)}" if given else "return None")
        function = script(f"def piece({typed}):\n " + "\n ".join(lines) + "\n")
        return None if function is None else Call(given, needed, function, ", ".join(needed), False)

    def _type(self, name: str) -> str:
        return "float" if isinstance(self._values.get(name), float) else "Tensor"

    def _owner(self, tensor: Tensor) -> str:
        """Return which of the bound tensors this one is a view of; empty: none of them."""
        return self._storages.get(tensor.untyped_storage().data_ptr(), "")

    def bind(self, own: dict[str, Tensor]) -> bool:
        """From now on use these tensors.

        Return False if some are missing, or if the recording holds for only one client.
        """
        if self._run is None:
            self._run = self._compiled()
        if self.one_client or not {whose for whose, *_ in self._fixed_own.values()} <= own.keys():
            return False
        for name, (whose, shape, stride, offset) in self._fixed_own.items():
            self._values[name] = own[whose].detach().as_strided(shape, stride, offset)
        return True

    def replay(self, leaves: list[Tensor], numbers: dict[str, int]) -> None:
        """Repeat the step on this batch."""
        if self._run is None:
            self._run = self._compiled()
        jit: Any = torch.jit  # torch.jit does not declare all its functions
        with jit.optimized_execution(False):
            self._run(*leaves)
        for name, number in self.counted.items():
            numbers[name] += number


def alike(there: Tensor, copied: Tensor, product: Tensor) -> bool:
    """Return whether the copy takes the whole product in its order in memory.

    Then writing the product to that place directly gives the same bits.
    """
    whole = copied.data_ptr() == product.data_ptr() and there.shape == copied.shape
    tensors = (there, copied, product)
    in_order = all(t.is_contiguous() and t.numel() == product.numel() for t in tensors)
    # The last bits of a product depend on the alignment of its memory.
    aligned = there.data_ptr() % ALIGNED == 0
    return whole and in_order and aligned and there.dtype == product.dtype


def reach(tensor: Tensor) -> tuple[int, int]:
    """Return the address of its first byte, and of the byte after its last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@cache
def changes_lists(func: Any) -> bool:
    """Return whether a call changes tensors that it gets in a list."""
    arguments = func._schema.arguments
    return any(
        a.alias_info is not None and a.alias_info.is_write and "List" in str(a.type)
        for a in arguments
    )


@lru_cache(maxsize=64)
def script(code: str) -> Callable[..., Any] | None:
    """Return a TorchScript function, one for all recordings of the same calls; None: impossible."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            unit: Any = torch.jit.CompilationUnit(code)
            piece: Callable[..., Any] = unit.piece
            return piece
    except Exception:  # TorchScript does not know a call, or does not support this Python
        return None
