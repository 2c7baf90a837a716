"""Coordinates that a client does not train in a round: they do not change.

A method's hook ``trained`` says which coordinates a client trains. HeteroFL's submodels, adapters
of unequal ranks and factors that are trained in turn are such methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fl_lightning.errors import UserError, refuse_both
from fl_lightning.learner.adapter_products import check_what_is_added
from fl_lightning.learner.adapters import check_products, check_there
from fl_lightning.learner.layout import Layout
from fl_lightning.round.base_weights import declared_bases
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.clients import Clients
from fl_lightning.round.model_parts import Parts


class PartialTraining:
    """The part of :class:`.FederatedCallback` about coordinates that do not change."""

    untrained: Literal["given", "zero"] = "given"
    """The values of coordinates that a client does not train: ``"given"``: those that the
    client was given; ``"zero"``: 0, and they are not sent to it.
    """

    averaged_over: Literal["holders", "all", "zeros"] = "holders"
    """The clients over which a coordinate's update is averaged: ``"holders"``: those that
    trained it (if none did, it stays); ``"all"``: all, with update 0 for those that did not;
    ``"zeros"``: all, with model 0 for those that did not (zero-padding).
    """

    alike: bool = False
    """Whether all clients of a round train the same coordinates."""

    server_moves: ClassVar[bool] = False
    """Whether the server's update changes coordinates that clients do not train, too."""

    of_trained: ClassVar[bool] = False
    """Whether its ``transmit`` works with the coordinates that all clients of a round train."""

    restarts: ClassVar[bool] = False
    """Whether coordinates have another meaning after a round, so that no method may keep a
    vector of D numbers from round to round.
    """

    of_coordinates: ClassVar[tuple[str, ...]] = ()
    """Names in shapes of its states that stand for numbers of parameters, besides ``"D"``: what is
    kept under them belongs to coordinates, like a vector of D numbers.
    """

    needs_adapters: ClassVar[bool | str] = False
    """Whether it needs learners with adapters (LoRA). Other learners are refused before round 0.
    ``"heads"``: it needs :class:`~fl_lightning.models.MultiHead`, and checks that itself."""

    needs_products: ClassVar[bool] = False
    """Whether it takes products B·A of the adapters at the server, in its ``aggregate``.
    Adapters that add something else are refused, and so is a server's step other than w + d.
    """

    def trained(self, clients: Clients) -> Tensor:
        """One owner. Return ``(n, D)`` bool: the coordinates that each client trains in this round.

        The hook is called before ``on_local_start``, and may depend only on (seed, round, client)
        and committed state. Without this hook clients train all coordinates.
        """

    def numbers_down(self, layout: Layout, t: int, last: int | None) -> int | None:
        """Return how many coordinates of w a client is sent in round t, if the method has a rule
        for it.

        Args:
            last: the round in which the client was last sent w; None: there is none.
        """
        return None

    def foreseen(self, given: Tensor, layout: Layout, t: int) -> Tensor:
        """Return the w ``(D,)`` of round t that clients expect if they were given ``given`` before.

        If the expectation is right, w need not be sent to sites.
        """
        return given

    def remembers_sent(self) -> bool:
        """Whether ``numbers_down`` depends on the round in which a client was last sent w."""
        return False

    def not_beside(self, other: Any) -> str:
        """Why this method cannot run together with another callback, as a clause; empty: it can."""
        return ""

    @staticmethod
    def kept_vector(other: Any, of_clients: bool = False) -> str:
        """The first state that a callback keeps for coordinates, as D numbers; empty: none."""
        about = {"D", *other.of_coordinates}
        for declared in other.declarations().values():
            kept = declared.keeps_rows or (declared.at_server and not of_clients)
            if kept and (declared.shape is None or about & declared.names):
                return str(declared.key(other))
        return ""

    def check_layout(self, layout: Layout, num_clients: int, w: Tensor) -> None:
        """Refuse, before round 0, a learner that the method cannot train.

        ``w`` ``(D,)``: the server's model.

        Raises:
            UserError: it has ``needs_adapters``, but the learner has none.
        """
        if self.needs_adapters is True:
            check_there(layout, type(self).__name__)
        if self.needs_products:
            check_products(layout, type(self).__name__)


def mask_of(methods: Any, group: ClientGroup) -> Tensor | None:
    """Return ``(n, D)`` bool: the coordinates that the clients of a group do not train; None: they
    train all.

    Raises:
        UserError: the hook returned something else, or a client trains nothing; the error names
            round, client and method.
    """
    hook = methods.owner("trained")
    if hook is None:
        return None
    name = methods.name_of_owner("trained")
    ids = group.ids
    where = f"in round {group.round.t}, client {ids[0]}"
    mask = methods.call(hook, Clients(group))
    shape = tuple(group.x.shape)
    if not isinstance(mask, Tensor) or mask.shape != shape or mask.dtype != torch.bool:
        given = repr(mask)
        if isinstance(mask, Tensor):
            given = f"a tensor of shape {tuple(mask.shape)} and type {mask.dtype}"
        raise UserError(
            f"method: {name}.trained has to return a bool tensor of shape (n, D) = {shape}, which "
            f"says what each client trains; {where}, it returned {given}."
        )
    mask = mask.to(group.x.device)
    for client, row in zip(ids, mask, strict=True):
        if not bool(row.any()):
            raise UserError(
                f"method: {name}.trained gives client {client} nothing to train in round "
                f"{group.round.t}: its row of the mask has no True. Let it train at least one "
                "coordinate, or leave the client out with the hook `select`."
            )
    alike = group.round.trained
    if alike is not None and not bool((mask == alike).all()):
        raise UserError(
            f"method: {name} has alike = True, but {where}, its hook `trained` returns another "
            "mask than for other clients. Let it depend on the round only, or set alike = False."
        )
    return ~mask


def mask_of_round(methods: Any, round: Any) -> Tensor | None:
    """``(D,)`` bool: coordinates that all clients of a round train; None: there is no rule."""
    if not methods.partial_training.alike:
        return None
    client = round.ids[0] if round.ids else 0
    group = ClientGroup(round, [client], round.w.clone().view(1, -1))
    untrained = mask_of(methods, group)
    assert untrained is not None
    return ~untrained[0]


def remember_sent(methods: Any) -> bool:
    return any(callback.remembers_sent() for callback in methods.callbacks)


def foreseen(methods: Any, given: Tensor, layout: Layout, t: int) -> Tensor:
    for callback in methods.callbacks:
        given = callback.foreseen(given, layout, t)
    return given


def check_companions(callbacks: Sequence[Any]) -> None:
    """Refuse callbacks that have no defined meaning if clients train only a part.

    Raises:
        UserError: naming both.
    """
    for callback in callbacks:
        for other in callbacks:
            if other is callback:
                continue
            why = "" if other.role == "measurement" else callback.not_beside(other)
            if not why and callback.has("trained"):
                why = _beside_resting(callback, other)
            if not why and callback.restarts and other.role != "measurement":
                why = _beside_restarts(other)
            if not why and declared_bases(callback):
                why = _beside_base(other)
            if why:
                refuse_both(type(callback).__name__, type(other).__name__, why)


def check_parts(methods: Any, parts: Parts | None, layout: Layout) -> None:
    """Refuse clients' own copies of adapters, if the server takes products of all adapters or
    changes frozen weights.

    Raises:
        UserError: naming both methods and a parameter.
    """
    asking = [each for each in methods.callbacks if each.needs_products or declared_bases(each)]
    if parts is None or not asking:
        return
    factors = chain.from_iterable((each.a, each.b) for each in layout.adapters)
    own = [name for name in factors if parts.kept[layout[name][0]].any()]
    for callback in asking if own else ():
        name = type(callback).__name__
        keeps = methods.name_of_owner("parts")
        why = f"{name} changes frozen weights, to which the adapters of a round belong"
        if callback.needs_products:
            why = f"{name} takes the products of all clients' adapters in each round"
        raise UserError(
            f"method: {name} and {keeps} cannot run together: {why}, and with {keeps} clients "
            f"keep copies of {own[0]} of their own. Let {keeps} leave the adapters out, or keep "
            "one of them."
        )


def check_added(callbacks: Sequence[Any], learner: nn.Module, layout: Layout) -> None:
    """Refuse adapters that add something other than scale · B A, if a method takes products.

    Raises:
        UserError: it names the method and the layer.
    """
    for callback in callbacks:
        if callback.needs_products:
            check_what_is_added(learner, layout, type(callback).__name__)


def _beside_resting(callback: Any, other: Any) -> str:
    if other.has("parts"):
        return "both say which coordinates take part in a round"
    if callback.averaged_over == "zeros" and other.has("broadcast"):
        return (
            "it averages the clients' models, with 0 for what they do not train, and the clients "
            "are given another model than the one to which the server adds the average's change"
        )
    sends_less = other.has("encode") and not other.of_trained
    if other.has("transmit") and (not callback.alike or sends_less):
        return "what it sends of coordinates that a client does not train is not defined"
    if callback.alike or other.role == "measurement":
        return ""
    if other.has("aggregate") or other.has("on_updates"):
        return (
            "it combines the clients' updates coordinate by coordinate, and clients train "
            "different ones"
        )
    if key := PartialTraining.kept_vector(other, of_clients=True):
        return f"what {key} means on coordinates that a client does not train is not defined"
    return ""


def _beside_restarts(other: Any) -> str:
    if key := PartialTraining.kept_vector(other):
        return f"{key} is kept from round to round, and coordinates mean something else after each"
    return ""


def _beside_base(other: Any) -> str:
    """Return why another callback cannot run if frozen weights change; empty: it can.

    A model that is kept or mixed from models of several rounds has adapters that belong to the
    frozen weights of an earlier round. Directions, such as momentum and control variates, have not.
    """
    if other.has("evaluated"):
        return "it evaluates adapters of earlier rounds, which belong to other frozen weights"
    key = PartialTraining.kept_vector(other)
    if key and (other.has("personal") or "clients.w" in other.cannot_run_with):
        return (
            f"{key} keeps models of clients, whose adapters belong to the frozen weights of the "
            "round in which they were trained, and these weights change in each round"
        )
    return ""


def why_not_with(callback: Any, facts: Any) -> str:
    if callback.restarts and facts.keeps_optimizer:
        return (
            "gives coordinates another meaning after each round, and keep_optimizer_state=True "
            "keeps the clients' optimizer states"
        )
    if not callback.restarts and not callback.needs_products:
        return ""
    sets = "sets the server's model in each round, and"
    if facts.server:
        return f"{sets} the server optimizer is {facts.server}, and not SGD with learning rate 1"
    if facts.server_rate != 1:
        return f"{sets} the server optimizer's learning rate is not 1 in all rounds"
    return ""
