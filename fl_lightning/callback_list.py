"""The callbacks of a run taken together: who owns which hook, and how hooks are called."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.callback import (
    Assigned,
    Declaration,
    FederatedCallback,
    Layout,
    Refusal,
    RunBinding,
    RunFacts,
)
from fl_lightning.checks.notes import refuse_optimizer
from fl_lightning.errors import UserError, WrongKind, refuse_both, suggest
from fl_lightning.introspection.hook_arguments import MAY_TAKE, refuse_other_arguments, takes
from fl_lightning.round import partial_training
from fl_lightning.round.model_parts import Parts
from fl_lightning.round.partial_training import PartialTraining
from fl_lightning.round.transaction import RoundTransaction
from fl_lightning.schedules import arguments

OWNED = {
    "select": "who takes part",
    "steps": "how many steps clients take",
    "broadcast": "what clients get as w",
    "step_samples": "which samples a step takes",
    "reduce_samples": "what is made of single samples' gradients",
    "scale_samples": "how single samples' gradients are scaled",
    "on_samples_reduced": "what is made of their sum",
    "perturbation": "where the gradient is taken",
    "on_loss_gradient": "how the loss gradient is mixed",
    "precondition": "in which direction clients step",
    "on_direction": "how that direction is changed",
    "step_rate": "the learning rate of each step",
    "local_batch": "what clients train on",
    "transmit": "what clients send",
    "aggregate": "how updates are combined",
    "neighbours": "who the clients' neighbours are",
    "evaluated": "what is evaluated",
    "parts": "which part is averaged when",
    "trained": "what clients train",
    "personal": "what a client uses itself",
}
SHARED = (
    "on_layout",
    "on_round_start",
    "on_local_start",
    "local_output",
    "local_loss",
    "on_local_gradient",
    "on_local_step_end",
    "on_local_end",
    "on_updates",
    "on_server_update",
    "on_exchange",
    "on_round_end",
)
LOOKING = ("local_output", "local_loss")
# Hooks that are called in the order of the callbacks' ``order``.
IN_ORDER = (
    *("on_local_start", "on_local_gradient", "on_local_step_end"),
    *("on_updates", "on_server_update"),
)
IN_STEPS = (
    *("reduce_samples", "scale_samples", "on_samples_reduced"),
    *("perturbation", "on_loss_gradient", "on_local_gradient"),
    *("precondition", "on_direction", "step_rate", "on_local_step_end"),
    *LOOKING,
)
# Hooks that change a step's gradient, in order: before it is clipped, and after.
BEFORE_CLIPPING = ("on_loss_gradient", "on_local_gradient")
AFTER_CLIPPING = ("precondition", "on_direction")
CHANGING = (
    *OWNED,
    *("on_local_start", "on_local_gradient", "on_local_step_end", "on_updates"),
    *LOOKING,
)


class CallbackList:
    """The federated callbacks of a run.

    Args:
        layout: layout of the model; None: it is given later, by :meth:`lay_out`.

    Raises:
        UserError: there are two callbacks of one class, or two owners of one hook.
    """

    def __init__(
        self, callbacks: Sequence[FederatedCallback], layout: Layout | None = None
    ) -> None:
        self.callbacks = list(callbacks)
        # If set, it calls hooks for this object: ``(hook, subject, *more)``.
        self.watch: Callable[..., Any] | None = None
        self._transaction: RoundTransaction | None = None
        self.tell(None)
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
            refuse_other_arguments(callback, FederatedCallback, (*SHARED, *OWNED))
        # Callbacks that change updates for the clients come before those that work at the server.
        # Callbacks that keep coordinates at rest come after all that move them.
        ordered = sorted(self.callbacks, key=lambda c: c.order)
        # `on_local_end` may still ask for a gradient, so callbacks that change the loss end last.
        ending = sorted(self.callbacks, key=looks)
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        for hook in SHARED:
            in_order = self.callbacks
            if hook in IN_ORDER:
                in_order = ordered
            if hook == "on_local_end":
                in_order = ending
            self._hooks[hook] = [getattr(c, hook) for c in in_order if c.has(hook)]
        self._owners: dict[str, Callable[..., Any]] = {}
        self._owned_by: dict[str, FederatedCallback] = {}
        self._sends: str = "x"
        for hook, decision in OWNED.items():
            owners = [c for c in self.callbacks if c.has(hook)]
            if len(owners) > 1:
                raise _both_decide(owners, f"{decision} (the hook `{hook}`)")
            if owners:
                self._owners[hook] = getattr(owners[0], hook)
                self._owned_by[hook] = owners[0]
                if hook == "transmit":
                    self._sends = owners[0].sends
        both = [
            self._owned_by[h] for h in ("reduce_samples", "scale_samples") if h in self._owned_by
        ]
        if len(both) > 1:
            raise _both_decide(both, OWNED["reduce_samples"])
        self._takes = self._values_taken()
        self.declared: dict[str, Declaration] = {}
        self._declare()
        for callback in self.callbacks:
            self._refuse_companions(callback)
        self._refuse_batches()
        partial_training.check_companions(self.callbacks)
        if layout is not None:
            self.lay_out(layout)

    def _values_taken(self) -> dict[Callable[..., Any], str]:
        """Return the methods' hooks with one more parameter, each with the value that it takes."""
        found = {}
        for hook, value in MAY_TAKE.items():
            owner = self._owners.get(hook)
            calls = self._hooks.get(hook, [] if owner is None else [owner])
            found.update({call: value for call in calls if takes(call, value)})
        return found

    def _declare(self) -> None:
        for callback in self.callbacks:
            for declaration in callback.declarations().values():
                self.declared[declaration.key(callback)] = declaration

    def lay_out(self, layout: Layout) -> None:
        for told in self._hooks["on_layout"]:
            told(layout)
        self._declare()

    def _refuse_companions(self, callback: FederatedCallback) -> None:
        """Refuse callbacks that cannot run together, and partial averaging with silent states.

        A state is silent if it does not declare how partial averaging affects it.
        """
        name = type(callback).__name__
        there = {type(other).__name__ for other in self.callbacks}
        for needed in callback.needs_callbacks:
            if needed not in there:
                raise UserError(
                    f"method: {name} needs {needed}, which this run does not have. Add it: "
                    f"--method+={needed}."
                )
        for companion, why in callback.cannot_run_with.items():
            for other in self.callbacks:
                if companion in (*SHARED, *OWNED):
                    meant = other.has(companion) and other.role != "measurement"
                elif companion == "moves_start":
                    meant = other.has("on_local_start") and other.moves_start
                elif companion in ("ServerState", "Upload"):
                    kinds = {type(each).__name__ for each in other.declarations().values()}
                    meant = other.is_method() and companion in kinds
                else:
                    meant = type(other).__name__ == companion
                if other is not callback and meant:
                    refuse_both(name, type(other).__name__, why)
        if "parts" not in self._owners:
            return
        # If parts are not averaged, the run evaluates the mean of the clients' parts.
        if callback.has("evaluated"):
            raise _both_decide([callback, self._owned_by["parts"]], OWNED["evaluated"])
        for declared in callback.declarations().values():
            if declared.synchronised is None:
                raise UserError(
                    f"method: {declared.key(callback)} does not say how partial averaging affects "
                    "it, so the two cannot run together. Declare synchronised=True (on parts that "
                    "are not averaged its values stay as they are) or False."
                )

    def _refuse_batches(self) -> None:
        """Refuse hooks that need a step's whole batch, where a method takes its samples."""
        name = self.reduced_by
        for other in self.callbacks if name else ():
            if other.has("perturbation") or looks(other):
                beside = type(other).__name__
                why = f"computes with a step's whole batch, but {name} takes the gradient of each"
                refuse_both(name, beside, f"{beside} {why} sample")

    def notes(self, run: RunFacts) -> list[str]:
        """Return the notes of the methods about a run before it begins.

        Raises:
            UserError: a method cannot run with these settings.
        """
        names = {hook: type(owner).__name__ for hook, owner in self._owned_by.items()}
        direction = names.get("precondition", "")
        rate = names.get("step_rate", "")
        refuse_optimizer(run, direction, rate)
        companions = tuple(type(callback).__name__ for callback in self.callbacks)
        run = replace(run, companions=companions, direction_owner=direction, rate_owner=rate)
        texts = []
        for callback in self.callbacks:
            for note in callback.notes:
                text = note.about(callback, run)
                if text and isinstance(note, Refusal):
                    raise UserError(f"method: {text}")
                if text:
                    texts.append(text)
            if why := partial_training.why_not_with(callback, run):
                raise UserError(f"method: {type(callback).__name__} {why}. Leave that option out.")
        return texts

    def on_gradient(self, hooks: Sequence[str]) -> list[Callable[..., Any]]:
        found: list[Callable[..., Any]] = []
        for hook in hooks:
            found += [self._owners[hook]] if hook in self._owners else self._hooks.get(hook, [])
        return found

    def bind_run(self, binding: RunBinding) -> None:
        """From now on let callbacks draw by the run's seed and read its data."""
        for callback in self.callbacks:
            vars(callback)["_bound_run"] = binding

    def bind(self, transaction: RoundTransaction) -> None:
        """From now on let declared state read and write this round's transaction."""
        self._transaction = transaction
        transaction.measuring = self.measuring
        round = transaction.round
        self.bind_run(RunBinding(round.seed, round.steps_of, round.noise_of_clients))
        for callback in self.callbacks:
            vars(callback)["_bound_transaction"] = transaction

    def tell(self, assigned: Assigned | None) -> None:
        """From now on, call ``assigned`` when a callback assigns an attribute of its own that it
        does not declare; None: call nothing.
        """
        self._assigned = assigned
        for callback in self.callbacks:
            vars(callback)["_bound_assigned"] = assigned

    @contextmanager
    def telling(self, assigned: Assigned | None) -> Iterator[None]:
        before = self._assigned
        self.tell(before if assigned is None else assigned)
        try:
            yield
        finally:
            self.tell(before)

    def __getitem__(self, hook: str) -> list[Callable[..., Any]]:
        return self._hooks[hook]

    def owner(self, hook: str) -> Callable[..., Any] | None:
        return self._owners.get(hook)

    def call(self, hook: Callable[..., Any], subject: Any, *more: Any) -> Any:
        """Call one method's hook.

        ``subject``: the clients or the server, which from now on know whose hook is running.

        Raises:
            UserError: the hook changed a vector of the run in place, or a state of the server in a
                hook of clients.
        """
        subject._hook = hook
        # Hooks get the run's own vectors, because copies would cost as much as a step.
        lent = subject._lent
        versions = [tensor._version for _, tensor in lent]
        try:
            if self.watch is not None:
                returned = self.watch(hook, subject, *more)
            else:
                returned = hook(subject, *more)
        except RuntimeError as error:
            raise _explained(hook, lent, error) from error
        for (name, tensor), version in zip(lent, versions, strict=True):
            if tensor._version != version:
                raise _changed_vector(hook, name)
        if self._transaction is not None and (key := self._transaction.changed_by_clients()):
            raise _changed_state(hook, key)
        return returned

    def run(self, hook: str, argument: Any) -> None:
        for call in self._hooks[hook]:
            checked_nothing(call, self.call(call, argument, *self.asked(call, argument)))

    def asked(self, hook: Callable[..., Any], subject: Any) -> tuple[Any, ...]:
        """Return the value that a method's hook takes by one more parameter, if it has that."""
        value = self._takes.get(hook)
        if value is None:
            return ()
        subject._hook = hook
        return (getattr(subject, value),)

    def end_round(self, server: Any, finished: bool) -> None:
        """Call ``on_round_end``; if no client ``finished``, only with ``every_round``."""
        if finished:
            self.run("on_round_end", server)
            return
        for call in self._hooks["on_round_end"]:
            callback: Any = getattr(call, "__self__", None)
            if callback.every_round:
                checked_nothing(call, self.call(call, server))

    def of_every_round(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return those of ``states`` that are committed if no client finished."""
        names = {type(c).__name__ for c in self.callbacks if c.every_round}
        return {key: value for key, value in states.items() if key.split(".")[0] in names}

    def gradient(self, call: Callable[..., Any], clients: Any, gradient: Tensor) -> Tensor:
        """Return the gradient after a hook, which may change it in place or return another."""
        returned = self.call(call, clients, gradient)
        if returned is None:
            return gradient
        return checked_rows(call, returned, gradient)

    def parts(self, layout: Layout, device: torch.device) -> Parts | None:
        owner = self.owner("parts")
        given = owner(layout) if owner else []
        return Parts(given, layout.size, device) if given else None

    def sent_to_clients(self) -> dict[str, Declaration]:
        return {key: declared for key, declared in self.declared.items() if declared.goes_down}

    @property
    def steps(self) -> Callable[[int, Sequence[int]], list[int]] | None:
        """Return ``(t, ids)`` → K_i of each, if a method decides on them.

        This raises a UserError if the method gives values that are not integers of at least 1.
        """
        owner = self.owner("steps")
        if owner is None:
            return None
        name = self.name_of_owner("steps")

        def checked(t: int, ids: Sequence[int]) -> list[int]:
            given = owner(t, torch.tensor(ids, dtype=torch.int64))
            return checked_steps(name, given, t, ids)

        return checked

    def name_of_owner(self, hook: str) -> str:
        return type(self._owned_by[hook]).__name__

    @property
    def blind(self) -> bool:
        """Return whether local steps are perturbed without a gradient at x."""
        owner = self._owned_by.get("perturbation")
        return owner is not None and owner.blind

    @property
    def partial_training(self) -> PartialTraining:
        """Return the callback that chooses which coordinates clients train, if there is one."""
        return self._owned_by.get("trained", PartialTraining())

    @property
    def personal_of_all(self) -> bool:
        """Return whether clients that never finished a round have their own model, too."""
        owner = self._owned_by.get("personal")
        return owner is not None and owner.personal_of_all

    @property
    def move_starts(self) -> bool:
        """Whether a method may let clients start elsewhere than at w (kept parts aside)."""
        return any(c.moves_start for c in self.callbacks if c.has("on_local_start"))

    @property
    def aggregates_nobody(self) -> bool:
        """Return whether the server takes its step even if no client finished."""
        return any(c.every_round for c in self.callbacks if c.has("aggregate"))

    @property
    def draws_from(self) -> int | Literal["secret"] | None:
        return next((c.draws_from for c in self.callbacks if c.draws_from is not None), None)

    @property
    def clients_draw_from(self) -> int | Literal["secret"] | None:
        sources = (c.clients_draw_from for c in self.callbacks)
        return next((source for source in sources if source is not None), None)

    @property
    def reduced_by(self) -> str:
        """Return the callback that takes the gradients of single samples; empty: none."""
        owner = self._takes_samples
        return "" if owner is None else type(owner).__name__

    @property
    def _takes_samples(self) -> FederatedCallback | None:
        owned = self._owned_by
        return owned.get("reduce_samples") or owned.get("scale_samples")

    @property
    def samples_at_once(self) -> int | None:
        owner = self._takes_samples
        return None if owner is None else owner.samples_at_once

    @property
    def protects_samples(self) -> str:
        """Return the callback that protects the clients' samples; empty: none."""
        return next((type(c).__name__ for c in self.callbacks if c.protects_samples), "")

    @property
    def look(self) -> str:
        for callback in self.callbacks:
            if looks(callback):
                return type(callback).__name__
        return ""

    @property
    def gathering(self) -> list[str]:
        return [type(c).__name__ for c in self.callbacks if c.asks_for("updates")]

    @property
    def measuring(self) -> set[str]:
        return {type(c).__name__ for c in self.callbacks if c.role == "measurement"}

    @property
    def gives_models(self) -> str:
        """Return the callback from whose own models clients train; empty: they train from w."""
        for callback in self.callbacks:
            if "clients.w" in callback.cannot_run_with:
                return type(callback).__name__
        return ""

    @property
    def reads_loss(self) -> bool:
        return any(c.asks_for("loss") for c in self.callbacks)

    @property
    def start_from_w0(self) -> bool:
        return any(getattr(d, "initial", None) == "initial_model" for d in self.declared.values())

    def going_up(self) -> dict[str, Declaration]:
        """Return the states that clients send in addition to their update, and that are counted.

        They are the reported states, and the uploads that the server cannot compute from other
        messages.
        """
        known = {self._sends}
        # If clients start at w, their model determines their displacement, and vice versa.
        if self._sends and not self.move_starts:
            known = {"x", "displacement"}
        return {key: each for key, each in self.declared.items() if each.goes_up(known)}

    def in_steps_of_others(self) -> str:
        """Return the first callback by others with a hook in local steps, or an empty string."""
        for callback in self.callbacks:
            packaged = type(callback).__module__.startswith("fl_lightning.")
            if not packaged and any(callback.has(hook) for hook in IN_STEPS):
                return type(callback).__name__
        return ""

    def fingerprint(self) -> dict[str, str]:
        return {type(c).__name__: arguments(c) for c in self.callbacks if c.declarations()}

    def stateless(self) -> str:
        """Return stateless callbacks that change the training: ``ProximalTerm(mu=0.1)``."""
        texts = []
        for callback in self.callbacks:
            changes = (
                callback.role == "system"
                or getattr(callback, "shapes_rounds", False)
                or any(map(callback.has, CHANGING))
                or (callback.is_method() and callback.has("on_server_update"))
            )
            if changes and not callback.declarations():
                texts.append(f"{type(callback).__name__}({arguments(callback)})")
        return ", ".join(sorted(texts)) or "none"

    def title(self) -> str:
        names = [c.title or type(c).__name__ for c in self.callbacks if c.is_method()]
        return " + ".join(names) or "FedAvg"


def looks(callback: FederatedCallback) -> bool:
    return bool(callback.taps) or any(callback.has(hook) for hook in LOOKING)


def refuse_misspelt_hooks(callback: FederatedCallback) -> None:
    """Refuse a method whose name is almost that of a hook: it would never be called."""
    hooks = [name for name in dir(FederatedCallback) if name.startswith("on_") or name in OWNED]
    for name in dir(type(callback)):
        near = suggest(name, hooks) if name.startswith("on_") and name not in hooks else ""
        if near and name != "on_client_end":
            raise UserError(
                f"method: {type(callback).__name__}.{name} is not a hook, so it would never be "
                f"called.{near}"
            )


def checked_nothing(call: Callable[..., Any], returned: object) -> None:
    if returned is not None:
        raise _returned(call, returned, "nothing")


def checked_rows(call: Callable[..., Any], returned: object, like: Tensor) -> Tensor:
    if not isinstance(returned, Tensor) or returned.shape != like.shape:
        raise _returned(call, returned, f"a tensor of shape {tuple(like.shape)}")
    return returned


def checked_loss(call: Callable[..., Any], returned: object, like: Tensor) -> Tensor:
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        raise _returned(call, returned, "the loss, a scalar tensor")
    return returned.reshape(like.shape)


def checked_choice(call: Callable[..., Any], returned: Any, available: Tensor, n: int) -> list[int]:
    """Return the clients that ``select`` returned, ascending: n distinct ones of the available."""
    choice = returned.tolist() if hasattr(returned, "tolist") else returned
    ids = sorted(int(i) for i in choice) if isinstance(choice, Iterable) else []
    if len(ids) != n or len(set(ids)) != n or not set(ids) <= set(available.tolist()):
        raise _returned(
            call, returned, f"{n} distinct ids of the {len(available)} available clients"
        )
    return ids


def checked_steps(name: str, returned: Any, t: int, ids: Sequence[int]) -> list[int]:
    """Return the steps that a method gave, one number per client.

    Raises:
        UserError: there are more or fewer of them, or one is not an integer of at least 1.
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    expected = f"method: {name}.steps has to give each client an integer from 1"
    if not isinstance(values, Iterable) or len(steps := list(values)) != len(ids):
        raise UserError(f"{expected}; for {len(ids)} of them in round {t} it gave {returned!r}.")
    for client, k in zip(ids, steps, strict=True):
        if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
            raise UserError(f"{expected}; to client {client} in round {t} it gave {k!r}.")
    return [int(k) for k in steps]


def _both_decide(callbacks: Sequence[FederatedCallback], what: str) -> UserError:
    both = " and ".join(type(callback).__name__ for callback in callbacks)
    return UserError(
        f"method: {both} both decide {what}, but only one callback of a run may do that. Keep one "
        "of them."
    )


def _changed_vector(call: Callable[..., Any], name: str) -> UserError:
    also = " (clients.origin is the same vector here)" if name == "clients.start" else ""
    return UserError(
        f"method: {getattr(call, '__qualname__', call)} changed {name}{also} in place, or a view "
        "of it. The vector belongs to the run, and other clients and methods read it, too. Change "
        f"a copy: own = {name}.clone()."
    )


def _explained(
    call: Callable[..., Any], lent: Sequence[tuple[str, Tensor]], error: RuntimeError
) -> RuntimeError | UserError:
    """Return the error of a hook; a UserError if it changed a start that is w itself."""
    # If several clients start at w, each row of `start` is w itself, and torch refuses to change
    # it.
    starts = [tensor for name, tensor in lent if name == "clients.start"]
    if "single memory location" in str(error) and starts and starts[0].stride(0) == 0:
        return _changed_vector(call, "clients.start")
    return error


def _changed_state(call: Callable[..., Any], key: str) -> UserError:
    return UserError(
        f"method: {getattr(call, '__qualname__', call)} changed the server's state {key} in place, "
        "and it takes clients: several of them share that state, and the change would be lost. "
        "Send what the server needs as an Upload (self.name[clients] = … in on_local_end), and "
        "change the state in a hook that takes server, such as on_server_update."
    )


def _returned(call: Callable[..., Any], returned: object, expected: str) -> WrongKind:
    result = reprlib.repr(returned)
    if isinstance(returned, Tensor):
        result = f"a tensor of shape {tuple(returned.shape)}"
    return WrongKind(
        f"{getattr(call, '__qualname__', call)} returned {result}; it has to return {expected}"
    )
