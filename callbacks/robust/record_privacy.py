"""Differential privacy of single samples: DP-SGD at the clients.

M. Abadi, A. Chu, I. Goodfellow, H. B. McMahan, I. Mironov, K. Talwar, L. Zhang: Deep Learning with
Differential Privacy (CCS 2016), arXiv:1607.00133, Algorithm 1, in each client's local steps. ε is
that of ``DifferentialPrivacy``; neighbouring data differ by one sample of one client, whose
gradient is 0 everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_lightning.callback import (
    Above,
    AtLeast,
    AtMost,
    Below,
    Clients,
    ClientState,
    FederatedCallback,
    NonNegativeFloat,
    Note,
    Paper,
    PositiveFloat,
    PositiveInt,
    Refusal,
    Server,
    ServerState,
    UserError,
    privacy,
    refuse_both,
)

_OF_SERVER: dict[str, Any] = {"synchronised": False}


class RecordPrivacy(FederatedCallback):
    """g̃ = (1/B_i) (Σ_j g_j min(1, C/‖g_j‖) + σ C N(0, I)) takes the loss gradient's place.

    C is ``clip``, σ ``noise_multiplier``. The g_j are the gradients of the step's samples, and B_i
    = min(B, N_i), with B the batch size times ``accumulate``. A g_j that is not finite counts as 0.
    All that a client sends follows from its g̃ and from public values, so ε protects each sample
    from everybody who sees all that its client sends. What else depends on samples is refused:
    other methods that read losses, gradients or labels, BatchNorm, and averaged buffers.
    ``privacy/record_epsilon_max`` is ε(δ) of the client that has spent most, and
    ``privacy/record_noise`` is σ. At the end the run prints that client. The run stops before a
    round in which a participant would exceed ``target_epsilon``. The guarantee does not cover N_i,
    label counts, and what is logged or measured on samples.

    Noise and coins are drawn from the run's secret, as with ``DifferentialPrivacy``; over sites,
    from each site's own. Without noise the coins are drawn from the seed.
    Sent: nothing more. Kept: one number.

    Args:
        clip: C, above 0; may be infinite without noise.
        noise_multiplier: σ, at least 0; None: the least that keeps each client within
            ``target_epsilon`` for so many ``rounds``.
        target_epsilon: above 0; None: no target, and the run ends with its last round.
        delta: above 0, below 1; less than 1/N_i is usual.
        sampling: ``"poisson"``: each sample takes part in a step with probability q_i = B_i/N_i.
            ``"shuffle"``: steps take the run's batches, and ε counts no amplification: q = 1 in
            each epoch.
        rounds: in how many rounds a client takes part, to find σ; None: ``max_epochs``.
        samples_at_once: how many samples' gradients are computed together; None: as many as fit
            into memory; 1: one after the other. A learner that ``torch.func.vmap`` cannot take is
            computed one by one, with a note.
        noise_seed: for tests only. Noise and coins are functions of (this seed, round, client,
            step), and ε does not hold.

    Raises:
        UserError: a value is not accepted; neither σ nor a target is given; a part of the run would
            reveal samples; the first round exceeds the target; or a resumed run has another σ, C
            or q_i.

    Example:
        >>> from fl_lightning.callbacks import RecordPrivacy
        >>> from fl_lightning.testing import tiny_run
        >>> method = RecordPrivacy(clip=1.0, noise_multiplier=4.0)
        >>> run = tiny_run(method, buffers="keep")  # doctest: +ELLIPSIS
        RecordPrivacy: ε = ... at δ = 1e-05 for client 0, which has spent most, and ...
        >>> 1 < float(run.trainer.callback_metrics["privacy/record_epsilon_max"]) < 10
        True
    """

    title = "DP-SGD"
    paper = Paper("abadi2016dpsgd")
    draws_by_client = True
    every_round = True
    moves_start = False
    protects_samples = True
    reads_values = True
    cannot_run_with = {
        "select": "it chooses clients by values of their samples, which ε does not cover",
        "local_batch": "it changes what a sample is before its gradient is clipped",
    }
    notes = (
        Refusal(
            "the clients would send buffers neither clipped nor noised: {averaged_buffers}. Set "
            "buffers='keep'.",
            when=lambda method, run: bool(run.averaged_buffers),
            settings={"buffers": "keep"},
        ),
        Note("outside its guarantee: {outside}.", when=lambda method, run: True),
        Note(
            "ε does not hold with noise_seed={noise_seed}: anybody who knows the seed can compute "
            "the noise and the samples of each step. Use it only for tests.",
            when=lambda method, run: isinstance(method.clients_draw_from, int),
        ),
    )
    # A client's own count of what ε is composed of: steps, or epochs with "shuffle".
    compositions = ClientState(shape=(), dtype=torch.int64, synchronised=False)
    # The same of every client, at the server, from public values.
    counted = ServerState(shape=("_m",), dtype=torch.int64, **_OF_SERVER)
    # q of each client that has taken part; σ and C. ε is composed of equal steps.
    shares = ServerState(shape=("_m",), dtype=torch.float64, **_OF_SERVER)
    spent_at = ServerState(lambda w: -1.0, shape=(2,), dtype=torch.float64, **_OF_SERVER)
    # Number of rounds with noise from the secret, and not from a known seed.
    private_rounds = ServerState(shape=(), dtype=torch.int64, **_OF_SERVER)
    sigma = ServerState(shape=(), dtype=torch.float64, sent="known", **_OF_SERVER)

    def __init__(
        self,
        clip: Annotated[float, Above(0), AtMost(math.inf)],
        noise_multiplier: NonNegativeFloat | None = None,
        target_epsilon: PositiveFloat | None = None,
        delta: Annotated[float, Above(0), Below(1)] = 1e-5,
        sampling: Literal["poisson", "shuffle"] = "poisson",
        rounds: PositiveInt | None = None,
        samples_at_once: PositiveInt | None = None,
        noise_seed: Annotated[int, AtLeast(0), Below(2**63)] | None = None,
    ) -> None:
        super().__init__()
        privacy.check_given(
            type(self).__name__, clip, noise_multiplier, target_epsilon, noise_multiplier != 0
        )
        self.clip = clip
        self.noise_multiplier = noise_multiplier
        self.target_epsilon = target_epsilon
        self.delta = delta
        self.sampling = sampling
        self.rounds = rounds
        self.samples_at_once = samples_at_once
        self.noise_seed = noise_seed
        self.outside = ""
        if sampling == "poisson":
            self.use("step_samples", self._by_coins)
        self._m = 1  # until the data is known
        self._batch: int | None = None
        self._planned_rounds = -1
        self._everybody = False
        self._sizes: Callable[[], NDArray[np.int64]] = lambda: np.zeros(0, np.int64)
        self._indices: Callable[[int], NDArray[np.int64]] | None = None
        self._at_site = False
        # At a site: client → what ε is composed of in all its answers, whatever the server counts.
        self._answered: dict[int, int] = {}

    @property
    def clients_draw_from(self) -> int | Literal["secret"] | None:
        if self.noise_multiplier == 0:
            return None
        return "secret" if self.noise_seed is None else self.noise_seed

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        data = trainer.datamodule
        why = getattr(data, "samples_together", "it does not say which samples a batch has")
        if why:
            raise UserError(
                f"RecordPrivacy cannot protect the samples of {type(data).__name__}: {why}. Use "
                "data whose samples are read one by one, such as FromDatasets."
            )
        self._at_site = any(getattr(each, "at_site", False) for each in trainer.callbacks)
        self._answered = {}
        self._m = int(data.num_clients)
        self._sizes = data.client_sizes
        self._indices = getattr(data, "client_indices", None)
        batch = data.most_in_batch
        self._batch = None if batch is None else batch * pl_module.settings.accumulate
        self._planned_rounds = trainer.max_epochs if self.rounds is None else self.rounds
        privacy.check_planned("RecordPrivacy", self.noise_multiplier, self._planned_rounds)
        methods = [c for c in trainer.callbacks if isinstance(c, FederatedCallback)]
        self._look_at([method for method in methods if method is not self])
        released = ["how many samples each client has of each class", "what the training logs"]
        released += [data.computed_from_samples] if data.computed_from_samples else []
        measuring = [type(c).__name__ for c in methods if c.role == "measurement"]
        released += [f"the measurements of {', '.join(measuring)}"] if measuring else []
        self.outside = ", ".join(released[:-1]) + f", and {released[-1]}"

    def _look_at(self, others: list[FederatedCallback]) -> None:
        """Refuse methods that read clients' losses."""
        for other in others:
            if other.asks_for("loss") and other.role != "measurement":
                why = "its clients use the loss of their steps, which is computed from samples"
                unprotected = f"{why}, and that is neither clipped nor noised"
                refuse_both("RecordPrivacy", type(other).__name__, unprotected)
        # With client-level privacy nobody may know who took part, so ε counts every client in each
        # round.
        self._everybody = any(other.draws_from is not None for other in others)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse learners in which samples of a batch meet."""
        for name, part in pl_module.learner.named_modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                raise UserError(
                    f"RecordPrivacy: {name} is BatchNorm, which mixes the samples of a batch, so a "
                    "single sample has no gradient of its own. Use GroupNorm or LayerNorm."
                )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse buffers that clients would send; frozen parameters that steps write count too."""
        privacy.refuse_sent_buffers("RecordPrivacy", pl_module)

    # ---- at the clients

    def _by_coins(self, client: int, t: int, steps: int) -> Iterator[NDArray[np.int64]]:
        """The hook ``step_samples``: each sample takes part in a step with probability q_i."""
        size = int(self._sizes()[client])
        share = self._batch_of(size) / size
        draw = self._keyed if self.clients_draw_from is None else self.private_generator
        for k in range(steps):
            yield np.flatnonzero(draw("record samples", t, client, k).random(size) < share)

    def _batch_of(self, size: int) -> int:
        """Return B_i of a client with so many samples."""
        return size if self._batch is None else min(self._batch, size)

    def scale_samples(self, clients: Clients, norms: Tensor) -> Tensor:
        """Return min(1, C/‖g_j‖); 0 if g_j is not finite."""
        return torch.where(norms.isfinite(), (self.clip / norms).clamp(max=1.0), 0.0)

    def on_samples_reduced(self, clients: Clients, total: Tensor) -> Tensor:
        """Add the noise, and divide by B_i."""
        sigma = self._noise()
        expected = self._batch_of(int(clients.sizes))
        if sigma > 0:
            # The scales are part of the noise's key: the same noise added to one sum at two scales
            # would reveal the sum.
            onto = torch.cat([total[0], total.new_tensor([sigma, self.clip, expected])])
            draw = clients.private_generator("record noise", int(clients.step), onto)
            noise = torch.from_numpy(draw.standard_normal(total.shape[1])).to(total)
            total.add_(noise, alpha=sigma * self.clip)
        return total.div_(expected)

    def on_local_start(self, clients: Clients) -> None:
        """Refuse a client that has a sample twice, which would move its sum by twice C."""
        if self._at_site and self.target_epsilon is not None:
            self._refuse_above(*self._after(clients), clients.round)
        if self._indices is None:
            return
        for client in clients.client_ids:
            samples, times = np.unique(self._indices(client), return_counts=True)
            if (times > 1).any():
                sample = int(samples[times.argmax()])
                raise UserError(
                    f"RecordPrivacy: client {client} has sample {sample} {times.max()} times, and "
                    "ε is for a sample that its client has once. Use a partition without "
                    "replacement, or clients' lists without repetitions."
                )

    def on_local_end(self, clients: Clients) -> None:
        self.compositions[clients] += self._in_round(clients.steps[:, 0], clients.ids)

    def _after(self, clients: Clients) -> tuple[float, int]:
        """Return ε after this round, and the client. The server gives σ, and may repeat rounds."""
        (client,) = clients.client_ids
        count = self._answered.get(client, int(self.compositions[clients]))
        self._answered[client] = count + int(self._in_round(clients.steps[:, 0], clients.ids))
        setting = self._share(int(clients.sizes)), self._answered[client], self.delta
        return privacy.epsilon(self._noise(), *setting), client

    # ---- at the server

    def on_round_start(self, server: Server) -> None:
        """Count the round before clients train, and refuse it if it would exceed the target."""
        everybody = torch.arange(server.num_clients)
        sizes = server.sizes(everybody).numpy()
        shares = np.array([self._share(int(size)) for size in sizes])
        sigma = self._found_noise(server, shares)
        source = self.clients_draw_from
        privacy.spend_round(self, server, [sigma, self.clip], source, "another σ or C")
        ids = everybody if self._everybody else server.participants.cpu()
        present = torch.from_numpy(shares)[ids].to(self.shares)
        earlier = self.shares[ids]
        if bool(((earlier > 0) & (earlier != present)).any()):
            raise UserError(
                "RecordPrivacy: a client has another number of samples, or the run another batch "
                "size, than in earlier rounds, and ε would not hold for both. Go on with the "
                "settings that the run began with, or begin another run with init_from."
            )
        self.shares[ids] = present
        self.counted[ids] += self._in_round(server.steps(ids), ids).to(self.counted)
        spent, client = self._largest(sigma, shares, self.counted.cpu().numpy())
        self._refuse_above(spent, client, server.round)
        server.log("privacy/record_epsilon_max", spent)
        server.log("privacy/record_noise", sigma)

    def _refuse_above(self, spent: float, client: int, t: int) -> None:
        of, less = f" of client {client}", "fewer local steps, smaller batches"
        privacy.check_spent("RecordPrivacy", spent, self.target_epsilon, t, of, less)

    def _share(self, size: int) -> float:
        """Return q in ε: 1 where no amplification is claimed."""
        if self.sampling == "shuffle" or not size:
            return 1.0
        return self._batch_of(size) / size

    def _in_round(self, steps: Tensor, ids: Tensor) -> Tensor:
        """Return what ε is composed of in a round of these clients, ``(k,)``."""
        steps = steps.to(torch.int64)
        if self.sampling == "poisson":
            return steps
        epochs = torch.tensor([self.steps_of(int(i), 1) for i in ids]).to(steps)
        return (steps + epochs - 1) // epochs

    def _noise(self) -> float:
        return float(self.sigma) if self.noise_multiplier is None else self.noise_multiplier

    def _found_noise(self, server: Server, shares: NDArray[np.float64]) -> float:
        """Return σ; the first round finds it, and a resumed run keeps it."""
        if self.noise_multiplier is None and not self.sigma:
            assert self.target_epsilon is not None
            everybody = torch.arange(server.num_clients)
            planned = self._planned_rounds * self._in_round(server.steps(everybody), everybody)
            found = 0.0
            for share, count, _ in _foremost(shares, planned.numpy()):
                setting = (share, count, self.delta)
                if privacy.epsilon(found, *setting) > self.target_epsilon:
                    found = privacy.calibrated(self.target_epsilon, *setting)
            self.sigma = torch.tensor(found, dtype=torch.float64)
        return self._noise()

    def _largest(
        self, sigma: float, shares: NDArray[np.float64], counts: NDArray[np.int64]
    ) -> tuple[float, int]:
        """Return the largest ε(δ) of these clients, and whose it is."""
        spent = [
            (privacy.epsilon(sigma, share, count, self.delta), client)
            for share, count, client in _foremost(shares, counts)
        ]
        return max(spent, default=(0.0, 0))

    # ---- between rounds

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop before a round in which a participant would exceed the target."""
        if self.target_epsilon is None:
            return
        sigma, _, counts = self._ledger(pl_module)
        t = trainer.current_epoch + 1
        cohort = pl_module.run.loop.cohort  # with the numbers of samples that sites told
        ids = np.array(range(self._m) if self._everybody else cohort.participants(t), np.int64)
        steps = torch.tensor([cohort.steps(int(i), t) for i in ids])
        counts[ids] += self._in_round(steps, torch.from_numpy(ids)).numpy()
        shares = np.array([self._share(int(size)) for size in cohort.data.client_sizes()])
        trainer.should_stop |= self._largest(sigma, shares, counts)[0] > self.target_epsilon

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Print who has spent how much."""
        if not pl_module.run.state.rounds:
            return
        sigma, shares, counts = self._ledger(pl_module)
        spent, client = self._largest(sigma, shares, counts)
        # By q² times the count, which ε follows closely, so that one ε suffices.
        took_part = np.flatnonzero(counts)
        in_order = took_part[np.argsort(shares[took_part] ** 2 * counts[took_part])]
        middle = in_order[len(in_order) // 2] if len(in_order) else 0
        median = privacy.epsilon(sigma, float(shares[middle]), int(counts[middle]), self.delta)
        trainer.print(
            f"RecordPrivacy: ε = {spent:.4g} at δ = {self.delta:g} for client {client}, which has "
            f"spent most, and {median:.4g} for the client in the middle (σ = {sigma:.4g})"
        )

    def _ledger(self, module: Any) -> tuple[float, NDArray[np.float64], NDArray[np.int64]]:
        """Return σ, and each client's share and count, as committed."""
        states = module.server_states
        keys = {name: declared.key(self) for name, declared in self.declarations().items()}
        sigma = float(states[keys["sigma"]]) if self.noise_multiplier is None else self._noise()
        shares = states[keys["shares"]].cpu().numpy().copy()
        return sigma, shares, states[keys["counted"]].cpu().numpy().copy()


def _foremost(
    shares: NDArray[np.float64], counts: NDArray[np.int64]
) -> Iterator[tuple[float, int, int]]:
    """Yield share, count and number of the clients that may have the largest ε."""
    most = 0
    # ε grows with the share and with the count. So in this order only a client with a larger count
    # than all before it can have a larger ε.
    for client in np.lexsort((-counts, -shares)).tolist():
        if counts[client] > most:
            most = int(counts[client])
            yield float(shares[client]), most, client
