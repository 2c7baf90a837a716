"""Any optimizer of torch steps clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.learners import Lit, blobs, federated, trainer


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW([{"params": list(p)[:2], "lr": 0.02}, {"params": []}], lr=0.01),
        lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.01),
    ],
)
def test_any_torch_optimizer_steps_clients_as_it_steps_a_network(optimizer: Any) -> None:
    if "Muon" in optimizer.__code__.co_names and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    data = blobs(clients=1)
    module = federated(participation="all", local_epochs=1, client_optimizer=lambda p: optimizer(list(p)))
    learner = Lit().double()
    learner.load_state_dict(module.learner.state_dict())
    trainer(1).fit(module, data)
    own = optimizer(list(learner.parameters()))
    for x, y in data.client_batches(0, 0, 3):
        own.zero_grad()
        nn.functional.cross_entropy(learner.net(x), y).backward()
        own.step()
    for name, value in learner.state_dict().items():
        torch.testing.assert_close(module.export().state_dict()[name], value, rtol=1e-12, atol=1e-12)
