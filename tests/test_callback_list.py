"""The callbacks of a run as one thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import ClientState, FederatedCallback, Scratch, Upload, UserError
from fl_lightning.callbacks import SharpnessAwareMinimization
from tests.helpers.commands import typed
from tests.helpers.learners import Lit, blobs, federated, trainer


def test_a_misspelt_hook_is_refused_with_the_right_name() -> None:
    class Typo(FederatedCallback):
        def on_local_grad(self, clients: Any, gradient: Any) -> None: ...

    told = r"Typo\.on_local_grad is not a hook.*Did you mean 'on_local_gradient'"
    with pytest.raises(UserError, match=told):
        trainer(1, [Typo()]).fit(federated(), blobs())


class TooFew(FederatedCallback):
    def on_local_gradient(self, clients: Any) -> None: ...


class TooMany(FederatedCallback):
    def on_server_update(self, server: Any, update: Any) -> None: ...


class Exchanged(FederatedCallback):
    def on_local_gradient(self, gradient: Any, clients: Any) -> None: ...


class OtherNames(FederatedCallback):
    def on_local_gradient(self, c: Any, g: Any, *more: Any, k: int = 1) -> None: ...

    def perturbation(self, c: Any) -> Any:
        return torch.zeros_like(c.x)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (TooFew, r"defines on_local_gradient\(self, clients\), but .*\(self, clients, gradient\)"),
        (TooMany, r"defines on_server_update\(self, server, update\), but .*\(self, server\)"),
        (Exchanged, r"defines on_local_gradient\(self, gradient, clients\), but the run calls"),
    ],
)
def test_a_hook_of_other_arguments_is_refused_before_the_run(method: Any, said: str) -> None:
    module = federated()
    with pytest.raises(UserError, match=said):
        trainer(1, [method()]).fit(module, blobs())
    assert module.run.state.rounds == 0 and module.run.loop is None
    trainer(1, [OtherNames()]).fit(federated(), blobs())


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_what_is_logged_and_sent_is_what_it_was_then(engine: str) -> None:
    """A row that is changed in place afterwards changes neither."""

    class Counting(FederatedCallback):
        rounds = ClientState(shape=(), synchronised=False)
        path = ClientState(synchronised=False)
        before = Upload(shape=())
        there = Upload()

        def on_local_end(self, clients: Any) -> None:
            clients.log("before", self.rounds[clients])
            self.before[clients] = self.rounds[clients]
            self.there[clients] = self.path[clients]
            self.rounds[clients] += 1
            self.path[clients].add_(clients.x)

        def on_round_end(self, server: Any) -> None:
            server.log("sent", self.before.mean())
            server.log("path", self.there.mean().abs().sum())

    run = trainer(1, [Counting()])
    run.fit(federated(engine=engine, participation="all"), blobs())
    logged = run.callback_metrics
    assert [float(logged[name]) for name in ("before", "sent", "path")] == [0, 0, 0]


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_a_method_that_says_it_does_not_move_starts_may_not(engine: str) -> None:
    class Moving(FederatedCallback):
        moves_start = False

        def on_local_start(self, clients: Any) -> None:
            clients.x.mul_(0.9)

    with pytest.raises(TypeError, match="moves_start = False"):
        trainer(1, [Moving()]).fit(federated(Lit(), engine=engine), blobs())


def test_a_callback_is_taken_once_and_a_hook_of_one_owner_has_one() -> None:
    class Mine(FederatedCallback):
        def perturbation(self, clients: Any, gradient: Tensor) -> Tensor:
            return 0 * gradient

    for methods, words in (
        ([Mine(), Mine()], r"Mine is given 2 times"),
        (
            [Mine(), SharpnessAwareMinimization()],
            r"Mine and SharpnessAwareMinimization both decide.*`perturbation`",
        ),
    ):
        with pytest.raises(UserError, match=words):
            trainer(1, methods).fit(federated(), blobs())


SHARED = typed("on_round_start on_local_start on_local_gradient on_local_step_end on_local_end")
SHARED += typed("on_server_update on_round_end")


def calling(name: str, called: list[tuple[str, str]], on_instance: bool) -> FederatedCallback:
    """A callback with all shared hooks, of its class or put on the instance."""

    def hook(of: str) -> Any:
        return lambda *given: called.append((of, name))

    made: FederatedCallback = type(
        name, (FederatedCallback,), {} if on_instance else {h: hook(h) for h in SHARED}
    )()
    for shared in SHARED if on_instance else ():
        object.__setattr__(made, shared, hook(shared))
    return made


def test_each_hook_is_called_on_each_callback_in_the_order_of_the_list() -> None:
    called: list[tuple[str, str]] = []
    methods = [calling("B", called, False), calling("A", called, True), calling("C", called, False)]
    trainer(1, methods).fit(federated(engine="sequential", participation=2, local_steps=2), blobs())
    local = ["on_local_start", *2 * ["on_local_gradient", "on_local_step_end"], "on_local_end"]
    hooks = ["on_round_start", *2 * local, "on_server_update", "on_round_end"]
    assert called == [(hook, name) for hook in hooks for name in "BAC"]


@pytest.mark.parametrize(
    ("hook", "returned", "words"),
    [
        ("on_local_gradient", torch.zeros(3), r"shape \(3,\); it has to return a tensor of sh"),
        ("on_local_gradient", 1.0, r"returned 1\.0"),
        ("on_local_start", True, "returned True; it has to return nothing"),
        ("on_local_step_end", 3, "returned 3; it has to return nothing"),
        ("on_server_update", torch.zeros(204), "has to return nothing"),
        ("aggregate", None, r"returned None; it has to return a tensor of shape \(204,\)"),
        ("aggregate", torch.zeros(3), r"has to return a tensor of shape \(204,\)"),
        ("transmit", torch.zeros(204), r"has to return a tensor of shape \(1, 204\)"),
    ],
)
def test_what_a_hook_may_not_return_is_said(hook: str, returned: object, words: str) -> None:
    method = type("Wrong", (FederatedCallback,), {hook: lambda self, *given: returned})()
    with pytest.raises(TypeError, match=words):
        trainer(1, [method]).fit(federated(), blobs())


def test_a_gradient_may_be_changed_in_place_or_returned() -> None:
    class InPlace(FederatedCallback):
        def on_local_gradient(self, clients: Any, gradient: Tensor) -> None:
            gradient.mul_(0.5)

    class Returned(FederatedCallback):
        def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
            return 0.5 * gradient

    plain, one, other = federated(), federated(), federated()
    for module, methods in ((plain, []), (one, [InPlace()]), (other, [Returned()])):
        trainer(2, methods).fit(module, blobs())
    assert torch.equal(one.global_vector, other.global_vector)
    assert not torch.equal(one.global_vector, plain.global_vector)


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_a_full_gradient_at_the_start_moves_no_start(engine: str) -> None:
    class Looking(FederatedCallback):
        moves_start = False
        at_start = Scratch()

        def on_local_start(self, clients: Any) -> None:
            self.at_start[clients] = clients.full_gradient(clients.x)

        def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
            return gradient + 0.1 * self.at_start[clients]

    module = federated(engine=engine)
    trainer(1, [Looking()]).fit(module, blobs())
    Looking.moves_start = True
    other = federated(engine="sequential")
    trainer(1, [Looking()]).fit(other, blobs())
    torch.testing.assert_close(module.global_vector, other.global_vector, rtol=1e-9, atol=1e-12)
