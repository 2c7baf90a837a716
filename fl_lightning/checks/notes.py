"""Notes about a run before it begins, and refusals of settings that cannot work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fl_lightning.errors import UserError

# Torch's optimizers whose step is proportional to their learning rate.
LINEAR = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam")


@dataclass(frozen=True)
class RunFacts:
    """The facts on which a :class:`Note` or a :class:`Refusal` may depend.

    ``n`` of ``m`` clients take part in a round; ``weighting``, ``clip_norm``, ``sampling`` and
    ``on_nonfinite`` are as they were given. ``optimizer``: the clients' optimizer, if a step is not
    its gradient times the learning rate; otherwise empty. ``momentum``: its. ``server``: the
    server optimizer, if it is not plain SGD; otherwise empty. ``server_rate``: its learning rate;
    None if it changes.
    ``by_step``: whether the clients' rate changes within a round. ``deadline``: whether a clock
    leaves out late clients. ``keeps_optimizer``: keep_optimizer_state. ``averaged_buffers``: the
    buffers that the server averages. ``companions``: the classes
    of the run's callbacks. ``direction_owner``: the one that decides the direction of local steps
    (``precondition``); empty if no callback does. ``rate_owner``: the one that decides the rate of
    each local step (``step_rate``); empty if no callback does.
    """

    n: int
    m: int
    weighting: str
    optimizer: str = ""
    momentum: float = 0.0
    server: str = ""
    server_rate: float | None = 1.0
    clip_norm: float | None = None
    sampling: str = "uniform"
    on_nonfinite: str = "stop"
    by_step: bool = False
    deadline: bool = False
    keeps_optimizer: bool = False
    averaged_buffers: str = ""
    companions: tuple[str, ...] = ()
    direction_owner: str = ""
    rate_owner: str = ""


class Note:
    """A warning about a run that is printed before the run begins, if it applies; the run's card
    repeats it.

    Args:
        text: text that may refer, in braces, to attributes of the method, of :class:`RunFacts` and
            to ``values``.
        when: function that returns whether it applies to a method in a run.
        values: further names for the text, each a function of the method and the run.
    """

    def __init__(
        self,
        text: str,
        when: Callable[[Any, RunFacts], bool],
        **values: Callable[[Any, RunFacts], object],
    ) -> None:
        self.text = text
        self.when = when
        self.values = values

    def about(self, method: object, run: RunFacts) -> str:
        """Return the text for this method and run; empty if it does not apply."""
        if not self.when(method, run):
            return ""
        values = {name: value(method, run) for name, value in self.values.items()}
        names = {**vars(method), **vars(run), **values}
        return f"{type(method).__name__}: {self.text.format(**names)}"


class Refusal(Note):
    """A setting with which a method cannot run: if it applies, the run is refused with this text.

    Args:
        settings: arguments of FederatedModule with which it does not apply; the contracts run with
            them.
    """

    def __init__(
        self,
        text: str,
        when: Callable[[Any, RunFacts], bool],
        settings: dict[str, Any] | None = None,
        **values: Callable[[Any, RunFacts], object],
    ) -> None:
        super().__init__(text, when, **values)
        self.settings = settings or {}


# For methods that take batch[1] for class indices: the first steps refuse other batches.
CLASS_LABELS = Refusal("", when=lambda method, run: False)
UNIFORM_OPTIMUM = Note(
    "its fixed point is the optimum of the uniform mean over clients, also with "
    "weighting='samples'.",
    when=lambda method, run: run.weighting == "samples",
)
# For methods that read clients.lr in the hooks of a local step.
ROUND_RATE = Note(
    "it takes steps of its own at the round's learning rate, which {rate_owner} does not change.",
    when=lambda method, run: bool(run.rate_owner),
)


def _other_displacement(method: Any, run: RunFacts) -> str:
    """Return why a client's displacement / (Σ η) is not the mean of its steps' gradients; empty: it
    is, or the method does not take it for that.
    """
    estimate = getattr(method, "estimate", "")
    direction = run.direction_owner
    # The owner of `on_direction` adds the mean of directions to directions.
    if estimate == "gradient" or (direction and method.has("on_direction")):
        return ""
    if not direction and run.optimizer == "SGD" and run.momentum:
        why = f"with momentum={run.momentum:g} it is up to {1 / (1 - run.momentum):.3g} times that"
    elif direction or run.optimizer:
        way_out = f". {type(method).__name__}(estimate='gradient') takes the gradient itself"
        why = (
            f"a step of {direction or run.optimizer} is not its gradient times the learning rate, "
            "so the method's state has another scale than the gradients to which it is added. The "
            f"method is made for SGD{way_out if estimate else ''}"
        )
    elif run.clip_norm is not None:
        why = f"where clipping is active (clip_norm={run.clip_norm:g}), it is less than that"
    else:
        return ""
    return f"it takes a client's displacement / (Σ η) for the mean gradient of its steps; {why}"


# For methods that read clients.mean_gradient.
MEAN_GRADIENT = Note(
    "{why}", when=lambda m, run: bool(_other_displacement(m, run)), why=_other_displacement
)


def beyond_memory(kept: Mapping[str, int], clients: int, budget: int) -> str:
    """Return a note if the rows of all clients do not fit into memory; otherwise an empty text.

    Args:
        kept: bytes of a client's row, by the state's name.
        budget: bytes of rows that a process keeps in memory.
    """
    whole = clients * sum(kept.values())
    if whole <= budget:
        return ""
    return (
        f"{', '.join(kept)}: the rows of {clients:,} clients take up to {whole / 2**30:,.1f} GiB. "
        f"Beyond {budget / 2**30:,.1f} GiB per process they lie on disk"
    )


def refuse_optimizer(run: RunFacts, direction: str, rate: str) -> None:
    """Refuse client optimizers whose own rule would change a method's decision about a step.

    Args:
        direction, rate: the methods that decide the direction and the rate of local steps; empty:
            there is none.

    Raises:
        UserError: it names the method, the optimizer and what to set.
    """
    if direction and run.optimizer:
        kind = run.optimizer
        if kind == "SGD":
            kind = "SGD with momentum, maximize or several groups"
        raise UserError(
            f"method: {direction} decides in which direction clients step, and the client "
            f"optimizer is {kind}, whose update rule would change that direction again. Use plain "
            "SGD: model.client_optimizer=torch.optim.SGD, with lr and weight_decay only."
        )
    if rate and run.by_step:
        raise UserError(
            f"method: {rate} decides the learning rate of each local step, and so does "
            "client_scheduler='local_steps'. Set model.client_scheduler='rounds' or 'ignore', or "
            f"leave {rate} out."
        )
    if rate and run.optimizer and run.optimizer not in LINEAR:
        raise UserError(
            f"method: {rate} multiplies the learning rate of each local step, but a step of "
            f"{run.optimizer} is not proportional to its learning rate. Use one of torch.optim's "
            f"{', '.join(LINEAR)}."
        )
