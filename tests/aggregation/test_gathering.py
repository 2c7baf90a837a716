"""All updates at the server: whose they are, that they are the clients', and what may be done with
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning.callback import Clients, FederatedCallback
from fl_lightning.callbacks import ControlVariates
from fl_lightning.lab.contracts.federation import (
    Outcome,
    fit,
    in_processes,
    outcome,
    quiet,
    require_same,
)
from fl_lightning.testing import tiny_run
from tests.helpers.learners import Lit, blobs, federated, trainer


class Looking(FederatedCallback):
    def on_updates(self, server: Any) -> None:
        server.log("spread", server.updates.std(0).norm())


class Median(FederatedCallback):
    def aggregate(self, server: Any, updates: Tensor) -> Tensor:
        return updates.median(0).values


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"weighting": "samples"},
        {"participation": "all", "weighting": "samples"},
        {"participation": 5},
    ],
)
def test_the_mean_of_updates_that_nobody_changed_has_the_bits_of_the_mean(arguments: Any) -> None:
    plain = tiny_run(ControlVariates(), **arguments)
    looked = tiny_run(ControlVariates(), Looking(), **arguments)
    assert torch.equal(plain.global_vector, looked.global_vector)
    assert torch.equal(
        plain.server_states["ControlVariates.c"], looked.server_states["ControlVariates.c"]
    )


def test_rows_are_what_each_client_transmitted_in_ascending_order() -> None:
    seen: dict[str, Any] = {}

    class Marked(FederatedCallback):
        def transmit(self, clients: Clients, update: Tensor) -> Tensor:
            return torch.ones_like(update) * (1.0 + clients.ids[:, None])

        def aggregate(self, server: Any, updates: Tensor) -> Tensor:
            seen["rows"], seen["ids"] = updates.clone(), server.ids.tolist()
            return 0 * server.update

    for engine in ("sequential", "concurrent", "stacked"):
        tiny_run(Marked(), rounds=1, participation=5, engine=engine)
        assert seen["ids"] == sorted(seen["ids"]) and len(seen["ids"]) == 5
        assert torch.equal(
            seen["rows"], (1.0 + torch.tensor(seen["ids"]))[:, None].expand_as(seen["rows"])
        )


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_what_a_hook_changes_is_what_is_averaged(weighting: str) -> None:
    class Halved(FederatedCallback):
        def on_updates(self, server: Any) -> None:
            if server.round % 2:
                server.updates = server.updates / 2
            else:
                server.updates.mul_(0.5)

        def on_server_update(self, server: Any) -> None:
            means.append((server.mean_change.clone(), server.updates.mean(0)))

    means: list[Any] = []
    halved = tiny_run(Halved(), weighting=weighting)
    slower = tiny_run(weighting=weighting, server_optimizer=lambda w: torch.optim.SGD(w, 0.5))
    assert torch.allclose(halved.global_vector, slower.global_vector, rtol=0, atol=1e-14)
    assert all(torch.allclose(mean, of_rows, rtol=0, atol=1e-15) for mean, of_rows in means)


def test_one_and_four_processes_have_the_same_rows() -> None:
    def job(world: int) -> Outcome:
        given = {"strategy": "federated", "devices": world}
        return outcome(fit([Median(), Looking()], participation=5, trainer=given))

    with quiet():
        alone = outcome(fit([Median(), Looking()], participation=5))
        for world in (4,):
            require_same(
                alone,
                in_processes(world, lambda world=world: job(world)),
                0.0,
                f"{world} processes",
                "",
            )


def test_who_diverged_has_no_row() -> None:
    class Bad(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (
                float("nan") if len(batch[1]) == 2 else 1.0
            )

    shapes: list[Any] = []

    class Told(FederatedCallback):
        def on_updates(self, server: Any) -> None:
            shapes.append(
                (len(server.updates), server.ids.tolist(), bool(server.updates.isfinite().all()))
            )

    trainer(1, [Told()]).fit(
        federated(Bad(), participation="all", on_nonfinite="skip"), blobs(clients=5)
    )
    assert shapes == [(4, [0, 1, 2, 4], True)]
