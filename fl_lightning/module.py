"""One ``Trainer.fit`` is one federated run, one epoch one round: ``training_step`` is the round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning import checks, client_optimizer, persistence
from fl_lightning.aggregation import visiting_order
from fl_lightning.callback import FederatedCallback
from fl_lightning.cohort import Cohort, decay_factor
from fl_lightning.collect import Collector
from fl_lightning.engines.choose import choose
from fl_lightning.engines.replica import buffer_values
from fl_lightning.engines.sequential import Engine
from fl_lightning.errors import UserError
from fl_lightning.flat import trainable
from fl_lightning.methods import Methods
from fl_lightning.parts import Parts
from fl_lightning.rounds import Round, Server
from fl_lightning.schedules import Schedule
from fl_lightning.server_step import conclude

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


class FederatedModule(Cohort):
    """Trains any LightningModule federatedly.

    Args:
        learner: any LightningModule, of ``pytorch_lightning`` or ``lightning.pytorch``: ``training_step`` gives the
            local loss; evaluation and its hooks run as if it were alone, on the global model.
        participation: clients a round: ``"all"``, a number, or a fraction (rounded half up, at least one).
        sampling: ``"uniform"`` (a fixed number, without replacement) or ``"bernoulli"`` (each by its own coin).
        local_epochs: of one client a round, may be fractional; without it and ``local_steps``: 5.
        local_steps: of one client a round; wins over ``local_epochs``.
        client_optimizer: ``params -> optimizer`` of the local steps; None: the learner's ``configure_optimizers``.
        lr_decay: client learning rates × ``lr_decay ** round``, or × ``schedule(round)``.
        clip_norm: per client, min(1, clip_norm/‖g‖) on the corrected gradient.
        keep_optimizer_state: local optimizer state per client, instead of fresh every round.
        server_optimizer: ``params -> optimizer`` over the global vector, its gradient minus the aggregated update;
            None: SGD with learning rate 1.
        server_lr_decay: as ``lr_decay``, for the server.
        weighting: aggregation weights p_i: ``"uniform"`` or ``"samples"``.
        buffers: ``"average"`` (floating-point buffers weighted by p_i, integer ones the maximum) or ``"keep"``.
        on_nonfinite: ``"stop"`` the run, or ``"skip"`` clients whose update is not finite.
        init_from: a checkpoint or exported file whose weights to start from.
        engine: ``"sequential"``: one client after the other; ``"concurrent"``: several side by side, each on one
            thread of a CPU or one stream of a GPU, same bits whatever their number; ``"stacked"``: many as one batch of
            models, the same to rounding; ``"auto"``: the faster one of the first two, measured before round 0.
        clients_at_once: clients of a group of the stacked engine; ``"auto"``: as fit into a gigabyte.
        workers: clients side by side in the concurrent engine; ``"auto"``: the process's cores, on a GPU up to 16.
        capture: whether the concurrent engine records a local step and replays it: same bits, without the learner's
            Python; ``"auto"``: where a trial before round 0 leaves the same bits, and steps are short or on a GPU.
        seed: None: that of ``seed_everything``; none there either: drawn, and kept in the checkpoint.
        strict_resume: refuse to resume with other methods or arguments than the checkpoint's.

    Raises:
        UserError: for each argument, learner or Trainer setting that cannot work, before training starts.
    """

    def __init__(
        self,
        learner: nn.Module,
        *,
        participation: int | float | str = 0.1,
        sampling: str = "uniform",
        local_epochs: float | None = None,
        local_steps: int | None = None,
        client_optimizer: OptimizerFactory | None = None,
        lr_decay: float | Schedule = 1.0,
        clip_norm: float | None = None,
        keep_optimizer_state: bool = False,
        server_optimizer: OptimizerFactory | None = None,
        server_lr_decay: float | Schedule = 1.0,
        weighting: str = "uniform",
        buffers: str = "average",
        on_nonfinite: str = "stop",
        init_from: str | None = None,
        engine: str = "auto",
        clients_at_once: int | float | str = "auto",
        workers: int | float | str = "auto",
        capture: bool | str = "auto",
        seed: int | None = None,
        strict_resume: bool = True,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        checks.check_learner(learner)
        checks.count_participants(participation, 2**62)
        checks.one_of("sampling", sampling, ("uniform", "bernoulli"))
        checks.positive("local_epochs", local_epochs)
        checks.positive("local_steps", local_steps, whole=True)
        checks.positive("clip_norm", clip_norm)
        checks.rate("lr_decay", lr_decay)
        checks.rate("server_lr_decay", server_lr_decay)
        checks.seed(seed)
        checks.one_of("weighting", weighting, ("uniform", "samples"))
        checks.one_of("buffers", buffers, ("average", "keep"))
        checks.one_of("on_nonfinite", on_nonfinite, ("stop", "skip"))
        checks.one_of("engine", engine, ("auto", "sequential", "concurrent", "stacked"))
        checks.one_of("capture", capture, ("auto", True, False))
        checks.positive("clients_at_once", clients_at_once, whole=True, or_auto=True)
        checks.positive("workers", workers, whole=True, or_auto=True)
        self.learner: Any = learner
        self.adopt(learner)
        self.participation, self.sampling = participation, sampling
        self.local_epochs = local_epochs
        self.local_steps = None if local_steps is None else int(local_steps)
        self.client_optimizer, self.lr_decay, self.clip_norm = client_optimizer, lr_decay, clip_norm
        self.keep_optimizer_state = keep_optimizer_state
        self.server_optimizer, self.server_lr_decay = server_optimizer, server_lr_decay
        self.weighting, self.buffer_policy, self.on_nonfinite = weighting, buffers, on_nonfinite
        self.init_from, self.engine, self.seed, self.strict_resume = init_from, engine, seed, strict_resume
        self.clients_at_once = clients_at_once if isinstance(clients_at_once, str) else int(clients_at_once)
        self.workers = workers if isinstance(workers, str) else int(workers)
        self.capture = capture
        self.notes: list[str] = []
        self.engine_facts: dict[str, str] = {}
        self.learner_config: dict[str, Any] = {}
        self.stop_requested = False
        self.methods = Methods([])
        self.server_states: dict[str, Tensor] = {}
        self.initial_vector: Tensor | None = None
        self.resume_from: dict[str, Any] | None = None
        self.known_indices: dict[Any, Any] = {}
        self._ready = False
        self._engine: Engine | None = None

    # Lightning's hooks, in the order of a fit ------------------------------------------------------------------------

    def configure_callbacks(self) -> Any:
        if self.trainer.state.fn == "fit":  # the first hook of a fit: before Lightning's own, terser refusals
            checks.check_trainer(self.trainer)
        return self.learner.configure_callbacks()

    def setup(self, stage: str) -> None:
        if stage == "fit":
            checks.check_data(self.data)
            checks.count_participants(self.participation, int(self.data.num_clients))
            self.methods = Methods([c for c in self.trainer.callbacks if isinstance(c, FederatedCallback)])  # type: ignore[attr-defined]
            persistence.atomic_checkpoints(self.trainer)
        self.connect_learner()
        self.learner.setup(stage)

    def configure_model(self) -> None:
        self.learner.configure_model()
        self.build()
        if self.trainer.state.fn == "fit" and self.init_from is not None:
            weights = persistence.load_weights(self.init_from)
            persistence.check_weights(self, weights)
            self.learner.load_state_dict(weights)

    def configure_optimizers(self) -> Optimizer:
        self.build(again=True)
        given = (self.server_optimizer or _sgd)([self.global_vector])  # type: ignore[list-item]
        self._server = given
        self._server_rates = [float(g["lr"]) for g in given.param_groups]
        if self.client_optimizer is not None:
            self._client = self.client_optimizer([p for _, p in trainable(self.learner)])
        else:
            self._client, scheduler = client_optimizer.from_learner(self.learner)
            if scheduler:
                self.note("the learner's lr scheduler is ignored: client learning rates follow lr_decay, by the round")
        if isinstance(self._client, torch.optim.LBFGS):
            raise UserError(
                "client_optimizer: LBFGS evaluates the loss several times a step, which a local step does not. "
                "Use an optimizer that takes one gradient, such as torch.optim.SGD or torch.optim.Adam."
            )
        self.client_account, self.server_account = persistence.account(self._client), persistence.account(given)
        return given

    def on_fit_start(self) -> None:
        self.build(again=True)
        w = self.global_vector
        going_on = self.resume_from is None and self.trainer.current_epoch > 0  # fit() again on the same Trainer
        if not going_on:
            self.client_rows, self.server_states, self.initial_vector = persistence.new_rows(self), {}, None
            if any(getattr(d, "initial", None) == "initial_model" for d in self.methods.declared.values()):
                self.initial_vector = w.detach().clone()
        if self.resume_from is not None:
            persistence.resume(self, self.resume_from)
        parts = self.methods.parts(self.layout)
        self.parts = Parts(parts, self.layout.size, w.device) if parts else None
        self.refuse_undeclared_synchronisation()
        rates = client_optimizer.differing_groups(self._client)
        if rates and self.methods.reads("lr", "mean_gradient", "elapsed"):
            raise UserError(rates)
        self._rates = rates
        if self.local_steps is not None and self.local_epochs is not None:
            self.note(f"local_steps={self.local_steps} wins over local_epochs={self.local_epochs}")
        if self.participation == 1 and isinstance(self.participation, int):
            self.note("participation=1 is one client a round; for all of them give 'all' or 1.0")
        self._sizes = self.data.client_sizes()
        self.learner.on_fit_start()
        before = self.resume_from or {}
        self._engine, self.engine_facts = choose(self)
        began, now = (before.get("engine") or {}).get("engine"), self.engine_facts["engine"]
        if began and began != now:
            self.note(f"engine='{now}' goes on with what '{began}' began: alike to rounding, not to the bit")
        self.resume_from = None

    def refuse_undeclared_synchronisation(self) -> None:
        """Under partial averaging each state has to say what happens to coordinates that are not averaged."""
        if self.parts is None:
            return
        for key, declared in self.methods.declared.items():
            if getattr(declared, "synchronised", False) is None:
                raise UserError(
                    f"method: {key} does not say what partial averaging does to it, so the two cannot run together. "
                    "Declare synchronised=True (kept where a part is not averaged) or False."
                )

    def on_train_start(self) -> None:
        for logger in self.trainer.loggers:
            if hasattr(logger, "resume"):
                logger.resume(self.current_epoch)
        self._ready = True
        self.learner.on_train_start()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One round."""
        began = time.perf_counter()
        device = self.global_vector.device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            metrics = self.run_round(self.current_epoch)
        metrics["time/round"] = time.perf_counter() - began
        self.report(metrics, self.current_epoch)

    def run_round(self, t: int) -> dict[str, float]:
        ids = list(self.participants(t))
        rank, world = self.trainer.global_rank, self.trainer.world_size
        factor, server_factor = decay_factor(self.lr_decay, t), decay_factor(self.server_lr_decay, t)
        w = self.global_vector.detach()
        sizes = {i: int(self._sizes[i]) for i in ids}
        self.client_rows.fetch(ids)
        round = Round(
            t=t,
            ids=ids,
            steps={i: self.steps(t, i) for i in ids},
            sizes=sizes,
            weights={i: float(sizes[i]) if self.weighting == "samples" else 1.0 for i in ids},
            num_clients=int(self.data.num_clients),
            w=w,
            w0=w if self.initial_vector is None else self.initial_vector,
            lr=torch.tensor(self._client_rate() * factor, dtype=torch.float64, device=w.device),
            layout=self.layout,
            read=self.client_rows.read,
            server_states=self.server_states,
            parts=self.parts,
            rates=self._rates,
            optimizer_rows=[n for n in self.client_rows.names() if n.startswith("optimizer.")],
        )
        for callback in self.methods.callbacks:
            callback._bound_round = round
        for group, rate in zip(self._server.param_groups, self._server_rates, strict=True):
            group["lr"] = rate * server_factor
        self.methods.run("on_round_start", Server(round, w))
        round.at_server = False
        own = ids[rank::world]
        buffers = buffer_values(self.learner)
        collector = Collector(
            round=round,
            methods=self.methods,
            leaves=len(own),
            uniform=self.weighting == "uniform",
            average_buffers=self.buffer_policy == "average",
            buffers=buffers,
            keep_optimizer_state=self.keep_optimizer_state,
            averaged=None if self.parts is None else self.parts.averaged(t),
        )
        leaves = [(leaf, own[leaf]) for leaf in visiting_order(len(own))]
        done = 0

        def tell() -> None:
            nonlocal done
            done += 1
            for watch in self._watchers():
                watch(self.trainer, self, done, len(own))

        assert self._engine is not None
        self._engine.run(round, leaves, factor, buffers, self.evaluated_vector.detach(), collector, tell)
        metrics = conclude(self, round, collector)
        metrics["client_lr"] = self._client_rate() * factor
        return metrics

    def _watchers(self) -> list[Callable[..., None]]:
        return [c.on_client_end for c in self.trainer.callbacks if hasattr(c, "on_client_end")]  # type: ignore[attr-defined]

    def _client_rate(self) -> float:
        return float(self._client.param_groups[0]["lr"])

    def report(self, metrics: dict[str, float], t: int) -> None:
        """To every logger at step t, and to what monitors."""
        self.trainer.callback_metrics.update({k: torch.tensor(v) for k, v in metrics.items()})
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=t)

    def on_validation_start(self) -> None:
        self._validation_began = time.perf_counter()
        self.learner.on_validation_start()

    def on_validation_end(self) -> None:
        self.learner.on_validation_end()
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self.report({"time/validation": time.perf_counter() - self._validation_began}, self.current_epoch)

    def teardown(self, stage: str) -> None:
        self.learner.teardown(stage)
        self.release_learner()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._ready:
            persistence.save(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.build()
        persistence.load(self, checkpoint)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Gradients on, and autocast where the Trainer's precision asks for it, around the learner alone."""
        if self.trainer.precision != "bf16-mixed":
            return torch.enable_grad()
        stack = ExitStack()
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(self.global_vector.device.type, dtype=torch.bfloat16, cache_enabled=False))
        return stack


def _sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)
