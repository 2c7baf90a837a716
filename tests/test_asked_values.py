"""Values that cost something are there for methods that ask for them, and for no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import FederatedCallback, Upload, UserError
from fl_lightning.callback_list import CallbackList
from fl_lightning.testing import tiny_run
from tests.deploy.test_in_memory import over_sites
from tests.helpers.learners import blobs, federated, trainer

ENGINES: list[dict[str, Any]] = [
    {"engine": "sequential"},
    {"engine": "concurrent", "workers": 2, "capture": True},
    {"engine": "stacked"},
]


def half_of_loss(clients: Any) -> Tensor:
    """A helper of a method, of which its class shows nothing."""
    half: Tensor = clients.loss[:, 0] / 2
    return half


def spread(server: Any) -> Tensor:
    deviation: Tensor = server.updates.std(0).norm()
    return deviation


class Undeclared(FederatedCallback):
    losses = Upload(shape=())

    def on_local_end(self, clients: Any) -> None:
        self.losses[clients] = half_of_loss(clients)

    def on_server_update(self, server: Any) -> None:
        server.log("half", self.losses.mean())


class ByAttribute(Undeclared):
    reads_loss = True


class ByParameter(Undeclared):
    def on_local_end(self, clients: Any, loss: Tensor) -> None:
        assert loss.shape == (len(clients.ids), 1)
        super().on_local_end(clients)


class Updates(FederatedCallback):
    def aggregate(self, server: Any) -> Tensor:
        server.log("spread", spread(server))
        update: Tensor = server.update
        return update


class UpdatesByAttribute(Updates):
    gathers = True


class Evaluated(FederatedCallback):
    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        return gradient + 0 * clients.evaluated


UNASKED = [
    (
        Undeclared(),
        "reads clients.loss in on_local_end, .* Write def on_local_end"
        r"\(self, clients, loss\), or reads_loss = True in the class Undeclared\.",
    ),
    (
        Updates(),
        "reads server.updates in aggregate, .* Write def aggregate"
        r"\(self, server, updates\), or gathers = True in the class Updates\.",
    ),
    (Evaluated(), r"Write reads_evaluated = True in the class Evaluated\."),
]


@pytest.mark.parametrize(("method", "line"), UNASKED)
def test_an_unasked_value_is_refused_with_the_line_to_write(method: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        tiny_run(method, rounds=1)


def test_it_is_refused_beside_a_method_that_asks_for_it() -> None:
    with pytest.raises(UserError, match=r"Undeclared reads clients\.loss in"):
        tiny_run(ByAttribute(), Undeclared(), rounds=1)
    with pytest.raises(UserError, match=r"Updates reads server\.updates in"):
        tiny_run(Updates(), type("Own", (FederatedCallback,), {"gathers": True})(), rounds=1)


@pytest.mark.parametrize("method", [ByAttribute, ByParameter])
def test_a_declared_loss_reaches_a_helper_in_all_engines_and_at_sites(
    method: Any, tmp_path: Path
) -> None:
    found = []
    for engine in ENGINES:
        torch.manual_seed(0)
        run = trainer(2, [method()])
        run.fit(federated(**engine), blobs())
        found.append(float(run.callback_metrics["half"]))
    assert found[0] > 0 and found == pytest.approx([found[0]] * len(found), abs=1e-6)
    _, seen, _ = over_sites(lambda: [method()], tmp_path)
    assert all(row["half"] > 0 for row in seen)


def test_the_updates_are_gathered_for_whoever_asks() -> None:
    assert CallbackList([UpdatesByAttribute()]).gathering == ["UpdatesByAttribute"]
    assert not CallbackList([Updates()]).gathering
    plain, gathered = tiny_run(rounds=1), tiny_run(UpdatesByAttribute(), rounds=1)
    assert torch.equal(plain.global_vector, gathered.global_vector)
    assert float(gathered.trainer.callback_metrics["spread"]) > 0


def test_a_parameter_of_another_name_is_refused() -> None:
    class Other(FederatedCallback):
        def aggregate(self, server: Any, gathered: Tensor) -> Tensor:
            return gathered.mean(0)

    with pytest.raises(UserError, match=r"calls aggregate\(self, server\) or aggregate\(self, s"):
        CallbackList([Other()])


def test_a_method_without_source_asks_as_any_other() -> None:
    space: dict[str, Any] = {"FederatedCallback": FederatedCallback}
    step = "    def aggregate(self, server, updates):\n        return updates.mean(0)\n"
    exec(f"class Typed(FederatedCallback):\n{step}", space)
    typed = CallbackList([space["Typed"]()])
    assert typed.gathering == ["Typed"] and not typed.reads_loss
