"""The clients' side of a round, as local hooks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.devices import to_device
from fl_lightning.learner import Layout
from fl_lightning.round.context import Evaluate, InStep, Round, asking
from fl_lightning.round.partial import COPY, ELAPSED, ORIGIN, WRITTEN
from fl_lightning.state import ClientState, PerClient, Scratch, Upload

# Where a method reads the loss of local steps, it travels with what is logged, under this name.
LOSS = "the loss of local steps"


class Clients:
    """``n`` clients that train together, as local hooks see them.

    Numbers that each client has one of are columns ``(n, 1)``.

    Args:
        x: their models ``(n, D)``.
        full_gradient, evaluate: what stands behind the methods of these names; given by whoever
            trains them.
    """

    def __init__(
        self,
        round: Round,
        ids: list[int],
        x: Tensor,
        full_gradient: Callable[[Clients, Tensor], Tensor] | None = None,
        evaluate: Evaluate | None = None,
    ) -> None:
        self._round = round
        self._x = x
        self._ids = ids
        self._full_gradient = full_gradient
        self._evaluate = evaluate
        self.looked_up = False
        self.mean_gradient_read = ""
        # A client that stands alone brings these home beside its model: the learner's buffers,
        # what its steps left in the learner's metrics, and what its optimizer keeps.
        self.buffers: dict[str, Tensor] = {}
        self.metrics: object = None
        self.optimizer_rows: dict[str, Tensor] = {}
        # A row was written if its count of changes moved since it was loaded.
        self._rows: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._declared: dict[str, PerClient] = {}
        self.uploads: dict[str, Tensor] = {}
        self.logs: dict[str, Tensor] = {}
        self.transmitted: tuple[float | None, float | None] = (None, None)
        self.kept_origin: Tensor | None = None
        self.kept_elapsed: Tensor | None = None
        self.kept_mask: Tensor | None = None
        self._start: Tensor | None = None
        self.clipped: Tensor
        self.local_step: InStep | None = None
        # Gradients are counted in the first step, since all steps evaluate the same number.
        self.gradients_a_step = 1
        self.full_gradients = 0  # outside of steps
        self.full_gradients_a_step = 0
        self._step: Tensor | None = None
        self._columns: dict[str, Tensor] = {}

    @property
    def client_ids(self) -> list[int]:
        """Their numbers; a local step that asks for them is not replayed for other clients."""
        self.looked_up = True
        return self._ids

    @cached_property
    def ids(self) -> Tensor:
        """Their numbers ``(n,)``, int64."""
        return to_device(self._ids, self._x.device)

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
    def evaluated(self) -> Tensor:
        """What was evaluated last ``(D,)``: w^t, except under partial averaging."""
        return self._round.evaluated

    @property
    def num_clients(self) -> int:
        """Registered clients m."""
        return self._round.num_clients

    @property
    def start(self) -> Tensor:
        """x_{i,0} ``(n, D)``, from the first step on."""
        if self._start is None:
            raise RuntimeError(
                "clients.start is known from the first local step on, not in on_local_start"
            )
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
        self._round.rates.require_constant()
        return self._round.rates.lr

    @property
    def momentum(self) -> float:
        """The client optimizer's momentum; 0 where it has none."""
        self._round.rates.require_constant()
        return self._round.rates.momentum

    @property
    def weight_decay(self) -> float:
        """λ of the client optimizer; 0 where weight decay is no part of the gradient (AdamW)."""
        self._round.rates.require_one()
        return self._round.rates.weight_decay

    @cached_property
    def steps(self) -> Tensor:
        """K_i ``(n, 1)``."""
        return self._column(self._round.steps)

    def steps_of(self, epochs: float) -> Tensor:
        """Local steps of so many epochs ``(n, 1)``, whatever K_i is."""
        name = f"steps of {epochs}"
        if name not in self._columns:
            assert self._round.steps_of is not None
            steps = {i: self._round.steps_of(i, epochs) for i in self._ids}
            self._columns[name] = self._column(steps)
        return self._columns[name]

    @property
    def step(self) -> Tensor:
        """The number of the present local step, from 0: an int64 scalar; in the hooks of a step."""
        # A tensor that counts on the device: a recorded step reads the number of each replay.
        if self._step is None:
            self._step = to_device(self._in_step("clients.step").index, self._x.device)
        return self._step

    def gradient_at(self, x: Tensor) -> Tensor:
        """Gradient ``(n, D)`` of the present batch's loss at x ``(D,)`` or ``(n, D)``.

        It is without weight decay. In the hooks of a step, from the first step on: same batch, same
        random numbers, from the buffers with which the step began. x, buffers and logs stay; what
        is returned has memory of its own. It costs what the loss gradient does, which
        ``cost/gradients`` shows.
        """
        return self._in_step("clients.gradient_at").gradient_at(x)

    def _in_step(self, what: str) -> InStep:
        if self.local_step is None:
            raise RuntimeError(
                f"{what} is there in the hooks of a local step, not before or after a client's "
                "steps"
            )
        return self.local_step

    def step_done(self) -> None:
        """The present local step is over."""
        if self._step is not None:
            self._step += 1

    def gradients(self, client: int) -> int:
        """How many gradients of a batch's loss a client evaluated.

        A gradient of its whole objective counts as many as an epoch has batches.
        """
        steps = self._round.steps[client]
        whole = self.full_gradients + steps * self.full_gradients_a_step
        batches = 0
        if whole and self._round.steps_of is not None:
            batches = self._round.steps_of(client, 1)
        return steps * self.gradients_a_step + whole * batches

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
        """Where the clients' present displacement began ``(n, D)``.

        That is ``start``, except on parts that a client has kept since an earlier round.
        """
        return self.start if self.kept_origin is None else self.kept_origin

    @property
    def elapsed(self) -> Tensor:
        """Σ η K since ``origin``: ``(n, 1)``, or ``(n, D)`` with partial averaging."""
        self._round.rates.require_one()
        return self.total_elapsed()

    def total_elapsed(self) -> Tensor:
        here = self._round.rates.elapsed(self.steps)
        return here if self.kept_elapsed is None else here + self.kept_elapsed

    @property
    def mean_gradient(self) -> Tensor:
        """(origin - x) / elapsed ``(n, D)``, at the end of a round; 0 where nothing elapsed.

        Where rates change from step to step, steps count by their rates.
        """
        elapsed = self.elapsed
        # The reader's name is kept for the refusal where a step was no plain SGD step.
        self.mean_gradient_read = self.mean_gradient_read or asking()
        return torch.where(elapsed > 0, (self.origin - self._x) / elapsed, 0.0).to(self._x.dtype)

    @property
    def loss(self) -> Tensor:
        """The mean loss of their local steps ``(n, 1)``, in ``on_local_end``.

        It is there for methods with ``reads_loss = True``.
        """
        if LOSS not in self.logs:
            raise RuntimeError(
                "clients.loss is there in on_local_end, where a method's class says reads_loss = "
                "True"
            )
        return self.logs[LOSS].reshape(-1, 1)

    def norm(self, v: Tensor) -> Tensor:
        """‖v‖ of each client's row: ``(n, D)`` → ``(n, 1)``."""
        norm: Tensor = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        return norm

    def full_gradient(self, x: Tensor) -> Tensor:
        """Gradient ``(n, D)`` of the clients' whole objectives at x ``(D,)`` or ``(n, D)``.

        Weight decay is included.
        """
        assert self._full_gradient is not None
        # All steps do alike, so those of the first step stand for each of them.
        self.full_gradients += self.local_step is None
        self.full_gradients_a_step += self.local_step is not None and self.local_step.first
        return self._full_gradient(self, x)

    def evaluate(self, x: Tensor, what: Literal["train", "test"] = "train") -> dict[str, Tensor]:
        """Loss and metrics of the clients' own samples at x ``(D,)`` or ``(n, D)``.

        Columns ``(n, 1)`` by name, NaN for a client without samples: ``"loss"``, and what
        ``validation_step`` logs, without ``val/``. The learner is in evaluation mode and has the
        server's buffers. It reads values, so a local step that asks for it is not captured.

        Args:
            what: the samples they train on, or those that ``client_test_fraction`` holds out.
        """
        assert self._evaluate is not None
        return self._evaluate(self, x, what)

    def log(self, name: str, values: Tensor) -> None:
        """Log one value per client, ``(n,)`` or ``(n, 1)``; ``name`` shows their mean."""
        self.logs[name] = values.detach().reshape(len(self._ids))

    def sent(self, parameters: float | None = None, bytes: float | None = None) -> None:
        """Say how much each client sends by ``transmit``, in place of D parameters."""
        self.transmitted = (parameters, bytes)

    def rows(self, key: str, declaration: PerClient) -> Tensor:
        """The round's staged rows of a state, loaded at first access."""
        if key not in self._rows:
            rows = [self._load(key, declaration, i) for i in self._ids]
            self._keep(key, declaration, torch.stack(rows))
        return self._rows[key]

    def _keep(self, key: str, declaration: PerClient, rows: Tensor) -> None:
        self._declared[key] = declaration
        self._rows[key] = rows
        self._versions[key] = rows._version

    def _load(self, key: str, declaration: PerClient, client: int) -> Tensor:
        row = self._round.read(key, client) if isinstance(declaration, ClientState) else None
        if row is not None:
            return to_device(row, self._x.device)
        if declaration.initial != "zeros":
            return self._round.initial(declaration.initial, declaration.shape, declaration.dtype)
        # The rows are stacked, which copies them, so one zero may stand for each row until then.
        like = self._x[0]
        if declaration.shape is not None:
            like = self._x.new_empty(declaration.shape)
        zero = torch.zeros((), dtype=declaration.dtype or like.dtype, device=like.device)
        return zero.expand_as(like)

    def write(self, key: str, declaration: PerClient, value: Tensor) -> None:
        # Scratch that is assigned before it is read needs no zeros, which would be overwritten.
        if key not in self._rows and isinstance(declaration, Scratch):
            one = self._load(key, declaration, self._ids[0])
            self._keep(key, declaration, one.new_empty(len(self._ids), *one.shape))
        rows = self.rows(key, declaration)
        if value is not rows:
            rows.copy_(torch.as_tensor(value))
        # No count of changes is -1: the rows count as written, even where `value` is what they are.
        self._versions[key] = -1

    def upload(self, key: str, declaration: Upload, value: Tensor) -> None:
        shape = self._x.shape[1:] if declaration.shape is None else declaration.shape
        dtype = declaration.dtype or self._x.dtype
        self.uploads[key] = torch.as_tensor(value).to(dtype).expand(len(self._ids), *shape)

    def step_tensors(self) -> dict[str, Tensor]:
        """Columns, starts and rows of states by name: what a local step may read besides x."""
        tensors = {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "_x"
        }
        return {**tensors, **self._rows, **self._columns}

    def given(self) -> list[Tensor]:
        """The values that hooks have logged and uploaded so far."""
        return [*self.logs.values(), *self.uploads.values()]

    def take_kept_parts(self) -> None:
        """Put the clients' own copies of parts into ``x``, where newer than the last average."""
        round = self._round
        if round.parts is not None:
            taken = round.parts.taken(round.t, round.read, self.client_ids, self._x, round.wide)
            self.kept_origin, self.kept_elapsed, self.kept_mask = taken

    def kept_parts(self) -> dict[str, Tensor]:
        """The rows in which a client, a group of one, keeps its copies of parts."""
        parts = self._round.parts
        if parts is None or not parts.masks:
            return {}
        elapsed = self.total_elapsed().expand_as(self._x)[0]
        return {
            COPY: self._x[0][parts.kept].clone(),
            ORIGIN: self.origin[0][parts.kept].clone(),
            ELAPSED: torch.stack([elapsed[mask][0] for mask in parts.masks]),
            WRITTEN: torch.tensor(self.round),
        }

    def begin(self, own_starts: bool) -> None:
        """Remember the starts, which are final; ``own_starts``: a method may have moved them."""
        # Where every client starts from w, w itself is remembered, and no copy of n × D numbers.
        if own_starts or self.kept_mask is not None:
            self._start = self._x.clone()
        else:
            self._start = self._round.w.expand_as(self._x)
        if self.kept_mask is not None and self.kept_origin is not None:
            self.kept_origin = torch.where(self.kept_mask, self.kept_origin, self._start)

    def written(self) -> Iterator[tuple[str, Tensor]]:
        """Rows of states that outlive the round, where they were assigned or changed in place."""
        for key, rows in self._rows.items():
            changed = rows._version != self._versions[key]
            if changed and isinstance(self._declared[key], ClientState):
                yield key, rows

    def drop_scratch(self) -> None:
        """Forget the rows that nobody reads any more."""
        self._rows = {
            key: rows
            for key, rows in self._rows.items()
            if isinstance(self._declared[key], ClientState)
        }

    def _column(self, values: dict[int, int] | dict[int, float]) -> Tensor:
        column = [[values[i]] for i in self._ids]
        return to_device(column, self._x.device, self._round.wide)
