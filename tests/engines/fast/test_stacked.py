"""Clients as one batch of models.

The same as one after the other to rounding, and what cannot be stacked.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import callbacks as methods
from fl_lightning.callback import ClientState, FederatedCallback
from fl_lightning.engines.fast import stacked
from tests.helpers.learners import Lit, Normed, blobs, client_rows, federated, momentum, trainer

pytestmark = pytest.mark.fast


class Walking(FederatedCallback):
    """A row that changes at every step, and a frozen client's must not."""

    seen = ClientState(synchronised=False)

    def on_local_step_end(self, clients: Any) -> None:
        self.seen[clients] += clients.x


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


CASES: dict[str, Any] = {
    "fedavg": ({}, lambda: []),
    "scaffold": ({}, lambda: [methods.ControlVariates()]),
    "scaffold, full gradients": ({}, lambda: [methods.ControlVariates(estimate="gradient")]),
    "fedsam and fedinit": (
        {},
        lambda: [methods.SharpnessAwareMinimization(0.05), methods.RelaxedInitialization(0.1)],
    ),
    "fedsmoo": (
        {},
        lambda: [
            methods.GlobalSharpnessAwareMinimization(0.05),
            methods.DynamicRegularization(0.1),
        ],
    ),
    "rows of each step": ({}, lambda: [Walking()]),
    "clipping": ({"clip_norm": 0.5, "weighting": "samples"}, lambda: []),
    "momentum": ({"client_optimizer": momentum}, lambda: []),
    "adam": ({"client_optimizer": adam}, lambda: []),
    "parts": ({}, lambda: [methods.PartialAveraging(periods={"net.2.*": 2})]),
    "divergence": ({}, lambda: [methods.DivergenceLogger()]),
}


def ran(
    engine: str, arguments: Any, callbacks: Any, **more: Any
) -> tuple[Any, dict[Any, Tensor], dict[str, Tensor]]:
    torch.manual_seed(3)
    module = federated(
        Lit(), engine=engine, participation=0.6, local_epochs=1.5, **arguments, **more
    )
    run = trainer(3, callbacks)
    run.fit(module, blobs())  # clients of 16 to 24 samples: unequal steps and unequal last batches
    return (
        module,
        client_rows(module),
        {k: v for k, v in run.callback_metrics.items() if not k.startswith("time/")},
    )


@pytest.mark.parametrize("name", CASES)
def test_stacking_changes_nothing_but_rounding(name: str) -> None:
    arguments, callbacks = CASES[name]
    reference, reference_rows, reference_metrics = ran("sequential", arguments, callbacks())
    for at_once in (2, "auto"):
        module, rows, metrics = ran("stacked", arguments, callbacks(), clients_at_once=at_once)
        assert module.engine_facts["engine"] == "stacked"
        torch.testing.assert_close(
            module.global_vector, reference.global_vector, rtol=1e-9, atol=1e-9
        )
        assert rows.keys() == reference_rows.keys()
        for key in rows:
            torch.testing.assert_close(rows[key], reference_rows[key], rtol=1e-9, atol=1e-9)
        assert metrics.keys() == reference_metrics.keys()
        for key in metrics:
            torch.testing.assert_close(
                metrics[key].double(), reference_metrics[key].double(), rtol=1e-6, atol=1e-9
            )


class Branching(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss) > 1 else 2 * loss


class NormedDropping(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.5))


@pytest.mark.parametrize(
    ("learner", "instead"),
    [(Normed, "concurrent"), (Branching, "concurrent"), (NormedDropping, "sequential")],
)
def test_what_cannot_be_stacked_trains_otherwise_with_one_line(
    learner: type[Lit], instead: str
) -> None:
    torch.manual_seed(3)
    module = federated(learner(), engine="stacked", workers=2)
    with pytest.warns(UserWarning, match="engine='stacked' cannot train"):
        trainer(2).fit(module, blobs())
    assert module.engine_facts["engine"] == instead
    torch.manual_seed(3)
    reference = federated(learner(), engine="sequential")
    trainer(2).fit(reference, blobs())
    assert torch.equal(module.global_vector, reference.global_vector)


def test_groups_are_halved_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stacked.Stack.gradient

    def gradient(self: stacked.Stack, groups: Any, step: int, log: bool = True) -> Tensor:
        if len(self.x) > 2 and step == 1:
            raise torch.OutOfMemoryError("not enough memory")
        return whole(self, groups, step, log)

    monkeypatch.setattr(stacked.Stack, "gradient", gradient)
    reference, reference_rows, _ = ran("sequential", {}, [methods.ControlVariates()])
    with pytest.warns(UserWarning, match="memory ran out"):
        module, rows, _ = ran("stacked", {}, [methods.ControlVariates()])
    torch.testing.assert_close(module.global_vector, reference.global_vector, rtol=1e-9, atol=1e-9)
    assert rows.keys() == reference_rows.keys()


class Bounded(Lit):
    """An embedding of bounded norm, and weights clipped as a step begins: both in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 4, max_norm=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            self.net[2].weight.clamp_(-0.2, 0.2)
        return nn.functional.cross_entropy(self.net(x) + self.table((x[:, 0] > 0).long()), y)


@pytest.mark.filterwarnings("ignore:.*performance drop:UserWarning")
def test_what_a_step_changes_in_place_stays_where_batches_differ_in_size() -> None:
    found = []
    for engine in ("sequential", "stacked"):
        module = federated(Bounded(), participation="all", engine=engine)
        trainer(2).fit(module, blobs(clients=3, per_client=14))
        assert module.engine_facts["engine"] == engine
        found.append(module.global_vector.detach())
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
