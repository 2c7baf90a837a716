"""Methods compute with the model that clients were given, if another method broadcasts one. Every
packaged method runs beside a ``broadcast`` of w + c, with c constant. What clients do is then what
they do in a run without it that begins at w^0 + c, and the server adds the same updates. So the
models of the two runs differ by c in each round, unless the pair is refused by both names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning import FederatedCallback, UserError
from fl_lightning import callbacks as c
from fl_lightning.callbacks.decentralised.without_server import WithoutServer
from fl_lightning.learner.layout import Layout
from tests.callbacks.test_adapters import NET, TRAININGS, Halves, ours
from tests.engines.test_every_method import CASES, COMPOSED, learner
from tests.helpers.agreement import trained
from tests.helpers.low_rank import Adapted

SHIFT = 0.1
# These read a model that is not what clients were given, by their definition: FedInit starts a
# client that never took part away from w^0; LoRA-FAIR fits B to the A of the next model; FedGMT
# averages the server's models.
OF_W = ("method/fedinit", "method/ri", "method/lora_fair", "method/fedgmt")
# They own `broadcast` themselves.
OWNERS = ("method/fedacg", "method/fedgloss", "method/fednsam", "method/ifca")
# They compute each client's factors from w^t and its update.
OF_FACTORS = ("method/flexlora", "method/flora", "method/hetlora", "method/fedsvd")


def shift(size: int) -> Tensor:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return SHIFT * drawn


class Shifted(FederatedCallback):
    def broadcast(self, server: Any) -> Tensor:
        found: Tensor = server.w + shift(len(server.w)).to(server.w)
        return found


def moved(learner: Callable[[], Any]) -> Any:
    """The learner, whose trainable parameters begin at w^0 + c."""
    made = learner().double()
    layout = Layout(made)
    parameters = dict(made.named_parameters())
    for name, view in zip(layout, layout.views(shift(layout.size)), strict=True):
        parameters[name].data.add_(view)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in CASES if each not in (*COMPOSED, "every hook")])
def test_a_method_follows_the_model_that_clients_were_given(name: str) -> None:
    logged = learner(name, draws=False)
    methods, options = CASES[name]()
    options = {**options, "clip_norm": 0.9, "rounds": 4}
    serverless = any(isinstance(method, WithoutServer) for method in methods)
    if serverless or name in (*OWNERS, *OF_FACTORS):
        says = "both decide what clients get" if name in OWNERS else "and Shifted cannot run"
        with pytest.raises(UserError, match=says):
            trained(([*methods, Shifted()], {}), "sequential", learner=logged, **options)
        return
    run = trained(([*methods, Shifted()], {}), "sequential", learner=logged, **options)
    plain = trained((CASES[name]()[0], {}), "sequential", learner=lambda: moved(logged), **options)
    differences = [
        np.abs(one + shift(one.size).numpy() - other).max()
        for one, other in zip(run.record.w, plain.record.w, strict=True)
    ]
    assert max(differences) < 1e-9 if name not in OF_W else min(differences) > 1e-3


@pytest.mark.parametrize("untrained", ["given", "zero"])
@pytest.mark.parametrize("over", ["holders", "all", "zeros"])
def test_masks_follow_the_model_that_clients_were_given(over: Any, untrained: Any) -> None:
    def halves() -> Halves:
        method = Halves()
        method.untrained, method.averaged_over = untrained, over
        return method

    if over == "zeros":
        with pytest.raises(UserError, match="Halves and Shifted cannot run together"):
            ours([halves(), Shifted()], TRAININGS["sgd"], rounds=1)
        return
    run = ours([halves(), Shifted()], TRAININGS["sgd"], rounds=3)
    plain = ours([halves()], TRAININGS["sgd"], rounds=3, learner=moved(Adapted))
    for one, other in zip(run.record.w, plain.record.w, strict=True):
        assert np.abs(one + shift(one.size).numpy() - other).max() < 1e-12


# --------------------------------------------------------------------------- adapters


class Seen(FederatedCallback):
    """Keeps the clients' models, what they were given, and the weights of each round."""

    role = "measurement"

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[tuple[int, int], Any] = {}
        self.given: list[Any] = []
        self.rounds: list[Any] = []

    def on_local_end(self, clients: Any) -> None:
        for client, row in zip(clients.client_ids, clients.x, strict=True):
            self.models[clients.round, client] = row.numpy().copy()

    def on_server_update(self, server: Any) -> None:
        self.given.append(server.given.numpy().copy())
        self.rounds.append((server.ids.tolist(), server.weights.numpy().copy()))


BROADCASTS: dict[str, Callable[[], list[Any]]] = {
    "none": lambda: [],
    "FedInit": lambda: [c.RelaxedInitialization(0.3)],
    "FedACG": lambda: [c.LookaheadMomentum(0.85)],
    "FedGloSS": lambda: [c.ServerAscent(0.3)],
    "quantised": lambda: [c.QuantizedBroadcast(1)],
    "constant": lambda: [Shifted()],
}


def correction(layer: Any, p: Any, rows: Any, a: Any) -> Any:
    """R Aᵀ(A Aᵀ + λ I)⁻¹, λ = 0.1, with the spread R of the clients' factors."""
    pairs = [layer.factors(row - p @ rows) for row in rows]
    spread = sum(weight * own_b @ own_a for weight, (own_a, own_b) in zip(p, pairs, strict=True))
    return spread @ a.T @ np.linalg.inv(a @ a.T + 0.1 * np.eye(layer.rank))


@pytest.mark.parametrize(
    ("beside", "first"), [*((name, True) for name in BROADCASTS), ("FedACG", False)]
)
def test_lora_fair_corrects_b_for_the_next_a(beside: str, first: bool) -> None:
    """Whatever the order of the callbacks: B = B̄ + R Āᵀ(Ā Āᵀ + λ I)⁻¹, with the Ā of the model."""
    seen, fair = Seen(), c.CorrectedFactor(0.1)
    others = BROADCASTS[beside]()
    callbacks = [fair, *others, seen] if first else [*others, seen, fair]
    run = ours(callbacks, TRAININGS["sgd"], rounds=4)
    plain = run.start
    for t, w in enumerate(run.record.w):
        ids, p = seen.rounds[t]
        rows = np.stack([seen.models[t, i] for i in ids])
        for layer in NET.layers:
            a, b = layer.factors(w)
            change = correction(layer, p, rows, a)
            assert np.abs(change).max() > 1e-4, "there is something to correct"
            # FedACG's model is the mean of the clients'; the others add the updates to w.
            mean = p @ rows if beside == "FedACG" else plain + p @ rows - seen.given[t]
            mean_a, mean_b = layer.factors(mean)
            assert np.abs(a - mean_a).max() < 1e-12, f"A in round {t}"
            assert np.abs(b - mean_b - change).max() < 1e-9, f"B in round {t}"
        plain = w
