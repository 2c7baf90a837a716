"""What hooks see of a round: ``clients`` in local hooks, ``server`` in the others; behind both, the round itself.

During a round nothing persistent changes: rows and server state are staged here and committed together at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.aggregation import Leaf
from fl_lightning.callback import ClientState, Initial, Scratch, ServerState, Upload
from fl_lightning.devices import sent
from fl_lightning.errors import UserError
from fl_lightning.flat import Layout
from fl_lightning.schedules import Schedule

if TYPE_CHECKING:
    from fl_lightning.parts import Parts

Rows = dict[str, dict[int, Tensor]]


@dataclass
class Round:
    """One round t: who takes part, w^t, and all that the round stages.

    ``read(key, client)`` gives a committed row or None; ``w0`` is w^0 where a method asked for it.
    """

    t: int
    ids: list[int]
    steps: dict[int, int]
    sizes: dict[int, int]
    weights: dict[int, float]
    num_clients: int
    w: Tensor
    w0: Tensor
    lr: Tensor
    layout: Layout
    read: Callable[[str, int], Tensor | None]
    server_states: dict[str, Tensor]
    parts: Parts | None = None
    rates: str = ""
    optimizer_rows: list[str] = field(default_factory=list)
    full_gradient: Callable[[Clients, Tensor], Tensor] | None = None
    staged: Rows = field(default_factory=dict)
    staged_server: dict[str, Tensor] = field(default_factory=dict)
    total: Leaf = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    at_server: bool = True
    mean_gradient_read: bool = False
    _cache: dict[object, Tensor] = field(default_factory=dict)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums and per-client scalars: the learner's, at least float32."""
        return torch.promote_types(self.w.dtype, torch.float32)

    def initial(self, initial: Initial, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> Tensor:
        """A state's value before it was ever written."""
        size = self.w.shape if shape is None else torch.Size(shape)
        kind = self.w.dtype if dtype is None else dtype
        if initial == "zeros":
            return torch.zeros(size, dtype=kind, device=self.w.device)
        value = initial(self.w) if callable(initial) else self.w0 if initial == "initial_model" else self.w
        return value.to(kind).expand(size)

    def coefficient(self, schedule: Schedule) -> float:
        """A schedule's value of this round."""
        return float(schedule(self.t))

    def server_state(self, key: str, declaration: ServerState) -> Tensor:
        """The present value; in server hooks a copy that becomes the state when the round is committed."""
        if key in self.staged_server:
            return self.staged_server[key]
        if ("staged", key) in self._cache:
            return self._cache["staged", key]
        value = self.server_states.get(key)
        if value is None:
            if key not in self._cache:
                self._cache[key] = self.initial(declaration.initial, declaration.shape, declaration.dtype)
            value = self._cache[key]
        if self.at_server:
            value = self._cache["staged", key] = value.clone()
        return value

    def set_server_state(self, key: str, declaration: ServerState, value: Tensor) -> None:
        if not self.at_server:
            raise RuntimeError(f"{key} was assigned in a hook that takes clients; the server's state changes in others")
        current = self.server_state(key, declaration)
        if value is not current:
            current.copy_(torch.as_tensor(value))
        self.staged_server[key] = current

    def server_state_in_place(self) -> None:
        """Note what was changed in place, without an assignment."""
        for key in [k[1] for k in self._cache if isinstance(k, tuple)]:
            value = self._cache["staged", key]
            if key not in self.staged_server and value._version > 0:
                self.staged_server[key] = value

    def uploaded(self, key: str, declaration: Upload) -> tuple[Tensor, int]:
        return self._uploaded("sum:" + key, declaration), len(self.finished)

    def uploaded_weighted(self, key: str, declaration: Upload) -> Tensor:
        weighted = "weighted:" + key if "weighted:" + key in self.total else "sum:" + key
        return self._uploaded(weighted, declaration) / self.total["weight"].to(self.wide)

    def _uploaded(self, key: str, declaration: Upload) -> Tensor:
        if key in self.total:
            return self.total[key]
        zeros = self.initial("zeros", declaration.shape, declaration.dtype)
        return zeros.to(torch.promote_types(zeros.dtype, torch.float32))


class Clients:
    """``n`` clients that train together, as local hooks see them; per-client scalars are columns ``(n, 1)``."""

    def __init__(self, round: Round, ids: list[int], x: Tensor) -> None:
        self._round, self._x = round, x
        self._ids = ids
        self.looked_up = False
        self._rows: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._declared: dict[str, ClientState | Scratch] = {}
        self.uploads: dict[str, Tensor] = {}
        self.logs: dict[str, Tensor] = {}
        self.transmitted: tuple[float | None, float | None] = (None, None)
        self.kept_origin: Tensor | None = None
        self.kept_elapsed: Tensor | None = None
        self.kept_mask: Tensor | None = None
        self._start: Tensor | None = None
        self.clipped: Tensor

    @property
    def client_ids(self) -> list[int]:
        """Who, as numbers; a local step that asks is not replayed for other clients."""
        self.looked_up = True
        return self._ids

    @cached_property
    def ids(self) -> Tensor:
        """Who: ``(n,)`` int64."""
        return sent(self._ids, self._x.device)

    @property
    def x(self) -> Tensor:
        """The clients' models ``(n, D)``; assigning copies into them."""
        return self._x

    @x.setter
    def x(self, value: Tensor) -> None:
        if value is not self._x:
            self._x.copy_(value)

    @property
    def w(self) -> Tensor:
        """The server's model w^t ``(D,)``."""
        return self._round.w

    @property
    def initial_model(self) -> Tensor:
        """w^0 ``(D,)``, kept where a state of the run starts from it."""
        return self._round.w0

    @property
    def start(self) -> Tensor:
        """x_{i,0} ``(n, D)``, from the first step on."""
        if self._start is None:
            raise RuntimeError("clients.start is known from the first local step on, not in on_local_start")
        return self._start

    @property
    def round(self) -> int:
        """t = 0, 1, …"""
        return self._round.t

    @property
    def layout(self) -> Layout:
        return self._round.layout

    @property
    def lr(self) -> Tensor:
        """This round's client learning rate, a scalar tensor."""
        if self._round.rates:
            raise UserError(self._round.rates)
        return self._round.lr

    @cached_property
    def steps(self) -> Tensor:
        """K_i ``(n, 1)``."""
        return self._column(self._round.steps)

    @cached_property
    def sizes(self) -> Tensor:
        """Numbers of samples N_i ``(n, 1)``."""
        return self._column(self._round.sizes)

    @cached_property
    def weights(self) -> Tensor:
        """Aggregation weights p_i ``(n, 1)`` among the round's participants."""
        return self._column(self._round.weights) / sum(self._round.weights.values())

    @property
    def origin(self) -> Tensor:
        """Where the clients' present displacement began ``(n, D)``: ``start``, except on parts kept since."""
        return self.start if self.kept_origin is None else self.kept_origin

    @property
    def elapsed(self) -> Tensor:
        """Σ η K since ``origin``: ``(n, 1)``, or ``(n, D)`` with partial averaging."""
        if self._round.rates:
            raise UserError(self._round.rates)
        return self.total_elapsed()

    def total_elapsed(self) -> Tensor:
        here = self.steps * self._round.lr.to(self.steps.dtype)
        return here if self.kept_elapsed is None else here + self.kept_elapsed

    @property
    def mean_gradient(self) -> Tensor:
        """(origin - x) / elapsed ``(n, D)``, at the end of a round; 0 where nothing elapsed."""
        elapsed = self.elapsed
        self._round.mean_gradient_read = True
        return torch.where(elapsed > 0, (self.origin - self._x) / elapsed, 0.0).to(self._x.dtype)

    def norm(self, v: Tensor) -> Tensor:
        """‖v‖ of each client's row: ``(n, D)`` → ``(n, 1)``."""
        norm: Tensor = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        return norm

    def full_gradient(self, x: Tensor) -> Tensor:
        """Gradient ``(n, D)`` of the clients' whole objectives at x ``(D,)`` or ``(n, D)``, weight decay included."""
        assert self._round.full_gradient is not None
        return self._round.full_gradient(self, x)

    def log(self, name: str, values: Tensor) -> None:
        """Log a value a client, ``(n,)`` or ``(n, 1)``; the mean over clients appears under ``name``."""
        self.logs[name] = values.detach().reshape(len(self._ids))

    def sent(self, parameters: float | None = None, bytes: float | None = None) -> None:
        """Say how much ``transmit`` sends, each client, in place of D parameters."""
        self.transmitted = (parameters, bytes)

    def rows(self, key: str, declaration: ClientState | Scratch) -> Tensor:
        """The round's staged rows of a state, loaded at first access."""
        if key not in self._rows:
            self._keep(key, declaration, torch.stack([self._load(key, declaration, i) for i in self._ids]))
        return self._rows[key]

    def _keep(self, key: str, declaration: ClientState | Scratch, rows: Tensor) -> None:
        self._declared[key], self._rows[key], self._versions[key] = declaration, rows, rows._version

    def _load(self, key: str, declaration: ClientState | Scratch, client: int) -> Tensor:
        row = self._round.read(key, client) if isinstance(declaration, ClientState) else None
        if row is None and declaration.initial == "zeros":
            like = self._x[0] if declaration.shape is None else self._x.new_empty(declaration.shape)
            return torch.zeros((), dtype=declaration.dtype or like.dtype, device=like.device).expand_as(like)
        if row is None:
            return self._round.initial(declaration.initial, declaration.shape, declaration.dtype)
        return sent(row, self._x.device)

    def write(self, key: str, declaration: ClientState | Scratch, value: Tensor) -> None:
        if key not in self._rows and isinstance(declaration, Scratch):  # its zeros would be overwritten
            one = self._load(key, declaration, self._ids[0])
            self._keep(key, declaration, one.new_empty(len(self._ids), *one.shape))
        rows = self.rows(key, declaration)
        if value is not rows:
            rows.copy_(torch.as_tensor(value))
        self._versions[key] = -1

    def upload(self, key: str, declaration: Upload, value: Tensor) -> None:
        shape = self._x.shape[1:] if declaration.shape is None else torch.Size(declaration.shape)
        kind = self._x.dtype if declaration.dtype is None else declaration.dtype
        self.uploads[key] = torch.as_tensor(value).to(kind).expand(len(self._ids), *shape)

    def tensors(self) -> dict[str, Tensor]:
        """All that is theirs but x, by name."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, Tensor) and name != "_x"}
        return {**own, **self._rows}

    def told(self) -> list[Tensor]:
        """What hooks logged and uploaded so far."""
        return [*self.logs.values(), *self.uploads.values()]

    def begin(self, moved: bool) -> None:
        """Starts are final: remember them; ``moved``: a method may have changed them."""
        own = moved or self.kept_mask is not None
        self._start = self._x.clone() if own else self._round.w.expand_as(self._x)
        if self.kept_mask is not None and self.kept_origin is not None:
            self.kept_origin = torch.where(self.kept_mask, self.kept_origin, self._start)

    def written(self) -> Iterator[tuple[str, ClientState | Scratch, Tensor]]:
        """States whose rows were assigned or changed in place."""
        for key, rows in self._rows.items():
            if rows._version != self._versions[key]:
                yield key, self._declared[key], rows

    def _column(self, values: dict[int, int] | dict[int, float]) -> Tensor:
        column = [[values[i]] for i in self._ids]
        return sent(column, self._x.device, self._round.wide)


class Server:
    """The server's side of a round. Means and sums are over the clients that finished."""

    def __init__(self, round: Round, w: Tensor) -> None:
        self._round, self.w = round, w
        self.w_before = w
        self.update = w
        self.averaged: Tensor | None = None
        self.evaluated = w
        self.communication: dict[str, int] = {}
        self.logs: dict[str, Tensor | float] = {}

    @property
    def round(self) -> int:
        """t = 0, 1, …"""
        return self._round.t

    @property
    def initial_model(self) -> Tensor:
        """w^0 ``(D,)``, kept where a state of the run starts from it."""
        return self._round.w0

    @property
    def ids(self) -> Tensor:
        """The clients that finished, ascending, ``(n,)``."""
        return torch.tensor(self._round.finished, device=self.w.device)

    @property
    def n(self) -> int:
        """How many clients finished."""
        return len(self._round.finished)

    @property
    def num_clients(self) -> int:
        """Registered clients m."""
        return self._round.num_clients

    @property
    def layout(self) -> Layout:
        return self._round.layout

    @property
    def mean_change(self) -> Tensor:
        """The uniform mean ``(D,)`` of what was transmitted."""
        total = self._round.total
        return total.get("update", total["weighted"]) / max(self.n, 1)

    def log(self, name: str, value: Tensor | float) -> None:
        """Log a scalar against the round."""
        self.logs[name] = value

    def staged(self, key: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows written this round, ascending by client, brought to every process."""
        mine = self._round.staged.get(key, {})
        distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        for j, client in enumerate(self._round.ids):
            row = mine.get(client)
            if distributed:
                box = [row]
                dist.broadcast_object_list(box, src=j % dist.get_world_size())
                row = box[0]
            if row is not None:
                yield torch.tensor([client], device=self.w.device), row.unsqueeze(0)
