"""Clients that train together, in the form in which engines hold them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.machine.device_memory import to_device
from fl_lightning.round.context import Evaluate, Round
from fl_lightning.round.declared_state import Exchanged, PerClient, Upload
from fl_lightning.round.model_parts import COPY, ELAPSED, ORIGIN, WRITTEN

# If a method reads the loss of local steps, the loss is logged under this name.
LOSS = "the loss of local steps"


class ClientGroup:
    """``n`` clients of a round, their models ``x`` ``(n, D)``, and all values that hooks gave for
    them.

    Hooks get :class:`~fl_lightning.round.clients.Clients`, a view of it for authors.

    Args:
        ids: the client IDs.
        x: their models ``(n, D)``; the group works in this memory.
        full_gradient: ``(group, point)`` → ∇f_i ``(n, D)`` without weight decay.
        evaluate: ``(group, point, what)`` → columns ``(n, 1)`` by name.
    """

    place_in_step = 0  # of the present batch, if a step takes several
    # The callback that takes the gradients of single samples, and the one that protects the
    # samples of clients; empty: none.
    reduced_by = protected_by = ""
    # (n, D): share of the steps in which each coordinate moves; None: all move in all steps.
    moving: Tensor | None = None

    def __init__(
        self,
        round: Round,
        ids: list[int],
        x: Tensor,
        full_gradient: Callable[[ClientGroup, Tensor], Tensor] | None = None,
        evaluate: Evaluate | None = None,
    ) -> None:
        self.round = round
        self.ids = ids
        self.x = x
        self.full_gradient = full_gradient
        self.evaluate = evaluate
        # (method, x, training) -> the outputs of its taps at x; (client) -> samples by class.
        self.seen_at: Callable[[str, Tensor, bool], dict[str, Any]] | None = None
        self.measuring: Collection[str] = ()  # callbacks whose passes do not count as a method's
        self.models_of = ""  # callback from whose models clients train; empty: from w
        self.label_counts: Callable[[int], Sequence[int] | None] | None = None

        # Tensors that hooks read. A local step may read any of these besides x.
        self.start: Tensor | None = None
        self.kept_origin: Tensor | None = None
        self.kept_elapsed: Tensor | None = None
        self.kept_mask: Tensor | None = None
        self.untrained: Tensor | None = None  # (n, D) bool: untrained coordinates; None: none
        self.clipped: Tensor | None = None  # (n,): number of steps in which clipping was active
        self.rates_used: Tensor | None = None  # (n, 1): sum of the factors of the steps taken
        self.step: Tensor | None = None
        self.columns: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.declared: dict[str, PerClient] = {}
        self.attributes: dict[str, object] = {}  # attributes that hooks assigned to clients
        # A row was written if its version counter has changed since it was loaded.
        self.change_counts: dict[str, int] = {}

        # What hooks gave.
        self.uploads: dict[str, Tensor] = {}
        self.logs: dict[str, Tensor] = {}
        self.transmitted: tuple[float | Tensor | None, float | Tensor | None] = (None, None)

        # Facts about the hooks that the engine collects while they run.
        self.local_step: Any = None  # the step that the clients take together now
        self.looked_up = False  # a hook read the clients' numbers
        self.batches: int | None = None  # batches of all steps, if a step takes several; else None
        # Gradients are counted in the first step, because all steps evaluate the same number.
        self.gradients_a_step = 1
        self.full_gradients = 0  # outside of steps
        self.full_gradients_a_step = 0
        # Passes without a gradient: over one batch, and over all samples.
        self.forwards = 0
        self.forwards_a_step = 0
        self.evaluations = 0
        self.evaluations_a_step = 0

        # A single client's results besides its model: the learner's buffers, the states that its
        # steps left in the learner's metrics, and the state of its optimizer.
        self.buffers: dict[str, Tensor] = {}
        self.metrics: object = None
        self.optimizer_rows: dict[str, Tensor] = {}

    def take_kept_parts(self) -> None:
        """Put clients' own copies of parts into ``x`` if they are newer than the last average."""
        round = self.round
        if round.parts is not None:
            states = round.server_states
            taken = round.parts.taken(round.t, states, round.read, self.ids, self.x, round.wide)
            self.kept_origin, self.kept_elapsed, self.kept_mask = taken

    def begin(self, own_starts: bool) -> None:
        """Remember the starts, now final; ``own_starts``: a method may have moved them."""
        # If every client starts from w, keep a reference to w, and no copy of n × D numbers.
        if own_starts or self.kept_mask is not None:
            self.start = self.x.clone()
        else:
            # Through `.data` the tensor has a version counter separate from that of w.
            self.start = self.round.w.data.expand_as(self.x)
        if self.kept_mask is not None and self.kept_origin is not None:
            self.kept_origin = torch.where(self.kept_mask, self.kept_origin, self.start)

    def hold(self, at: Tensor | None) -> None:
        """Set coordinates that the clients do not train to these values."""
        if self.untrained is not None and at is not None:
            self.x.copy_(torch.where(self.untrained, at, self.x))

    def trained_part(self, v: Tensor) -> Tensor:
        """Return values ``(n, D)`` with zeros where the clients do not train."""
        return v if self.untrained is None else v.masked_fill(self.untrained, 0.0)

    def step_done(self) -> None:
        if self.step is not None:
            self.step += 1

    def step_tensors(self) -> dict[str, Tensor]:
        """Columns, starts and rows by name: what a local step may read besides x."""
        named = {
            "start": self.start,
            "kept_origin": self.kept_origin,
            "kept_elapsed": self.kept_elapsed,
            "kept_mask": self.kept_mask,
            "untrained": self.untrained,
            "clipped": self.clipped,
            "rates_used": self.rates_used,
            "step": self.step,
        }
        everything = {**named, **self.attributes, **self.columns, **self.rows}
        return {name: value for name, value in everything.items() if isinstance(value, Tensor)}

    def attributes_of_clients(self) -> dict[str, Tensor]:
        return {
            name: value
            for name, value in self.attributes.items()
            if isinstance(value, Tensor) and value.dim() and len(value) == len(self.ids)
        }

    def given(self) -> list[Tensor]:
        return [*self.logs.values(), *self.uploads.values()]

    def column(self, name: str, values: dict[int, int] | dict[int, float]) -> Tensor:
        """Return one number per client as a column ``(n, 1)``, made at its first use."""
        if name not in self.columns:
            column = [[values[i]] for i in self.ids]
            self.columns[name] = to_device(column, self.x.device, self.round.wide)
        return self.columns[name]

    def elapsed(self) -> Tensor:
        """Return Σ η K since the displacement's origin: ``(n, 1)``, or ``(n, D)`` if parts are
        kept, or move only in some steps.
        """
        here = self.round.rates.elapsed(self.column("steps", self.round.steps))
        if self.rates_used is not None:
            here = self.rates_used * self.round.rates.lr.to(self.rates_used.dtype)
        if self.moving is not None:
            here = here * self.moving
        return here if self.kept_elapsed is None else here + self.kept_elapsed

    def gradients(self, client: int) -> int:
        """Return how many gradients of a batch's loss a client evaluated.

        A gradient of its whole objective counts as many gradients as an epoch has batches.
        """
        steps = self.round.steps[client]
        whole = self.full_gradients + steps * self.full_gradients_a_step
        batches = steps if self.batches is None else self.batches
        return batches * self.gradients_a_step + whole * self.in_epoch(client, whole)

    def in_epoch(self, client: int, asked: int) -> int:
        """Return the batches of an epoch; 0 if they were not used, or are not known."""
        of = self.round.epoch_batches
        return of(client) if asked and of is not None else 0

    def count_pass(self, asking: str) -> None:
        """Count a pass without gradient that a callback asked for, unless it only measures."""
        if asking in self.measuring:
            return
        # If steps take unequal numbers of batches, they ask for different numbers of passes.
        if self.local_step is None or self.batches is not None:
            self.forwards += 1
        elif self.local_step.first:
            self.forwards_a_step += 1

    def count_evaluation(self, asking: str) -> None:
        """Count passes over all training samples of the clients that a callback asked for."""
        if asking in self.measuring:
            return
        if self.local_step is None:
            self.evaluations += 1
        elif self.local_step.first:
            self.evaluations_a_step += 1

    def passes(self, client: int) -> int:
        """Return how many passes of a batch without a gradient methods asked for."""
        steps = self.round.steps[client]
        whole = self.evaluations + steps * self.evaluations_a_step
        passes = self.forwards + steps * self.forwards_a_step
        return passes + whole * self.in_epoch(client, whole)

    def read(self, key: str, declaration: PerClient) -> Tensor:
        if key not in self.rows:
            rows = [self.load(key, declaration, i) for i in self.ids]
            self._keep(key, declaration, torch.stack(rows))
        return self.rows[key]

    def load(self, key: str, declaration: PerClient, client: int) -> Tensor:
        """Return one client's row from before the round, or the initial value of its state."""
        row = self.round.read(key, client) if declaration.keeps_rows else None
        if row is not None:
            return to_device(row, self.x.device)
        if declaration.initial != "zeros":
            return declaration.first(self.round)
        # Stacking copies the rows, so one zero may stand for each row until then.
        zero = torch.zeros((), dtype=declaration.dtype or self.x.dtype, device=self.x.device)
        return zero.expand(declaration.sized(self.x.shape[1]))

    def write(self, key: str, declaration: PerClient, value: Tensor) -> None:
        # Scratch that is assigned before it is read needs no zeros, which would be overwritten.
        if key not in self.rows and not declaration.keeps_rows:
            one = self.load(key, declaration, self.ids[0])
            self._keep(key, declaration, one.new_empty(len(self.ids), *one.shape))
        rows = self.read(key, declaration)
        if value is not rows:
            given = torch.as_tensor(value)
            try:
                rows.copy_(given)
            except RuntimeError as error:
                raise _unfit(key, rows.shape, given) from error
        # No version counter is -1, so the rows count as written, even if `value` equals them.
        self.change_counts[key] = -1

    def receive(self, key: str, declaration: PerClient, value: Tensor) -> None:
        """Set the row of a state, of a group of one, to what the client got from its neighbours."""
        dtype = declaration.dtype or self.x.dtype
        row = to_device(value, self.x.device).to(dtype, copy=True)
        self._keep(key, declaration, row.unsqueeze(0))

    def _keep(self, key: str, declaration: PerClient, rows: Tensor) -> None:
        self.declared[key] = declaration
        self.rows[key] = rows
        self.change_counts[key] = rows._version

    def upload(self, key: str, declaration: Upload, value: Tensor) -> None:
        shape = declaration.sized(self.x.shape[1])
        dtype = declaration.dtype or self.x.dtype
        given = torch.as_tensor(value).to(dtype)
        try:
            given = given.expand(len(self.ids), *shape)
        except RuntimeError as error:
            raise _unfit(key, (len(self.ids), *shape), given) from error
        # Copy what is sent: x and rows of states may be changed in place afterwards.
        memory = given.untyped_storage()._cdata
        changing = (self.x, *self.rows.values())
        if any(memory == rows.untyped_storage()._cdata for rows in changing):
            given = given.clone()
        self.uploads[key] = given

    def written(self) -> Iterator[tuple[str, Tensor]]:
        """Rows of states that outlive the round, if they were assigned or changed in place."""
        for key, rows in self.rows.items():
            changed = rows._version != self.change_counts[key]
            if changed and self.declared[key].keeps_rows:
                yield key, rows

    def exchanged(self) -> Iterator[tuple[str, Tensor]]:
        """Return the rows that the clients assigned for their neighbours."""
        for key, rows in self.rows.items():
            if isinstance(self.declared[key], Exchanged):
                yield key, rows

    def drop_scratch(self) -> None:
        self.rows = {key: rows for key, rows in self.rows.items() if self.declared[key].keeps_rows}

    def kept_parts(self) -> dict[str, Tensor]:
        """Return the rows in which a client, a group of one, keeps its copies of parts."""
        parts = self.round.parts
        if parts is None or not parts.masks:
            return {}
        elapsed = self.elapsed().expand_as(self.x)[0]
        origin = self.start if self.kept_origin is None else self.kept_origin
        assert origin is not None  # the client has been trained
        return {
            COPY: self.x[0][parts.kept].clone(),
            ORIGIN: origin[0][parts.kept].clone(),
            ELAPSED: torch.stack([elapsed[mask][0] for mask in parts.masks]),
            WRITTEN: torch.tensor(self.round.t),
        }

    def alone(self, row: int) -> ClientGroup:
        own = copy.copy(self)
        part = slice(row, row + 1)
        own.ids = [self.ids[row]]
        own.x = self.x[part]
        own.columns = {}  # a group of one client computes these again
        rows_of = self.attributes_of_clients()
        own.attributes = {**self.attributes, **{k: rows[part] for k, rows in rows_of.items()}}
        own.rows = {key: rows[part] for key, rows in self.rows.items()}
        own.change_counts = dict(self.change_counts)
        own.declared = dict(self.declared)
        own.uploads = {key: value[part] for key, value in self.uploads.items()}
        own.logs = {name: value[part] for name, value in self.logs.items()}
        # A hook before `transmit` may have reported the size for clients that train together.
        parameters, number = self.transmitted
        own.transmitted = (_of_row(parameters, row), _of_row(number, row))
        kept = ("kept_origin", "kept_elapsed", "kept_mask")
        for name in (*kept, "start", "untrained", "rates_used", "moving"):
            value = getattr(self, name)
            setattr(own, name, None if value is None else value[part])
        return own


def _of_row(value: float | Tensor | None, row: int) -> float | Tensor | None:
    return value[row] if isinstance(value, Tensor) and value.dim() else value


def _unfit(key: str, shape: Sequence[int], given: Tensor) -> ValueError:
    hint = ""
    if len(shape) == 1 and given.shape == (*shape, 1):
        hint = ", a column as clients.loss is one: [:, 0] makes it fit"
    return ValueError(
        f"{key}[clients] is {tuple(shape)}, one row per client, as declared, but a value of shape "
        f"{tuple(given.shape)} was assigned{hint}"
    )
