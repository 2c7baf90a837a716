"""FedExP: the server makes a longer step if the clients' updates point in different directions.

D. Jhunjhunwala, S. Wang, G. Joshi: FedExP: Speeding Up Federated Averaging via Extrapolation (ICLR
2023), Algorithm 1, arXiv:2301.09604. As with projections onto convex sets, the server may follow
the mean of the updates beyond its end: by half of the mean squared norm over the squared norm of
the mean.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import (
    Clients,
    Coefficient,
    FederatedCallback,
    Paper,
    Refusal,
    Schedule,
    Server,
    Upload,
    ordered_norm,
)


class ExtrapolatedStep(FederatedCallback):
    """d ← η_g d with η_g = max(1, Σ p_i ‖x_{i,K} - w‖² / (2 (‖d‖² + ε))).

    The run evaluates and exports (w^{t+1} + w^t)/2, and w^1 after round 0; training goes on from
    w^{t+1}. d is the weighted mean of the transmitted updates; terms of other methods are added
    afterwards, unscaled. ``fedexp/rate`` is η_g.
    Sent: one number up, ‖x_{i,K} - w‖², which counts only if x_{i,K} itself is not sent. Kept:
    nothing.

    Args:
        epsilon: ε > 0; inf is rate 1.
        average: whether to evaluate the mean of the latest two models, and otherwise w.

    Example:
        With a single client the mean equals its update, so nothing is extrapolated.

        >>> from fl_lightning.callbacks import ExtrapolatedStep
        >>> from fl_lightning.testing import tiny_run
        >>> fedexp = tiny_run(ExtrapolatedStep(), participation=1)
        >>> fedexp.global_vector.equal(tiny_run(participation=1).global_vector)
        True
        >>> fedexp.evaluated_vector.equal(fedexp.global_vector)
        False
    """

    title = "FedExP"
    paper = Paper("jhunjhunwala2023fedexp")
    neutral = {"epsilon": float("inf"), "average": False}
    cannot_run_with = {"parts": "its rate would be of coordinates that are not averaged, too"}
    notes = (
        Refusal(
            "its step is along the update, so the server optimizer is SGD without momentum and "
            "weight decay, at any rate; given is {server}.",
            when=lambda method, run: bool(run.server),
        ),
    )
    epsilon = Coefficient(above=0, infinite=True)
    squared_norm = Upload(sent="derived from x", shape=(), least=0)

    def __init__(self, epsilon: float | Schedule = 1e-3, average: bool = True) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.average = average
        if average:
            self.use("evaluated", self.mean_of_two)

    def on_local_end(self, clients: Clients) -> None:
        self.squared_norm[clients] = clients.norm(clients.x - clients.w)[:, 0].square()

    def aggregate(self, server: Server) -> Tensor:
        d = server.update
        spread = self.squared_norm.weighted()
        rate = (spread / (2 * (ordered_norm(d).square() + self.epsilon))).clamp(min=1)
        server.log("fedexp/rate", rate)
        extrapolated: Tensor = d * rate
        return extrapolated

    def mean_of_two(self, server: Server) -> Tensor:
        """Return the model that is evaluated after a round."""
        return server.w if server.round == 0 else (server.w + server.w_before) / 2
