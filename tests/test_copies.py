"""A module that has trained can be copied and pickled: weights, settings and states go along."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import FederatedModule
from fl_lightning.callback import FederatedCallback
from fl_lightning.callbacks import ControlVariates, PartialAveraging
from tests.helpers.learners import Normed, blobs, client_rows, federated, momentum, trainer

METHODS = {
    "SCAFFOLD": lambda: [ControlVariates()],
    "personal": lambda: [PartialAveraging(periods={"net.3.*": "never"})],
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
}


def trained(method: str, **settings: Any) -> FederatedModule:
    torch.manual_seed(0)
    module = federated(Normed(), client_optimizer=momentum, keep_optimizer_state=True, **settings)
    trainer(2, METHODS[method]()).fit(module, blobs())
    return module


def state(module: FederatedModule) -> dict[Any, Tensor]:
    vectors = {"w": module.global_vector.detach(), "evaluated": module.evaluated_vector.detach()}
    return {**module.state_dict(), **module.server_states, **client_rows(module), **vectors}


@pytest.mark.parametrize(("method", "how"), [("SCAFFOLD", "pickle"), ("personal", "copy")])
def test_a_copy_has_everything_and_shares_nothing(method: str, how: str) -> None:
    module = trained(method, engine="concurrent", workers=2)
    before = {key: value.clone() for key, value in state(module).items()}
    twin = COPIES[how](module)
    found = state(twin)
    assert found.keys() == before.keys()
    assert all(torch.equal(found[key], value) for key, value in before.items())
    assert twin.settings == module.settings and twin.global_model.learner is twin.learner
    assert twin.run.model is twin.global_model
    fit, other = trainer(2, METHODS[method]()), trainer(2, METHODS[method]())
    again = copy.deepcopy(module)
    fit.fit(twin, blobs())
    other.fit(again, blobs())
    assert torch.equal(twin.global_vector, again.global_vector)
    assert not torch.equal(twin.global_vector, before["w"])
    assert all(torch.equal(value, before[key]) for key, value in state(module).items())
    assert torch.equal(twin.export().net[0].weight, twin.learner.net[0].weight)


IN_A_ROUND = ("on_round_start", "on_local_end", "on_server_update", "on_round_end")
PLACE = IN_A_ROUND[1]


class Within(FederatedCallback):
    """Does something in the middle of round 1, once."""

    def __init__(self, place: str, what: Callable[[], Any]) -> None:
        super().__init__()
        self._place, self._what, self._lock, self.found = place, what, threading.Lock(), list[Any]()

    def at(self, place: str, t: int) -> None:
        with self._lock:
            if place == self._place and t == 1 and not self.found:
                self.found.append(self._what())


def _at(place: str) -> Callable[..., None]:
    def hook(self: Within, given: Any) -> None:
        self.at(place, given.round)

    return hook


for _place in IN_A_ROUND:
    setattr(Within, _place, _at(_place))


class Teaching(Normed):
    """Its steps write a frozen parameter, which is a buffer to the run."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Parameter(torch.zeros(3), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.teacher.data.add_(1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("place", "engine"), [*((place, "sequential") for place in IN_A_ROUND), (PLACE, "concurrent")]
)
def test_a_copy_made_in_a_round_is_of_the_rounds_before(place: str, engine: str) -> None:
    def made() -> FederatedModule:
        torch.manual_seed(0)
        given = {"client_optimizer": momentum, "keep_optimizer_state": True, "engine": engine}
        return federated(Teaching(), participation=0.5, **given)

    one, module = made(), made()
    trainer(1, [ControlVariates()]).fit(one, blobs())
    copying = Within(place, lambda: copy.deepcopy(module))
    trainer(2, [ControlVariates(), copying]).fit(module, blobs())
    expected, found = state(one), state(copying.found[0])
    assert {key for key, value in expected.items() if not torch.equal(found[key], value)} == set()
