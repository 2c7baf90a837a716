"""Consensus and drift as their definitions give them, from what clients end with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedCallback, FederatedModule
from fl_lightning import callbacks as c
from fl_lightning.callbacks.loggers.consensus_distance_logger import layers
from fl_lightning.learner.layout import Layout
from fl_lightning.models import ResNet20
from fl_lightning.systems import Buffered, Devices, LogNormal
from tests.helpers.federation import network
from tests.helpers.learners import Lit, blobs, federated, trainer


class Ends(FederatedCallback):
    """Remembers x_{i,K} of the latest round."""

    def __init__(self) -> None:
        super().__init__()
        self.x: dict[tuple[int, int], Any] = {}

    def on_local_end(self, clients: Any) -> None:
        self.x[clients.round, int(clients.ids[0])] = clients.x[0].numpy().copy()

    def of(self, t: int) -> Any:
        return np.stack([x for (s, _), x in sorted(self.x.items()) if s == t])


@pytest.mark.parametrize("parts", [{}, {"net.0.*": 3}])
def test_consensus_and_drift_are_what_their_definitions_say(parts: dict[str, Any]) -> None:
    ends = Ends()
    methods = [c.PartialAveraging(parts)] if parts else []
    ours = network([c.ConsensusDistanceLogger(), c.DriftLogger(), ends, *methods], 5)
    evaluated = [ours.start, *ours.record.evaluated]
    for t, metrics in enumerate(ours.record.metrics):
        x = ends.of(t)
        squared = ((x - x.mean(0)) ** 2).mean(0)
        assert metrics["consensus/total"] == pytest.approx(squared.sum(), rel=1e-6)
        for layer, where in {"net.0": slice(0, 16), "net.2": slice(16, 31)}.items():
            raw, centre = squared[where].sum(), x.mean(0)[where]
            assert metrics[f"consensus/{layer}"] == pytest.approx(raw, rel=1e-6)
            assert metrics[f"consensus_per_coordinate/{layer}"] == pytest.approx(
                squared[where].mean(), rel=1e-6
            )
            assert metrics[f"consensus_relative/{layer}"] == pytest.approx(
                raw / (centre @ centre), rel=1e-6
            )
        u = x - evaluated[t]
        norms = np.linalg.norm(u, axis=1)
        cosines = [u[i] @ u[j] / norms[i] / norms[j] for i in range(3) for j in range(3) if i != j]
        assert metrics["drift/norm"] == pytest.approx(norms.mean(), rel=1e-6)
        assert metrics["drift/cosine"] == pytest.approx(np.mean(cosines), rel=1e-6)


def test_distances_in_an_asynchronous_run_are_between_models_of_different_ages() -> None:
    class Measured(FederatedCallback):
        tolerates_staleness = True

        def __init__(self) -> None:
            super().__init__()
            self.ages, self.expected = set[int](), list[tuple[float, float]]()

        def on_round_end(self, server: Any) -> None:
            x = np.stack(list(ends.x.values()))
            self.ages |= {server.round - version for version, _ in ends.x}
            w = server.w.detach().numpy()
            spread = ((x - x.mean(0)) ** 2).sum(1).mean()
            self.expected.append((((x - w) ** 2).sum(1).mean(), spread))
            ends.x.clear()

    class Seen(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            names = ("divergence/participants", "consensus/total")
            logged.append(tuple(float(trainer.callback_metrics[name]) for name in names))

    ends, measured, logged = Ends(), Measured(), list[tuple[float, ...]]()
    ends.tolerates_staleness = True
    late = Buffered(Devices(LogNormal(1.0, 0.8)), size=3, concurrency=6)
    module = federated(asynchronous=late, engine="sequential")
    loggers = [c.DivergenceLogger(), c.ConsensusDistanceLogger(per_layer=False)]
    trainer(5, [ends, measured, *loggers, Seen()]).fit(module, blobs())
    assert len(measured.ages) > 1, "some models are older than others"
    for one, expected in zip(logged, measured.expected, strict=True):
        assert one == pytest.approx(expected, rel=1e-6)


class Submodels(Ends):
    """Client i trains two thirds of the coordinates; the others stand at 0."""

    untrained = "zero"

    def trained(self, clients: Any) -> Any:
        numbers = torch.arange(clients.x.shape[1])
        return (numbers + clients.ids[:, None]) % 3 > 0


def test_drift_is_of_the_coordinates_that_a_client_trains() -> None:
    ends = Submodels()
    ours = network([c.DriftLogger(), ends], 3)
    w = [ours.start, *ours.record.w]
    for t, metrics in enumerate(ours.record.metrics):
        moved = []
        for (round, i), x in sorted(ends.x.items()):
            if round == t:
                moved.append(np.where((np.arange(len(x)) + i) % 3 > 0, x - w[t], 0.0))
        norms = np.linalg.norm(moved, axis=1)
        together = (np.array(moved) / norms[:, None]).sum(0)
        n = len(moved)
        assert metrics["drift/norm"] == pytest.approx(norms.mean(), rel=1e-6)
        cosine = (together @ together - n) / (n * (n - 1))
        assert metrics["drift/cosine"] == pytest.approx(cosine, rel=1e-6)


def test_a_norm_is_counted_with_the_layer_before_it() -> None:
    names = list(layers(Layout(ResNet20(10, depth=8))))
    assert names == ["conv1", *(f"blocks.{i}.conv{j}" for i in range(3) for j in (1, 2)), "fc"]
    found = layers(Layout(ResNet20(10, depth=8)))
    # and its norm's weight and bias
    assert sum(s.stop - s.start for s in found["conv1"]) == 16 * 3 * 9 + 16 + 16


def test_total_alone_costs_less_and_is_the_same() -> None:
    both = [
        network([c.ConsensusDistanceLogger(per_layer=p)], 3).record.metrics[-1]
        for p in (True, False)
    ]
    assert both[0]["consensus/total"] == pytest.approx(both[1]["consensus/total"], rel=1e-6)
    assert [k for k in both[1] if k.startswith("consensus/")] == ["consensus/total"]


def test_one_client_has_no_cosine() -> None:
    metrics = network([c.DriftLogger()], 2, participation=1).record.metrics[-1]
    assert metrics["drift/norm"] > 0 and "drift/cosine" not in metrics


def test_one_participant_is_where_the_server_goes() -> None:
    """Also in single precision, where squares of long ways cancel badly."""
    torch.manual_seed(0)
    learner = Lit()
    for p in learner.parameters():
        p.data.mul_(30)
    module = FederatedModule(learner, participation=1, local_epochs=3, seed=1)
    run = trainer(2, [c.DivergenceLogger()])
    run.fit(module, blobs(dtype=torch.float32))
    logged = run.callback_metrics
    assert logged["divergence/update"] > 1e-3
    assert logged["divergence/participants"] == 0
