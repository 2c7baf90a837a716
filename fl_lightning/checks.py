"""What cannot work is refused before training starts, with the reason and the way out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fl_lightning.errors import UserError, suggest
from fl_lightning.learner import lightning_base, overrides
from fl_lightning.schedules import Schedule
from fl_lightning.strategies import FederatedStrategy

REFUSED_HOOKS = {
    "optimizer_step": "the optimizer's step belongs to the federated loop. Remove it; a warm-up written there is an lr "
    "scheduler of configure_optimizers with client_scheduler='local_steps' or 'rounds', and what "
    "else it does a FederatedCallback (on_local_gradient, on_local_step_end)",
    "configure_sharded_model": "layers are made in configure_model. Rename it",
}

REFUSED_CALLBACKS = {  # of Lightning
    "LearningRateFinder": "its trial steps are steps of the server, not of clients; try some client_lr in short runs",
    "BatchSizeFinder": "its trial steps are steps of the server, not of clients; give data.batch_size",
    "ThroughputMonitor": "it counts samples of the Trainer's batches, and those of a round are the clients'; the "
    "metrics time/round and cost/gradients say how much was done in what time",
    "GradientAccumulationScheduler": "a round is one step of the server; use a larger data.batch_size",
}


def check_learner(learner: Any) -> None:
    """Refuse learners that the federated loop cannot honour.

    Raises:
        UserError: not a LightningModule, manual optimization, or a hook that cannot do what it does
            alone.
    """
    name = type(learner).__name__
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
            hint = f"wrap it: ImageClassifier({name}(), num_classes=10)"
        else:
            hint = "pass one"
        raise UserError(
            f"learner: {name} is no LightningModule; accepted is any LightningModule of "
            "pytorch_lightning or lightning.pytorch, whose training_step gives the local loss; "
            f"{hint}."
        )
    if not learner.automatic_optimization:
        raise UserError(
            f"learner: {name} uses manual optimization (automatic_optimization=False), whose "
            "steps cannot be run per client. Let training_step return the loss and remove that "
            "line."
        )
    for hook, why in REFUSED_HOOKS.items():
        if overrides(learner, hook):
            raise UserError(
                f"learner: {name} overrides {hook}, which a federated run does not call: {why}."
            )
    if overrides(learner, "optimizer_zero_grad") and not clears_gradients(learner):
        raise UserError(
            f"learner: {name} overrides optimizer_zero_grad and leaves gradients standing, but "
            "each local step of a federated run has a gradient of its own. Remove it; to "
            "accumulate, use a larger batch size of the data."
        )


def clears_gradients(learner: Any) -> bool:
    """Whether the learner's own ``optimizer_zero_grad`` does what Lightning's does, tried on an
    optimizer of no use.
    """
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.ones(1)
    try:
        learner.optimizer_zero_grad(0, 0, torch.optim.SGD([probe], lr=0.0))
    except Exception:  # it looks at more than is there
        return False
    return probe.grad is None or not bool(probe.grad.any())


def check_trainer(trainer: Any) -> None:
    """Refuse Trainer settings that have no meaning when one epoch is one round.

    Raises:
        UserError: names the setting, its value and what to use.
    """
    quick = bool(trainer.fast_dev_run)
    for name in ("lr_decay", "server_lr_decay"):
        if trainer.lightning_module is not None:
            rates_over(name, getattr(trainer.lightning_module.settings, name), trainer.max_epochs)
    refused = [
        (
            "max_steps",
            trainer.max_steps,
            trainer.max_steps == -1 or quick,
            "rounds are epochs: use max_epochs",
        ),
        (
            "min_steps",
            trainer.fit_loop.min_steps,
            not trainer.fit_loop.min_steps,
            "rounds are epochs: use min_epochs",
        ),
        (
            "accumulate_grad_batches",
            trainer.accumulate_grad_batches,
            trainer.accumulate_grad_batches == 1,
            "a round is one step of the server: use a larger data.batch_size",
        ),
        (
            "gradient_clip_val",
            trainer.gradient_clip_val,
            trainer.gradient_clip_val is None,
            "clients clip with model.clip_norm",
        ),
        (
            "val_check_interval",
            trainer.val_check_interval,
            trainer.val_check_interval in (None, 1.0),
            "validation follows whole rounds: use check_val_every_n_epoch",
        ),
        (
            "check_val_every_n_epoch",
            trainer.check_val_every_n_epoch,
            (trainer.check_val_every_n_epoch or 1) > 0 and trainer.check_val_every_n_epoch != 0,
            "give a number of rounds from 1; limit_val_batches=0 leaves validation out",
        ),
        (
            "limit_train_batches",
            trainer.limit_train_batches,
            trainer.limit_train_batches in (None, 1.0) or quick,
            "an epoch is one round: use model.local_steps or model.participation",
        ),
        (
            "overfit_batches",
            trainer.overfit_batches,
            trainer.overfit_batches in (None, 0, 0.0),
            "give the clients less data, or model.local_steps",
        ),
        (
            "precision",
            trainer.precision,
            trainer.precision != "16-mixed",
            "its loss scaling cannot follow many clients: use 32-true, 64-true, bf16-mixed or "
            "bf16-true",
        ),
    ]
    for name, value, fine, instead in refused:
        if not fine:
            raise UserError(
                f"trainer.{name}={value!r} has no meaning in a federated run; {instead}."
            )
    check_fixed_parameters(trainer)
    for callback in trainer.callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ in REFUSED_CALLBACKS:
                raise UserError(
                    f"trainer.callbacks: {type(callback).__name__} cannot work in a federated run: "
                    f"{REFUSED_CALLBACKS[cls.__name__]}."
                )
    for callback in trainer.callbacks:
        averaging = any(c.__name__ == "StochasticWeightAveraging" for c in type(callback).__mro__)
        normalised = (isinstance(m, nn.modules.batchnorm._BatchNorm) for m in _parts(trainer))
        if averaging and any(normalised):
            raise UserError(
                "callback StochasticWeightAveraging: with BatchNorm it adds an epoch to estimate "
                "the statistics of the averaged weights, and here that epoch would be a round, "
                "which trains them on. Use a learner without BatchNorm (GroupNorm), or average "
                "exported models of late rounds outside the run."
            )
    if trainer.world_size > 1 and not isinstance(trainer.strategy, FederatedStrategy):
        raise UserError(
            f"trainer.devices gives {trainer.world_size} processes, but trainer.strategy is "
            f"{type(trainer.strategy).__name__}, which would average gradients of different "
            "clients. Use --trainer.strategy federated (in Python: strategy='federated')."
        )
    for callback in trainer.callbacks if trainer.world_size > 1 else ():
        if (
            getattr(callback, "save_on_exception", False)
            or type(callback).__name__ == "OnExceptionCheckpoint"
        ):
            raise UserError(
                f"callback {type(callback).__name__} saves as an exception passes "
                "(save_on_exception), which several processes cannot do together: where one "
                "fails, the others are elsewhere. Set save_on_exception=False; the checkpoint of "
                "the last round is what to resume from."
            )


def _parts(trainer: Any) -> Iterator[nn.Module]:
    module = trainer.lightning_module
    return iter(()) if module is None else module.modules()


def check_fixed_parameters(trainer: Any) -> None:
    """Refuse callbacks that change which parameters are trained during a fit.

    Raises:
        UserError: with the callback's name.
    """
    for callback in trainer.callbacks:
        if any(c.__name__ == "BaseFinetuning" for c in type(callback).__mro__):
            raise UserError(
                f"callback {type(callback).__name__} unfreezes parameters during a fit, and the "
                "set of trainable parameters is fixed at its start. Set requires_grad in the "
                "learner's __init__, setup or configure_model; for another set, begin another "
                "fit with init_from."
            )


def check_data(data: Any) -> None:
    """Refuse data without clients.

    Raises:
        UserError: with the line that federates it.
    """
    if callable(getattr(data, "client_batches", None)):
        return
    given = type(data).__name__ if data is not None else "a DataLoader"
    if data is not None:
        wrap = f"FromDataModule({given}(…), num_clients=100)"
    else:
        wrap = "FromDatasets(train, val=val, num_clients=100)"
    raise UserError(
        f"data: {given} has no clients. Federate it: trainer.fit(module, {wrap}) with from "
        "fl_lightning.datamodules import FromDataModule, FromDatasets; or use InMemoryDataModule."
    )


def count_participants(participation: str | int | float, num_clients: int) -> int:
    """n of m: a fraction is rounded half up, computed exactly from its decimal form; at least one.

    >>> [count_participants(p, 25) for p in ("all", 3, 0.1, 0.001)]
    [25, 3, 3, 1]

    Raises:
        UserError: more than there are, none, or not a number.
    """
    accepted = "accepted are 'all', a fraction above 0 up to 1.0, or a number of clients"
    if participation == "all":
        return num_clients
    # NumPy's
    if isinstance(participation, Real) and not isinstance(participation, (bool, int, float)):
        if isinstance(participation, Integral):
            participation = int(participation)
        else:
            participation = float(participation)
    if isinstance(participation, bool) or not isinstance(participation, (int, float)):
        hint = suggest(str(participation), ["all"])
        raise UserError(f"participation={participation!r} is not known; {accepted}.{hint}")
    if isinstance(participation, int):
        if participation < 1:
            raise UserError(f"participation={participation} is no number of clients; {accepted}.")
        if participation > num_clients:
            raise UserError(
                f"participation={participation} clients a round, but {num_clients} are "
                f"registered; {accepted} (1 to {num_clients})."
            )
        return participation
    if not 0 < participation <= 1:
        raise UserError(f"participation={participation!r} is no fraction of clients; {accepted}.")
    exact = Fraction(str(participation)) * num_clients
    return max(1, int(exact + Fraction(1, 2)))


def one_of(name: str, value: object, accepted: tuple[str | bool, ...]) -> None:
    """Refuse a word that is not known."""
    if value not in accepted:
        known = ", ".join(repr(a) for a in accepted)
        raise UserError(
            f"{name}={value!r} is not known; accepted are "
            f"{known}.{suggest(str(value), [str(a) for a in accepted])}"
        )


def positive(
    name: str, value: float | str | None, whole: bool = False, or_auto: bool = False
) -> None:
    """Refuse what is not a number above 0 (``whole``: an integer; ``or_auto``: or ``"auto"``)."""
    if value is None or (or_auto and value == "auto"):
        return
    number = isinstance(value, Real) and not isinstance(value, bool) and 0 < value < float("inf")
    if not number or (whole and int(value) != value):
        kind = "an integer" if whole else "a number"
        raise UserError(
            f"{name}={value!r} is not accepted; it has to be {kind} above "
            f"0{' or auto' if or_auto else ''}."
        )


def rate(name: str, value: object) -> None:
    """Refuse a decay that is neither a finite number above 0 nor a schedule.

    0 is refused as well: with 0 ** t the first round would be the only one that learns.
    """
    if isinstance(value, Schedule):
        return
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise UserError(
            f"{name}={value!r} is not accepted; it has to be a number above 0, such as 0.998 (1 "
            "is no decay), or a schedule."
        )


def rates_over(name: str, decay: float | Schedule, rounds: int) -> None:
    """Refuse a decay or schedule that becomes negative, or too large for single precision, within a
    run.

    Args:
        rounds: how many are asked for; -1: no end.

    Raises:
        UserError: names the first such round.
    """
    last = 10_000 if rounds < 0 else min(rounds, 10_000)  # later rounds are checked as they come
    largest = float(torch.finfo(torch.float32).max)
    if isinstance(decay, Schedule):
        for t in [*range(last), *([rounds - 1] if rounds > last else [])]:
            if not 0 <= (value := float(decay(t))) <= largest:
                raise UserError(
                    f"{name}={decay!r} gives {value!r} in round {t}; learning rates are "
                    "multiplied by it, so it has to be a finite number from 0."
                )
    elif decay > 1 and (rounds < 0 or (rounds - 1) * math.log(decay) > math.log(largest)):
        if rounds < 0:
            asked = "a run without an end (trainer.max_epochs=-1)"
        else:
            asked = f"{rounds} rounds"
        raise UserError(
            f"{name}={decay!r} multiplies the learning rate in every round: over {asked} it grows "
            "beyond every number. Give one up to 1, such as 0.998, or a schedule that stays "
            "finite."
        )


def check_optimizer(name: str, optimizer: Any) -> None:
    """Refuse what is no optimizer, or one whose step cannot be taken here.

    Args:
        name: the option that made it, ``"client_optimizer"`` or ``"server_optimizer"``.

    Raises:
        UserError: also for learning rates that are negative or not finite, which torch's optimizers
            partly take.
    """
    if not isinstance(optimizer, Optimizer):
        given = "nothing" if optimizer is None else f"a {type(optimizer).__name__}"
        raise UserError(
            f"{name}: it gives {given}, but has to be a function params -> torch.optim.Optimizer."
        )
    kind = type(optimizer).__name__
    why = ""
    if isinstance(optimizer, torch.optim.LBFGS):
        why = "evaluates the loss several times a step"
    elif isinstance(optimizer, torch.optim.SparseAdam):
        why = "takes sparse gradients alone"
    elif any(
        g.get("capturable") and not all(p.is_cuda for p in g["params"])
        for g in optimizer.param_groups
    ):
        why = "has capturable=True, which needs a GPU"
    if why:
        raise UserError(
            f"{name}: {kind} {why}, which cannot work here. Use an optimizer that takes one "
            "gradient a step, such as torch.optim.SGD or torch.optim.Adam."
        )
    for group in optimizer.param_groups:
        if not 0 <= float(group["lr"]) < math.inf:
            raise UserError(
                f"{name}: {kind} has lr={float(group['lr'])!r}; it has to be a finite number from "
                "0."
            )


def seed(value: object) -> None:
    """Refuse a seed that is no integer from 0."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise UserError(
            f"seed={value!r} is not accepted; it has to be an integer from 0, or None for the "
            "run's."
        )
