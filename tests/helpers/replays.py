"""Runs whose local steps may be recorded and replayed, and what such a run left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.learners import Lit, blobs, client_rows, federated, trainer


def ran(learner: type[Lit], callbacks: Any, arguments: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(3)
    settings = {
        "engine": "concurrent",
        "workers": 2,
        "participation": 0.8,
        "local_epochs": 4.5,
        **arguments,
        **more,
    }
    module = federated(learner(), **settings)
    engines: list[Any] = []
    module.learner.on_train_epoch_start = lambda: engines.append(module.run.engine)
    run = trainer(3, callbacks())
    run.fit(module, blobs(per_client=30))
    logged = {k: v for k, v in run.callback_metrics.items() if not k.startswith("time")}
    return (
        module,
        {
            "w": module.global_vector.detach(),
            **client_rows(module),
            **module.server_states,
            **logged,
        },
        engines[0],
    )


def assert_same(one: dict[Any, Tensor], other: dict[Any, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def replayed(engine: Any) -> int:
    return sum(worker.step_runner.replayed for worker in engine.workers)
