"""Whether sites can run a method or a learner: what its code at the site reads has to be there.

Sites run the hooks that take clients, ``steps`` and ``parts``. The server runs all others, on its
own copy of the callback. So sites know what these hooks set only if it is a declared state that is
sent. The learner's steps run at sites, and its hooks between steps at the server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from fl_lightning.callback import FederatedCallback
from fl_lightning.deploy.progress import names_of
from fl_lightning.errors import UserError
from fl_lightning.learner.modules import overrides

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
# Lightning's hooks that the server runs in each round, and sites do not.
OF_ROUNDS = (
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
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


def check_learner(
    learner: nn.Module, changed: Collection[str], note: Callable[[str], None]
) -> None:
    """Refuse a learner whose steps, at sites, change attributes that the server's hooks may read.

    If it has only hooks of validation, ``note`` gets a text: validation may have changed the value,
    too.

    Args:
        changed: names of the attributes that a training step changes.

    Raises:
        UserError: it names the learner, the attribute and the hook.
    """
    modules = dict(learner.named_modules())
    for full in changed:
        part, _, attribute = full.rpartition(".")
        declared = [names_of(modules[part], each) for each in ("sent_to_sites", "at_sites")]
        hooks = [hook for hook in OF_ROUNDS if overrides(learner, hook)]
        if not hooks or any(attribute in names for names in declared):
            continue
        text = (
            f"learner {type(learner).__name__}: training_step changes self.{full} at the sites, "
            f"and {hooks[0]}, which only the server runs, would find it without these changes. In "
            "training_step, log the value (self.log gives the mean over steps and clients), or "
            "update a metric of torchmetrics"
        )
        if hooks[0].startswith("on_train"):
            raise UserError(
                f'{text}; if no hook reads it, write at_sites = ("{attribute}",) in the class '
                f"{type(modules[part]).__name__}; or simulate with `fl-lightning fit`."
            )
        note(text)
