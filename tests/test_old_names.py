"""Attributes of methods that an earlier version had keep working for a version, with a warning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import ClientState, FederatedCallback
from fl_lightning.callback import OLD_NAMES
from fl_lightning.callback_list import CallbackList
from fl_lightning.lab.contracts.federation import required_by
from fl_lightning.testing import tiny_run


def old(**body: Any) -> Any:
    """A method with these attributes, and hooks that do nothing."""
    (name,) = OLD_NAMES.keys() & body.keys()
    with pytest.warns(FutureWarning, match=f"Old.{name} is an old name"):
        return type("Old", (FederatedCallback,), body)()


def nothing(self: Any, *given: Any) -> Any:
    return None


def test_roles_and_orders() -> None:
    assert old(measures=True).role == "measurement" and old(simulates=True).role == "system"
    assert old(rests=True).order == 1 and old(stands_for_clients=True).order == -1
    assert old(measures=False).role == "method" and old(rests=False).order == 0


def test_what_hooks_and_declarations_say_now() -> None:
    kept = ClientState(synchronised=False)
    assert CallbackList([old(personal_of_all=True, personal=nothing, kept=kept)]).personal_of_all
    assert CallbackList([old(blind=True, perturbation=nothing)]).blind
    assert CallbackList([old(aggregates_nobody=True, aggregate=nothing)]).aggregates_nobody
    assert CallbackList([old(gives_models=True)]).gives_models == "Old"
    assert old(needs_classes=True).needs_classes
    assert "Old" in CallbackList([old(shapes_rounds=True)]).stateless()
    assert required_by(type(old(requires={"sampling": "poisson"}))) == {"sampling": "poisson"}


def test_a_perturbation_of_before_gets_none() -> None:
    seen: list[Any] = []

    def perturbation(self: Any, clients: Any, gradient: Any) -> Tensor:
        seen.append(gradient)
        return torch.zeros_like(clients.x)

    tiny_run(old(blind=True, perturbation=perturbation), rounds=1)
    assert seen and all(gradient is None for gradient in seen)
