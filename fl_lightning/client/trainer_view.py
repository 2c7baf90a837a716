"""The Trainer for a learner in a client's local steps, with the client's own numbers.

Lightning's training batch is the round's token. In a step a learner reads the client's own values
from it, such as ``num_training_batches`` for the weight of a KL term; everything else comes from
the run's Trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from fl_lightning.errors import UserError
from fl_lightning.introspection.attribute_view import View
from fl_lightning.machine.lightning import DummyLogger, is_foreign

VALIDATING = "validate"  # a value of Lightning's RunningStage
MISSING = object()


class Lent:
    """What a learner's steps reach through its Trainer in trials, measurements and workers.

    The Trainer belongs to the run and not to a copy of the learner. So a trial step and a
    measurement must not write there, and a worker process that writes there would lose it.

    ``reached``: the first place that the steps may have written; empty: none.
    """

    def __init__(self) -> None:
        self.reached = ""
        self._assigned: dict[tuple[int, str], tuple[Any, Any]] = {}

    def reach(self, place: str) -> None:
        self.reached = self.reached or place

    def assign(self, each: Any, name: str) -> None:
        """The learner assigns to an attribute of this object."""
        self.reach(f"{type(each).__name__}.{name}")
        self._assigned.setdefault((id(each), name), (each, getattr(each, name, MISSING)))

    def undo(self) -> None:
        """Give the objects the attributes that they had."""
        for (_, name), (each, before) in self._assigned.items():
            if before is not MISSING:
                setattr(each, name, before)
            elif hasattr(each, name):
                delattr(each, name)


def nobody() -> NoReturn:
    """Refuse to give a client's number of batches while several clients train at once."""
    raise UserError(
        "training_step reads how many batches its client has (trainer.num_training_batches, "
        "train_dataloader, is_last_batch). Here several clients are trained or measured at once, "
        "so there is no single number. Use --model.engine sequential or concurrent."
    )


@dataclass
class ClientProgress:
    """The client and the local step in which a learner is.

    Args:
        who: function that returns the client's number.
        steps: steps of the client in the round; None: it is not trained, but measured.
        index: index of the step, which ``training_step`` gets as ``batch_idx``.
        validated: the number of batches on which ``model`` is validated; None: it is in a training
            step.
        silent: whether the Trainer shows a logger that writes nothing (Lightning's DummyLogger),
            because this is not the run's own round.
        measures: whether the learner is measured, so that it is not in the training stage.
        lent: notices what the learner reaches at its Trainer; None outside of trials and workers.
    """

    data: Any = None
    who: Callable[[], int] = nobody
    steps: int | None = None
    index: Any = 0
    validated: int | None = None
    model: Any = None
    view: View | None = None
    silent: bool = False
    measures: bool = False
    lent: Lent | None = None

    def begin(self, data: Any, who: Callable[[], int] = nobody, steps: int | None = None) -> None:
        self.data = data
        self.who = who
        self.steps = steps
        self.index = 0
        self.validated = None

    def begin_validation(self, batches: int, model: Any) -> None:
        """Let the learner ``model`` find at its Trainer that it is validated on so many batches."""
        self.validated = batches
        self.model = model

    def __deepcopy__(self, memo: Any) -> ClientProgress:
        # A copy of the learner is not in a step, and has no batches.
        return ClientProgress()

    def loader(self) -> ClientLoader:
        return ClientLoader(self.data, self.who())

    def batches(self) -> int:
        return len(self.loader())

    def is_last(self) -> bool:
        """Return whether this is the last batch of an epoch of the client, or of its round."""
        done = self.index + 1
        return bool(done % self.batches() == 0 or done == self.steps)

    def stage(self, trainer: Any) -> Any:
        """Return Lightning's RunningStage of the learner, whatever ``trainer`` does."""
        stage = trainer.state.stage
        return type(stage)(VALIDATING) if self._validates and stage is not None else stage

    def in_stage(self, trainer: Any, word: str) -> bool:
        """Return ``trainer.training``, ``trainer.validating`` or ``trainer.evaluating``."""
        return word != "training" if self._validates else bool(getattr(trainer, word))

    @property
    def _validates(self) -> bool:
        return self.measures or self.validated is not None

    def validation_batches(self, trainer: Any) -> Any:
        return trainer.num_val_batches if self.validated is None else [self.validated]

    def loggers(self, trainer: Any) -> list[Any]:
        """Return the run's loggers, or as many that write nothing."""
        if self.silent and self.lent is not None and trainer.loggers:
            self.lent.reach("the run's loggers")
        return [DummyLogger() for _ in trainer.loggers] if self.silent else trainer.loggers

    def logger(self, trainer: Any) -> Any:
        return next(iter(self.loggers(trainer)), None)

    def callbacks(self, trainer: Any) -> Any:
        """Return the Trainer's callbacks; in a trial, copies of those that users wrote."""
        if self.lent is None or not any(is_foreign(type(each)) for each in trainer.callbacks):
            return trainer.callbacks
        self.lent.reach("the Trainer's callbacks")
        return [copy.copy(c) if is_foreign(type(c)) else c for c in trainer.callbacks]

    def _assigns(self, each: Any, name: str) -> None:
        if self.lent is not None:
            self.lent.assign(each, name)

    @contextmanager
    def lending(self) -> Iterator[Lent]:
        """Within this context, what the learner writes at its Trainer is noticed, then undone."""
        self.lent = lent = Lent()
        try:
            yield lent
        finally:
            self.lent = None
            lent.undo()

    def trainer(self, trainer: Any) -> Any:
        """Return a view of ``trainer`` that shows the current client's numbers.

        The view is created once. Returns None if ``trainer`` is None.
        """
        if trainer is not None and trainer is self.view:
            return trainer
        # A copied learner may carry the view of the worker that it was copied from.
        while type(trainer) is View:
            trainer = trainer._of
        if trainer is None:
            return None
        epoch = trainer.fit_loop.epoch_loop
        index = partial(getattr, self, "index")
        progress = View(epoch.batch_progress, is_last_batch=self.is_last)
        epoch = View(epoch, batch_idx=index, batch_progress=lambda: progress)
        loop = View(
            trainer.fit_loop, batch_idx=index, max_batches=self.batches, epoch_loop=lambda: epoch
        )
        own: dict[str, Callable[[], Any]] = {
            "fit_loop": lambda: loop,
            "num_training_batches": self.batches,
            "is_last_batch": self.is_last,
            "train_dataloader": self.loader,
        }
        state = View(trainer.state, stage=partial(self.stage, trainer))
        own["state"] = lambda: state
        for word in ("training", "validating", "evaluating"):
            own[word] = partial(self.in_stage, trainer, word)
        own["num_val_batches"] = partial(self.validation_batches, trainer)
        own["model"] = lambda: trainer.model if self.validated is None else self.model
        if trainer.datamodule is not None:
            assigns = partial(self._assigns, trainer.datamodule)
            data = View(trainer.datamodule, assigns, train_dataloader=lambda: self.loader)
            own["datamodule"] = lambda: data
        for name in ("callbacks", "logger", "loggers"):
            own[name] = partial(getattr(self, name), trainer)
        self.view = View(trainer, partial(self._assigns, trainer), **own)
        return self.view


class ClientLoader:
    """A client's samples for its learner, with its batches in order."""

    def __init__(self, data: Any, client: int) -> None:
        self._data = data
        self._client = client

    def __len__(self) -> int:
        return int(self._data.batches_per_epoch(self._client))

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _ in self._data.full_batches(self._client))

    @property
    def dataset(self) -> Any:
        """Return the samples that the client trains on, one by one."""
        return self._data.client_dataset(self._client)

    @property
    def batch_size(self) -> int:
        return int(self._data._mine.batch_size or self._data.client_sizes()[self._client])

    @property
    def drop_last(self) -> bool:
        return bool(self._data._mine.drop_last)
