"""One ``Trainer.fit`` is one federated run, and one epoch is one round: ``training_step`` is
the round.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning import checkpoint
from fl_lightning.checks import refusals
from fl_lightning.client import batch_callbacks
from fl_lightning.errors import UserError
from fl_lightning.evaluation import measurement, personal_models, validated_model
from fl_lightning.evaluation.evaluator import Evaluator
from fl_lightning.evaluation.validated_model import evaluated
from fl_lightning.introspection.accepted import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_arguments,
)
from fl_lightning.learner import saved_network
from fl_lightning.learner.buffers import BufferWord
from fl_lightning.learner.hooks import STEPS, WHERE_OVERRIDDEN, LearnerHooks
from fl_lightning.learner.layout import Layout
from fl_lightning.learner.modules import TRANSFER
from fl_lightning.machine.agreement import Alike, check_logged_alike
from fl_lightning.machine.device_memory import prepare_process
from fl_lightning.machine.lightning import (
    LightningOptimizer,
    explain_to_other_trainers,
    is_default_bar,
)
from fl_lightning.machine.processes import gathered
from fl_lightning.machine.random_state import seed_round
from fl_lightning.metrics import Logged
from fl_lightning.record import description
from fl_lightning.round.client_schedule import ShownScheduler
from fl_lightning.round.cohort import Cohort
from fl_lightning.round.global_model import GlobalModel
from fl_lightning.round.settings import (
    AUTO,
    EngineName,
    OptimizerFactory,
    Participation,
    Settings,
)
from fl_lightning.run import FederatedRun
from fl_lightning.schedules import Schedule
from fl_lightning.storage.client_rows import ClientRows
from fl_lightning.virtual.buffered import Buffered


class FederatedModule(LearnerHooks):
    """Trains any LightningModule by federated learning.

    Args:
        learner: any LightningModule, of ``pytorch_lightning`` or ``lightning.pytorch``:
            ``training_step`` returns the local loss; evaluation and its hooks run on the global
            model, as in plain Lightning.
        participation: clients per round: ``"all"``, a number, or a fraction (rounded half up, at
            least one).
        sampling: ``"uniform"``: a fixed number; ``"poisson"``, ``"bernoulli"`` (at least one): each
            client takes part independently.
        local_epochs: epochs of each client in a round, which may be a fraction; 5 if neither it nor
            ``local_steps`` is given.
        local_steps: steps of each client in a round; overrides ``local_epochs``.
        client_optimizer: ``params -> optimizer`` of the local steps; None: the learner's
            ``configure_optimizers``.
        client_scheduler: what steps the learner's lr scheduler: ``"rounds"``; ``"local_steps"`` of
            each client, which begin again in every round; or nothing: ``"ignore"``.
        lr_decay: client learning rates × ``lr_decay ** round``, or × ``schedule(round)``.
        clip_norm: in each local step a client's corrected gradient is scaled by
            min(1, clip_norm/‖g‖).
        accumulate: batches of the data in each local step; the last step of an epoch takes those
            that are left. The batches of a step are weighted by their samples, or by ``count`` if
            ``training_step`` returns ``{"loss": …, "count": …}``.
        keep_optimizer_state: keep each client's optimizer state, instead of a fresh one every
            round.
        server_optimizer: ``params -> optimizer`` over w, whose gradient is minus the update; None:
            SGD with rate 1.
        server_lr_decay: as ``lr_decay``, for the server.
        weighting: aggregation weights p_i: ``"uniform"`` or ``"samples"``.
        buffers: ``"average"``: statistics of normalisation layers are averaged with weights p_i,
            and counters take the maximum; unknown buffers stay the server's, and a note says so.
            ``"keep"``: all buffers stay the server's. ``"own"``: each client keeps its own; the
            server's, for evaluation, are that average. Or words by patterns of names; the first
            pattern that matches decides: ``{"*.running_*": "average", "queue*": "own"}``.
        on_nonfinite: ``"stop"`` the run, or ``"skip"`` clients whose update is not finite.
        init_from: a checkpoint or exported file with the weights to start from.
        engine: ``"sequential"``: one client after the other. ``"concurrent"``: several in parallel,
            each on one thread of a CPU or one stream of a GPU, with the same bits for any number.
            ``"stacked"``: many as one batch of models, the same up to rounding. ``"debug"``: the
            bits of sequential, and an error in a hook or in ``training_step`` has an attribute
            ``at`` (round, client, step, hook, arguments, batch). ``"auto"``: sequential or
            concurrent, by the table in `engines/auto.py`.
        clients_at_once: clients that the stacked engine trains together; ``"auto"``: as many as fit
            into a gigabyte.
        workers: clients that the concurrent engine trains in parallel; ``"auto"``: the process's
            cores, on a GPU up to 16.
        capture: whether the concurrent engine records a local step and replays it: same bits,
            without the learner's Python. ``"auto"``: if a trial before round 0 gives the same bits,
            and steps are short or on a GPU.
        seed: None: the seed of ``seed_everything``; without it the checkpoint's, else a new one is
            drawn.
        strict_resume: refuse to resume with other methods or arguments than the checkpoint's.
        asynchronous: ``Buffered(devices, …)`` of ``fl_lightning.systems``: clients train all the
            time, and an epoch is a step of the server; ``participation`` is then ignored. None:
            each round waits for its participants.

    Raises:
        UserError: before training starts, for each argument, learner or Trainer setting that cannot
            work.
    """

    def __init__(
        self,
        learner: nn.Module,
        *,
        participation: Participation = 0.1,
        sampling: Literal["uniform", "bernoulli", "poisson"] = "uniform",
        local_epochs: PositiveFloat | None = None,
        local_steps: PositiveInt | None = None,
        client_optimizer: OptimizerFactory | None = None,
        client_scheduler: Literal["ignore", "rounds", "local_steps"] = "ignore",
        lr_decay: PositiveFloat | Schedule = 1.0,
        clip_norm: PositiveFloat | None = None,
        accumulate: PositiveInt = 1,
        keep_optimizer_state: bool = False,
        server_optimizer: OptimizerFactory | None = None,
        server_lr_decay: PositiveFloat | Schedule = 1.0,
        weighting: Literal["uniform", "samples"] = "uniform",
        buffers: BufferWord | Mapping[str, BufferWord] = "average",
        on_nonfinite: Literal["stop", "skip"] = "stop",
        init_from: str | None = None,
        engine: EngineName = AUTO,
        clients_at_once: PositiveInt | Literal["auto"] = "auto",
        workers: PositiveInt | Literal["auto"] = "auto",
        capture: bool | Literal["auto"] = "auto",
        seed: NonNegativeInt | None = None,
        strict_resume: bool = True,
        asynchronous: Buffered | None = None,
    ) -> None:
        given = locals()
        for name in ("local_steps", "clients_at_once", "workers"):
            if isinstance(given[name], float) and given[name].is_integer():
                given[name] = int(given[name])
        check_arguments(FederatedModule.__init__, given)
        super().__init__()
        self.automatic_optimization = False
        explain_to_other_trainers(FederatedModule)
        refusals.check_learner(learner)
        self.settings = Settings(**{field.name: given[field.name] for field in fields(Settings)})
        self.adopt(learner)
        self.global_model = GlobalModel(learner)
        self.run = FederatedRun(self.settings, self.global_model)
        self.logged = Logged()
        self.stop_requested = False
        self._last_round = False  # whether a callback stopped the run at the start of this round

    # For users, callbacks and loggers
    # --------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Return ``{parameter name: (slice, shape)}`` of the global vector."""
        return self.global_model.layout

    @property
    def global_vector(self) -> Tensor:
        """The server's model w ``(D,)``."""
        return self.global_model.w

    @property
    def evaluated_vector(self) -> Tensor:
        """Return the model ``(D,)`` that is evaluated and exported: w, unless a method evaluates
        another model.

        With Lightning's ``WeightAveraging`` it is the average.
        """
        return evaluated(self.global_model, self._trainer)[0]

    @property
    def client_rows(self) -> ClientRows:
        """Return the clients' rows of methods: ``client_rows.read("ClassName.name", i)``."""
        return self.run.state.rows

    @property
    def server_states(self) -> dict[str, Tensor]:
        """Return the server's states of methods, by ``"ClassName.name"``."""
        return self.run.state.server

    @property
    def base(self) -> dict[str, Tensor]:
        """Return the frozen weights that a method's server changes, by name, in full precision."""
        base = self.run.state.base
        return {} if base is None else dict(base.values)

    @property
    def engine_facts(self) -> dict[str, str]:
        """Return the engine that trains the clients, and why, as text; empty before training."""
        return {} if self.run.plan is None else self.run.plan.card()

    @property
    def notes(self) -> list[str]:
        """Return the run's warnings, which the card repeats."""
        return self.run.notes

    @property
    def run_seed(self) -> int:
        """Return the seed from which all random numbers of this run follow."""
        return self.run.seed(self._trainer)

    @property
    def cohort(self) -> Cohort:
        """Object that decides who takes part in a round, and how many steps each takes."""
        return self.run.cohort(self.trainer)

    def participants(self, t: int) -> tuple[int, ...]:
        """Return the participants of round t, ascending; the same in every process and after a
        resume.

        Raises:
            UserError: a method chooses them (``select``), and has not chosen for this round yet.
        """
        return self.run.participants(t, self.cohort)

    def steps(self, t: int, i: int) -> int:
        """Return K_i: local steps of client i in round t; the same in every round, unless a
        method's hook changes them.

        The numbers of steps are known before the round, and the same in every process and after a
        resume.
        """
        return self.cohort.steps(i, t)

    def describe(self) -> str:
        """Return the run in one line."""
        return description.line(self.run)

    def note(self, text: str) -> None:
        """Warn now, and again in the run card and the closing table."""
        self.run.note(text)

    def export(self, path: str | Path | None = None, client: int | None = None) -> Any:
        """Return a copy of the learner with the evaluated weights and buffers.

        ``path``: file to which it is also saved, as a checkpoint. ``client``: a client whose
        personal model is returned instead; every process has to call it then.
        """
        if client is None:
            model = evaluated(self.global_model, self._trainer)
        else:
            model = personal_models.of_client(self.run, client, self._trainer)
        return self.global_model.export(path, self._trainer, model)

    def save_pretrained(self, folder: str | Path, merged: bool = False) -> None:
        """Write the evaluated network in the format of peft and transformers.

        Unmerged, the folder has ``adapter_config.json`` and ``adapter_model.safetensors``, which
        ``peft.PeftModel.from_pretrained(base, folder)`` loads. If the adapter belongs to another
        base than the one with which the run began, that base is in ``folder/base``.

        Args:
            merged: add the adapters to the weights, which gives a folder for
                ``AutoModelFor….from_pretrained``.

        Raises:
            UserError: the learner has not exactly one network of peft or transformers.
        """
        saved_network.save(self.export(), folder, merged, bool(self.base))

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the checkpoint holds the arguments of the learner, and not those of this class.

        Raises:
            UserError: it names the calls that load the learner.
        """
        learner = type(kwargs["learner"]).__name__ if "learner" in kwargs else "MyLearner"
        raise UserError(
            f"{cls.__name__}.load_from_checkpoint: a checkpoint holds the learner and its "
            f"arguments. Load it with {learner}.load_from_checkpoint(path), or, from a run's "
            "folder, with fl_lightning.load(folder).learner. To go on with the run, give "
            "trainer.fit(module, data, ckpt_path=path)."
        )

    def evaluator(self) -> Evaluator:
        """Return an evaluator of losses and gradients at any vector, on a copy of the learner."""
        return Evaluator.of_run(self.run, self.trainer)

    def clients_optimizer(self) -> Any:
        """Clients' optimizer at the round's rates: ``self.optimizers()`` between rounds."""
        optimizer = self.run.client_optimizer_at(self.current_epoch)
        return [] if optimizer is None else LightningOptimizer(optimizer)

    def clients_scheduler(self) -> Any:
        """Learner's ``self.lr_schedulers()`` between rounds; None if it is not stepped."""
        optimizer = self.run.client_optimizer_at(self.current_epoch)
        if optimizer is None or self.run.optimizers.schedule is None:
            return None
        return ShownScheduler(self.run.optimizers.schedule, optimizer)

    def __getstate__(self) -> dict[str, Any]:
        """Leave learner and hooks out of a copy or pickle, which takes the model's copy."""
        state = dict(super().__getstate__())
        state["_modules"] = {k: v for k, v in self._modules.items() if k != "learner"}
        for name in (*STEPS, *TRANSFER, *WHERE_OVERRIDDEN):
            state.pop(name, None)
        return state

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch has no types there
        self.adopt(self.global_model.learner)

    # Lightning's hooks, in the order of a fit
    # ------------------------------------------------------------------------

    # The progress bar that replaces Lightning's default bar in a fit; None: keep that one.
    own_bar: ClassVar[Any] = None

    def configure_callbacks(self) -> Any:
        # A fit that ended with an exception did not call teardown.
        batch_callbacks.give_back(self.trainer)
        measurement.put_back(self.trainer)
        validated_model.put_back(self.trainer, self)
        self.run.put_modes_back()
        # This is the first hook of a fit: our message comes before Lightning's, and is shorter.
        if self.trainer.state.fn == "fit":
            refusals.check_trainer(self.trainer)
            self._show_own_bar()
        return self.learner.configure_callbacks()

    def _show_own_bar(self) -> None:
        """Replace Lightning's default bar, which counts one batch per round, by ours."""
        callbacks: list[Any] = vars(self.trainer)["callbacks"]
        for place, callback in enumerate(callbacks):
            if self.own_bar is not None and is_default_bar(callback):
                callbacks[place] = self.own_bar()

    def setup(self, stage: str) -> None:
        prepare_process(self.trainer.strategy.root_device)
        if stage == "fit":
            # The one batch of an epoch is a round, and is logged whatever the interval is.
            message = r"The number of training batches \(1\) is smaller than the logging interval"
            warnings.filterwarnings("ignore", message)
            measurement.follow(self.trainer)
            batch_callbacks.take_over(self.trainer)
            self.run.set_up(self.trainer)
            validated_model.check_averages(self.trainer, self.run.methods.callbacks)
            validated_model.follow(self.trainer)
        self.connect_learner()
        self.learner.setup(stage)

    def configure_model(self) -> None:
        super().configure_model()
        # Lightning converts a module after it has loaded a checkpoint, so the weights would pass
        # through float32.
        if self.trainer.precision == "64-true":
            self.learner.double()
        self.global_model.build()
        if self.trainer.state.fn == "fit":
            self.run.methods.lay_out(self.layout)
            self.run.load_start(self.trainer)

    def on_load_checkpoint(self, saved: dict[str, Any]) -> None:
        # Check the whole checkpoint before restoring anything from it.
        self.global_model.build()
        self.learner.on_load_checkpoint(saved)
        if self.trainer.state.fn == "fit":
            self.run.take_up(saved, self.trainer)
        else:
            checkpoint.load_buffers(self.learner, saved)
            does: Any = self.trainer.state.fn
            self.run.loaded = f"trainer.{does.value} loaded the weights of {self.trainer.ckpt_path}"

    def configure_optimizers(self) -> Optimizer:
        # Lightning has moved the parameters to their device before this.
        self.global_model.build(again=True)
        return self.run.make_optimizers(self.trainer)

    def on_fit_start(self) -> None:
        # Lightning has loaded a checkpoint's weights by now, and other callbacks may have changed
        # them. So w is the learner's model at the start of its first round.
        self.global_model.build(again=True)
        self.run.restore(self.trainer)
        self.run.keep_settings()
        self.learner.on_fit_start()
        self.run.begin(self.trainer, self.optimizers(), self.participants)

    def on_train_start(self) -> None:
        self.run.start(self.current_epoch)
        self.learner.on_train_start()
        ended, said = checkpoint.ended_early(self.trainer)
        if ended:
            self.trainer.should_stop = True
        if said:
            self.run.note(said)

    def on_train_epoch_start(self) -> None:
        self.run.watch_learner()
        # Lightning would count this round without running it, so run it as the last one.
        self._last_round = bool(self.trainer.should_stop)
        self.trainer.should_stop = False
        seed_round(self.run_seed, self.current_epoch)
        self.learner.on_train_epoch_start()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor] | None:
        """Run the round of this epoch; return its mean loss, if a callback reads it."""
        self.run.run_round(self.current_epoch)
        return self.run.outputs()

    def on_train_batch_end(self, *args: Any) -> None:
        # A signal or a callback may stop only one process. Lightning decides next whether to
        # validate, and then whether to go on: all processes have to decide alike.
        self.trainer.should_stop = any(gathered(self._stops))

    @property
    def _stops(self) -> bool:
        return self.stop_requested or self._last_round or bool(self.trainer.should_stop)

    def on_train_epoch_end(self) -> None:
        alike = Alike(self._stops, self.global_vector)
        alike.check_model(self.current_epoch)
        self.trainer.should_stop = alike.stops
        self.learner.on_train_epoch_end()
        self.run.note_learner()
        self.run.monitored = dict(self.trainer.callback_metrics)
        self.run.show_server_rates(self.current_epoch + 1)
        # Lightning resets the metrics that steps logged, so that a later validation or test starts
        # empty.
        self.run.reset_metrics()

    def on_validation_start(self) -> None:
        if self.run.reporter is not None:
            self.run.reporter.validation_starts()
        self.learner.on_validation_start()

    def on_validation_batch_end(self, outputs: Any, batch: Any, index: int, *loader: int) -> None:
        self.learner.on_validation_batch_end(outputs, batch, index, *loader)
        # After a loader's last batch Lightning reduces the values that steps logged.
        if index + 1 == self.trainer.num_val_batches[loader[0] if loader else 0]:
            check_logged_alike(self.trainer)

    def on_validation_epoch_end(self) -> None:
        self.learner.on_validation_epoch_end()
        check_logged_alike(self.trainer)

    def on_validation_end(self) -> None:
        self.learner.on_validation_end()
        if self.run.reporter is not None:
            self.run.reporter.validation_ends(self.trainer)

    def on_train_end(self) -> None:
        self.learner.on_train_end()
        self.run.end()

    def on_save_checkpoint(self, saved: dict[str, Any]) -> None:
        # The learner's hook comes last, as in plain training, and may change every entry.
        self.run.save(saved, self.trainer)
        self.learner.on_save_checkpoint(saved)

    def teardown(self, stage: str) -> None:
        batch_callbacks.give_back(self.trainer)
        measurement.put_back(self.trainer)
        self.learner.teardown(stage)
        self.release_learner()
        self.run.close()
