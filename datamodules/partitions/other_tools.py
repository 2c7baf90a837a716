"""Splits of skewed labels as other tools make them; the lists equal the tools' sample by sample."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.partitions.partition import (
    Indices,
    Partition,
    Source,
    Stream,
    by_class,
    check_classes,
    check_none_empty,
    check_share,
    integers,
    need_samples,
    shuffled,
    stream,
    tell_left,
    tested,
)
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import (
    BelowOne,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    checked,
)
from fl_lightning.introspection.papers import Paper

TRIES = 1000
TRIES_OF_FLWR = 11


def least(source: str, samples: int, clients: int) -> int:
    """Return the smallest client size that a tool accepts by default."""
    return int(min(40, samples / clients / 2)) if source == "pfllib" else 10


@checked
@dataclass(repr=False, eq=False)
class DirichletByClass(Partition):
    """Each class is divided among the clients by shares p ~ Dir(alpha) (Yurochkin et al., 2019).

    Sizes differ. If a client would have fewer than ``min_samples``, all classes are drawn again.
    ``source`` names the tool whose algorithm draws the split. With ``tool_seed`` the lists are
    exactly those of that tool, for the same labels in the same order.

    Args:
        alpha: one number, or one per client.
        source: ``"flwr"`` (flwr-datasets' DirichletPartitioner), ``"pfllib"``, ``"niid-bench"`` or
            ``"fl-bench"``.
        min_samples: 0: the first split is taken. None: 10, and with ``pfllib`` min(40, N / m / 2).
        balance: clients that have their share N / m get no more samples. None: ``source`` decides
            (only ``pfllib`` and ``niid-bench`` balance).
        shuffle: shuffle each client's list; None: as the tool does (``flwr`` and ``niid-bench``).
        tool_seed: the seed of the tool's own generator; None: the run's seed and generator.
        test_share: the fraction of each client's samples that become its test samples, cut as
            by the tool; only for ``pfllib`` and ``fl-bench``.
    """

    paper = Paper("yurochkin2019bayesian")

    alpha: PositiveFloat | list[PositiveFloat]
    source: Source = "flwr"
    min_samples: NonNegativeInt | None = None
    balance: bool | None = None
    shuffle: bool | None = None
    tool_seed: NonNegativeInt | None = None
    test_share: BelowOne = 0.0

    def __post_init__(self) -> None:
        check_share(self, self.test_share, self.source)

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Any]:
        need_samples(num_clients, len(labels))
        alpha = np.asarray(self.alpha, np.float64)
        if alpha.ndim and len(alpha) != num_clients:
            raise UserError(
                f"DirichletByClass's alpha has {len(alpha)} numbers, and num_clients is "
                f"{num_clients}: give one number, or one per client."
            )
        alpha = np.broadcast_to(alpha, num_clients)
        r = stream(seed, self.tool_seed, self.source)
        clients = self._drawn(r, labels, alpha)
        shuffle = self.source in ("flwr", "niid-bench") if self.shuffle is None else self.shuffle
        if shuffle:
            for own in clients:
                r.shuffle(own)
        return tested(self, r, clients, self.source, self.test_share)

    def _drawn(self, r: Stream, labels: Indices, alpha: NDArray[np.float64]) -> list[Any]:
        """Return the first try in which every client has enough samples."""
        m = len(alpha)
        wanted = self.min_samples
        if wanted is None:
            wanted = max(1, least(self.source, len(labels), m))
        _, members = by_class(labels)
        tries = TRIES_OF_FLWR if self.source == "flwr" else TRIES
        smallest = 0
        for _ in range(tries):
            clients = self._tried(r, members, alpha, len(labels))
            if clients is None:
                continue
            smallest = max(smallest, min(map(len, clients)))
            sizes = [len(own) for own in clients]
            if min(sizes) >= max(wanted, 1):
                return clients
            if wanted == 0:
                raise UserError(
                    f"DirichletByClass: min_samples=0 takes the first split, in which client "
                    f"{sizes.index(0)} has no samples, so it cannot train. Give min_samples=1, by "
                    "which such a split is drawn again, a larger alpha, or fewer clients."
                )
        raise UserError(
            f"DirichletByClass: in {tries} tries with alpha={self.alpha!r} no split gave each of "
            f"{m} clients min_samples={wanted} samples; the best had a client of {smallest}. Give "
            "a larger alpha, a smaller min_samples, or fewer clients."
        )

    def _tried(
        self, r: Stream, members: list[Indices], alpha: NDArray[np.float64], total: int
    ) -> list[Any] | None:
        """Return one try; None if balancing leaves no client for a class."""
        m = len(alpha)
        clients: list[list[int]] = [[] for _ in range(m)]
        balance = self.source in ("pfllib", "niid-bench") if self.balance is None else self.balance
        for c, own in enumerate(members):
            if self.source in ("pfllib", "niid-bench"):
                own = own.copy()
            if self.source != "flwr":
                # When FL-bench draws again, it continues with the shuffled list.
                r.shuffle(own)
                members[c] = own if self.source == "fl-bench" else members[c]
            p = r.dirichlet(alpha)
            if balance:
                sizes = np.array([len(client) for client in clients])
                full = sizes > total / m if self.source == "flwr" else sizes >= total / m
                p = np.where(full, 0.0, p)
                # Python's sum and NumPy's differ in the last bit.
                whole = sum(p.tolist()) if self.source == "flwr" else p.sum()
                if whole == 0:
                    return None
                p = p / whole
            cuts = (np.cumsum(p) * len(own)).astype(int)[:-1]
            for client, piece in zip(clients, np.split(own, cuts), strict=True):
                client.extend(piece.tolist())
        return clients


@checked
@dataclass(repr=False, eq=False)
class LabelsPerClient(Partition):
    """Each client has ``classes`` classes, and every sample belongs to one client.

    ``source="pfllib"`` is PFLlib's ``pat``: clients that still need a class are taken in order, so
    clients hold blocks of classes. ``"niid-bench"`` is its ``#label k``: client i has class i, and
    the others are drawn. ``"flwr"`` is flwr-datasets' PathologicalPartitioner. With ``tool_seed``
    the lists are exactly those of that tool.

    Args:
        classes: per client.
        balance: with ``pfllib``, all clients with a class get equal numbers; if False, the numbers
            are drawn.
        mode: with ``flwr``, ``"random"``, ``"deterministic"`` (client i has the classes i, i + 1,
            …) or ``"first-deterministic"`` (only the first of them is class i).
        tool_seed, test_share: as for :class:`DirichletByClass`.
    """

    classes: PositiveInt
    source: Literal["pfllib", "niid-bench", "flwr"] = "pfllib"
    balance: bool = True
    mode: Literal["random", "deterministic", "first-deterministic"] = "random"
    tool_seed: NonNegativeInt | None = None
    test_share: BelowOne = 0.0

    def __post_init__(self) -> None:
        check_share(self, self.test_share, self.source)

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Any]:
        need_samples(num_clients, len(labels))
        _, members = by_class(labels)
        check_classes(self, self.classes, len(members))
        r = stream(seed, self.tool_seed, self.source)
        if self.source == "pfllib":
            clients = self._in_blocks(r, members, num_clients)
        else:
            holders = self._holders(r, len(members), num_clients, seed)
            clients = self._dealt(r, members, holders)
        left = len(labels) - sum(map(len, clients))
        tell_left(self, left, len(labels), "since no client has their class")
        mend = "give fewer clients or more classes per client"
        check_none_empty(self, clients, mend)
        if self.source == "flwr":
            clients = shuffled(r, clients)
        return tested(self, r, clients, self.source, self.test_share)

    def _in_blocks(self, r: Stream, members: list[Indices], m: int) -> list[Any]:
        free = np.full(m, self.classes)
        clients: list[list[int]] = [[] for _ in range(m)]
        total = sum(map(len, members))
        each = int(np.ceil((m / len(members)) * self.classes))
        for own in members:
            chosen = np.flatnonzero(free > 0)[:each]
            if not len(chosen):
                break
            share = len(own) / len(chosen)
            sizes = [int(share)] * (len(chosen) - 1)
            if not self.balance:
                low = int(max(share / 10, least("pfllib", total, m) / len(members)))
                if low >= int(share):
                    raise UserError(
                        f"{self!r}: a class of {len(own)} samples is too small for "
                        f"{len(chosen)} owners. Give fewer clients, or balance=True."
                    )
                sizes = integers(r, low, int(share), len(chosen) - 1).tolist()
            sizes.append(len(own) - sum(sizes))
            start = 0
            for client, size in zip(chosen, sizes, strict=True):
                clients[client].extend(own[start : start + size].tolist())
                start += size
            free[chosen] -= 1
        return clients

    def _holders(self, r: Stream, classes: int, m: int, seed: int) -> list[list[int]]:
        # NIID-Bench draws its classes from Python's generator, and everything else from NumPy's.
        python = None
        if self.source == "niid-bench" and self.tool_seed is not None:
            python = random.Random(self.tool_seed)
        holders = []
        for client in range(m):
            if self.source == "flwr" and self.mode == "random":
                assert isinstance(r, np.random.Generator)
                drawn = r.choice(np.arange(classes), self.classes, replace=False)
                holders.append(drawn.tolist())
                continue
            own = [client % classes]
            while len(own) < self.classes:
                if self.source == "flwr" and self.mode == "deterministic":
                    one = (client + len(own)) % classes
                elif self.source == "flwr":
                    assert isinstance(r, np.random.Generator)
                    one = int(r.choice(np.arange(classes), 1)[0])
                elif python is not None:
                    one = python.randint(0, classes - 1)
                else:
                    one = int(integers(r, 0, classes))
                if one not in own:
                    own.append(one)
            holders.append(own)
        return holders

    def _dealt(self, r: Stream, members: list[Indices], holders: list[list[int]]) -> list[Any]:
        clients: list[list[int]] = [[] for _ in holders]
        for c, own in enumerate(members):
            if self.source == "niid-bench":
                r.shuffle(own)
            of = [client for client, classes in enumerate(holders) if c in classes]
            if not of:
                continue
            if self.source == "flwr" and len(of) > len(own):
                raise UserError(
                    f"{self!r}: class {c} has {len(own)} samples and {len(of)} clients that hold "
                    "it. Give fewer clients, or fewer classes per client."
                )
            for client, piece in zip(of, np.array_split(own, len(of)), strict=True):
                clients[client].extend(piece.tolist())
        return clients
