"""Who reads and writes what on several streams, and whether they waited for each other."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Stream:
    """``clock``: of each stream, up to which of its calls this one has waited."""

    device = torch.device("cuda", 0)

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.number = len(streams.all)
        self.clock: dict[int, int] = {}
        streams.all.append(self)

    def wait_stream(self, other: Stream) -> None:
        later(self.clock, self.streams.host)
        later(self.clock, other.clock)

    def synchronize(self) -> None:
        """The host waits for it."""
        later(self.streams.host, self.clock)


class Streams:
    """``races``: (what, file:line) → how often; ``place`` gives the file and the line. ``memory``:
    of each storage its write (stream, tick), and each stream's latest read. ``host``: up to which
    call of each stream the host has waited."""

    def __init__(self, place: Callable[[], str]) -> None:
        self.place = place
        self.races: Counter[tuple[str, str]] = Counter()
        self.memory: dict[int, tuple[tuple[int, int] | None, dict[int, int]]] = {}
        self.host: dict[int, int] = {}
        self.all: list[Stream] = []
        self.current = Stream(self)

    def touch(self, read: Collection[int], changed: Collection[int], new: Collection[int]) -> None:
        """The present stream reads and writes memory, and gets new memory."""
        number, clock = self.current.number, self.current.clock
        later(clock, self.host)
        tick = clock[number] = clock.get(number, 0) + 1
        for key in new:
            self.memory[key] = ((number, tick), {})
        for key in (*read, *changed):
            write, readers = self.memory.setdefault(key, (None, {}))
            if write and clock.get(write[0], 0) < write[1]:
                self.races["read or written before it is written", self.place()] += 1
            if key in changed:
                if any(clock.get(other, 0) < at for other, at in readers.items()):
                    self.races["written before it is read", self.place()] += 1
                self.memory[key] = ((number, tick), {})
            else:
                readers[number] = tick

    def synchronize(self, device: Any = None) -> None:
        """The host waits for all of them."""
        for stream in self.all:
            stream.synchronize()

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


def later(clock: dict[int, int], other: dict[int, int]) -> None:
    for number, tick in other.items():
        clock[number] = max(clock.get(number, 0), tick)


def storages(leaves: Collection[Any]) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}


@cache
def traits(func: Any) -> tuple[bool, list[tuple[int, str]]]:
    """Whether a call makes a view, and which of its arguments it writes."""
    schema = func._schema
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    found = []
    for j, argument in enumerate(schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        # These calls write running statistics without saying so.
        if writes or ("batch_norm" in schema.name and argument.name.startswith("running")):
            found.append((j, argument.name))
    return views, found


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among its arguments that a call writes."""
    values = [args[j] if j < len(args) else kwargs.get(name) for j, name in traits(func)[1]]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
