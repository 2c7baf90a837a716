"""The model in a question of the server, checked by a site before it uses anything of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callback_list import CallbackList
from fl_lightning.deploy import round_messages
from fl_lightning.deploy.fields import LARGEST, Fields, WrongField
from fl_lightning.deploy.sent_base import ANY, BaseAtSite
from fl_lightning.deploy.transport import BFLOAT, Message
from fl_lightning.errors import UserError
from fl_lightning.round.global_model import GlobalModel
from fl_lightning.round.model_parts import AVERAGED, Parts

MOST_NAMES = 2**20  # bytes of the names of columns or classes
ROUNDING = 1e-9  # relative, of a sum of weights


class Asked(Protocol):
    """A site: what its learner and methods declare, and what it has of the server's model."""

    model: GlobalModel
    methods: CallbackList
    parts: Parts | None
    base: BaseAtSite | None

    def lacks_model(self, message: Message) -> bool:
        """Return whether the message builds on a model that the site does not have."""

    def parts_sent(self, message: Message) -> Tensor:
        """Return ``(D,)`` bool: the coordinates of w that are in the message."""


def refused(error: WrongField) -> UserError:
    """Return the error of a question with a wrong field."""
    return UserError(f"the server's question is refused: {error}.")


def check_hello(message: Message) -> None:
    """Refuse a hello without the run's numbers.

    Raises:
        UserError: it names the field.
    """
    fields = Fields.of(message)
    try:
        fields.optional("question")
        fields.integer("run")
        fields.integer("m", 1)
        fields.optional("tests", 0, 1)
        if "shape" in fields.arrays:
            fields.integers("shape", 0, LARGEST, most=16)
        for name in ("column_names", "class_names"):
            if name in fields.arrays:
                fields.text(name, MOST_NAMES)
    except WrongField as error:
        raise refused(error) from error


def check_model(message: Message, site: Asked) -> None:
    """Refuse a model, buffers and states that are not those of this site's learner and methods.

    The question's other fields have been checked (:class:`~fl_lightning.deploy.permitted`).

    Raises:
        UserError: it names the field.
    """
    fields = Fields.of(message)
    try:
        _numbers(fields, site)
        # The site asks for the model that it lacks, and uses nothing of this one.
        if not site.lacks_model(message):
            _arrays(fields, site, message)
    except WrongField as error:
        raise refused(error) from error


def _numbers(fields: Fields, site: Asked) -> None:
    fields.optional("question")
    fields.optional("since", -1)
    if "changed" in fields.arrays:
        fields.integer("model")
    if site.base is not None:
        fields.integer("base")
        fields.integer("base_from", ANY)


def _arrays(fields: Fields, site: Asked, message: Message) -> None:
    size, dtype = site.model.layout.size, site.model.w.dtype
    fields.tensor("w", [(_sent(fields, site, message),)], dtype)
    for name in ("w0", "evaluated"):
        if fields.has(name):
            fields.tensor(name, [(size,)], dtype)
    _weights(fields)
    _buffers(fields.under("buffer"), site)
    _states(fields.under("state"), site)
    _base(fields.under("base"), {} if site.base is None else site.base.weights.values)


def _sent(fields: Fields, site: Asked, message: Message) -> int:
    """Return how many coordinates of w the message has."""
    size = site.model.layout.size
    if "changed" in fields.arrays:
        try:
            return int(round_messages.got_mask(fields.array("changed", "u"), size).sum())
        except ValueError as error:
            fields.wrong("changed", f"is not a mask of {size} coordinates ({error})")
    if message.numbers["whole"]:
        return size
    if site.parts is None:
        fields.wrong("whole", "is 0, but this run's model has no parts")
    shape = (len(site.parts.masks),)
    if (parts := fields.array("parts", "b")).shape != shape:
        fields.wrong("parts", f"has the shape {parts.shape}, and not {shape}")
    return int(site.parts_sent(message).sum())


def _weights(fields: Fields) -> None:
    clients = len(fields.arrays["mine"])
    mine = float(clients)
    if "weights" in fields.arrays:
        weights = fields.tensor("weights", [(clients,)], torch.float64)
        if bool((weights < 0).any()):
            fields.wrong("weights", "holds a weight below 0")
        mine = float(weights.sum())
    if "total_weight" in fields.numbers:
        total = fields.number("total_weight", finite=True)
        if not math.isfinite(mine) or total < mine * (1 - ROUNDING):
            fields.wrong("total_weight", f"is {total:g}, and this site's clients weigh {mine:g}")


def _buffers(fields: Fields, site: Asked) -> None:
    learner = site.model.learner
    buffers = dict(learner.named_buffers())
    # Frozen parameters that steps write travel as buffers, too.
    frozen = {name: p for name, p in learner.named_parameters() if not p.requires_grad}
    for name, own in buffers.items():
        if not fields.has(name):
            fields.wrong(name, "is missing")
        _like(fields, name, own)
    for name in fields.tensors():
        if name not in frozen:
            fields.wrong(name, "is not a buffer of the learner")
        _like(fields, name, frozen[name])


def _like(fields: Fields, name: str, own: Tensor) -> None:
    """Refuse a buffer of another shape or kind than the learner's; it may hold any numbers."""
    shape = tuple(own.shape)
    bits = name not in fields.arrays
    array = fields.array(name + BFLOAT if bits else name, "biufc")
    kind = "f" if bits else array.dtype.kind
    kinds = {True: "f", False: "c" if own.is_complex() else "biu"}[own.is_floating_point()]
    if array.shape != shape or kind not in kinds:
        given = f"the shape {array.shape} and the type {array.dtype}"
        fields.wrong(name, f"has {given}, and the learner's has {shape} and {own.dtype}")


def _states(fields: Fields, site: Asked) -> None:
    size, dtype = site.model.layout.size, site.model.w.dtype
    for key, declared in site.methods.sent_to_clients().items():
        wanted = declared.dtype or dtype
        fields.tensor(key, [declared.sized(size)], wanted, infinite=wanted.is_floating_point)
    if site.parts is not None and AVERAGED in fields.arrays:
        fields.tensor(AVERAGED, [(len(site.parts.masks),)], torch.int64)
    fields.end()


def _base(fields: Fields, weights: Mapping[str, Tensor]) -> None:
    """Refuse changes of frozen weights that do not fit them."""
    for k, value in enumerate(weights.values()):
        own = fields.under(str(k))
        if own.has("whole"):
            own.tensor("whole", [tuple(value.shape)], value.dtype)
        i = 0
        while own.has(f"{i}/left"):
            left = _factor(own, f"{i}/left")
            if not own.has(f"{i}/right"):
                fits = left.shape == value.shape
            else:
                right = _factor(own, f"{i}/right")
                outer = left.ndim == right.ndim == 2 and left.shape[1] == right.shape[0]
                fits = outer and (left.shape[0], right.shape[1]) == value.shape
            if not fits:
                own.wrong(f"{i}/left", f"does not fit a weight of the shape {tuple(value.shape)}")
            i += 1
        own.end()
    fields.end()


def _factor(fields: Fields, name: str) -> Tensor:
    bits = name not in fields.arrays
    shape = np.shape(fields.arrays[name + BFLOAT if bits else name])
    return fields.tensor(name, [tuple(shape)], torch.float32)
