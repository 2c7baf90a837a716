"""Loggers that measure the model after a round; they do not change the round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from fl_lightning.callback import FederatedCallback
from fl_lightning.introspection.accepted import PositiveInt
from fl_lightning.introspection.attribute_view import View
from fl_lightning.machine.processes import gathered


class Measurement(FederatedCallback, ABC):
    """Base class of loggers that measure the evaluated model after some rounds and after the last.

    A logger measures if (t + 1) mod ``every_n_rounds`` = 0; None: only after the last round. If a
    signal stops a run, no round counts as the last, because the run will be resumed.

    Raises:
        UserError: ``every_n_rounds`` is neither None nor an integer above 0.
    """

    role = "measurement"
    of_samples = True  # the logged values are computed from clients' samples
    # How the names of the logged metrics begin. EarlyStopping and ModelCheckpoint that monitor one
    # of these look only in rounds that were measured.
    prefixes: tuple[str, ...] = ()

    def __init__(self, every_n_rounds: PositiveInt | None = 10) -> None:
        super().__init__()
        self.every_n_rounds = None if every_n_rounds is None else int(every_n_rounds)
        self._ended = self._measured = self._validated = -1  # rounds
        self._failure: Exception | None = None  # of the latest measurement
        self.measured_late = False  # whether at the end of the fit, after the last round

    @abstractmethod
    def measure(self, module: Any) -> dict[str, float]:
        """Return the values to log for this FederatedModule; called in every process."""

    @property
    def measured(self) -> bool:
        return self._measured >= 0

    def has_measured(self, t: int) -> bool:
        """Return whether it has measured the model of round t, and has its values."""
        return self._measured == t and self._failure is None

    def validated(self, t: int) -> bool:
        return self._validated == t

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._ended = self._measured = self._validated = -1
        self.measured_late = False
        self._failure = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validated = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._ended = t = trainer.current_epoch
        every = self.every_n_rounds
        if (every and (t + 1) % every == 0) or t + 1 == trainer.max_epochs:
            try:
                self._measure(trainer)
            except Exception as error:
                if trainer.world_size > 1:
                    raise  # other processes wait for this one
                self._failure = error

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise the error of a measurement, when checkpoints of its round have been written."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure the last round, if it is known only now that it was the last."""
        self._raise_failure()
        if self._ended < 0:
            # EarlyStopping had ended the resumed run, and a kill may have come before this.
            self._ended = rounds = pl_module.run.state.rounds - 1
            every = trainer.check_val_every_n_epoch
            if every and (rounds + 1) % every == 0:
                self._validated = self._ended
        # After an early stop the last round is an earlier one than `max_epochs` gives.
        if self._measured != self._ended and self.run_ends(trainer, pl_module):
            self._measure(trainer)
            self.measured_late = True

    def run_ends(self, trainer: Any, pl_module: Any) -> bool:
        """Return whether the run is done, and not only stopped by a signal."""
        # A signal in the last round stops nothing.
        return self._ended + 1 == trainer.max_epochs or not any(gathered(pl_module.stop_requested))

    def _measure(self, trainer: Any) -> None:
        self._measured = self._ended
        module = trainer.lightning_module
        module.run.reporter.log(self.measure(module), self._measured)


HOOKS = ("on_train_epoch_end", "on_train_end")
# Whether Lightning's callbacks look at the end of an epoch; if not, after a validation.
AT_THE_END = ("_check_on_train_epoch_end", "_save_on_train_epoch_end")


def follow(trainer: Any) -> None:
    """Let callbacks that monitor a measurement run after it, and only if it took place."""
    callbacks: list[Any] = vars(trainer)["callbacks"]
    measurements = [each for each in callbacks if isinstance(each, Measurement)]
    moved = []
    for callback in callbacks:
        measurement = _monitored(callback, measurements)
        if measurement is not None:
            _watch(callback, measurement)
            moved.append(callback)
    if moved:
        # Checkpoints stay last.
        others = [each for each in callbacks if each not in moved]
        saving = [each for each in others if _saves(each)]
        before = [each for each in others if each not in saving]
        moved.sort(key=_saves)
        callbacks[:] = [*before, *moved, *saving]


def put_back(trainer: Any) -> None:
    for callback in vars(trainer)["callbacks"]:
        for hook in HOOKS:
            if isinstance(vars(callback).get(hook), partial):
                del vars(callback)[hook]


def _saves(callback: Any) -> bool:
    return hasattr(callback, "best_model_path")


def _monitored(callback: Any, measurements: list[Measurement]) -> Measurement | None:
    monitor = getattr(callback, "monitor", None)
    kinds = {kind.__name__ for kind in type(callback).__mro__}
    if not isinstance(monitor, str) or not kinds & {"EarlyStopping", "ModelCheckpoint"}:
        return None
    logging = [each for each in measurements if monitor.startswith(each.prefixes)]
    return logging[0] if logging else None


def _watch(callback: Any, measurement: Measurement) -> None:
    # A measurement follows the validation, so the callback looks at the end of the round.
    (option,) = [name for name in AT_THE_END if hasattr(callback, name)]
    setattr(callback, option, True)
    own = vars(callback)
    own[HOOKS[0]] = partial(_at_the_end, callback, option, measurement)
    own[HOOKS[1]] = partial(_after_the_last, callback, measurement)


def _at_the_end(
    callback: Any, option: str, measurement: Measurement, trainer: Any, pl_module: Any
) -> None:
    # A subclass's own hook is called in each round; Lightning's looks only if the option is set.
    setattr(callback, option, measurement.has_measured(trainer.current_epoch))
    try:
        type(callback).on_train_epoch_end(callback, trainer, pl_module)
    finally:
        setattr(callback, option, True)


def _after_the_last(callback: Any, measurement: Measurement, trainer: Any, pl_module: Any) -> None:
    # After an early stop the last round is measured only now, when Lightning counts one more.
    t = trainer.current_epoch - 1
    if measurement.measured_late and measurement.has_measured(t) and _saves(callback):
        in_round = View(trainer, current_epoch=lambda: t)
        type(callback).on_train_epoch_end(callback, in_round, pl_module)
    type(callback).on_train_end(callback, trainer, pl_module)
