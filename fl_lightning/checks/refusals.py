"""Refusals, before training starts, of settings that cannot work, with the reason and a remedy."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from torch import nn

from fl_lightning.checks.optimizers import rates_over
from fl_lightning.errors import UserError, check_on_disk
from fl_lightning.learner.modules import lightning_base, overrides
from fl_lightning.machine.federated_strategy import FederatedStrategy

# Use this in place of the Trainer's accumulate_grad_batches.
ACCUMULATE = (
    "Gradients are accumulated in a client's local step: give model.accumulate, the number of "
    "batches of data.batch_size in each step"
)

REFUSED_HOOKS = {
    "optimizer_step": (
        "the optimizer's step belongs to the federated loop. Remove it; a warm-up written there "
        "is an lr scheduler of configure_optimizers with client_scheduler='local_steps' or "
        "'rounds', and what else it does a FederatedCallback (on_local_gradient, "
        "on_local_step_end)"
    ),
    "configure_sharded_model": "layers are made in configure_model. Rename it",
}

# Precisions of the Trainer that convert the learner's weights to less than float32.
HALF = ("16-true", "bf16-true", "transformer-engine", "transformer-engine-float16")

# Lightning's own callbacks, by the name of the class.
REFUSED_CALLBACKS = {
    "LearningRateFinder": (
        "its trial steps are steps of the server, not of clients; try some client_lr in short runs"
    ),
    "BatchSizeFinder": (
        "its trial steps are steps of the server, not of clients; give data.batch_size"
    ),
    "ThroughputMonitor": (
        "it counts samples of the Trainer's batches, and those of a round are the clients'; the "
        "metrics time/round and cost/gradients say how much was done in what time"
    ),
    "SpikeDetection": (
        "it leaves out batches of the Trainer, and those of a round are the clients'; give "
        "model.on_nonfinite='skip' for clients whose update is not finite, model.clip_norm, or "
        "EarlyStopping(monitor='train/loss', divergence_threshold=…)"
    ),
    "GradientAccumulationScheduler": (f"a round is one step of the server. {ACCUMULATE}"),
    "BaseFinetuning": (
        "it unfreezes parameters during a fit, and the set of trainable parameters is fixed at its "
        "start; set requires_grad in the learner's __init__, setup or configure_model, and for "
        "another set begin another fit with init_from"
    ),
}


def check_learner(learner: Any) -> None:
    """Refuse learners that the federated loop cannot train as they ask for.

    Raises:
        UserError: not a LightningModule, no training_step, manual optimization, or a hook that a
            federated run cannot call.
    """
    name = type(learner).__name__
    if any(kind.__name__ == "FederatedModule" for kind in type(learner).__mro__):
        raise UserError(
            f"learner: {name} is a FederatedModule already. Give it to the Trainer, or wrap its "
            "learner: FederatedModule(module.learner, …)."
        )
    if isinstance(learner, type):
        raise UserError(
            f"learner: {learner.__name__} is a class. Give an object of it: {learner.__name__}(…)."
        )
    compiled = getattr(learner, "_orig_mod", None)
    if lightning_base(compiled) is not None:
        inner = type(compiled).__name__
        raise UserError(
            f"learner: this is torch.compile({inner}(…)), whose training_step would not be the "
            f"compiled one. Give the learner itself, FederatedModule({inner}(…), …), and compile "
            "parts of it in its __init__ if need be."
        )
    if lightning_base(learner) is None:
        if isinstance(learner, nn.Module):
            hint = f"wrap it: Classifier({name}(), num_classes=10)"
        else:
            hint = "pass one"
        raise UserError(
            f"learner: {name} is not a LightningModule; accepted is any LightningModule of "
            "pytorch_lightning or lightning.pytorch whose training_step returns the local loss; "
            f"{hint}."
        )
    if not overrides(learner, "training_step"):
        raise UserError(
            f"learner: {name} has no training_step. Write training_step(self, batch, batch_idx); "
            "it returns the local loss."
        )
    if not learner.automatic_optimization:
        raise UserError(
            f"learner: {name} uses manual optimization (automatic_optimization=False), and a "
            "federated run cannot run such steps per client: it steps one optimizer itself. Let "
            "training_step return one loss and configure_optimizers give one optimizer, and "
            "remove that line."
        )
    for hook, why in REFUSED_HOOKS.items():
        if overrides(learner, hook):
            raise UserError(
                f"learner: {name} overrides {hook}, which a federated run does not call: {why}."
            )


def check_trainer(trainer: Any) -> None:
    """Refuse Trainer settings that have no meaning when one epoch is one round.

    Raises:
        UserError: a setting is refused; the error names it, its value and what to use instead.
    """
    for name in ("lr_decay", "server_lr_decay"):
        if trainer.lightning_module is not None:
            rates_over(name, getattr(trainer.lightning_module.settings, name), trainer.max_epochs)
    check_options(trainer)
    check_folders(trainer)
    for callback in trainer.callbacks:
        check_callback(trainer, callback)
    if trainer.world_size > 1:
        check_processes(trainer)


def check_options(trainer: Any) -> None:
    """Refuse options of the Trainer that have no meaning when one epoch is one round.

    Raises:
        UserError: an option is refused; the error names it, its value and what to use instead.
    """
    # A trial run (fast_dev_run) sets some of these options itself.
    quick = bool(trainer.fast_dev_run)
    batches = trainer.limit_train_batches
    # For Lightning the integer 1 means one batch, and 1.0 means all batches.
    whole = batches is None or (isinstance(batches, float) and batches == 1.0)
    accumulated = trainer.accumulate_grad_batches
    # (option, whether it is accepted, what to use instead); overfit_batches also sets
    # limit_train_batches, which comes after it.
    rows: list[tuple[str, bool, str]] = [
        ("max_steps", trainer.max_steps == -1 or quick, "rounds are epochs: use max_epochs"),
        (
            "accumulate_grad_batches",
            accumulated == 1,
            f"a round is one step of the server. {ACCUMULATE} (here {accumulated})",
        ),
        (
            "gradient_clip_val",
            trainer.gradient_clip_val is None,
            "clients clip with model.clip_norm",
        ),
        (
            "val_check_interval",
            trainer.val_check_interval in (None, 1.0),
            "validation follows whole rounds: use check_val_every_n_epoch",
        ),
        (
            "overfit_batches",
            trainer.overfit_batches in (None, 0, 0.0),
            "give the clients less data, or model.local_steps",
        ),
        (
            "limit_train_batches",
            whole or quick,
            "an epoch is one round: use model.local_steps or model.participation",
        ),
        (
            "precision",
            trainer.precision not in ("16-mixed", *HALF),
            "its loss scaling cannot follow many clients, and half precision would lose small "
            "steps: use 32-true, 64-true or bf16-mixed",
        ),
    ]
    for name, accepted, instead in rows:
        if not accepted:
            value = getattr(trainer, name)
            raise UserError(
                f"trainer.{name}={value!r} has no meaning in a federated run; {instead}."
            )


def check_folders(trainer: Any) -> None:
    """Refuse folders that are not on a disk, as those of a remote storage.

    Raises:
        UserError: it names the option, and how to keep a run in such a storage.
    """
    folders = {"trainer.default_root_dir": trainer.default_root_dir}
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        folders[f"callback {type(callback).__name__}: dirpath"] = folder
        # Without a folder of its own, it writes beside the first logger.
        for logger in trainer.loggers[:1] if folder is None else ():
            folders[f"logger {type(logger).__name__}: save_dir"] = logger.save_dir
    for option, folder in folders.items():
        check_on_disk(option, folder)


def check_callback(trainer: Any, callback: Any) -> None:
    """Refuse a callback of Lightning that cannot work when one epoch is one round.

    Raises:
        UserError: a callback is refused; the error names it and what to use instead.
    """
    name = type(callback).__name__
    # Compare names of classes: Lightning has two namespaces, and each has its own classes.
    kinds = [kind.__name__ for kind in type(callback).__mro__]
    for kind in kinds:
        if kind in REFUSED_CALLBACKS:
            raise UserError(
                f"trainer.callbacks: {name} cannot work in a federated run: "
                f"{REFUSED_CALLBACKS[kind]}."
            )
    saves = "ModelCheckpoint" in kinds
    if saves and (callback._every_n_train_steps or callback._train_time_interval):
        raise UserError(
            "callback ModelCheckpoint: every_n_train_steps would save another model than the one "
            "that its score belongs to, because it saves within a round, and train_time_interval "
            "would save nothing. Give every_n_epochs, the number of rounds between checkpoints."
        )
    if "StochasticWeightAveraging" in kinds and trainer.lightning_module is not None:
        modules = trainer.lightning_module.modules()
        if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in modules):
            raise UserError(
                "callback StochasticWeightAveraging: with BatchNorm it adds an epoch to estimate "
                "the statistics of the averaged weights, and here that epoch would be a round, "
                "which trains the weights further. Use a learner without BatchNorm (GroupNorm), or "
                "average exported models of late rounds outside the run."
            )


def check_processes(trainer: Any) -> None:
    """Refuse a strategy or a callback that cannot work in several processes.

    Raises:
        UserError: the object is refused; the error says what to use instead.
    """
    if not isinstance(trainer.strategy, FederatedStrategy):
        raise UserError(
            f"trainer.devices gives {trainer.world_size} processes, but trainer.strategy is "
            f"{type(trainer.strategy).__name__}, which would average gradients of different "
            "clients. Use --trainer.strategy federated (in Python: strategy='federated')."
        )
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if getattr(callback, "save_on_exception", False) or name == "OnExceptionCheckpoint":
            raise UserError(
                f"callback {name} saves after an exception (save_on_exception). Several processes "
                "cannot do that together: if one fails, the others do not take part. Set "
                "save_on_exception=False, and resume from the checkpoint of the last round."
            )


def check_data(data: Any) -> None:
    """Refuse data without clients.

    Raises:
        UserError: it has the line of code that federates the data.
    """
    if callable(getattr(data, "client_batches", None)):
        return
    name = "a DataLoader"
    wrap = "FromDatasets(train, val=val, num_clients=100)"
    if data is not None:
        name = type(data).__name__
        wrap = f"FromDataModule({name}(…), num_clients=100)"
    raise UserError(
        f"data: {name} has no clients. Federate it: trainer.fit(module, {wrap}) with from "
        "fl_lightning.datamodules import FromDataModule, FromDatasets; or use InMemoryDataModule."
    )


def count_participants(participation: str | int | float, num_clients: int) -> int:
    """Return n of m: a fraction is rounded half up, computed exactly from its decimal form; at
    least one.

    >>> [count_participants(p, 25) for p in ("all", 3, 0.1, 0.001)]
    [25, 3, 3, 1]

    Raises:
        UserError: the number is larger than m.
    """
    if isinstance(participation, str):
        return num_clients
    if isinstance(participation, int):
        if participation > num_clients:
            raise UserError(
                f"participation={participation} clients per round, but {num_clients} are "
                "registered. Give at most these, a fraction above 0 up to 1.0, or 'all'."
            )
        return participation
    # The float 0.35 is slightly less than 0.35, so rounding it would turn a half down.
    exact = Fraction(str(participation)) * num_clients
    return max(1, int(exact + Fraction(1, 2)))
