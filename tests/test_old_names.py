"""Attributes of methods that an earlier version had keep working for a version, with a warning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import ClientState, FederatedCallback, Upload
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


def test_what_is_read_from_the_source_now() -> None:
    assert CallbackList([old(gathers=True, aggregate=nothing)]).gathering == ["Old"]
    assert CallbackList([old(reads_loss=True)]).reads_loss
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


class Helped(FederatedCallback):
    """Reads the loss and the updates in methods of its class that the hooks call."""

    losses = Upload(shape=())

    def on_local_end(self, clients: Any) -> None:
        self.losses[clients] = self.of(clients)

    def of(self, clients: Any) -> Tensor:
        loss: Tensor = clients.loss
        return loss[:, 0]

    def aggregate(self, server: Any) -> Tensor:
        server.log("loss", self.losses.mean())
        return self.median(server)

    def median(self, server: Any) -> Tensor:
        middle: Tensor = server.updates.median(0).values
        return middle


def test_what_hooks_read_is_found_in_the_methods_that_they_call() -> None:
    assert CallbackList([Helped()]).reads_loss and CallbackList([Helped()]).gathering == ["Helped"]
    assert float(tiny_run(Helped(), rounds=1).trainer.callback_metrics["loss"]) > 0


class Plain(FederatedCallback):
    """Has an ``updates`` and a ``loss`` of its own, and reads nothing of the run's."""

    updates = loss = 0

    def on_local_end(self, clients: Any) -> None:
        clients.log("own", clients.steps * self.loss)

    def aggregate(self, server: Any) -> Tensor:
        update: Tensor = server.update * (1 + self.updates)
        return update


def test_a_method_s_own_attributes_of_these_names_are_its_own() -> None:
    assert not CallbackList([Plain()]).reads_loss and not CallbackList([Plain()]).gathering


def test_a_method_without_source_is_read_by_its_names() -> None:
    space: dict[str, Any] = {"FederatedCallback": FederatedCallback}
    exec(
        "class Typed(FederatedCallback):\n"
        "    def aggregate(self, server):\n        return server.updates.mean(0)\n"
        "    def on_local_end(self, clients):\n        clients.log('own', clients.steps)\n",
        space,
    )
    typed = CallbackList([space["Typed"]()])
    assert typed.gathering == ["Typed"] and not typed.reads_loss
