"""Whether sites can run a method: everything that its clients' hooks read has to exist at the site.

Sites run the hooks that take clients, ``steps`` and ``parts``. The server runs all others, on its
own copy of the callback. So sites know what these hooks set only if it is a declared state that is
sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fl_lightning.callback import FederatedCallback
from fl_lightning.errors import UserError
from fl_lightning.introspection import hook_source
from fl_lightning.learner.attributes import of_framework
from fl_lightning.learner.modules import lightning_modules, overrides

AT_SITES = (
    "steps",
    "parts",
    "trained",
    "on_local_start",
    "perturbation",
    "local_output",
    "local_loss",
    "local_batch",
    "on_loss_gradient",
    "on_local_gradient",
    "precondition",
    "on_direction",
    "step_rate",
    "on_local_step_end",
    "on_local_end",
    "transmit",
    "encode",
    "personal",
)
AT_SERVER = (
    "select",
    "on_round_start",
    "broadcast",
    "on_updates",
    "aggregate",
    "on_server_update",
    "evaluated",
    "on_round_end",
)
# Lightning's hooks that the server runs in each round, and sites do not.
OF_ROUNDS = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


def refuse_unsent(callback: object, name: str) -> None:
    """Refuse an attribute that a method assigns at the server, if sites run hooks of the method,
    too.

    Raises:
        UserError: it names the method and the attribute.
    """
    if isinstance(callback, FederatedCallback) and any(map(callback.has, AT_SITES)):
        raise UserError(
            f"method: {type(callback).__name__} sets self.{name} in a hook that only the server "
            f"runs, and sites, which run its other hooks, would not see it. Declare it with {name} "
            "= ServerState(sent=True), or ServerState() if only hooks of the server read it; or "
            "simulate with `fl-lightning fit`."
        )


def check_learner(learner: nn.Module, note: Callable[[str], None]) -> None:
    """Refuse a learner whose ``on_train_epoch_…`` reads values that its training steps collect.

    The steps run at sites, and the hook at the server. If only a hook of validation reads such a
    value, ``note`` gets a text: validation may have changed the value, too.

    Raises:
        UserError: it names the learner, the attribute and the hook.
    """
    for part in lightning_modules(learner):
        name = type(part).__name__
        moved = {
            each for each in hook_source.moved_by(part, part.training_step) if _stays(part, each)
        }
        for hook in filter(partial(overrides, part), OF_ROUNDS if moved else ()):
            if hook in ("on_train_batch_start", "on_train_batch_end"):
                continue
            for attribute in sorted(moved & hook_source.read_first(getattr(part, hook))):
                text = (
                    f"learner {name}: training_step changes self.{attribute} at the sites, and "
                    f"{hook}, which only the server runs, reads it there, without these changes. "
                    "In training_step, log the value (self.log gives the mean over steps and "
                    "clients), or update a metric of torchmetrics"
                )
                if hook.startswith("on_train"):
                    raise UserError(f"{text}; or simulate with `fl-lightning fit`.")
                note(text)


def _stays(learner: Any, name: str) -> bool:
    """Return whether this is an attribute that is not sent to the server."""
    if name in {*learner._modules, *learner._parameters, *learner._buffers}:
        return False
    return not of_framework(learner, name)
