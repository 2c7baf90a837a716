"""The server's side of a round, as server hooks see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.learner.layout import Layout
from fl_lightning.machine.device_memory import to_device
from fl_lightning.machine.processes import gathered, world_size
from fl_lightning.round.clients import HookSubject
from fl_lightning.round.context import Round
from fl_lightning.round.declared_state import Declaration
from fl_lightning.round.transaction import RoundTransaction, refuse_outsiders
from fl_lightning.sampling import generator
from fl_lightning.storage.secret import drawn_from


class Server(HookSubject):
    """The server's side of a round. Means and sums are over the clients that finished.

    ``w`` is w^t until the server optimizer's step, and w^{t+1} in ``on_round_end``. ``w_before`` is
    w^t. ``evaluated`` is the model that will be evaluated, w unless a method evaluates another
    model. ``update`` is the aggregated update. Each is ``(D,)``.
    """

    def __init__(self, round: Round, transaction: RoundTransaction) -> None:
        super().__init__()
        self._round = round
        self._transaction = transaction
        self.update = self.w_before = self.evaluated = round.w
        self.communication: dict[str, int] = {}
        self.kept_vectors = 0.0
        self.logs = transaction.logs

    @property
    def w(self) -> Tensor:
        return self._round.w

    @property
    def _lent(self) -> list[tuple[str, Tensor]]:
        """Return the run's vectors that hooks get without a copy, by their names in hooks."""
        lent = [
            ("server.w", self.w),
            ("server.w_before", self.w_before),
            ("server.given", self.given),
            ("server.evaluated", self.evaluated),
            ("server.client_lr", self._round.rates.lr),
        ]
        if self._round.w0 is not None:
            lent.append(("server.initial_model", self._round.w0))
        return lent

    @property
    def round(self) -> int:
        """t = 0, 1, …"""
        return self._round.t

    @property
    def initial_model(self) -> Tensor:
        """Return w^0 ``(D,)``; it exists if a state of the run has ``initial="initial_model"``.

        Raises:
            UserError: no state has it.
        """
        return self._round.initial_model

    @property
    def averaged(self) -> Tensor | None:
        """Return ``(D,)`` bool: coordinates averaged at the end of this round; None: all."""
        return self._round.averaged

    @property
    def moves(self) -> Tensor | None:
        """Return ``(D,)`` bool: coordinates that the server's step may change; None: all."""
        return None if self._round.server_moves else self._round.averaged

    @property
    def ids(self) -> Tensor:
        """Return the clients that finished, ascending, ``(n,)``."""
        self._guard_participants("server.ids")
        return torch.tensor(self._transaction.finished, device=self.w.device)

    @property
    def participants(self) -> Tensor:
        """Return the clients that take part, also those that drop out, ascending, ``(k,)``."""
        self._guard_participants("server.participants")
        return torch.tensor(self._round.ids, dtype=torch.int64, device=self.w.device)

    @property
    def n(self) -> int:
        """Return how many clients finished."""
        self._guard_participants("server.n")
        return len(self._transaction.finished)

    @property
    def weights(self) -> Tensor:
        """P_i of the clients that finished, in the order of ``ids``: ``(n,)``, with sum 1."""
        self._guard_participants("server.weights")
        given = [self._round.weights[i] for i in self._transaction.finished]
        weights = torch.tensor(given, dtype=self._round.wide, device=self.w.device)
        return weights / weights.sum()

    @property
    def num_clients(self) -> int:
        """Registered clients m."""
        return self._round.num_clients

    @property
    def client_lr(self) -> Tensor:
        """Return the clients' learning rate in this round, a scalar tensor."""
        self._round.rates.require_constant(self._caller)
        return self._round.rates.lr

    @property
    def layout(self) -> Layout:
        return self._round.layout

    @property
    def given(self) -> Tensor:
        """Return the model ``(D,)`` that clients got as w: w^t, except under a ``broadcast``."""
        return self.w_before if self._transaction.broadcast is None else self._transaction.broadcast

    @property
    def updates(self) -> Tensor:
        """Return the updates ``(n, D)`` of the clients that finished, in the order of ``ids``.

        These updates are the transmitted ones, and exist from ``on_updates`` on.

        Raises:
            UserError: the method does not ask for them.
            RuntimeError: no client has finished yet.
        """
        self._check_asked("updates")
        if self._transaction.gathered is None:
            raise RuntimeError("server.updates can be read from on_updates on")
        return self._transaction.gathered

    @updates.setter
    def updates(self, value: Tensor) -> None:
        if value is not self.updates:
            self.updates.copy_(value)

    @property
    def messages(self) -> int:
        """Return how many values of each kind clients exchanged, in runs without a server."""
        given = self._transaction.neighbourhood
        return 0 if given is None else given.messages(len(self._transaction.finished))

    @property
    def mean_change(self) -> Tensor:
        """Return the uniform mean ``(D,)`` of the transmitted updates; 0 if no client finished."""
        self._guard("server.mean_change")
        total = self._transaction.total
        if not self.n:
            return torch.zeros_like(self._round.w, dtype=self._round.wide)
        summed = total.weighted if total.update is None else total.update
        assert summed is not None
        return summed / max(self.n, 1)

    def outputs(self, vector: Tensor, x: Any) -> Any:
        """Return what the learner's ``forward`` gives for inputs ``x``, in evaluation mode.

        The outputs have a graph if the vector requires a gradient and gradients are enabled
        (``torch.enable_grad``).

        Args:
            vector: the parameters ``(D,)``, such as ``server.w`` or ``server.given +
                server.updates[j]``. Buffers are the server's from before the round.
            x: a batch of inputs, which is moved to the vector's device.

        Raises:
            UserError: the learner has no ``forward``.
        """
        assert self._round.outputs is not None
        return self._round.outputs(vector, x)

    def generator(self, purpose: str, *counters: int) -> np.random.Generator:
        """Return random numbers keyed by (seed, purpose, round, counters).

        The numbers are the same in every process and after a resume. Another call with the same
        arguments starts the same numbers again.

        Args:
            purpose: name of the draw; methods that use the same name draw the same numbers.
            counters: up to two more, such as a client's number.
        """
        return generator(self._round.seed, "method: " + purpose, self.round, *counters)

    def private_generator(self, purpose: str, onto: Tensor) -> np.random.Generator:
        """Return random numbers for noise, which no reader of the run can compute.

        The numbers are keyed by (secret, purpose, round, digest of ``onto``). So different values
        never get the same noise; otherwise their difference would be revealed. The numbers are the
        same in every process and after a resume. If the method draws from a seed, they are keyed by
        (that seed, purpose, round).

        Args:
            purpose: name of the draw.
            onto: all values to which the noise is added, the same in every process.
        """
        if self._round.noise is None:
            raise RuntimeError(
                "only a method with the attribute draws_from may call server.private_generator"
            )
        content = onto.detach().cpu().contiguous().view(-1).numpy().data
        return drawn_from(self._round.noise, "method: " + purpose, self.round, onto=content)

    def _guard_rows(self, key: str, declaration: Declaration) -> None:
        """Refuse to read clients' rows at a server that does not have them."""
        self._guard(f"the rows of {key} at the server")
        if self._transaction.rows_elsewhere and not declaration.comes_from_sites:
            raise UserError(
                f"method: {self._caller} reads the rows of {key} at the server, but they stay at "
                "the sites. Declare it as ClientState(reported=True), so that sites send the rows, "
                "or send an Upload. Or leave the method out, or simulate the run."
            )

    def _guard(self, what: str, hint: str = "") -> None:
        if self._round.noise is not None:
            refuse_outsiders(what, self._caller, hint)

    def _guard_participants(self, what: str) -> None:
        """Refuse methods that could let w depend on who takes part, which ε assumes is secret."""
        if self._caller not in self._transaction.measuring:
            self._guard(what, ' If it only logs, declare role = "measurement".')

    def sizes(self, ids: Tensor) -> Tensor:
        """Return the numbers of samples N_i of these clients ``(k,)``, float64."""
        assert self._round.all_sizes is not None
        return torch.as_tensor(
            self._round.all_sizes()[ids.cpu().numpy()], dtype=torch.float64, device=ids.device
        )

    def steps(self, ids: Tensor) -> Tensor:
        """Return K_i in this round of these clients, also of others than participants, ``(k,)``."""
        assert self._round.steps_in is not None
        taken = self._round.steps_in(ids.tolist())
        return torch.tensor([taken[i] for i in ids.tolist()], dtype=torch.int64, device=ids.device)

    def sent(
        self, parameters: float | Tensor | None = None, bytes: float | Tensor | None = None
    ) -> None:
        """In ``broadcast``, say how much each participant is sent instead of D parameters.

        Args:
            parameters, bytes: one number, which may be a tensor.
        """
        self._transaction.sent = (
            None if parameters is None else float(parameters),
            None if bytes is None else float(bytes),
        )

    def note(self, text: str) -> None:
        """Give the user a warning, once; the run's card repeats it."""
        self._transaction.notes.append(text)

    def log(self, name: str, value: Tensor | float) -> None:
        """Log the present value of a scalar for this round."""
        # The hook may change the tensor in place afterwards.
        self.logs[name] = float(value) if not isinstance(value, Tensor) else value.detach().clone()

    def committed(self, key: str, declaration: Declaration, ids: Tensor | Sequence[int]) -> Tensor:
        """Rows ``(k, …)`` of these clients' state from before the round, in every process."""
        self._guard_rows(key, declaration)
        clients = [int(i) for i in ids]
        # One process stores each client's rows, and sends them to all other processes.
        home = self._round.home or self._round.read
        rows_here = {i: row for i in clients if (row := home(key, i)) is not None}
        rows: dict[int, Tensor] = {}
        for rows_there in gathered(rows_here):
            rows.update(rows_there)
        unwritten = declaration.first(self._round)
        if not clients:
            return unwritten.new_empty(0, *unwritten.shape)
        return torch.stack([rows[i].to(unwritten) if i in rows else unwritten for i in clients])

    def staged(self, key: str, declaration: Declaration) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the rows written in this round, ascending by client, in every process."""
        self._guard_rows(key, declaration)
        rows_here = self._transaction.rows.get(key, {})
        world = world_size()
        for j, client in enumerate(self._round.ids):
            row = rows_here.get(client)
            # Process j mod W trained the round's j-th client. All processes must take part in each
            # broadcast, even if there is no row.
            if world > 1:
                box = [row]
                dist.broadcast_object_list(box, src=j % world)
                row = box[0]
            if row is not None:
                device = self.w.device
                shown = to_device(row, device).unsqueeze(0)
                yield to_device([client], device), shown
                # `on_round_end` may have changed it in place. On a GPU that was a copy.
                if shown.is_cuda and client in rows_here:
                    row.copy_(shown[0])
