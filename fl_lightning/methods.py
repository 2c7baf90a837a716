"""The callbacks of a run taken together: who owns which hook, what they declare, and how hooks are
called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import Tensor

from fl_lightning.callback import (
    Declaration,
    FederatedCallback,
    Layout,
    RunFacts,
    ServerState,
    Upload,
)
from fl_lightning.errors import UserError, suggest
from fl_lightning.schedules import arguments
from fl_lightning.state import Staging, State

OWNED = {
    "select": "who takes part",
    "perturbation": "where the gradient is taken",
    "on_loss_gradient": "how the loss gradient is mixed",
    "local_batch": "what clients train on",
    "transmit": "what clients send",
    "aggregate": "how updates are combined",
    "parts": "which part is averaged when",
    "personal": "what a client uses itself",
}
SHARED = (
    "on_round_start",
    "on_local_start",
    "on_local_gradient",
    "on_local_step_end",
    "on_local_end",
    "on_updates",
    "on_server_update",
    "on_round_end",
)
CHANGING = (*OWNED, "on_local_start", "on_local_gradient", "on_local_step_end", "on_updates")


class Methods:
    """The federated callbacks of a run.

    Raises:
        UserError: two callbacks of one class, or two owners of a hook that has one.
    """

    def __init__(self, callbacks: Sequence[FederatedCallback]) -> None:
        self.callbacks = list(callbacks)
        names = [type(c).__name__ for c in self.callbacks]
        for name in names:
            if names.count(name) > 1:
                raise UserError(
                    f"method: {name} is given {names.count(name)} times; a run takes each "
                    "callback once. Remove one (a config such as method/fedinit may bring it "
                    "already)."
                )
        for callback in self.callbacks:
            refuse_misspelt_hooks(callback)
        self._hooks = {
            hook: [getattr(c, hook) for c in self.callbacks if overrides(c, hook)]
            for hook in SHARED
        }
        ordered = sorted(self.callbacks, key=lambda c: (c.rests, not c.stands_for_clients))
        for hook in ("on_local_gradient", "on_local_step_end", "on_updates"):
            self._hooks[hook] = [getattr(c, hook) for c in ordered if overrides(c, hook)]
        self._owners: dict[str, Callable[..., Any]] = {}
        self._sends: str = "x"
        for hook, what in OWNED.items():
            owners = [c for c in self.callbacks if overrides(c, hook)]
            if len(owners) > 1:
                both = " and ".join(type(c).__name__ for c in owners)
                raise UserError(
                    f"method: {both} both decide {what} (the hook `{hook}`), which one callback "
                    "of a run can do. Keep one of them."
                )
            if owners:
                self._owners[hook] = getattr(owners[0], hook)
                if hook == "transmit":
                    self._sends = owners[0].sends
        self.declared: dict[str, Declaration] = {
            d.key(c): d for c in self.callbacks for d in c.declarations().values()
        }
        for callback in self.callbacks:
            self._refuse_companions(callback)

    def _refuse_companions(self, callback: FederatedCallback) -> None:
        """Refuse what a callback cannot run with, and states that do not say what partial averaging
        does to them.
        """
        name = type(callback).__name__
        for what, why in callback.cannot_run_with.items():
            for other in self.callbacks:
                if what in (*SHARED, *OWNED):
                    has = overrides(other, what)
                else:
                    has = type(other).__name__ == what
                if other is not callback and has:
                    raise UserError(
                        f"method: {name} and {type(other).__name__} cannot run together: {why}. "
                        "Keep one of them."
                    )
        for declared in callback.declarations().values() if "parts" in self._owners else ():
            if isinstance(declared, State) and declared.synchronised is None:
                raise UserError(
                    f"method: {declared.key(callback)} does not say what partial averaging does "
                    "to it, so the two cannot run together. Declare synchronised=True (kept "
                    "where a part is not averaged) or False."
                )

    def notes(self, run: RunFacts) -> list[str]:
        """What the methods have to say about a run before it begins."""
        said = (note.about(callback, run) for callback in self.callbacks for note in callback.notes)
        return [text for text in said if text]

    def bind(self, ledger: Staging) -> None:
        """From here on, declared state reads and writes this round's ledger."""
        for callback in self.callbacks:
            callback._bound_ledger = ledger

    def __getitem__(self, hook: str) -> list[Callable[..., Any]]:
        return self._hooks[hook]

    def owner(self, hook: str) -> Callable[..., Any] | None:
        return self._owners.get(hook)

    def run(self, hook: str, argument: object) -> None:
        """Call a hook that returns nothing, on every callback that has it."""
        for call in self._hooks[hook]:
            returned = call(argument)
            if returned is not None:
                raise _returned(call, returned, "nothing")

    def gradient(self, call: Callable[..., Any], clients: Any, gradient: Tensor) -> Tensor:
        """Call a hook that takes a gradient; gives the gradient, whether it was changed in place or
        returned.
        """
        returned = call(clients, gradient)
        if returned is None:
            return gradient
        return checked_rows(call, returned, gradient)

    def parts(self, layout: Layout) -> list[tuple[Tensor, int | None]]:
        owner = self.owner("parts")
        return owner(layout) if owner else []

    def sent_to_clients(self) -> dict[str, ServerState]:
        return {k: d for k, d in self.declared.items() if isinstance(d, ServerState) and d.sent}

    @property
    def move_starts(self) -> bool:
        """Whether a method may let clients start elsewhere than at w (their own kept parts do not
        count).
        """
        return any(c.moves_start for c in self.callbacks if overrides(c, "on_local_start"))

    @property
    def aggregates_nobody(self) -> bool:
        """Whether the server takes its step where no client finished, too."""
        return any(c.aggregates_nobody for c in self.callbacks if overrides(c, "aggregate"))

    @property
    def draws_from(self) -> int | Literal["secret"] | None:
        """What a private run draws noise and coins from: its secret, or this seed; None: it is not
        private.
        """
        return next((c.draws_from for c in self.callbacks if c.draws_from is not None), None)

    @property
    def gathering(self) -> list[str]:
        """Those that take all updates of a round together, by name."""
        return [type(c).__name__ for c in self.callbacks if c.gathers or overrides(c, "on_updates")]

    @property
    def reads_loss(self) -> bool:
        """Whether one of them asks for the mean loss of a client's local steps."""
        return any(c.reads_loss for c in self.callbacks)

    @property
    def start_from_w0(self) -> bool:
        """Whether a state starts from w^0, so that w^0 has to be kept."""
        return any(getattr(d, "initial", None) == "initial_model" for d in self.declared.values())

    def sent_by_clients(self) -> dict[str, Upload]:
        """Uploads that are counted; those that the server can compute from what is sent anyway are
        not.
        """
        known = {self._sends}
        if self._sends and not self.move_starts:  # one gives the other
            known = {"x", "displacement"}
        source = {"derived": "displacement", "derived from x": "x"}
        return {
            k: d
            for k, d in self.declared.items()
            if isinstance(d, Upload) and d.sent and source.get(str(d.sent)) not in known
        }

    def in_steps_of_others(self) -> str:
        """The first callback from outside this package with a hook in each local step; or an empty
        string.
        """
        hooks = ("perturbation", "on_loss_gradient", "on_local_gradient", "on_local_step_end")
        for callback in self.callbacks:
            packaged = type(callback).__module__.startswith("fl_lightning.")
            if not packaged and any(overrides(callback, hook) for hook in hooks):
                return type(callback).__name__
        return ""

    def fingerprint(self) -> dict[str, str]:
        """Stateful callbacks and their plain arguments, to be compared with those of a checkpoint."""
        return {type(c).__name__: arguments(c) for c in self.callbacks if c.declarations()}

    def stateless(self) -> str:
        """Callbacks without state that change the training, such as ``ProximalTerm(mu=0.1)``:
        compared as well.
        """
        told = (
            f"{type(c).__name__}({arguments(c)})"
            for c in self.callbacks
            if not c.declarations() and any(overrides(c, hook) for hook in CHANGING)
        )
        return ", ".join(sorted(told)) or "none"

    def title(self) -> str:
        """The methods' names, without those that only measure."""
        methods = [
            c for c in self.callbacks if not type(c).__name__.endswith(("Logger", "Evaluation"))
        ]
        names = [c.title or type(c).__name__ for c in methods]
        return " + ".join(names) or "FedAvg"


def refuse_misspelt_hooks(callback: FederatedCallback) -> None:
    """Refuse a method whose name is almost that of a hook: it would never be called."""
    hooks = [name for name in dir(FederatedCallback) if name.startswith("on_") or name in OWNED]
    for name in dir(type(callback)):
        near = suggest(name, hooks) if name.startswith("on_") and name not in hooks else ""
        if near and name != "on_client_end":
            raise UserError(
                f"method: {type(callback).__name__}.{name} is no hook, so it would never be "
                f"called.{near}"
            )


def overrides(callback: FederatedCallback, hook: str) -> bool:
    """Whether a callback has this hook: in its class, or put on the instance in ``__init__``."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(
        FederatedCallback, hook
    )


def checked_rows(call: Callable[..., Any], returned: object, like: Tensor) -> Tensor:
    """What a hook returned, which has to be a tensor with the shape of ``like``."""
    if not isinstance(returned, Tensor) or returned.shape != like.shape:
        raise _returned(call, returned, f"a tensor of shape {tuple(like.shape)}")
    return returned


def checked_choice(call: Callable[..., Any], returned: Any, available: Tensor, n: int) -> list[int]:
    """The clients that ``select`` returned, ascending: n distinct ones of the available."""
    given = returned.tolist() if hasattr(returned, "tolist") else returned
    ids = sorted(int(i) for i in given) if isinstance(given, Iterable) else []
    if len(ids) != n or len(set(ids)) != n or not set(ids) <= set(available.tolist()):
        raise _returned(
            call, returned, f"{n} distinct ids of the {len(available)} available clients"
        )
    return ids


def _returned(call: Callable[..., Any], returned: object, expected: str) -> TypeError:
    if isinstance(returned, Tensor):
        what = f"a tensor of shape {tuple(returned.shape)}"
    else:
        what = repr(returned)
    return TypeError(
        f"{getattr(call, '__qualname__', call)} returned {what}; it has to return {expected}"
    )


def reads_outputs(callback: Any) -> bool:
    """Whether a callback may look at ``outputs["loss"]``; those of Lightning and ours do not."""
    home = getattr(callback.on_train_batch_end, "__module__", None) or ""
    return home.split(".")[0] not in ("pytorch_lightning", "lightning", "fl_lightning")
