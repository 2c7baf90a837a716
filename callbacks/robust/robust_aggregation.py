"""Robust aggregation: rules in place of the mean, on which a few arbitrary updates have only a
bounded effect.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates (ICML 2018), arXiv:1803.01498 (median, trimmed mean). P. Blanchard, E. M. El
Mhamdi, R. Guerraoui, J. Stainer: Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent (NeurIPS 2017), arXiv:1703.02757 (Krum, multi-Krum). K. Pillutla, S. M. Kakade, Z.
Harchaoui: Robust Aggregation for Federated Learning (IEEE TSP 2022), arXiv:1912.13445 (geometric
median). Y. Allouah, S. Farhadkhani, R. Guerraoui, N. Gupta, R. Pinot, J. Stephan: Fixing by Mixing:
A Recipe for Optimal Byzantine ML under Heterogeneity (AISTATS 2023), arXiv:2302.01772 (``mixing``:
Algorithm 2). E. M. El Mhamdi, R. Guerraoui, S. Rouault: The Hidden Vulnerability of Distributed
Learning in Byzantium (ICML 2018), arXiv:1802.07927 (Bulyan).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from fl_lightning.callback import (
    AtLeast,
    Below,
    FederatedCallback,
    NonNegativeInt,
    Note,
    Paper,
    PositiveInt,
    Server,
    UserError,
    ordered_norm,
)

# Each rule needs n ≥ times · f + 3 clients; mixing needs the number that Krum needs.
NEEDED = {"krum": 2, "multi_krum": 2, "bulyan": 4}
PIECE = 4096  # coordinates


class RobustAggregation(FederatedCallback):
    """d = rule(u_1, …, u_n) of the participants' updates, on averaged coordinates, in float64.

    ``"median"`` and ``"trimmed_mean"`` work coordinate by coordinate; the second leaves out the
    ⌊trim · n⌋ largest and smallest values. ``"krum"``: the u_i with the least s_i, the sum of its
    n - f - 2 smallest ‖u_i - u_j‖²; ``"multi_krum"``: the mean of the ``keep`` updates with the
    least s_i. ``"geometric_median"``: the z with the least Σ ‖u_i - z‖, by Weiszfeld's iteration.
    ``"bulyan"``: Krum selects n - 2 f updates one after the other, each among those left. In each
    coordinate the result is the mean of the n - 4 f values nearest to the median of the selected
    ones. The weights p_i play no part. With ``mixing`` each u_i is first replaced by the mean of
    the n - f updates nearest to it, including itself. Use it for clients whose data differ much,
    because the rules alone leave out honest updates of such clients.
    Sent and kept: nothing more than by FedAvg. The server holds all updates of a round at once.

    Args:
        rule: one of the above.
        trim: τ of the trimmed mean, from 0 to below 0.5.
        byzantine: f, how many clients of a round Krum, Bulyan and mixing withstand. Krum and mixing
            need n ≥ 2 f + 3 participants, Bulyan needs 4 f + 3. In a round with fewer clients they
            withstand fewer, and a note says so. With one or two clients they take the mean.
        keep: k of multi-Krum; None: n - f.
        mixing: mix each update with its nearest neighbours before the rule.

    Raises:
        UserError: rule is not accepted; a number is outside its bounds; or there are too few
            participants for ``byzantine`` or ``keep``.

    Example:
        If all updates are equal, any rule gives that update.

        >>> import torch
        >>> from fl_lightning.callbacks import RobustAggregation
        >>> from fl_lightning.callbacks.robust.robust_aggregation import krum_scores
        >>> u = torch.tensor([[0.0], [1.0], [2.0], [2.5], [99.0]])
        >>> krum_scores(u, f=1).tolist()
        [5.0, 2.0, 1.25, 2.5, 18721.25]
        >>> from fl_lightning.testing import tiny_run
        >>> one = {"participation": 1}
        >>> median = tiny_run(RobustAggregation("median"), **one)
        >>> median.global_vector.allclose(tiny_run(**one).global_vector)
        True
    """

    title = "robust aggregation"
    paper = Paper(
        by=lambda given: [
            {
                "median": "yin2018byzantine",
                "trimmed_mean": "yin2018byzantine",
                "krum": "blanchard2017krum",
                "multi_krum": "blanchard2017krum",
                "geometric_median": "pillutla2022rfa",
                "bulyan": "elmhamdi2018bulyan",
            }.get(given.get("rule") or "median"),
            "allouah2023mixing" if given.get("mixing") else None,
        ]
    )
    notes = (
        Note(
            "the weights of weighting='samples' are not used: each participant counts once.",
            when=lambda method, run: run.weighting == "samples",
        ),
    )

    def __init__(
        self,
        rule: Literal[
            "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "bulyan"
        ] = "median",
        trim: Annotated[float, AtLeast(0), Below(0.5)] = 0.1,
        byzantine: NonNegativeInt = 1,
        keep: PositiveInt | None = None,
        mixing: bool = False,
    ) -> None:
        super().__init__()
        self.rule = rule
        self.trim = trim
        self.byzantine = byzantine
        self.keep = keep
        self.mixing = mixing
        self.uses_f = mixing or rule in NEEDED  # whether `byzantine` plays a part
        # How many clients a round needs per attacker, in addition to 3.
        self.times = NEEDED.get(rule, 2)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        n = pl_module.cohort.n
        f = self.byzantine
        if self.uses_f and n < self.times * f + 3:
            mixes = self.mixing and self.rule != "bulyan"
            option = "mixing" if mixes else f"rule={self.rule!r}"
            raise UserError(
                f"{type(self).__name__}: {option} with byzantine={f} needs {self.times} · {f} + 3 "
                f"= {self.times * f + 3} clients per round, but participation gives {n}. Let more "
                "take part, or lower byzantine."
            )
        if self.rule == "multi_krum" and self.keep is not None and self.keep > n:
            raise UserError(
                f"{type(self).__name__}: keep={self.keep} is more than the {n} clients of a round."
            )

    def aggregate(self, server: Server, updates: Tensor) -> Tensor:
        u = updates.double()
        # Coordinates that are not averaged must not count in the distances.
        u = u if server.averaged is None else u * server.averaged
        # Fewer clients may have finished than took part, or the draw may have chosen few.
        f = min(self.byzantine, (len(u) - 3) // self.times)
        if self.uses_f and max(f, 0) < self.byzantine:
            server.note(
                f"{type(self).__name__}: with {len(u)} clients in a round, byzantine can be at "
                f"most {max(f, 0)}, but you set {self.byzantine}."
            )
        # With one or two clients, no client is nearer to the others.
        if self.uses_f and f < 0:
            return u.mean(0)
        if self.mixing:
            u = mixed(u, f)
        if self.rule == "median":
            return median(u)
        if self.rule == "trimmed_mean":
            return trimmed_mean(u, math.floor(Fraction(str(self.trim)) * len(u)))
        if self.rule == "geometric_median":
            return geometric_median(u)
        if self.rule == "bulyan":
            return bulyan(u, f)
        k = 1 if self.rule == "krum" else min(self.keep or len(u) - f, len(u))
        return u[krum_scores(u, f).argsort(stable=True)[:k]].mean(0)


def median(u: Tensor) -> Tensor:
    """Return the median of each column of ``(n, D)``; for even n the mean of the middle two."""
    ordered = u.sort(0).values
    n = len(u)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def trimmed_mean(u: Tensor, k: int) -> Tensor:
    """Return the mean of each column without its k largest and k smallest values."""
    return u.sort(0).values[k : len(u) - k].mean(0)


def squared_distances(u: Tensor) -> Tensor:
    """Return the squared distance of each row to each row, ``(n, n)``."""
    # Take differences: the rounding of ‖u‖² + ‖v‖² - 2 u·v hides small distances. Each piece fits
    # into a processor's cache.
    away = u.new_zeros(len(u), len(u))
    for piece in u.split(PIECE, dim=1):
        away += torch.stack([(piece - row).square().sum(1) for row in piece])
    return away


def krum_scores(u: Tensor, f: int) -> Tensor:
    """Return ``(n,)``: for each row the sum of its n - f - 2 smallest squared distances to the
    others.
    """
    away = squared_distances(u).fill_diagonal_(torch.inf)
    return away.sort(1).values[:, : len(u) - f - 2].sum(1)


def bulyan(u: Tensor, f: int) -> Tensor:
    """Return in each coordinate the mean of the n - 4 f values nearest to the median of n - 2 f
    chosen rows.
    """
    away = squared_distances(u).fill_diagonal_(torch.inf)
    left = list(range(len(u)))
    chosen: list[int] = []
    for _ in range(len(u) - 2 * f):
        near = away[left][:, left].sort(1).values
        # The last row has no other row left.
        scores = near[:, : max(1, len(left) - f - 2)].sum(1)
        chosen.append(left.pop(int(scores.argsort(stable=True)[0])))
    rows = u[sorted(chosen)]
    far = (rows - median(rows)).abs()
    nearest = far.argsort(dim=0, stable=True)[: len(rows) - 2 * f]
    return rows.gather(0, nearest).mean(0)


def mixed(u: Tensor, f: int) -> Tensor:
    """Return ``(n, D)``: the mean of each row and its n - f - 1 nearest; ties go to the first."""
    nearest = squared_distances(u).fill_diagonal_(-1).argsort(dim=1, stable=True)[:, : len(u) - f]
    means = []
    for piece in u.split(PIECE, dim=1):
        means.append(torch.stack([piece[rows].mean(0) for rows in nearest]))
    return torch.cat(means, dim=1)


def geometric_median(u: Tensor) -> Tensor:
    """Return the geometric median, by Weiszfeld's iteration from the mean."""
    # A row without a finite norm is infinitely far away, and has weight 0.
    u = u[torch.linalg.vector_norm(u, dim=1).isfinite()]
    z = u.mean(0)
    for _ in range(1000):
        weights = 1 / torch.linalg.vector_norm(u - z, dim=1).clamp(min=1e-12)
        before = z
        z = (weights @ u) / weights.sum()
        if ordered_norm(z - before) <= 1e-10 * ordered_norm(z):
            break
    return z
