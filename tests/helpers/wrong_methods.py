"""Methods that each break one contract, and what the report has to say of it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning import ClientState, Coefficient, FederatedCallback, Upload
from fl_lightning.callback import Clients, Server


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

        self.on_server_update = grow


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
    """(n,) against (n, D): an error for several clients."""

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Any:
        return gradient / (1 + gradient.norm(dim=1))


class FirstSteps(Anchor):
    def on_local_end(self, clients: Clients) -> None:
        self.last[clients] = clients.x / clients.steps[0]


class Passed(FederatedCallback):
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
        (self._rate,) = {group["lr"] for group in pl_module.run.optimizers.clients.param_groups}


class Pulled(FederatedCallback):
    """A method that looks at models, for wrong ones to start from."""

    neutral = {"mu": 0.0}
    taps = {"logits": "last"}
    mu = Coefficient()

    def __init__(self, mu: float = 0.1) -> None:
        super().__init__()
        self.mu = mu

    def local_loss(self, clients: Clients, loss: Tensor, seen: Any, batch: Any) -> Any:
        received = clients.seen_at(clients.w)["logits"]
        return loss + self.mu * (seen["logits"] - received).square().mean()


class TeacherOnSelf(Pulled):
    def local_loss(self, clients: Clients, loss: Tensor, seen: Any, batch: Any) -> Any:
        self.teacher = clients.seen_at(clients.w)["logits"]
        return loss + self.mu * (seen["logits"] - self.teacher).square().mean()


class LossBranch(Pulled):
    def local_loss(self, clients: Clients, loss: Tensor, seen: Any, batch: Any) -> Any:
        return loss * 2 if loss > 1 else super().local_loss(clients, loss, seen, batch)


class OwnCoin(FederatedCallback):
    """Steps by a generator of its own, which goes on from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self._coin = np.random.default_rng(0)

    def steps(self, t: int, ids: Tensor) -> Any:
        return self._coin.integers(1, 4, len(ids))


class HiddenMean(FederatedCallback):
    """What is evaluated is kept where no checkpoint knows it."""

    mean: Any = None

    def evaluated(self, server: Server) -> Tensor:
        self.mean = server.w.clone() if self.mean is None else 0.5 * (self.mean + server.w)
        mean: Tensor = self.mean
        return mean


class Nothing(Anchor):
    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Any:
        return gradient + self.nothing  # type: ignore[attr-defined]


class NoReturn(Anchor):
    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Any:
        gradient + self.mu * (clients.x - clients.w)


class Unassigned(FederatedCallback):
    norms = Upload(shape=())

    def on_server_update(self, server: Server) -> None:
        server.log("norm", self.norms.mean())


class OwnNoise(FederatedCallback):
    def transmit(self, clients: Clients, u: Tensor) -> Tensor:
        return u + 0.01 * torch.randn_like(u)


WRONG: list[tuple[type[FederatedCallback], str, str]] = [
    (HiddenMomentum, "resume is exact", "the run changed: self.velocity"),
    (HiddenElsewhere, "resume is exact", "declare it"),
    (TeacherOnSelf, "client hooks set nothing on self", "local_loss set or changed self.teacher"),
    (LossBranch, "local steps can be captured", "local_loss reads a tensor's value"),
    (
        AttributeInHook,
        "client hooks set nothing on self",
        "on_local_end set or changed self.latest",
    ),
    (Item, "local steps can be captured", "on_local_gradient reads a tensor's value"),
    (Branch, "local steps can be captured", "torch.where"),
    (Masked, "local steps can be captured", "boolean indexing"),
    (NormOfAll, "engines agree", "engine='stacked' and engine='sequential' differ"),
    (RowNorms, "engines agree", "clients.norm(v)"),
    (FirstSteps, "engines agree", "columns (n, 1)"),
    (Passed, "order of training", "something passes from one client to the next"),
    (Passed, "client hooks set nothing on self", "self.previous"),
    (OwnSum, "two processes", "through Upload"),
    (OfOneThread, "engines agree", "no attribute of self"),
    (NotNeutral, "neutral setting is FedAvg", "with mu=0.0 it is not FedAvg"),
    (NoReturn, "neutral setting is FedAvg", "does one lack its return?"),
    (ByNumber, "order of clients", "no client's number"),
    (DividesByRate, "rounds with learning rate 0", "with learning rate 0 in round"),
    (DividesByNorm, "finite at zero gradients", "torch.where(norm > 0"),
    (Signs, "sparse and unused gradients", "parameters that get no gradient"),
    (OneStepLess, "small clients, short batches", "is not finite"),
    (Overwrites, "another callback, either order", "RelaxedInitialization"),
    (Meddles, "frozen parameters stay", "requires_grad=False changed"),
    (Meddles, "buffers untouched", "buffer"),
    (OneRate, "unequal learning rates", "wrong_methods.py"),
    (OwnCoin, "resume is exact", "gives another result"),
    (HiddenMean, "resume is exact", "the evaluated model"),
    (Nothing, "a run of three rounds", "has no attribute 'nothing' (wrong_methods.py"),
    (Unassigned, "uploads are assigned", "self.norms[clients] = …"),
    (OwnNoise, "draws have keys", "transmit draws from a random generator of the process"),
]
