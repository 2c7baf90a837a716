"""PowerSGD: matrices of low rank with error feedback, by client.

T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD, Practical Low-Rank Gradient Compression for
Distributed Optimization (NeurIPS 2019), Algorithms 1 and 2, arXiv:1905.13727, with rounds in place
of steps. The paper adds P over all workers before it is orthogonalised, and Q after. In this
project a client sends once per round and has its own P and Q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.callback import (
    AtLeast,
    Below,
    Clients,
    ClientState,
    FederatedCallback,
    Layout,
    Paper,
    wire,
)

# A column that keeps only this share of its length is rounding error, and not a direction.
NOTHING = 1e-12


@dataclass(frozen=True)
class Piece:
    """A parameter tensor as a matrix a × b, and the number of directions that are sent; 0: it is
    sent as it is.
    """

    where: slice
    a: int
    b: int
    rank: int


def pieces(layout: Layout, rank: int) -> list[Piece]:
    """Return the parameter tensors. A tensor is sent as it is if its two factors have no fewer
    numbers.
    """
    found = []
    for where, shape in layout.values():
        a = shape[0] if len(shape) > 1 else 1
        b = math.prod(shape[1:]) if len(shape) > 1 else where.stop - where.start
        r = min(rank, a, b)
        found.append(Piece(where, a, b, r if r * (a + b) < a * b else 0))
    return found


class LowRankUpdate(FederatedCallback):
    """M = (x_{i,K} - w) + e_i; P̂ = orthonormal(M Q_i), Q_i ← Mᵀ P̂; P̂ Q_iᵀ is sent; e_i ← M - P̂
    Q_iᵀ.

    M is each parameter tensor as a matrix: its first dimension by the product of the others.
    Vectors, and tensors for which P̂ and Q_i have no fewer numbers, are sent as they are. A
    client's first Q_i is drawn from N(0, 1), keyed by (seed, client). PowerSGD raises an error
    with partial averaging, because the error of a part that is not averaged would be lost.
    Sent: P̂ and Q_i in place of M. Kept: e_i and Q_i by each client.

    Args:
        rank: number of columns of P̂ and Q_i, at least 1.

    Example:
        With rank 1 a 4 × 3 matrix takes 4 + 3 numbers, and the biases take 4 and 3.

        >>> from fl_lightning.callbacks import CommunicationLogger, LowRankUpdate
        >>> from fl_lightning.testing import tiny_run
        >>> method = LowRankUpdate(rank=1)
        >>> run = tiny_run(method, CommunicationLogger(), rounds=1, participation=1)
        >>> int(run.trainer.callback_metrics["communication/up_parameters"])
        21
    """

    title = "PowerSGD"
    paper = Paper("vogels2019powersgd")
    tolerates_staleness = True
    draws_by_client = True
    cannot_run_with = {"parts": "what is not averaged is not sent, and its error would be lost"}
    error = ClientState(synchronised=False)

    def __init__(self, rank: Annotated[int, AtLeast(1), Below(2**31)] = 2) -> None:
        super().__init__()
        self.rank = rank
        # NaN means not drawn yet. The size is known when the model is.
        self.declare("q", ClientState(lambda w: math.nan, synchronised=False, shape=(0,)))

    def on_layout(self, layout: Layout) -> None:
        size = sum(piece.b * piece.rank for piece in pieces(layout, self.rank))
        self.declarations()["q"].shape = (size,)

    @wire.once
    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        v = update.double() + self.error[clients]
        layout = pieces(clients.layout, self.rank)
        none = v.new_zeros(len(v), 0)
        parts: dict[str, list[Tensor]] = {"p": [none], "q": [none], "raw": [none]}
        for piece, start in zip(layout, self._starts(clients, layout), strict=True):
            m = v[:, piece.where].reshape(len(v), piece.a, piece.b)
            if piece.rank:
                directions = orthonormal(m @ start)
                parts["p"].append(directions.flatten(1))
                parts["q"].append((m.mT @ directions).flatten(1))
            else:
                parts["raw"].append(m.flatten(1))
        message = {name: torch.cat(each, dim=1).to(update.dtype) for name, each in parts.items()}
        numbers = sum(part.shape[1] for part in message.values())
        clients.sent(parameters=numbers, bytes=numbers * update.element_size())
        vars(clients)["message"] = message
        sent = received(message, layout)
        self.error[clients] = v - sent
        self.q[clients] = message["q"]
        return sent

    def _starts(self, clients: Clients, layout: list[Piece]) -> list[Tensor]:
        """Return the Q_i of each piece ``(n, b, r)``: those of the client's last round, and at
        first a draw.
        """
        sizes = [piece.b * piece.rank for piece in layout]
        drawn = [
            torch.from_numpy(self._keyed("powersgd", i).standard_normal(sum(sizes)))
            for i in clients.client_ids
        ]
        kept = self.q[clients].double()
        q = torch.where(kept.isnan(), torch.stack(drawn).to(kept.device), kept)
        return [
            part.reshape(len(q), piece.b, piece.rank)
            for part, piece in zip(q.split(sizes, dim=1), layout, strict=True)
        ]

    def encode(self, clients: Clients, update: Tensor) -> dict[str, NDArray[Any]]:
        message = wire.message_of(LowRankUpdate.transmit, self, clients, update)
        return {name: wire.as_array(part[0]) for name, part in message.items()}

    def decode(self, arrays: dict[str, NDArray[Any]], round: int, client: int) -> Tensor:
        layout = pieces(self._transaction.layout, self.rank)
        lengths = {"p": 0, "q": 0, "raw": 0}
        for piece in layout:
            lengths["p"] += piece.a * piece.rank
            lengths["q"] += piece.b * piece.rank
            lengths["raw"] += 0 if piece.rank else piece.a * piece.b
        wire.check_arrays(arrays, lengths)
        message = {
            name: wire.as_tensor(part, like=self._transaction.w) for name, part in arrays.items()
        }
        return received(message, layout)[0]


def received(message: dict[str, Tensor], layout: list[Piece]) -> Tensor:
    """Return P̂ Q_iᵀ of each piece, or the piece itself: ``(n, D)``."""
    dtype = message["raw"].dtype
    p = message["p"].double().split([piece.a * piece.rank for piece in layout], dim=1)
    q = message["q"].double().split([piece.b * piece.rank for piece in layout], dim=1)
    sizes = [0 if piece.rank else piece.a * piece.b for piece in layout]
    parts = list(message["raw"].split(sizes, dim=1))
    for j, piece in enumerate(layout):
        if piece.rank:
            left = p[j].reshape(len(p[j]), piece.a, piece.rank)
            right = q[j].reshape(len(q[j]), piece.b, piece.rank)
            parts[j] = (left @ right.mT).flatten(1).to(dtype)
    return torch.cat(parts, dim=1)


def orthonormal(m: Tensor) -> Tensor:
    """Make the columns of each ``(n, a, r)`` orthonormal, in their order (modified Gram-Schmidt).

    A column that depends on the earlier ones becomes zero.
    """
    columns: list[Tensor] = []
    for column in m.unbind(2):
        rest = column
        for earlier in columns:
            rest = rest - (earlier * rest).sum(1, keepdim=True) * earlier
        whole = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        length = torch.linalg.vector_norm(rest, dim=1, keepdim=True)
        columns.append(torch.where(length > NOTHING * whole, rest / length, 0.0))
    return torch.stack(columns, dim=2)
