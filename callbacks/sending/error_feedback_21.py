"""EF21: each client compresses the change of its update since its last message.

P. Richtárik, I. Sokolov, I. Fatkhullin: EF21, A New, Simpler, Theoretically Better, and Practically
Faster Error Feedback (NeurIPS 2021), Algorithm 2, arXiv:2106.05203, with rounds in place of steps
and updates in place of gradients.
"""

from __future__ import annotations

from typing import Any, Literal

from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.callback import (
    Clients,
    ClientState,
    FederatedCallback,
    Note,
    Paper,
    Server,
    ServerState,
    UserError,
    wire,
)


class ErrorFeedback21(FederatedCallback):
    """c_i = C(u_i - h_i), u_i = x_{i,K} - w, travels; h_i ← h_i + c_i stands for u_i.

    With ``average="participants"`` the server's update is Σ p_i h_i over the participants. With
    ``"all"``, as printed, the update is the mean of h_i over all clients, and absent clients keep
    their h_i. EF21 raises an error with partial averaging, because a part that is not averaged
    would be lost.
    Sent: C(u_i - h_i) in place of D numbers. Kept: h_i by each client (and by the server, which
    knows the messages); with ``"all"`` only their mean by the server.

    Args:
        compressor: C, a ``TopKCompression``, a ``SignUpdate`` or a ``RandomK(memory=True)``, of
            which EF21 uses only the map and the count; None: everything is sent.
        average: ``"participants"`` or ``"all"``, the clients whose h_i are averaged.

    Example:
        the first message is C(u_i): one client changes 4 of the server's 31 parameters.

        >>> from fl_lightning.callbacks import ErrorFeedback21, TopKCompression
        >>> from fl_lightning.testing import tiny_run
        >>> def method():
        ...     return ErrorFeedback21(TopKCompression(0.1), average="all")
        >>> start, one = (tiny_run(method(), rounds=t, participation=1) for t in (0, 1))
        >>> int((start.global_vector != one.global_vector).sum())
        4
    """

    title = "EF21"
    paper = Paper("richtarik2021ef21")
    cannot_run_with = {"parts": "what is not averaged is not sent, and would be lost"}
    notes = (
        Note(
            "with average='all' the aggregation weights p_i of weighting='samples' are not used.",
            when=lambda method, run: method.average == "all" and run.weighting == "samples",
        ),
    )
    h = ClientState(synchronised=False)

    def __init__(
        self,
        compressor: FederatedCallback | None,
        average: Literal["participants", "all"] = "participants",
    ) -> None:
        super().__init__()
        refuse_no_contraction(compressor)
        self.compressor = compressor
        self.average = average
        # With "all" the server's mean is over all clients, with equal weights.
        vars(self)["tolerates_staleness"] = average == "participants"
        # If the compressor draws by client, so does this class.
        vars(self)["draws_by_client"] = getattr(compressor, "draws_by_client", False)
        if average == "all":
            self.declare("mean", ServerState(synchronised=False))
            self.use("aggregate", self.of_all)
            self.use("encode", self.encoded)
            self.use("decode", self.decoded)

    def not_beside(self, other: FederatedCallback) -> str:
        if not other.has("trained") or self.compressor is None or self.compressor.of_trained:
            return ""
        return "what it sends of coordinates that a client does not train is not defined"

    @wire.once
    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        h = self.h[clients].double()
        c = self.compress(clients, update.double() - h)
        self.h[clients] = h + c
        return c if self.average == "all" else self.h[clients].clone()

    def compress(self, clients: Clients, v: Tensor) -> Tensor:
        """C(v)."""
        if self.compressor is None:
            c = v.to(clients.w.dtype)
            vars(clients)["message"] = {"values": c}
        else:
            c = self.compressor.compress(clients, v, self)
        return c

    def of_all(self, server: Server) -> Tensor:
        """The hook ``aggregate`` with ``average="all"``: (1/m) Σ h_i over all clients."""
        mean: Tensor = self.mean
        mean += server.mean_change * server.n / server.num_clients
        return mean

    def encoded(self, clients: Clients, update: Tensor) -> dict[str, NDArray[Any]]:
        """``encode`` for ``average="all"``; with "participants" the server itself adds the updates
        of h_i."""
        message = wire.message_of(ErrorFeedback21.transmit, self, clients, update)
        if self.compressor is None:
            return {"values": wire.as_array(message["values"][0])}
        return self.compressor.encode(clients, update)

    def decoded(self, arrays: dict[str, NDArray[Any]], round: int, client: int) -> Tensor:
        """``decode`` with ``average="all"``."""
        if self.compressor is None:
            wire.check_arrays(arrays, {"values": len(self._transaction.w)})
            return wire.as_tensor(arrays["values"], like=self._transaction.w)[0]
        c: Tensor = self.compressor.decompress(arrays, round, client, self)
        return c


def refuse_no_contraction(compressor: Any) -> None:
    """Refuse a compressor that may send more than its input, or that needs its own state."""
    if compressor is None or getattr(compressor, "contraction", False):
        return
    raise UserError(
        f"ErrorFeedback21: compressor={compressor!r} is not accepted: EF21 needs a contraction "
        "that keeps no state; accepted are TopKCompression(fraction), "
        "SignUpdate(per_layer), RandomK(fraction, memory=True), or null (all is sent)."
    )
