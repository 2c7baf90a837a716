"""Contracts checked by small runs: changes that must not alter a result or break a run."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from fl_lightning.callback import FederatedCallback
from fl_lightning.callbacks import ControlVariates, RelaxedInitialization
from fl_lightning.errors import Diverged, UserError
from fl_lightning.lab.contracts import snapshots
from fl_lightning.lab.contracts.check_report import Failed, NotApplicable, where
from fl_lightning.lab.contracts.federation import (
    SIZES,
    Learner,
    Outcome,
    data,
    fit,
    in_processes,
    outcome,
    require_finite,
    require_same,
    required_by,
)
from fl_lightning.round.settings import CONCURRENT, SEQUENTIAL, STACKED
from fl_lightning.round.transaction import NOT_ASSIGNED
from fl_lightning.schedules import Steps

# A method may divide by small numbers of its own, or take eigenvectors of close eigenvalues: both
# make rounding larger, and differently on each processor.
ROUNDING = 1e-6


@dataclass
class Method:
    """Makes new instances of the method under check.

    ``plain`` is the run with which other runs are compared.
    """

    given: Callable[..., FederatedCallback]

    def factory(self, **arguments: Any) -> FederatedCallback:
        """A new instance.

        If it would draw from a secret, it draws from a seed, so that its runs can be compared.
        """
        callback = self.given(**arguments)
        if getattr(callback, "noise_seed", 0) is None:
            vars(callback)["noise_seed"] = 1
        return callback

    @cached_property
    def cls(self) -> type[FederatedCallback]:
        return type(self.factory())

    def run(self, **arguments: Any) -> Outcome:
        return outcome(fit([self.factory()], **arguments))

    @cached_property
    def _first(self) -> tuple[FederatedCallback, Any, Outcome]:
        callback = self.factory()
        module = fit([callback])
        # Hooks that are called later on it do not change the results of the run.
        return callback, module, outcome(module)

    @property
    def plain(self) -> Outcome:
        return self._first[2]

    @property
    def used(self) -> tuple[FederatedCallback, Any]:
        """Return a callback that has been through a run, and the module of that run."""
        return self._first[:2]

    @cached_property
    def average(self) -> Outcome:
        """Return the outcome of FedAvg with the settings that the method requires."""
        return self.fedavg()

    def fedavg(self, **settings: Any) -> Outcome:
        """Return the outcome of FedAvg with these settings and a learner like the method's."""
        if self.cls.needs_adapters:
            settings["adapters"] = self.cls.needs_adapters
        return fedavg(**{**required_by(self.cls), **settings})

    def learner(self, **given: Any) -> Learner:
        """Return a learner that fulfils the method's needs."""
        return Learner(adapters=self.cls.needs_adapters, **given)


def fedavg(**settings: Any) -> Outcome:
    """Return the outcome of FedAvg; each combination of settings runs once, for all methods."""
    simple = all(isinstance(value, str | int | float) for value in settings.values())
    return _once(**settings) if simple else outcome(fit([], **settings))


# A participation of 1 and one of 1.0 are different settings.
@lru_cache(typed=True)
def _once(**settings: Any) -> Outcome:
    return outcome(fit([], **settings))


def plain(method: Method) -> None:
    """Require that a run with the settings of all the other runs ends."""
    _ = method.plain


def uploads(method: Method) -> None:
    """Require that clients assign every upload that the server reads."""
    _, module = method.used
    missing = [text for text in module.notes if NOT_ASSIGNED in text]
    if missing:
        raise Failed(" ".join(missing))


def neutral(method: Method) -> None:
    # With the arguments under check the method may have no neutral setting.
    arguments = method.factory().neutral
    if arguments is None:
        raise NotApplicable("neutral is None")
    try:
        callbacks = [_neutral(method, arguments) for _ in range(2)]
    except TypeError as error:
        raise Failed(
            f"{method.cls.__name__} cannot be built with neutral = {arguments}: {error}",
            "let __init__ take what `neutral` names, with defaults for the rest",
        ) from None
    named = ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "no arguments"
    # Run once without further settings, and once with weights and clipping, which act on what the
    # method adds.
    settings: list[dict[str, Any]] = [{}, {"weighting": "samples", "clip_norm": 0.5}]
    for callback, setting in zip(callbacks, settings, strict=True):
        ours = outcome(fit([callback], **{**required_by(method.cls), **setting}))
        average = method.average
        if setting:
            average = method.fedavg(**setting)
        # A perturbation of length 0 still costs a gradient.
        theirs = {n: value for n, value in average.items() if not n.startswith("log cost/")}
        require_same(
            {name: ours[name] for name in theirs if name in ours},
            theirs,
            1e-12,
            f"with {named} it is not FedAvg",
            "every term of the method has to vanish there; where it has no such setting, say "
            "neutral = None",
        )
    if method.factory().is_method() and not _is_neutral(method.factory(), arguments):
        _require_effect(method, named)


def _is_neutral(callback: FederatedCallback, arguments: dict[str, Any]) -> bool:
    """Return whether a method has its neutral arguments."""
    try:
        return all(getattr(callback, name, None) == value for name, value in arguments.items())
    except RuntimeError:
        return False  # a schedule, which has a value only in a round


def _require_effect(method: Method, neutral: str) -> None:
    """Require that a run at other arguments than the neutral ones is not FedAvg's."""
    average = method.average
    same = all(value.equal(method.plain[name]) for name, value in average.items())
    if same and not method.factory().has("personal"):
        raise Failed(
            f"not only with {neutral}, also with the arguments of this check it is FedAvg to the "
            "last bit: in three rounds it changes nothing",
            "a hook that returns nothing has changed its values in place: does one lack its "
            "return?",
        )


def _neutral(method: Method, arguments: dict[str, Any]) -> FederatedCallback:
    try:
        return method.factory(**arguments)
    except TypeError:
        # The class may need more arguments: take those of the method under check.
        accepted = inspect.signature(method.cls).parameters
        attributes = vars(method.factory())
        others = {name: value for name, value in attributes.items() if name in accepted}
        return method.cls(**{**others, **arguments})


def order_of_clients(method: Method) -> None:
    """Register the clients in reverse, and compare client by client.

    All clients take part with full batches, because draws depend on client IDs.
    """
    if method.cls.order < 0:
        raise NotApplicable("it changes what some clients send, by their numbers")
    if method.factory().draws_by_client:
        raise NotApplicable("its draws for a client depend on the client's number")
    m = len(SIZES)
    whole = {"participation": "all"}
    ours = method.run(federation=data(batch_size=None), **whole)
    mirrored = method.run(federation=data(order=range(m)[::-1], batch_size=None), **whole)
    renamed = {}
    for name, value in mirrored.items():
        stem, client, number = name.rpartition(" of client ")
        renamed[f"{stem}{client}{m - 1 - int(number)}" if client else name] = value
    require_same(
        ours,
        renamed,
        ROUNDING,
        "clients registered in another order give another result",
        "use no client's number or place in the round, only its own rows; sums and means go "
        "through Upload. A method that draws for each client says draws_by_client = True",
    )


def order_of_training(method: Method) -> None:
    def reverse(module: Any) -> None:
        # Results are collected by position, whatever the order. So a difference shows that
        # something passed between clients.
        train = module.run.engine.train
        module.run.engine.train = lambda round, leaves, *rest: train(round, leaves[::-1], *rest)

    require_same(
        method.plain,
        method.run(started=reverse),
        0.0,
        "training the clients of a round in another order gives another result",
        "something passes from one client to the next: keep it in ClientState, or send it by an "
        "Upload",
    )


def engines(method: Method) -> None:
    refused = []
    hint = (
        "hooks that take clients see (n, D): per-client numbers are columns (n, 1), norms are "
        "clients.norm(v), sums over coordinates are .sum(1, keepdim=True), no client's row enters "
        "another's, and no attribute of self is set"
    )
    # Parallel clients give the same bits as clients one after another; stacked clients agree up to
    # rounding.
    for name, together, tolerance in (
        (CONCURRENT, {"workers": 2}, 0.0),
        (STACKED, {"clients_at_once": 3}, ROUNDING),
    ):
        try:
            ours = method.run(engine=name, **together, learner=method.learner(buffers=False))
        except UserError as error:
            refused.append(str(error))
            continue
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            raise Failed(f"engine={name!r}: {where(error)}", hint) from error
        what = f"engine={name!r} and engine={SEQUENTIAL!r} differ"
        theirs = method.run(learner=method.learner(buffers=False))
        require_same(theirs, ours, tolerance, what, hint)
    if len(refused) == 2:
        raise NotApplicable(f"refused: {refused[0]}")


def processes(method: Method) -> None:
    def job() -> Outcome:
        return method.run(trainer={"strategy": "federated", "devices": 2})

    require_same(
        method.plain,
        in_processes(2, job),
        0.0,
        "one and two processes differ",
        "a process sees its own clients alone: what the server needs of them goes through Upload "
        "or staged()",
    )


def frozen(method: Method) -> None:
    before = method.learner(frozen=True)
    learner = method.learner(frozen=True)
    module = fit([method.factory()], learner=learner)
    if not torch.equal(learner.first_bias, before.first_bias):
        hint = "change clients.x or server.update, not the learner"
        raise Failed("a parameter with requires_grad=False changed", hint)
    trained = [parameter for parameter in before.parameters() if parameter.requires_grad]
    if module.global_vector.numel() != sum(parameter.numel() for parameter in trained):
        raise Failed(
            "a frozen parameter is part of the flat vector",
            "this is the framework's fault: report it",
        )


def resume(method: Method) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fit([method.factory()], rounds=2, folder=folder)
        try:
            resumed = outcome(fit([method.factory()], folder=folder, resume=True))
        except UserError as error:
            hint = (
                "a public attribute counts as an argument and has to be the same after a resume; "
                "declare what changes"
            )
            raise Failed(
                f"resuming after round 2 is refused: {str(error)[:120]} …", hint
            ) from error
    # A checkpoint includes the attributes that the callback saves itself.
    saved = {f"self.{name}" for name in method.used[0].state_dict()}
    changed = snapshots.changes(snapshots.take(method.factory()), snapshots.take(method.used[0]))
    named = ", ".join(name for name in changed if name not in saved) or "none"
    require_same(
        method.plain,
        resumed,
        0.0,
        "stopping after round 2 and resuming gives another result",
        "state that no checkpoint knows: declare it as ClientState or ServerState. Attributes that "
        f"the run changed: {named}",
    )


def small_clients(method: Method) -> None:
    hint = (
        "count steps with clients.steps, not with the configuration; divide by nothing that a "
        "small client makes 0"
    )
    finite(method, "with one sample, and with a short last batch", hint, participation="all")
    finite(method, "with one local step", hint, participation="all", local_steps=1)
    try:
        finite(method, "with one client a round", hint, participation=1)
    except UserError as error:
        # The method may need more clients, and report that.
        if "participation" not in str(error):
            raise


def zero_rate(method: Method) -> None:
    hint = "clients.elapsed is 0 then: use clients.mean_gradient, which is 0 there, or torch.where"
    finite(method, "with learning rate 0 in round 0", hint, lr_decay=Steps({0: 0.0, 1: 1.0}))
    finite(method, "with learning rate 0 in round 1", hint, lr_decay=Steps({1: 0.0, 2: 1.0}))


def zero_gradient(method: Method) -> None:
    hint = "where something is divided by a norm: torch.where(norm > 0, norm, 1.0)"
    plain = {"client_optimizer": lambda p: torch.optim.SGD(p, lr=0.2)}
    finite(
        method, "with gradients that are all 0", hint, learner=method.learner(dead=True), **plain
    )


def unequal_rates(method: Method) -> None:
    def two(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        halves = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}]
        return torch.optim.SGD(halves, lr=0.2)

    try:
        finite(method, "with two learning rates in one optimizer", "", client_optimizer=two)
    except UserError as error:
        # The method may need a single learning rate, and report that.
        if "lr" not in str(error):
            raise


def lazy_gradients(method: Method) -> None:
    hint = (
        "gradients arrive as one dense vector (n, D), 0 where a parameter got none; take them "
        "from nowhere else"
    )
    unused = method.learner(embedding=False)
    dense = finite(method, "with parameters that get no gradient", hint, learner=unused)
    sparse = finite(method, "with sparse gradients", hint, learner=method.learner(embedding=True))
    require_same(dense, sparse, 1e-12, "sparse and dense gradients of one loss differ", hint)


def finite(method: Method, what: str, hint: str, **arguments: Any) -> Outcome:
    """Require that a run stays finite, in the model and in all its states."""
    try:
        left = method.run(**arguments)
    except Diverged as diverged:
        # Use the first sentence, without the name of the object that diverged.
        sentence = str(diverged).split(": ")[1].split(". ")[0]
        raise Failed(f"{what} {sentence}", hint) from None
    require_finite(left, what, hint)
    return left


def buffers(method: Method) -> None:
    if method.factory().has("steps"):
        raise NotApplicable("it decides how many batches clients see")
    # A method that selects clients itself would give other buffers than FedAvg.
    who: dict[str, Any] = {}
    if method.factory().has("select"):
        who = {"participation": "all"}
    average = method.average
    ours = method.plain
    if who:
        average = method.fedavg(**who)
        ours = method.run(**who)
    kept = {name for name in average if name.startswith("buffer ")}
    require_same(
        {name: value for name, value in ours.items() if name in kept},
        {name: average[name] for name in kept},
        0.0,
        "buffers that depend only on the inputs differ from FedAvg's",
        "a method runs no forward pass of its own: clients.full_gradient leaves buffers as they "
        "were",
    )


def beside_another(method: Method) -> None:
    refused = []
    # RelaxedInitialization changes where clients start. ControlVariates changes their gradients and
    # the server's state.
    for partner in (RelaxedInitialization, ControlVariates):
        if partner.__name__ == method.cls.__name__:
            continue
        try:
            first = _together(method, partner, ours_first=True)
            last = _together(method, partner, ours_first=False)
        except UserError as error:
            refused.append(str(error))
            continue
        require_same(
            first,
            last,
            ROUNDING,
            f"before and after {partner.__name__} in the list of callbacks it gives different "
            "results",
            "add to clients.x, the gradient and server.update; do not overwrite what another has "
            "added",
        )
    if len(refused) == 2:
        raise NotApplicable(f"refused: {refused[0]}")


def _together(
    method: Method, partner: Callable[[], FederatedCallback], ours_first: bool
) -> Outcome:
    callbacks: Sequence[FederatedCallback] = [method.factory(), partner()]
    return outcome(fit(callbacks if ours_first else callbacks[::-1]))
