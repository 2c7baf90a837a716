"""The contracts: they hold for every callback of ours, and each goes red for a method that breaks it."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import ClientState, Coefficient, Exponential, FederatedCallback, ServerState, Steps
from fl_lightning import callbacks as c
from fl_lightning.contracts import runs
from fl_lightning.contracts.federation import fit, outcome, quiet, require_same
from fl_lightning.contracts.verdict import Check, CheckReport
from fl_lightning.rounds import Clients, Server
from fl_lightning.testing import INVARIANTS, _checked, check_method

OTHERS: dict[str, Callable[..., FederatedCallback]] = {
    "FedInit, updates": lambda **given: c.RelaxedInitialization(**{"aggregate": "updates", **given}),
    "FedInit, scheduled": lambda **given: c.RelaxedInitialization(**{"beta": Exponential(0.9), **given}),
    "SCAFFOLD, gradient": lambda: c.ControlVariates("gradient"),
    "FedALS": lambda **given: c.PartialAveraging(**(given or {"periods": {"first.*": 2, "head.bias": "never"}})),
    "FedDyn, scheduled": lambda: c.DynamicRegularization(Exponential(0.9)),
    "FedCM, scheduled": lambda **given: c.ClientMomentum(**{"alpha": Exponential(0.5), **given}),
    "top-k": lambda **given: c.TopKCompression(**{"fraction": 0.4, **given}),
}
OURS: dict[str, Callable[..., FederatedCallback]] = {
    **{
        name: made
        for name, made in vars(c).items()
        if name in c.__all__ and isinstance(made, type) and issubclass(made, FederatedCallback)
    },
    **OTHERS,
}


@cache
def report(name: str) -> CheckReport:
    return check_method(OURS[name])


@pytest.mark.parametrize("invariant", INVARIANTS)
@pytest.mark.parametrize("name", OURS)
def test_our_methods_keep_the_contracts(name: str, invariant: str) -> None:
    check = report(name)[invariant]
    assert check.verdict != "fails", f"{check.reason}\n{check.hint}"


@pytest.mark.parametrize("name", [name for name in OURS if name.endswith("Logger")])
def test_loggers_change_nothing(name: str) -> None:
    with quiet():
        ours, average = outcome(fit([OURS[name]()])), outcome(fit([]))
    require_same({k: ours[k] for k in average}, average, 0.0, name, "")


def test_scaffold_keeps_its_estimates_in_a_round_without_learning() -> None:
    """Where Σ η K = 0 nothing was estimated: c_i stays, and c."""
    with quiet():
        before, after = (outcome(fit([c.ControlVariates()], rounds=n, lr_decay=Steps({1: 0.0}))) for n in (1, 2))
    kept = {k: v for k, v in after.items() if "ControlVariates.c" in k}
    require_same({k: before.get(k, torch.zeros_like(v)) for k, v in kept.items()}, kept, 0.0, "lr 0", "")
    assert len(kept) > 4


@pytest.mark.parametrize(
    ("beta", "rule", "participation", "warned"),
    [(0.5, "models", 2, True), (0.49, "models", 2, False), (0.5, "updates", 2, False), (0.5, "models", "all", False)],
)
def test_fedinit_warns_where_it_amplifies_a_drift(beta: float, rule: Any, participation: Any, warned: bool) -> None:
    """beta >= n/(m - n), which is 1/2 with 2 of 6 clients."""
    with quiet():
        module = fit([c.RelaxedInitialization(beta, rule)], rounds=1, participation=participation)
    assert any("amplifies" in note for note in module.notes) == warned


def test_divergence_of_all_clients_is_logged_unless_it_is_turned_off() -> None:
    with quiet():
        logged = [outcome(fit([c.DivergenceLogger(given)], rounds=1)) for given in (None, True, False)]
    assert ["log divergence/all" in left for left in logged] == [True, True, False]


class Anchor(FederatedCallback):
    """A method as the README teaches it, for wrong ones to start from."""

    neutral = {"mu": 0.0}
    mu = Coefficient()
    last = ClientState(initial="current_model", synchronised=False)

    def __init__(self, mu: float = 0.1) -> None:
        super().__init__()
        self.mu = mu

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Any:
        return gradient + self.mu * (clients.x - self.last[clients])

    def on_local_end(self, clients: Clients) -> None:
        self.last[clients] = clients.x


class HiddenMomentum(FederatedCallback):
    def __init__(self) -> None:
        super().__init__()
        self.velocity: Any = 0.0

    def on_server_update(self, server: Server) -> None:
        self.velocity = 0.5 * self.velocity + server.update
        server.update = self.velocity


class HiddenElsewhere(FederatedCallback):
    """Kept where no look at the callback finds it."""

    def __init__(self) -> None:
        super().__init__()
        kept: dict[str, Tensor] = {}

        def grow(server: Server) -> None:
            kept["v"] = server.update + 0.5 * kept.get("v", torch.zeros_like(server.update))
            server.update = kept["v"]

        self.on_server_update = grow  # type: ignore[method-assign]


class AttributeInHook(Anchor):
    def on_local_end(self, clients: Clients) -> None:
        super().on_local_end(clients)
        self.latest = clients.x


class Item(Anchor):
    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Any:
        return gradient * min(1.0, 5.0 / gradient.norm().item())


class Branch(Anchor):
    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Any:
        return gradient * 2 if clients.norm(gradient)[0, 0] < 0.1 else gradient


class Masked(Anchor):
    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient[gradient.abs() < 1e-3] *= 0.5


class NormOfAll(Anchor):
    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Any:
        return gradient / (1 + gradient.norm())


class RowNorms(Anchor):
    """(n,) against (n, D): an error at n = 3, silently wrong at n = D."""

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Any:
        return gradient / (1 + gradient.norm(dim=1))


class FirstSteps(Anchor):
    def on_local_end(self, clients: Clients) -> None:
        self.last[clients] = clients.x / clients.steps[0]


class Passed(FederatedCallback):
    """One client starts where the one before it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.previous: list[Tensor] = []

    def on_local_start(self, clients: Clients) -> None:
        if self.previous:
            clients.x += 0.1 * (self.previous[-1] - clients.x)

    def on_local_end(self, clients: Clients) -> None:
        self.previous.append(clients.x.clone())

    def on_round_end(self, server: Server) -> None:
        self.previous.clear()


class OwnSum(FederatedCallback):
    """Adds up on its own what this process's clients did."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[Tensor] = []

    def on_local_end(self, clients: Clients) -> None:
        self.gathered.append((clients.x - clients.w).sum(0))

    def on_server_update(self, server: Server) -> None:
        server.update = torch.stack(self.gathered).mean(0)
        self.gathered.clear()


class OfOneThread(FederatedCallback):
    """What is set up in one thread is not there in another."""

    def __init__(self) -> None:
        super().__init__()
        self._local = threading.local()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._local.factor = 0.5

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Any:
        return gradient * getattr(self._local, "factor", 1.0)


class NotNeutral(Anchor):
    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Any:
        return gradient + (self.mu + 0.01) * (clients.x - self.last[clients])


class ByNumber(FederatedCallback):
    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Any:
        return gradient * (1 + clients.ids[:, None] / 10)


class DividesByRate(Anchor):
    def on_local_end(self, clients: Clients) -> None:
        self.last[clients] = clients.x + (clients.start - clients.x) / (clients.lr * clients.steps)


class DividesByNorm(FederatedCallback):
    def perturbation(self, clients: Clients, gradient: Tensor) -> Any:
        return 0.05 * gradient / clients.norm(gradient)


class Signs(FederatedCallback):
    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Any:
        return gradient / gradient.abs()


class OneStepLess(Anchor):
    def on_local_end(self, clients: Clients) -> None:
        self.last[clients] = clients.x / (clients.steps - 1)


class Overwrites(FederatedCallback):
    def on_local_start(self, clients: Clients) -> None:
        clients.x = 0.9 * clients.w


class Meddles(FederatedCallback):
    """Holds the learner, and writes to what is not the method's."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._learner = pl_module.learner

    def on_local_end(self, clients: Clients) -> None:
        for parameter in self._learner.parameters():
            if not parameter.requires_grad:
                parameter += 1
        for buffer in self._learner.buffers():
            buffer += 1


class OneRate(FederatedCallback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        (self._rate,) = {group["lr"] for group in pl_module._client.param_groups}


WRONG: list[tuple[type[FederatedCallback], str, str]] = [
    (HiddenMomentum, "state is declared", "self.velocity changed"),
    (HiddenMomentum, "resume is exact", "declare it"),
    (HiddenElsewhere, "resume is exact", "declare it"),
    (AttributeInHook, "client hooks set nothing on self", "on_local_end set or changed self.latest"),
    (Item, "local steps can be captured", "on_local_gradient reads a tensor's value"),
    (Item, "groups of 1, 3 and D clients", "clients.norm(v)"),
    (Branch, "local steps can be captured", "torch.where"),
    (Masked, "local steps can be captured", "boolean indexing"),
    (NormOfAll, "groups of 1, 3 and D clients", "on_local_gradient differs in a group of 3"),
    (RowNorms, "groups of 1, 3 and D clients", "in a group of 3 clients: RuntimeError"),
    (FirstSteps, "groups of 1, 3 and D clients", "on_local_end differs in a group of 3"),
    (Passed, "order of training", "something passes from one client to the next"),
    (Passed, "client hooks set nothing on self", "self.previous"),
    (OwnSum, "two processes", "goes through Upload"),
    (OfOneThread, "engines agree", "no attribute of self"),
    (NotNeutral, "neutral setting is FedAvg", "with mu=0.0 it is not FedAvg"),
    (ByNumber, "order of clients", "no client's number"),
    (DividesByRate, "rounds with learning rate 0", "with learning rate 0 in round"),
    (DividesByNorm, "finite at zero gradients", "torch.where(norm > 0"),
    (Signs, "sparse and unused gradients", "parameters that get no gradient"),
    (OneStepLess, "small clients, short batches", "is not finite"),
    (Overwrites, "another callback, either order", "RelaxedInitialization"),
    (Meddles, "frozen parameters stay", "requires_grad=False changed"),
    (Meddles, "buffers untouched", "buffer"),
    (OneRate, "unequal learning rates", "test_contracts.py"),
]


def verdict(cls: type[FederatedCallback], invariant: str) -> Check:
    with quiet():
        return _checked(invariant, INVARIANTS[invariant], runs.Method(cls))


@pytest.mark.parametrize(("cls", "invariant", "says"), WRONG, ids=[f"{w[0].__name__}: {w[1]}" for w in WRONG])
def test_a_wrong_method_fails_with_a_message_that_leads_to_the_fault(
    cls: type[FederatedCallback], invariant: str, says: str
) -> None:
    check = verdict(cls, invariant)
    assert check.verdict == "fails"
    assert says in f"{check.reason} {check.hint}"


def test_every_contract_is_seen_to_fail() -> None:
    assert {invariant for _, invariant, _ in WRONG} == set(INVARIANTS)


def test_the_report_is_a_table_with_reasons_and_hints() -> None:
    good, bad = check_method(Anchor), check_method(AttributeInHook)
    assert good.ok and not bad.ok
    assert str(good).startswith("Anchor: all contracts hold")
    assert "what: on_local_end set or changed self.latest" in str(bad) and "hint: " in str(bad)


HOOKS = ["on_round_start", "on_local_start", "on_local_gradient", "on_local_step_end", "on_local_end"]
HOOKS += ["on_server_update", "on_round_end"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_run_interrupted_in_any_hook_resumes_exactly(hook: str) -> None:
    """A round that dies never happened."""

    class Killed(FederatedCallback):
        seen = ServerState(synchronised=False, shape=())

    def die(argument: Any, gradient: Any = None) -> None:
        if armed and argument.round == 2:
            raise RuntimeError("killed")

    setattr(Killed, hook, lambda self, *given: die(*given))

    def callbacks() -> list[FederatedCallback]:
        return [c.ControlVariates(), c.RelaxedInitialization(), c.DivergenceLogger(), c.CommunicationLogger(), Killed()]

    with quiet(), tempfile.TemporaryDirectory() as folder:
        armed = False
        whole = outcome(fit(callbacks(), rounds=4))
        armed = True
        with pytest.raises(RuntimeError, match="killed"):
            fit(callbacks(), rounds=4, folder=folder)
        armed = False
        require_same(whole, outcome(fit(callbacks(), rounds=4, folder=folder, resume=True)), 0.0, hook, "")
