"""One federated run, from the start of a fit on: the objects that it owns besides the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fl_lightning import checkpoint, sampling, systems
from fl_lightning.aggregation import server_update
from fl_lightning.aggregation.server_update import ServerStep
from fl_lightning.callback import FederatedCallback, RunBinding, RunFacts
from fl_lightning.callback_list import CallbackList
from fl_lightning.checkpoint import CheckpointFolder, Identity, SavedRun
from fl_lightning.checks import assignments, refusals
from fl_lightning.checks.notes import beyond_memory
from fl_lightning.client import run_optimizers
from fl_lightning.client.forward_pass import in_full_precision
from fl_lightning.client.local_step import LocalTraining
from fl_lightning.client.run_optimizers import RunOptimizers
from fl_lightning.engines.choice import choose
from fl_lightning.engines.engine import Engine
from fl_lightning.engines.engine_context import EngineContext, engine_context_of
from fl_lightning.engines.engine_plan import EnginePlan
from fl_lightning.engines.registry import NOT_CAPTURED
from fl_lightning.errors import UserError
from fl_lightning.evaluation.evaluator import Evaluator
from fl_lightning.evaluation.in_round import ClientEvaluation
from fl_lightning.evaluation.validated_model import averaging_notes
from fl_lightning.learner import parameters
from fl_lightning.learner.attributes import Attributes
from fl_lightning.learner.buffers import BufferPolicy
from fl_lightning.learner.modules import modes, overrides
from fl_lightning.loop import FederatedLoop, Participants, RoundMetrics
from fl_lightning.machine.escaping import plain
from fl_lightning.machine.lightning import is_foreign, rank_zero_warn
from fl_lightning.machine.processes import cores_of_each, limit_threads
from fl_lightning.machine.random_state import RandomState, random_state_kept
from fl_lightning.record.reporter import Reporter
from fl_lightning.round.base_weights import BaseWeights
from fl_lightning.round.cohort import Cohort
from fl_lightning.round.context import ClientRates, Evaluate
from fl_lightning.round.declared_state import ClientState
from fl_lightning.round.global_model import GlobalModel
from fl_lightning.round.partial_training import check_added, check_parts
from fl_lightning.round.settings import Settings
from fl_lightning.schedules import decay_factor
from fl_lightning.storage import secret
from fl_lightning.storage.checkpoint_io import use_atomic_checkpoints
from fl_lightning.storage.client_rows import ClientRows
from fl_lightning.storage.client_store import ClientStore
from fl_lightning.storage.run_state import RunState


class FederatedRun:
    """The objects of a run: those of the whole run, and those of its present or latest fit.

    ``methods``, ``state`` (server states, client rows, rounds done), ``optimizers``, ``plan`` and
    ``engine`` (which trains the clients), ``loop`` (the rounds), ``reporter`` (passes them to
    loggers and callbacks), ``folder`` (of checkpoints), ``notes`` (warnings for the user).
    """

    optimizers: RunOptimizers  # set by `make_optimizers`
    _identity: Identity  # of the latest fit that has begun
    _random_state: RandomState  # the process's random state before the first round

    def __init__(self, settings: Settings, model: GlobalModel) -> None:
        self.settings = settings
        self.model = model
        self.state = RunState(ClientRows(ClientStore()))
        self.notes: list[str] = []
        self.folder = CheckpointFolder()
        # The secret of a private run, from `make_optimizers` on. Copies and pickles leave it out.
        self.secret = secret.NOT_YET
        self._drawn_seed: int | None = None
        # The Trainer's callback_metrics after the latest round, with which the next fit goes on.
        self.monitored: dict[str, torch.Tensor] = {}
        self.loaded = ""  # the call that loaded weights since the last fit, in words
        # The following attributes belong to one fit.
        self.methods = CallbackList([])
        # Until this fit has begun: our part of the checkpoint that is resumed, and its states of
        # optimizers.
        self.resumed_from: SavedRun | None = None
        self._optimizer_states: list[Any] = []
        self.plan: EnginePlan | None = None
        self.engine: Engine | None = None
        self.loop: FederatedLoop | None = None
        self.reporter: Reporter | None = None
        self.evaluate: Evaluate | None = None  # behind clients.evaluate
        # In the first round of a resumed run: whether the learner's attributes are compared over
        # it, and what they were as it began.
        self._watches_learner = False
        self._learner_before: Attributes | None = None
        self.cores = 1  # number of cores that this process may use
        # Training modes of the module and its parts, which validation changes.
        self._modes: list[tuple[nn.Module, bool]] = []

    def __getstate__(self) -> dict[str, Any]:
        names = ("settings", "model", "state", "notes", "_drawn_seed")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        FederatedRun.__init__(self, state["settings"], state["model"])
        vars(self).update(state)

    def note(self, text: str) -> None:
        """Warn now, and again in the run card and the closing table."""
        text = plain(text)
        if text not in self.notes:
            self.notes.append(text)
            rank_zero_warn(text)

    def set_up(self, trainer: Any) -> None:
        """Refuse data that cannot work, and find the methods of this fit."""
        if self.resumed_from is not None:
            raise UserError(
                "the last fit of this module was refused after the weights of its checkpoint were "
                "loaded into it. Make the module anew."
            )
        own = self.reporter is None or self.continues(trainer)  # not those of an earlier run
        self.notes = [*self.notes] if own else []
        refusals.check_data(trainer.datamodule)
        refusals.count_participants(
            self.settings.participation, int(trainer.datamodule.num_clients)
        )
        self.methods = CallbackList(
            [c for c in trainer.callbacks if isinstance(c, FederatedCallback)]
        )
        use_atomic_checkpoints(trainer, after_exception=self.folder.release)
        self.folder.claim(trainer, begins=False)
        self.cores = cores_of_each()
        if lowered := limit_threads(self.cores):
            self.note(lowered)

    def seed(self, trainer: Any) -> int:
        """Seed from which all random numbers follow; ``trainer`` None: outside of a fit."""
        given = sampling.given_seed(self.settings.seed)
        if given is not None:
            return given
        if self._drawn_seed is None:
            drawn = sampling.fresh_seed()
            # All processes take the seed that the first one drew.
            if trainer is not None:
                drawn = int(trainer.strategy.broadcast(drawn))
            self._drawn_seed = drawn
        return self._drawn_seed

    def take_up(self, saved: dict[str, Any], trainer: Any) -> None:
        """Keep a checkpoint's part for ``restore``, and use its seed if none was given.

        If the seed differs, the data are split again.
        """
        held = self.resumed_from = checkpoint.resumed(saved)
        self._optimizer_states = saved["optimizer_states"]
        if sampling.given_seed(self.settings.seed) is None and held.seed != self._drawn_seed:
            self._drawn_seed = held.seed
            trainer.datamodule.setup("fit")

    def cohort(self, trainer: Any) -> Cohort:
        return self._cohort(
            trainer.datamodule, self.seed(trainer), self.methods, trainer.fast_dev_run
        )

    def _cohort(self, data: Any, seed: int, methods: CallbackList, quick: bool | int) -> Cohort:
        # The seed must not reveal who took part in a private run.
        key: Any = self.secret
        if methods.draws_from != "secret":
            key = methods.draws_from
        cohort = Cohort(data, seed, key=key, **self.settings.cohort(quick))
        # Methods may ask for the numbers of steps outside of rounds, too.
        noise = self._noise_of_clients(methods)
        methods.bind_run(RunBinding(cohort.seed, cohort.steps_of, noise))
        cohort.own_steps = methods.steps
        if cohort.own_steps is not None:
            cohort.steps_by = methods.name_of_owner("steps")
        systems.set_conditions(cohort, self.settings.asynchronous, methods.callbacks)
        return cohort

    def scheduled(
        self, data: Any, rounds: int, callbacks: Sequence[FederatedCallback]
    ) -> list[systems.ScheduledJob]:
        """Return the jobs of so many rounds with these methods, before they are trained.

        Raises:
            UserError: there is no clock that gives their durations.
        """
        methods = CallbackList(callbacks, self.model.layout)
        cohort = self._cohort(data, self.seed(None), methods, quick=0)
        plan = systems.plan(cohort, self.settings, methods, self.model.w)
        if plan is None or plan.durations is None:
            raise UserError(
                "schedule: no option gives the time that clients take. Give "
                "FederatedModule(asynchronous="
                "Buffered(devices, …)), or VirtualClock(devices) among the callbacks."
            )
        return list(plan.jobs(rounds))

    def participants(self, t: int, cohort: Cohort) -> tuple[int, ...]:
        if self.settings.asynchronous is not None and not cohort.quick:
            known = None if self.loop is None else self.loop.device_plan
            plan = known or systems.plan(cohort, self.settings, self.methods, self.model.w)
            assert plan is not None
            return plan.planned(t).ids
        if self.methods.owner("select") is None:
            return cohort.participants(t)
        latest = (-1, ()) if self.loop is None else self.loop.latest
        return self.state.chosen_in(t, latest)

    def client_optimizer_at(self, t: int) -> Optimizer | None:
        if self.loop is None:
            return None
        rates = self.loop.client_rates.in_round(t, decay_factor(self.settings.lr_decay, t), ())
        return run_optimizers.shown_at(self.optimizers.clients, rates)

    def continues(self, trainer: Any) -> bool:
        """Return whether this is another fit by the same Trainer, after rounds were committed."""
        same = self.reporter is not None and self.reporter.trainer is trainer
        return self.resumed_from is None and same and self.state.rounds > 0

    def load_start(self, trainer: Any) -> None:
        if self.settings.init_from is not None and not self.continues(trainer):
            loaded = parameters.load_weights(self.settings.init_from)
            parameters.load_state(self.model.learner, loaded, True, "init_from")

    def make_optimizers(self, trainer: Any) -> Optimizer:
        earlier = self.optimizers.server if self.continues(trainer) else None
        # A run has one secret, in all its fits and after a resume: a second one would draw other
        # noise for results that were already published.
        sources = (self.methods.draws_from, self.methods.clients_draw_from)
        if "secret" in sources and (earlier is None or self.secret is secret.NOT_YET):
            held = self.resumed_from
            wanted = None if held is None else held.secret
            folders = () if held is None else held.folders
            self.secret = secret.of_fit(trainer, wanted, folders, self.note)
        self.optimizers = run_optimizers.of_run(
            self.settings,
            self.model.learner,
            self.model.w,
            trainer.max_epochs,
            self.note,
            lambda: self._most_steps(trainer),
        )
        if earlier is not None:
            self.optimizers.server.load_state_dict(earlier.state_dict())
        return self.optimizers.server

    def _most_steps(self, trainer: Any) -> int:
        cohort = self.cohort(trainer)
        return max(cohort.steps_in(0, range(cohort.m)).values())

    def restore(self, trainer: Any) -> None:
        """Set the state with which rounds continue: this run's, a checkpoint's, or a new one."""
        if self.continues(trainer):
            if self.loaded and self.model.evaluated is self.model.w:
                self.note(f"{self.loaded}. The next fit goes on from them, with the run's states")
            self._keep_initial_model()
            self.state.keep_rows_for(trainer.datamodule)
            # The loggers' step counter: after an exception it can be one ahead of the rounds.
            fit = trainer.fit_loop
            fit.epoch_loop._batches_that_stepped = fit.epoch_progress.current.processed
            return
        self.loaded = ""
        self.reporter = None  # until this fit has begun
        rank = trainer.global_rank
        world = trainer.world_size
        held = self.resumed_from
        rows = ClientRows(ClientStore(rank=rank, world_size=world), rank, world)
        if held is None:
            self.state = RunState(rows)
            # A new run begins with the learner's weights. If an earlier one evaluated another
            # model than w, they are that model.
            self.model.move_to(self.model.evaluated.detach(), None, {})
        else:
            # Refuse before restoring anything from the checkpoint.
            if self.settings.strict_resume:
                Identity.of(self, trainer).check_same(held)
            self.state = self._fitting(held).restore(rows, self.model, trainer.ckpt_path)
        self.monitored = {} if held is None else held.monitored
        self.state.base = BaseWeights.of(
            self.methods.callbacks, self.model.layout, self.model.learner
        )
        if held is not None and (self.state.base is not None or held.base_kinds):
            base = self.state.base or BaseWeights()
            base.restore(held.base, held.base_costs, held.base_kinds)
        self._keep_initial_model()
        self.state.keep_rows_for(trainer.datamodule)

    def _fitting(self, held: SavedRun) -> SavedRun:
        """The checkpoint's part without client optimizers' states that do not fit this run's."""
        kept = any(key.startswith("optimizer.") for key in held.clients)
        now = self.optimizers.accounts["client_optimizer"]
        then = held.arguments.get("client_optimizer", now)
        if not kept or not self.settings.keep_optimizer_state:
            return held
        if run_optimizers.state_fits(then, now):
            return held
        self.note(
            "client_optimizer has other settings than the checkpoint's, to which the states that "
            "clients keep do not fit, so the clients' optimizers begin anew"
        )
        return held.without_optimizers()

    def keep_settings(self) -> None:
        """Let this run's settings of the server optimizer hold, also after a resume."""
        if self.resumed_from is not None:
            then = self.resumed_from.arguments["server_optimizer"]
            server = self.optimizers.server
            checkpoint.keep_settings(self._optimizer_states, server, then, self.note)

    def _keep_initial_model(self) -> None:
        if not self.methods.start_from_w0 or self.state.initial_vector is not None:
            return
        self.state.initial_vector = self.model.w.detach().clone()
        if self.state.rounds:
            self.note(
                "The initial model w^0 of this run was not stored, because no method needed it "
                "before. Instead of w^0, the run uses the model that it resumes from."
            )

    def begin(self, trainer: Any, server_optimizer: Any, participants: Participants) -> None:
        """Before the first round: choose the engine and make the loop."""
        model = self.model
        cohort = self.cohort(trainer)
        # Check before a step is tried: a method may refuse a model that the learner cannot train,
        # either.
        for callback in self.methods.callbacks:
            callback.check_layout(model.layout, cohort.m, model.w.detach())
        parts = self.methods.parts(model.layout, model.w.device)
        check_parts(self.methods, parts, model.layout)
        with random_state_kept(model.w):
            check_added(self.methods.callbacks, model.learner, model.layout)
        kept = self.settings.keep_optimizer_state
        rates = self.optimizers.client_rates(model.w.device, kept)
        reporter = Reporter(trainer)
        plan = systems.plan(cohort, self.settings, self.methods, model.w)
        self._note_settings(trainer, cohort, rates)
        context = self._choose_engine(trainer, cohort)
        noted = None
        if self.resumed_from is not None:
            noted = assignments.noting(self.methods.callbacks, self.note)
        assert self.engine is not None
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        self.loop = FederatedLoop(
            settings=self.settings,
            model=model,
            cohort=cohort,
            methods=self.methods,
            state=self.state,
            engine=self.engine,
            server_step=ServerStep(server_optimizer, self.optimizers.server_rates, progress),
            client_rates=rates,
            parts=parts,
            participants=participants,
            report=reporter.log,
            progress=reporter.client_ended,
            note=self.note,
            buffers=context.policy,
            device_plan=plan,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            noise_of_clients=self._noise_of_clients(self.methods),
            assigned_at_server=noted,
            assigned_by_clients=noted if context.in_order else assignments.refuse_shared,
        )
        self._identity = Identity.of(self, trainer)
        learner = self.model.learner
        resumes = self.resumed_from is not None
        self._watches_learner = resumes and not overrides(learner, "on_save_checkpoint")
        self._learner_before = None
        self.resumed_from = None
        self._optimizer_states = []
        self.reporter = reporter
        self._modes = modes(trainer.lightning_module)

    def _noise_of_clients(self, methods: CallbackList) -> secret.Key | None:
        source = methods.clients_draw_from
        return self.secret if source == "secret" else source

    def _note_settings(self, trainer: Any, cohort: Cohort, rates: ClientRates) -> None:
        """Note what settings and methods mean in this run, before its first round."""
        settings = self.settings
        other_optimizer = "" if rates.plain_sgd else rates.optimizer
        server, server_rate = self.optimizers.server_facts(settings.server_lr_decay)
        policy = BufferPolicy(self.model.learner, settings.buffers)
        buffers = self.model.buffers()
        shared = [name for name in buffers if name not in policy.own(buffers)]
        averaged = [name for name in shared if policy.averages(name, buffers[name])]
        about = RunFacts(
            n=cohort.n,
            m=cohort.m,
            weighting=settings.weighting,
            optimizer=other_optimizer,
            momentum=rates.momentum,
            server=server,
            server_rate=server_rate,
            clip_norm=settings.clip_norm,
            sampling=settings.sampling,
            on_nonfinite=settings.on_nonfinite,
            by_step=rates.by_step,
            deadline=cohort.over_selection is not None and cohort.over_selection.ticks is not None,
            keeps_optimizer=settings.keep_optimizer_state,
            averaged_buffers=", ".join(averaged),
        )
        of_learner = averaging_notes(trainer.callbacks)
        for text in [*settings.notes(), *self.methods.notes(about), *of_learner]:
            self.note(text)
        w, store = self.model.w, self.state.rows.store
        declared = self.methods.declared.items()
        kept = {name: each.bytes(w) for name, each in declared if isinstance(each, ClientState)}
        if said := beyond_memory(kept, cohort.m, store.budget_bytes * trainer.world_size):
            self.note(said)
        if sampling.given_seed(settings.seed) is None:
            whose = "was drawn" if self.resumed_from is None else "is the checkpoint's"
            self.note(
                f"no seed was given: seed={self.seed(trainer)} {whose}; give it to repeat this run"
            )
        names = self.methods.gathering
        if names:
            self.note(server_update.memory(" and ".join(names), cohort.most, self.model.w))

    def _choose_engine(self, trainer: Any, cohort: Cohort) -> EngineContext:
        settings = self.settings
        work = LocalTraining(
            cohort.data,
            self.methods,
            cohort.seed,
            settings.clip_norm,
            settings.keep_optimizer_state,
            settings.accumulate,
        )
        work.evaluate = self.evaluate = ClientEvaluation(
            self.model.learner, trainer.datamodule, lambda: Evaluator.of_run(self, trainer)
        )
        context = engine_context_of(trainer, settings, self.model, self.optimizers, work, cohort)
        ends = [callback.on_train_batch_end for callback in trainer.callbacks]
        keeps_loss = self.methods.reads_loss or any(map(is_foreign, ends))
        context = replace(context, keeps_loss=keeps_loss, usable_cores=self.cores)
        if self.resumed_from is not None:
            earlier = self.resumed_from.engine
        else:
            # Another Trainer begins another run, perhaps on other data.
            earlier = self.plan if self.continues(trainer) else None
        # An engine left by an earlier fit holds threads and memory that the trials need.
        self.close_engine()
        self.engine, self.plan = choose(context, earlier, self.note, self._not_captured)
        self.model.as_buffers = self.plan.as_buffers
        if earlier is not None and earlier.engine != self.plan.engine:
            self.note(
                f"engine='{self.plan.engine}' continues a run that '{earlier.engine}' began: the "
                "results agree up to rounding, but not in every bit"
            )
        return context

    def start(self, t: int) -> None:
        """Before this fit's first round t: lock the folder, and give loggers the first round."""
        assert self.reporter is not None
        self.folder.claim(self.reporter.trainer, begins=True)
        # Lightning empties them at the start of a fit.
        self.reporter.trainer.callback_metrics.update(self.monitored)
        self.show_server_rates(t)
        self.reporter.begin(self)
        self._random_state = RandomState(self.model.w)

    def show_server_rates(self, t: int) -> None:
        assert self.loop is not None and self.reporter is not None
        last = self.reporter.trainer.max_epochs
        if t < last or last < 0:
            self.loop.set_server_rates(t)

    def watch_learner(self) -> None:
        """Remember the learner's attributes before the first round of a resumed run."""
        if self._watches_learner:
            self._learner_before = Attributes(self.model.learner)
            self._watches_learner = False

    def note_learner(self) -> None:
        """Note which attributes the learner has changed in that round, and no checkpoint holds."""
        if self._learner_before is None:
            return
        learner = self.model.learner
        changed = self._learner_before.changed_by_learner(learner)
        self._learner_before = None
        if changed:
            self.note(
                f"{type(learner).__name__} changes {', '.join(changed)} from round to round, which "
                "no checkpoint holds, so this resumed run began with its first value again. If a "
                "later round reads it, save it in on_save_checkpoint and on_load_checkpoint, make "
                "it a buffer (register_buffer), or compute it from self.current_epoch"
            )

    def end(self) -> None:
        # Do this while the folder still belongs to this run, because another process may use the
        # folder later.
        self.folder.tidy(self.state.rows)
        self._random_state.restore()

    def run_round(self, t: int) -> RoundMetrics:
        """Run round t and return its metrics; a committed one is only reported again."""
        assert self.loop is not None and self.reporter is not None
        self._modes = modes(self.reporter.trainer.lightning_module)
        # After an interruption Lightning starts the epoch again, although its round may be
        # committed. After such an interruption only the round's validation is missing.
        if t < self.state.rounds:
            self.reporter.log(self.state.logged, t)
            return self.state.logged
        try:
            # The server computes in full precision without a graph; steps have their own contexts.
            with in_full_precision(self.model.w.device.type):
                return self.loop.run_round(t)
        except BaseException:
            # After an exception Lightning does not call teardown, but the threads must end.
            self.close_engine()
            raise
        finally:
            self.model.round_start = None

    def outputs(self) -> dict[str, torch.Tensor] | None:
        loss = None if self.loop is None else self.loop.loss
        return None if loss is None else {"loss": torch.tensor(loss)}

    def reset_metrics(self) -> None:
        for metric in self.loop.logged_metrics if self.loop is not None else ():
            metric.reset()

    def save(self, saved: dict[str, Any], trainer: Any) -> None:
        """Add the run's part to a checkpoint; before training there is no state to add."""
        checkpoint.with_hyper_parameters(saved, self.model)
        if self.loop is None or self.plan is None:
            return
        checkpoint.check_savable(trainer)
        # A checkpoint within a round holds the model from the start of the round, unless the round
        # is committed. An interrupted commit is finished first.
        if self.state.finish_commit(self.loop.latest[0]):
            self.model.round_start = None
        server_update.save_round_start(saved, self.model)
        of_run = (self._identity, self.state, self.model, self.plan, self.secret)
        self.folder.save(saved, trainer, *of_run)

    def put_modes_back(self) -> None:
        for part, training in self._modes:
            part.training = training

    def close(self) -> None:
        self._modes = []
        self.folder.release()
        self.close_engine()

    def close_engine(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _not_captured(self, why: str) -> None:
        assert self.plan is not None
        self.plan = replace(self.plan, captured=False, not_captured=why)
        self.note(NOT_CAPTURED + why)
