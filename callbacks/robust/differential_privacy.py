"""Client-level differential privacy: DP-FedAvg.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang: Learning Differentially Private Recurrent Language
Models (ICLR 2018), arXiv:1710.06963, Algorithm 1, the estimator with a fixed denominator. ε comes
from the privacy loss distribution of the Poisson-subsampled Gaussian mechanism (A. Koskela, J.
Jälkö, A. Honkela, AISTATS 2020, arXiv:1906.03049), by dp-accounting; neighbouring runs differ by
one client, added or removed. G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy: Differentially
Private Learning with Adaptive Clipping (NeurIPS 2021), arXiv:1905.03871 (``target_quantile``).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from fl_lightning.callback import (
    Above,
    AtLeast,
    AtMost,
    Below,
    Clients,
    FederatedCallback,
    NonNegativeFloat,
    Note,
    Paper,
    PositiveFloat,
    Refusal,
    Server,
    ServerState,
    UnitInterval,
    Upload,
    UserError,
    privacy,
    refuse_both,
)

_OF_SERVER: dict[str, Any] = {"dtype": torch.float64, "synchronised": False}


class DifferentialPrivacy(FederatedCallback):
    """u_i ← u_i min(1, C/‖u_i‖); the server adds d = (Σ u_i + σ C N(0, I))/(q m).

    C is ``clip``, q the participation.
    In each round every one of the m clients takes part independently with probability q
    (``sampling="poisson"``); a round without participants still adds its noise. ``privacy/epsilon``
    is ε(δ) of the rounds so far (computing it takes 0.1 s per round, and seconds with little
    noise). The run stops before a round that would exceed ``target_epsilon``. The weights p_i play
    no part. Everything else that clients send would have to be clipped, too. So the run refuses
    methods with uploads, methods that read single updates, averaged buffers and parts that are not
    averaged. It also refuses your own code if it reads ``server.mean_change``, clients' rows at the
    server, or a logger's sum; and, unless it only measures, ``server.n``, ``server.ids`` or
    ``server.weights``. The guarantee does not cover the list of participants and the logged
    training metrics.

    With ``target_quantile`` γ the bound follows the updates' norms: C^{t+1} = C^t exp(-η_C (b̃ -
    γ)), b̃ = ½ + (Σ (b_i - ½) + σ_b N(0, 1))/(q m); b_i is 1 if ‖u_i‖ ≤ C^t. The round's total
    noise is σ: the sum gets noise (σ⁻² - (2 σ_b)⁻²)^{-1/2} C^t, so ε is computed from σ only.
    ``privacy/clip`` logs C^t.

    Noise and participants are drawn from the run's secret, 32 bytes from the operating system,
    which lie only in the run's ``state/``. A round's noise is keyed by (secret, round, digest of
    the sum and of its scale). So a resumed run has the same bits, and a copy of the folder that
    continues differently never has the same noise. Without the file a resumed run draws another
    secret, and says so. With σ = 0 the participants are drawn from the seed.
    Sent: nothing more; with ``target_quantile`` one number in each direction. Kept: σ, q and C by
    the server.

    Args:
        clip: C, above 0; may be infinite without noise.
        noise_multiplier: σ, at least 0; None: the least that keeps ``max_epochs`` rounds within
            ``target_epsilon``.
        target_epsilon: above 0; None: no target, and the run ends with its last round.
        delta: above 0, below 1; less than 1/m is usual.
        target_quantile: γ, the share of updates that should not be clipped, from 0 to 1; None:
            ``clip`` is fixed. With a target quantile ``clip`` is C^0.
        clip_learning_rate: η_C above 0.
        count_stddev: σ_b of the noise on the count; None: q m/20, and 0 without noise.
        noise_seed: for tests only. Noise and participants are functions of (this seed, round), and
            ε does not hold.

    Raises:
        UserError: a value is not accepted; neither σ nor a target is given; participants are not
            drawn independently; a part of the run would reveal clients; or the first round exceeds
            the target, or earlier rounds have used it up.

    Example:
        Without noise and with a C that never clips, it is FedAvg that divides by q m, for any
        number of participants.

        >>> from fl_lightning.callbacks import DifferentialPrivacy
        >>> from fl_lightning.testing import tiny_run
        >>> coins = {"sampling": "poisson", "participation": 1.0}
        >>> run = tiny_run(DifferentialPrivacy(float("inf"), noise_multiplier=0.0), **coins)
        >>> run.global_vector.allclose(tiny_run(**coins).global_vector)
        True
    """

    title = "DP-FedAvg"
    paper = Paper(
        "mcmahan2018dp",
        by=lambda given: [None if given.get("target_quantile") is None else "andrew2021clipping"],
    )
    every_round = True
    cannot_run_with = {
        "select": "who takes part has to be drawn by coins, or ε does not hold",
        "parts": (
            "the mean of what is not averaged, which is evaluated, would be neither clipped nor "
            "noised"
        ),
    }
    notes = (
        Refusal(
            "its ε holds only with sampling='poisson', which decides for each client independently "
            "whether it takes part; this run has sampling={sampling!r}. Set sampling='poisson'.",
            when=lambda method, run: run.sampling != "poisson",
            settings={"sampling": "poisson", "buffers": "keep"},
        ),
        Note(
            "the aggregation weights p_i of weighting='samples' are not used.",
            when=lambda method, run: run.weighting == "samples",
        ),
        Note("outside its guarantee: {outside}.", when=lambda method, run: True),
        Note(
            "ε does not hold with noise_seed={noise_seed}: whoever knows the seed can compute "
            "the noise and the participants. Use it only for tests.",
            when=lambda method, run: isinstance(method.draws_from, int),
        ),
    )
    sigma = ServerState(shape=(), **_OF_SERVER)
    # σ and q of the rounds so far. ε is composed of equal rounds, so σ and q must not change.
    spent_at = ServerState(lambda w: -1.0, shape=(2,), **_OF_SERVER)
    # Number of rounds with noise from the secret, and not from a known seed.
    private_rounds = ServerState(shape=(), dtype=torch.int64, synchronised=False)

    def __init__(
        self,
        clip: Annotated[float, Above(0), AtMost(math.inf)],
        noise_multiplier: NonNegativeFloat | None = None,
        target_epsilon: PositiveFloat | None = None,
        delta: Annotated[float, Above(0), Below(1)] = 1e-5,
        noise_seed: Annotated[int, AtLeast(0), Below(2**63)] | None = None,
        target_quantile: UnitInterval | None = None,
        clip_learning_rate: PositiveFloat = 0.2,
        count_stddev: NonNegativeFloat | None = None,
    ) -> None:
        super().__init__()
        privacy.check_given(
            type(self).__name__,
            clip,
            noise_multiplier,
            target_epsilon,
            noise_multiplier != 0 or target_quantile is not None,
        )
        self.clip = clip
        self.noise_multiplier = noise_multiplier
        self.target_epsilon = target_epsilon
        self.delta = delta
        self.noise_seed = noise_seed
        self.target_quantile = target_quantile
        self.clip_learning_rate = clip_learning_rate
        self.count_stddev = count_stddev
        if target_quantile is not None:
            first = float(clip)
            limit = ServerState(lambda w: first, shape=(), **_OF_SERVER, sent=True)
            self.declare("limit", limit)
            self.declare("inside", Upload(shape=(), dtype=torch.float64, least=0, most=1))
        self.outside = "who takes part, and what is logged of the training"
        self._share = 1.0
        self._rounds = 0

    def _limit(self) -> Tensor | float:
        """C^t."""
        limit: Tensor | float = self.clip if self.target_quantile is None else self.limit
        return limit

    def _deviation(self, expected: float) -> float:
        """Return σ_b, the noise on the count, if ``expected`` clients take part."""
        if self.count_stddev is not None:
            return self.count_stddev
        return expected / 20 if self._noise() > 0 else 0.0

    def _noise_of_sum(self, expected: float) -> float:
        """Return the noise on the sum of updates, over C, so that sum and count together have σ.

        Raises:
            UserError: the count has so little noise that nothing is left for the sum.
        """
        sigma = self._noise()
        if self.target_quantile is None or sigma == 0:
            return sigma
        deviation = self._deviation(expected)
        if deviation <= sigma / 2:
            raise UserError(
                f"DifferentialPrivacy: count_stddev={deviation:.4g} uses up "
                f"noise_multiplier={sigma:.4g}, so that no noise is left for the updates. It has "
                f"to be above {sigma / 2:.4g}. Give count_stddev={sigma:.4g}, or let more than "
                f"{10 * sigma:.4g} clients take part in a round."
            )
        of_sum: float = (sigma**-2 - (2 * deviation) ** -2) ** -0.5
        return of_sum

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        settings = pl_module.settings
        m = int(trainer.datamodule.num_clients)
        participation = settings.participation
        if isinstance(participation, float):
            self._share = participation
        elif participation == "all":
            self._share = 1.0
        else:
            self._share = participation / m
        self._rounds = trainer.max_epochs
        privacy.check_planned("DifferentialPrivacy", self.noise_multiplier, self._rounds)
        methods = [c for c in trainer.callbacks if isinstance(c, FederatedCallback)]
        self._look_at([method for method in methods if method is not self])

    @property
    def draws_from(self) -> int | Literal["secret"] | None:
        if self.noise_multiplier == 0 and not self.count_stddev:
            return None
        return "secret" if self.noise_seed is None else self.noise_seed

    def _look_at(self, others: list[FederatedCallback]) -> None:
        """Refuse methods that would reveal clients; if another callback replaces updates, clip
        again afterwards.
        """
        measuring = []
        for other in others:
            name = type(other).__name__
            uploads = [each for each in other.declarations().values() if each.summed]
            if getattr(other, "mixes_clients", False):
                refuse_both(
                    "DifferentialPrivacy",
                    name,
                    "this attack's updates depend on each honest client's update, so one client "
                    "changes several updates of the sum, and ε counts one. Choose another attack "
                    "than alie",
                )
            leak = ""
            if other.asks_for("updates") and other.order >= 0:
                leak = "it sees all updates"
            if any(upload.goes_up(()) for upload in uploads):
                leak = "its clients send more than their update"
            elif uploads and other.role != "measurement":
                leak = "its server reads sums over clients of more than their updates"
            if leak:
                leak += ", and that is neither clipped nor noised"
                refuse_both("DifferentialPrivacy", name, leak)
            # The loggers listed here publish values of clients' samples without noise.
            if uploads or getattr(other, "of_samples", False):
                measuring.append(name)
            # An attacker does not clip, so the update that it substitutes is clipped afterwards.
            if other.order < 0 and other.asks_for("updates"):
                self.use("on_updates", self.clip_again)
        if measuring:
            self.outside = (
                "who takes part, what is logged of the training, and what "
                f"{', '.join(measuring)} measures"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse buffers that clients would send."""
        # `configure_model` may have made buffers, and frozen parameters that steps write count as
        # buffers.
        privacy.refuse_sent_buffers("DifferentialPrivacy", pl_module)

    def on_round_start(self, server: Server) -> None:
        settings = [self._noise(), self._share]
        # Check before clients train, also that a resumed run stops at its target again.
        self._noise_of_sum(self._share * server.num_clients)
        if self.target_epsilon is not None:
            spent = privacy.epsilon(settings[0], self._share, server.round + 1, self.delta)
            less = "a smaller share of clients"
            target = self.target_epsilon
            privacy.check_spent("DifferentialPrivacy", spent, target, server.round, also=less)
        privacy.spend_round(self, server, settings, self.draws_from, "other noise or coins")

    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        if self.target_quantile is not None:
            # An upload is the last value that a client sends, and here it is known whether its
            # update is clipped.
            self.inside[clients] = (self._norm(update.double()) <= self._limit())[:, 0].double()
        return self.clipped(update)

    def clip_again(self, server: Server) -> None:
        """The hook ``on_updates`` if attackers replace updates: clip the replacements."""
        server.updates = self.clipped(server.updates)

    def clipped(self, update: Tensor) -> Tensor:
        """Return rows ``(n, D)`` of norm at most C, also after rounding."""
        limit = self._limit()
        # The computed norm is rounded, so scale rows to slightly less than C.
        c = limit * (1 - 64 * torch.finfo(torch.float64).eps)
        exact = update.to(torch.float64, copy=True)
        norm = self._norm(exact)
        return torch.where(
            norm > limit, _towards_zero(exact.div_(norm).mul_(c), update.dtype), update
        )

    @staticmethod
    def _norm(update: Tensor) -> Tensor:
        """Return the norms ``(n, 1)`` of rows in float64."""
        # `sum` adds in pairs; the rounding error of `vector_norm` grows with D.
        return update.square().sum(1, keepdim=True).sqrt_()

    def aggregate(self, server: Server) -> Tensor:
        d = server.mean_change.double() * server.n
        expected = self._share * server.num_clients
        sigma = self._noise_of_sum(expected)
        limit = float(self._limit())
        if sigma > 0:
            # The scales are part of the noise's key: the same noise added to one sum at two scales
            # would reveal the sum.
            onto = torch.cat([d, d.new_tensor([sigma, limit, expected])])
            noise = server.private_generator("differential privacy", onto).standard_normal(len(d))
            d += sigma * limit * torch.from_numpy(noise).to(d)
        return d / expected

    def _noise(self) -> float:
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        # The first round sets σ. If the run is resumed for more rounds, it keeps σ and stops at the
        # target.
        if not self.sigma:
            assert self.target_epsilon is not None
            sigma = privacy.calibrated(self.target_epsilon, self._share, self._rounds, self.delta)
            self.sigma = torch.tensor(sigma)
        return float(self.sigma)

    def on_server_update(self, server: Server) -> None:
        spent = privacy.epsilon(self._noise(), self._share, server.round + 1, self.delta)
        server.log("privacy/epsilon", spent)
        if self.target_quantile is not None:
            server.log("privacy/clip", self.limit)
            self._follow(server, self.target_quantile)

    def _follow(self, server: Server, quantile: float) -> None:
        """Compute C^{t+1} from the share of updates that were not clipped, with noise."""
        expected = self._share * server.num_clients
        count = self.inside.sum().double() - server.n / 2
        deviation = self._deviation(expected)
        if deviation > 0:
            onto = torch.stack([count, count.new_tensor(deviation), self.limit.to(count)])
            noise = server.private_generator("clip", onto).standard_normal()
            count = count + deviation * float(noise)
        share = 0.5 + count / expected
        self.limit *= torch.exp(-self.clip_learning_rate * (share - quantile))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        key = self.declarations()["sigma"].key(self)
        sigma = pl_module.server_states.get(key, self.noise_multiplier)
        # The next round must not exceed the target.
        if self.target_epsilon is not None:
            rounds = trainer.current_epoch + 2
            spent = privacy.epsilon(float(sigma), self._share, rounds, self.delta)
            trainer.should_stop |= spent > self.target_epsilon


def _towards_zero(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round ``values`` so that no magnitude grows; this overwrites ``values``."""
    rounded = values.to(dtype, copy=True)
    grown = rounded.abs() > values.abs_()
    # The bits of a float minus 1, as an integer, give the next smaller magnitude. The integer also
    # works for the smallest numbers of a short type, for which a factor below 1 would round back.
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rounded.element_size()]
    rounded.view(whole).sub_(grown.view(torch.int8))
    return rounded
