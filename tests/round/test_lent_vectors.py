"""What hooks are handed of the run's own vectors is not changed unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fl_lightning import ClientState, FederatedCallback, ServerState, Upload, UserError
from fl_lightning.callbacks import PartialAveraging
from tests.helpers.learners import blobs, federated, trainer


class Changing(FederatedCallback):
    reads_evaluated = True
    first = ClientState(initial="initial_model", synchronised=False)
    n = ServerState(shape=(2,))

    def __init__(self, change: Callable[[Any, Any], Any], hook: str = "on_local_start") -> None:
        super().__init__()
        self._change = change
        setattr(self, hook, self._called)

    def _called(self, subject: Any, *more: Any) -> None:
        self._change(self, subject)


def twice(callback: Any, clients: Any) -> None:
    callback.n[0] += 1
    assert callback.n.shape == (2,)  # read once more


OF_CLIENTS: dict[str, Callable[[Any, Any], Any]] = {
    "clients.w": lambda _, clients: clients.w.sub_(0.1),
    "clients.evaluated": lambda _, clients: clients.evaluated.view(-1)[:3].zero_(),
    "clients.initial_model": lambda _, clients: clients.initial_model.mul_(2),
    "clients.lr": lambda _, clients: clients.lr.mul_(0.5),
}
OF_SERVER: dict[str, Callable[[Any, Any], Any]] = {
    "server.w": lambda _, server: server.w.sub_(0.1),
    "server.w_before": lambda _, server: server.w_before.sub_(0.1),
    "server.evaluated": lambda _, server: server.evaluated.sub_(0.1),
    "server.initial_model": lambda _, server: server.initial_model.mul_(2),
}


def fit(callback: FederatedCallback, **arguments: Any) -> None:
    trainer(2, [callback]).fit(federated(**arguments), blobs())


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
@pytest.mark.parametrize("name", OF_CLIENTS)
def test_a_vector_that_clients_share_is_not_changed_in_place(name: str, engine: str) -> None:
    # What is evaluated is w itself here, so either name is right.
    told = name.replace("evaluated", "(w|evaluated)")
    with pytest.raises(UserError, match=rf"Changing._called changed {told} in place.*clone\(\)"):
        fit(Changing(OF_CLIENTS[name]), engine=engine)


class Moving(FederatedCallback):
    def on_local_start(self, clients: Any) -> None:
        clients.x += 0.1


class MovingOrigin(FederatedCallback):
    def on_local_end(self, clients: Any) -> None:
        clients.origin.sub_(0.1)


@pytest.mark.parametrize("others", [[], [Moving()]])
@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
@pytest.mark.parametrize("name", ["start", "origin"])
def test_nor_is_where_they_started(name: str, engine: str, others: list[Any]) -> None:
    change = Changing(lambda _, clients: getattr(clients, name).sub_(0.1), "on_local_step_end")
    with pytest.raises(UserError, match=r"changed clients.start \(clients.origin is .*in place"):
        trainer(2, [*others, change]).fit(federated(engine=engine), blobs())


def test_nor_is_where_kept_parts_began() -> None:
    parts = PartialAveraging(periods={"last": "never"})
    with pytest.raises(UserError, match=r"MovingOrigin.* changed clients.origin in place"):
        trainer(2, [parts, MovingOrigin()]).fit(federated(), blobs())


@pytest.mark.parametrize("hook", ["on_round_start", "on_server_update", "on_round_end"])
@pytest.mark.parametrize("name", OF_SERVER)
def test_nor_are_the_server_s(name: str, hook: str) -> None:
    with pytest.raises(UserError, match=r"Changing._called changed server\.\w+ in place"):
        fit(Changing(OF_SERVER[name], hook))


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
@pytest.mark.parametrize("change", [lambda c, _: c.n.add_(1), twice])
def test_a_server_state_is_not_changed_in_place_by_clients(change: Any, engine: str) -> None:
    with pytest.raises(UserError, match=r"changed the server's state Changing.n in place.*Upload"):
        fit(Changing(change), engine=engine)


class Summing(FederatedCallback):
    gone = Upload()

    def on_local_end(self, clients: Any) -> None:
        self.gone[clients] = clients.x - clients.start

    def on_server_update(self, server: Any) -> None:
        self.gone.sum().zero_()
        assert bool(self.gone.sum().any())


def test_the_sum_of_an_upload_is_the_hook_s_own() -> None:
    fit(Summing())
