"""Each question of the server, checked by a site before it uses anything of it.

A site compares its config with the server's when it is greeted. So whatever the config does not
have, the server has no reason to ask for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fl_lightning.deploy.fields import LARGEST, Fields, WrongField, tensor_of
from fl_lightning.deploy.progress import FOREVER
from fl_lightning.deploy.sent_model import ANY
from fl_lightning.deploy.transport import Message
from fl_lightning.errors import UserError
from fl_lightning.round.model_parts import AVERAGED

MOST_NAMES = 2**20  # bytes of the names of columns or classes
ROUNDING = 1e-9  # relative, of a sum of weights


def check(message: Message, site: Any) -> None:
    """Refuse a question for more than the site's own file and config have, or whose model, buffers
    and states are not those of the site's learner and methods.

    Args:
        site: a :class:`~fl_lightning.deploy.site.Site`.
    """
    fields = Fields.of(message)
    try:
        if message.what == "hello":
            _hello(fields)
            return
        _numbers(fields, message.what, site)
        # The site asks for the model that it lacks, and uses nothing of this one.
        if not site.lacks_model(message):
            _arrays(fields, site)
    except WrongField as error:
        raise UserError(f"this site does not answer the server's question: {error}.") from error


def _hello(fields: Fields) -> None:
    fields.optional("question")
    fields.integer("run")
    fields.integer("m", 1)
    fields.optional("tests", 0, 1)
    if "shape" in fields.arrays:
        fields.integers("shape", 0, LARGEST, most=16)
    for name in ("column_names", "class_names"):
        if name in fields.arrays:
            fields.text(name, MOST_NAMES)


def _numbers(fields: Fields, what: str, site: Any) -> None:
    for name in ("run", "epoch", "steps"):
        fields.integer(name)
    fields.integer("round", 0 if what == "round" else -1)
    fields.integer("max_epochs", FOREVER)
    for name in ("question", "since"):
        fields.optional(name)
    if "changed" in fields.arrays:
        fields.integer("model")
    if site.base is not None:
        fields.integer("base")
        fields.integer("base_from", ANY)
    mine = fields.integers("mine", 0, LARGEST)
    if not {*mine} <= {*site.clients} or len({*mine}) < len(mine):
        fields.wrong("mine", f"asks for clients {mine[:10]}, and this site holds {site.clients}")
    fields.integers("counted", -1, LARGEST, len(mine))
    _weights(fields, len(mine), what)
    if what == "evaluate" and fields.number("epochs") not in site.finetune_epochs:
        own = sorted(site.finetune_epochs)
        fields.wrong("epochs", f"is not one of {own}, after which PerClientEvaluation measures")


def _weights(fields: Fields, clients: int, what: str) -> None:
    mine = float(clients)
    if "weights" in fields.arrays:
        weights = fields.tensor("weights", [(clients,)], torch.float64)
        if bool((weights < 0).any()):
            fields.wrong("weights", "holds a weight below 0")
        mine = float(weights.sum())
    if what == "round":
        total = fields.number("total_weight", finite=True)
        if not math.isfinite(mine) or total < mine * (1 - ROUNDING):
            fields.wrong("total_weight", f"is {total:g}, and this site's clients weigh {mine:g}")


def _arrays(fields: Fields, site: Any) -> None:
    size, dtype = site.model.layout.size, site.model.w.dtype
    sent = size
    if "changed" in fields.arrays:
        sent = int(fields.mask("changed", size).sum())
    fields.tensor("w", [(sent,)], dtype)
    for name in ("w0", "evaluated"):
        if name in fields.arrays:
            fields.tensor(name, [(size,)], dtype)
    _buffers(fields.under("buffer"), site)
    states = fields.under("state")
    for key, declared in site.methods.sent_to_clients().items():
        wanted = declared.dtype or dtype
        states.tensor(key, [declared.sized(size)], wanted, infinite=wanted.is_floating_point)
    if site.parts is not None and AVERAGED in states.arrays:
        states.tensor(AVERAGED, [(len(site.parts.masks),)], torch.int64)
    states.end()
    _base(fields.under("base"), {} if site.base is None else site.base.weights.values)


def _buffers(fields: Fields, site: Any) -> None:
    """Refuse buffers of other shapes or kinds than the learner's; they may hold any numbers."""
    learner = site.model.learner
    buffers = dict(learner.named_buffers())
    # Frozen parameters that steps write travel as buffers, too.
    frozen = {name: p for name, p in learner.named_parameters() if not p.requires_grad}
    for name in {**buffers, **fields.arrays}:
        own: Tensor | None = buffers.get(name, frozen.get(name))
        if own is None:
            fields.wrong(name, "is not a buffer of the learner")
        came = tensor_of(fields.array(name))
        kinds = [(each.is_floating_point(), each.is_complex()) for each in (own, came)]
        if came.shape != own.shape or kinds[0] != kinds[1]:
            given = f"the shape {tuple(came.shape)} and the type {came.dtype}"
            fields.wrong(name, f"has {given}, and the learner's is {tuple(own.shape)}, {own.dtype}")


def _base(fields: Fields, weights: Mapping[str, Tensor]) -> None:
    """Refuse changes of frozen weights that do not fit them."""
    for k, value in enumerate(weights.values()):
        own = fields.under(str(k))
        if "whole" in own.arrays:
            own.tensor("whole", [tuple(value.shape)], value.dtype)
        for i in count():
            if f"{i}/left" not in own.arrays:
                break
            left = own.tensor(f"{i}/left", None, torch.float32)
            shape = left.shape
            if f"{i}/right" in own.arrays:
                right = own.tensor(f"{i}/right", None, torch.float32)
                outer = left.ndim == right.ndim == 2 and left.shape[1] == right.shape[0]
                shape = torch.Size([left.shape[0], right.shape[1]] if outer else [])
            if shape != value.shape:
                own.wrong(f"{i}/left", f"does not fit a weight of the shape {tuple(value.shape)}")
        own.end()
    fields.end()
