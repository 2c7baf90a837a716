"""What a method's hooks read is found in their source."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fl_lightning import FederatedCallback, Upload
from fl_lightning.callback_list import CallbackList
from fl_lightning.testing import tiny_run


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
