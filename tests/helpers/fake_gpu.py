"""A make-believe GPU: its tensors say ``cuda``, compute on the CPU, and refuse what CUDA refuses.
Within ``fake_gpu()`` a whole ``Trainer(accelerator="gpu").fit`` runs, with real numbers. The
context counts where the host waits (``syncs``), and finds memory that one stream reads or writes
before another one is done with it (``races``, by ``fake_streams.py``). A CUDA graph records ATen
calls, computes nothing while it is captured, and replays them. It does not show bits and speed of
kernels, foreach optimizers, autocast's kernels, sparse tensors, or fragmented memory."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # at its first import it reads the functions that are replaced here
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tests.helpers.fake_streams import Stream, Streams, storages, traits, written

# For `cuda`, autograd would start a thread of the device; for `meta` it does not.
META = torch.device("meta")
# Calls that may have tensors of both devices; another call may have numbers on the CPU.
MIXING = {
    "copy_",
    "_to_copy",
    "_foreach_copy_",
    "lift_fresh",
    "lift",
    "set_",
    "index",
    "index_put_",
}
READING = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2"}
MEMORY = 2**36  # bytes


def on_gpu(value: Any) -> bool:
    return isinstance(value, OnGpu)


def inner(value: Any) -> Any:
    """The same with each GPU tensor's CPU tensor in its place."""
    return tree_map(lambda leaf: leaf.inner if on_gpu(leaf) else leaf, value)


def names_gpu(device: Any) -> bool:
    try:
        return not isinstance(device, bool | int) and torch.device(device).type in ("cuda", "meta")
    except (TypeError, RuntimeError):
        return False


def place() -> str:
    """The line of the package that is running."""
    frame: Any = sys._getframe()
    while frame is not None and "/fl_lightning/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    return f"{frame.f_code.co_filename.rpartition('/fl_lightning/')[2]}:{frame.f_lineno}"


class OnGpu(torch.Tensor):
    """A tensor on the GPU; ``inner`` is the CPU tensor with its numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU[-1].device)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda self: False)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> OnGpu:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        kind = {"dtype": inner.dtype, "layout": inner.layout, "device": META}
        make: Any = torch.Tensor._make_wrapper_subclass
        made: OnGpu = make(cls, inner.shape, **layout, **kind, requires_grad=requires_grad)
        made.inner = inner
        if GPU[-1].peak is not None:
            GPU[-1].live.add(made)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return GPU[-1].call(func, args, kwargs or {})

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        given: Any = [META if names_gpu(a) else a for a in args]
        if names_gpu(kwargs.get("device", "cpu")):
            kwargs["device"] = META
        return torch.Tensor.to(self, *given, **kwargs)

    def new_tensor(self, data: Any, dtype: Any = None, device: Any = None, **more: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or "cuda", **more)

    def __getitem__(self, index: Any) -> Any:
        # Of a list torch makes an index on the device, which is without numbers on `meta`.
        parts = index if isinstance(index, tuple) else (index,)
        given: Any = [torch.tensor(p, device="cuda") if isinstance(p, list) else p for p in parts]
        return torch.Tensor.__getitem__(self, tuple(given))

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        GPU[-1].wait("tolist")
        return self.inner.tolist()

    @property
    def data(self) -> Any:
        return torch._C.TensorBase.data.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        if not on_gpu(value):
            raise RuntimeError(f".data of a CUDA tensor is given a CPU tensor at {place()}")
        torch._C.TensorBase.data.__set__(self, value)
        self.inner = value.inner

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            new = type(self)(self.inner.detach().clone(), self.requires_grad)
            vars(new).update({k: v for k, v in vars(self).items() if k != "inner"})
            new.grad = None if self.grad is None else self.grad.clone()
            memo[id(self)] = new
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if GPU[-1].sends_objects:
            raise RuntimeError(f"a CUDA tensor is sent as an object at {place()}")
        return self.inner.detach().clone().__reduce_ex__(protocol)  # files are read on the CPU


class Data:
    """``parameter.data`` of a CPU tensor that may move to the GPU."""

    def __get__(self, tensor: Any, kind: Any = None) -> Any:
        return self if tensor is None else torch._C.TensorBase.data.__get__(tensor)

    def __set__(self, tensor: Any, value: Any) -> None:
        if on_gpu(tensor) or not on_gpu(value):
            torch._C.TensorBase.data.__set__(tensor, value)
            return
        made: Any = OnGpu(value.inner, tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, made)


class Graph:
    """A CUDA graph; ``pools``: how many graphs live in each pool, whose id dies with the last."""

    def __init__(self, *_: Any) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []
        self.pool: Any = None
        self.pools = GPU[-1].pools
        self.invalid = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if self.pools.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: a pool of released graphs")
        self.pool = pool or object()  # a pool of its own
        self.pools[self.pool] = self.pools.get(self.pool, 0) + 1
        GPU[-1].capturing = self

    def note(self, func: Any, args: Any, kwargs: Any, changed: list[Tensor]) -> Any:
        """Record a call, and keep what it changes until the capture ends: it computes nothing."""
        self.before += [(tensor, tensor.detach().clone()) for tensor in changed]
        out = func(*args, **kwargs)
        if not traits(func)[0]:
            self.calls.append((func, args, kwargs, out))
        return out

    def capture_end(self) -> None:
        gpu = GPU[-1]
        gpu.capturing = None
        for tensor, value in reversed(self.before):
            tensor.data.copy_(value)
        self.before = []
        if self.invalid:
            gpu.underway = True
            raise RuntimeError("CUDA error: operation failed due to a previous error in capture")
        for _, args, kwargs, out in self.calls:
            for key in storages(tree_leaves(out)) - storages(tree_leaves((args, kwargs))):
                gpu.streams.memory[key] = (None, {})
        gpu.graphs += bool(self.calls)

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            given = storages(tree_leaves((args, kwargs)))
            changed = storages(written(func, args, kwargs))
            new = func(*args, **kwargs)
            GPU[-1].streams.touch(
                given - changed, changed | (storages(tree_leaves(out)) - given), ()
            )
            if not any(r.alias_info is not None for r in func._schema.returns):
                for old, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                    if isinstance(old, Tensor):
                        old.data.copy_(value)

    def __del__(self) -> None:
        if self.pool is not None:
            self.pools[self.pool] -= 1


class Gpu(TorchDispatchMode):
    """What happened on the make-believe GPU. ``syncs``: (what, file:line) → how often. ``graphs``:
    how many were captured. ``underway``: whether a failed capture has left the allocator in it.
    ``free``: bytes. ``streams``: who reads and writes what."""

    def __init__(self, index: int, free: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = torch.device("cuda", index)
        self.free = free
        self.syncs: Counter[tuple[str, str]] = Counter()
        self.graphs = self.debug = 0
        self.underway = self.sends_objects = False
        self.pinned: dict[int, StorageWeakRef] = {}
        self.pools: dict[Any, int] = {}
        self.capturing: Graph | None = None
        self.live = weakref.WeakSet[Any]()  # tensors that were made while memory is measured
        self.peak: int | None = None  # bytes; None: nobody measures
        self.streams = Streams(place)

    @property
    def races(self) -> Counter[tuple[str, str]]:
        return self.streams.races

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def wait(self, what: str) -> None:
        """The host waits for the present stream."""
        if self.debug:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what} at {place()}")
        if self.capturing is not None:
            self.capturing.invalid = True
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.streams.current.synchronize()
        self.syncs[what, place()] += 1

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One ATen call, as CUDA would take it."""
        flat, spec = tree_flatten((args, kwargs))
        given = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        fakes = [leaf for leaf in given if on_gpu(leaf)]
        name = func._schema.name.removeprefix("aten::")
        device = kwargs.get("device")
        there = bool(fakes) if device is None else names_gpu(device)
        if fakes and len(fakes) < len(given):
            refuse(func, name, given)
        if fakes or there:
            self.count_waits(name, args, kwargs, bool(fakes), there)
        flat = [leaf.inner if on_gpu(leaf) else leaf for leaf in flat]
        args, kwargs = tree_unflatten(flat, spec)
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        pins = kwargs.pop("pin_memory", None)
        if not (fakes or there):
            out = func(*args, **kwargs)
            if pins:
                # As long as this weak reference lives, the storage's address is its own.
                storage = StorageWeakRef(out.untyped_storage())
                self.pinned[storage.cdata] = storage
            return out
        changed = written(func, args, kwargs)
        if self.capturing is not None:
            out = self.capturing.note(func, args, kwargs, changed)
        else:
            out = func(*args, **kwargs)
            if not traits(func)[0]:  # a view is no kernel
                mine = storages([each.inner for each in fakes])
                writes = storages(changed) & mine
                new = storages(tree_leaves(out)) - mine if there else ()
                self.streams.touch(mine - writes, writes, new)
        if self.peak is not None:
            self.peak = max(self.peak, self.allocated())
        if not there:
            return out
        back = {id(each.inner): each for each in fakes}  # what is written stays the same object
        return tree_map(lambda t: back.get(id(t), OnGpu(t)) if isinstance(t, Tensor) else t, out)

    def count_waits(self, name: str, args: Any, kwargs: Any, here: bool, there: bool) -> None:
        blocks = not kwargs.get("non_blocking")
        crosses = name == "_to_copy" and here != there
        if name == "copy_":
            crosses = on_gpu(args[0]) != on_gpu(args[1])
            blocks = blocks and not (len(args) > 2 and args[2])
        if crosses and blocks:
            self.wait("a copy from pageable memory" if there else "a copy to the CPU")
        if here and name in READING:
            self.wait(name)
        if here and name in ("index", "index_put_"):
            indices = [t for t in args[1] if isinstance(t, Tensor)]
            if any(t.dtype in (torch.bool, torch.uint8) or not on_gpu(t) for t in indices):
                self.wait("an index by a mask, or from the CPU")

    def allocated(self, device: Any = None) -> int:
        """Bytes of the tensors that were made since the measurement began."""
        memory = {t.inner.untyped_storage()._cdata: t.inner for t in [*self.live]}
        return sum(tensor.untyped_storage().nbytes() for tensor in memory.values())

    def measure(self, device: Any = None) -> None:
        self.live.clear()
        self.peak = 0

    def measured(self, device: Any = None) -> int:
        peak, self.peak = self.peak, None
        return peak or 0


def refuse(func: Any, name: str, given: list[Tensor]) -> None:
    """Refuse a call with tensors on both devices."""
    on_cpu = [each for each in given if not on_gpu(each)]
    numbers = torch.Tag.pointwise in func.tags and not any(each.dim() for each in on_cpu)
    changes = name.endswith("_") and not on_gpu(given[0])
    if name in MIXING:
        ends = [given[0]] if name == "index" else [given[0], given[-1]]  # indices may lie elsewhere
        wrong = name.startswith("index") and any(each.dim() and not on_gpu(each) for each in ends)
    else:
        wrong = changes or not numbers
    if wrong:
        raise RuntimeError(f"{func} has tensors on cuda and cpu at {place()}")


GPU: list[Gpu] = []


def functions(gpu: Gpu, devices: int) -> dict[str, Any]:
    """What takes the place of the functions of ``torch.cuda``."""
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    ignored = ("_lazy_init", "set_device", "empty_cache", "manual_seed", "manual_seed_all")
    constant = {"is_available": True, "is_initialized": True, "device_count": devices}
    constant |= {"current_device": gpu.device.index, "get_device_name": "a make-believe GPU"}
    constant |= {"get_device_capability": (9, 0), "mem_get_info": (gpu.free, MEMORY)}
    return {
        **dict.fromkeys((*ignored, "set_rng_state", "set_rng_state_all"), nothing),
        **{name: lambda *_, value=value: value for name, value in constant.items()},
        **dict.fromkeys(("memory_reserved", "memory_allocated"), gpu.allocated),
        "max_memory_allocated": gpu.measured,
        "reset_peak_memory_stats": gpu.measure,
        "synchronize": gpu.streams.synchronize,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": list,
        "get_sync_debug_mode": lambda: gpu.debug,
        "set_sync_debug_mode": lambda mode: setattr(gpu, "debug", 2 * (mode in ("error", 2))),
        "Stream": lambda *_: Stream(gpu.streams),
        "current_stream": lambda device=None: gpu.streams.current,
        "stream": gpu.streams.on,
        "CUDAGraph": Graph,
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: gpu.capturing is not None,
        "is_bf16_supported": lambda *_, **__: True,
    }


def pinned(tensor: Tensor, device: Any = None) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


@contextlib.contextmanager
def fake_gpu(devices: int = 1, free: int = MEMORY) -> Iterator[Gpu]:
    """Within this context the process has so many GPUs, and uses that of its local rank."""
    gpu = Gpu(int(os.environ.get("LOCAL_RANK", 0)) if devices > 1 else 0, free)
    GPU.append(gpu)
    capturing = mock.Mock(is_capturing=lambda: gpu.capturing is not None)
    accelerator = {"is_available": lambda: True, "current_stream": lambda device=None: capturing}
    accelerator["current_accelerator"] = lambda *_, **__: torch.device("cuda")
    settings = (cudnn := torch.backends.cudnn).deterministic, cudnn.allow_tf32
    with contextlib.ExitStack() as stack:
        stack.callback(GPU.remove, gpu)
        stack.enter_context(mock.patch.multiple(torch.cuda, **functions(gpu, devices)))
        stack.enter_context(mock.patch.multiple(torch.accelerator, **accelerator))
        stack.enter_context(mock.patch.object(torch.Tensor, "data", Data(), create=True))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", pinned))
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        # Autograd starts its threads once, one per device: forked processes could not use them.
        torch.ones(1, requires_grad=True).sum().backward()
        torch._C._ensureCUDADeviceGuardSet()
        torch._C._set_only_lift_cpu_tensors(True)
        stack.enter_context(gpu)
        try:
            yield gpu
        finally:
            cudnn.deterministic, cudnn.allow_tf32 = settings
