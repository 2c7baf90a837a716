"""A run goes on with the methods that it began with, whether they keep state or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adagrad, Adam

from fl_lightning import FederatedCallback, InMemoryDataModule, ServerState, UserError
from fl_lightning.callbacks import (
    ControlVariates,
    PartialAveraging,
    ProximalTerm,
    RobustAggregation,
    SharpnessAwareMinimization,
)
from fl_lightning.lab.contracts.federation import fit
from fl_lightning.schedules import arguments
from tests.helpers.learners import federated, trainer


class Scaled(FederatedCallback):
    """Keeps an argument that has no text of its own."""

    def __init__(self, by: object) -> None:
        super().__init__()
        self.by = by

    def on_local_gradient(self, clients: Any, gradient: Any) -> None:
        gradient.mul_(0.5)


class ScaledUpdate(FederatedCallback):
    """A method that has only a hook of the server."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def on_server_update(self, server: Any) -> None:
        server.update *= self.by


class Looking(FederatedCallback):
    def on_round_end(self, server: Any) -> None:
        server.log("moved", (server.w - server.w_before).norm())


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (ProximalTerm(0.1), ProximalTerm(0.2), r"ProximalTerm\(mu=0\.1.* then, Pro.*mu=0\.2.* now"),
        (PartialAveraging(period=3), PartialAveraging(period=2), r"d=3.* then, .*period=2.* now"),
        (SharpnessAwareMinimization(0.1), None, "then, none now"),
        (None, RobustAggregation(), r"none then, RobustAggregation\("),
        (ControlVariates(), None, "ControlVariates: .* then, absent now"),
        (ScaledUpdate(0.5), ScaledUpdate(2.0), r"by=0\.5\) then, .*by=2\.0\) now"),
    ],
)
def test_other_methods_are_refused(tmp_path: Path, then: Any, now: Any, words: str) -> None:
    arguments = {"participation": 5, "folder": str(tmp_path)}
    fit([then] if then else [], rounds=1, **arguments)
    with pytest.raises(UserError, match=words):
        fit([now] if now else [], rounds=2, resume=True, **arguments)
    fit([now] if now else [], rounds=2, resume=True, strict_resume=False, **arguments)


def test_a_method_that_comes_later_starts_from_the_model_that_it_met(tmp_path: Path) -> None:
    met: list[torch.Tensor] = []

    class First(FederatedCallback):
        first = ServerState(initial="initial_model", synchronised=False)

        def on_round_end(self, server: Any) -> None:
            met.append(server.initial_model.clone())

    before = fit([], rounds=2, folder=str(tmp_path)).global_vector.detach().clone()
    with pytest.warns(UserWarning, match=r"w\^0 of this run was not stored"):
        fit([First()], rounds=4, folder=str(tmp_path), resume=True, strict_resume=False)
    fit([First()], rounds=5, folder=str(tmp_path), resume=True)
    assert len(met) == 3 and all(torch.equal(first, before) for first in met)


def test_what_only_looks_may_come_and_go_and_so_may_objects_without_a_text(tmp_path: Path) -> None:
    fit([Scaled(object()), ProximalTerm(0.1), Looking()], rounds=1, folder=str(tmp_path))
    fit([ProximalTerm(0.1), Scaled(object())], rounds=2, folder=str(tmp_path), resume=True)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_other_values_in_a_long_array_are_refused(tmp_path: Path, kind: Any) -> None:
    values = [0.5] * 2000
    fit([Scaled(kind(values))], rounds=1, folder=str(tmp_path))
    fit([Scaled(kind(values))], rounds=2, folder=str(tmp_path), resume=True)
    values[1000] = 0.25
    with pytest.raises(UserError, match=r"Scaled\(by=\w+ \w{16}\) then, Scaled\(by=\w+ \w{16}\)"):
        fit([Scaled(kind(values))], rounds=3, folder=str(tmp_path), resume=True)
    # The text of a short one is that of earlier checkpoints.
    assert arguments(Scaled(kind(values[999:1001]))) == f"by={kind([0.5, 0.25])!r}"


@pytest.mark.parametrize(
    ("setting", "make", "words"),
    [
        ("client", lambda p: SGD(p, lr=0.3, weight_decay=0.01), r"\(client_optimizer\.lr: 0\.2 th"),
        ("client", lambda p: Adam(p, lr=0.2), r"\(client_optimizer: SGD then, Adam now\)"),
        (
            "server",
            lambda p: SGD(p, lr=1.0, momentum=0.9),
            r"optimizer\.momentum: 0 then, 0\.9 now",
        ),
    ],
)
def test_an_option_that_changed_is_told(
    tmp_path: Path, setting: str, make: Any, words: str
) -> None:
    fit([], rounds=1, folder=str(tmp_path))
    other = {f"{setting}_optimizer": make}
    with pytest.raises(UserError, match=words):
        fit([], rounds=2, folder=str(tmp_path), resume=True, **other)
    fit([], rounds=2, folder=str(tmp_path), resume=True, strict_resume=False, **other)


def test_other_data_of_the_same_sizes_are_refused_by_their_labels(tmp_path: Path) -> None:
    def data(first: int) -> InMemoryDataModule:
        x, y = torch.zeros(120, 20, dtype=torch.float64), (torch.arange(120) + first) % 4
        return InMemoryDataModule((x, y), num_clients=10, batch_size=8)

    run = trainer(1)
    run.fit(federated(), own := data(0))
    run.save_checkpoint(path := tmp_path / "one.ckpt")
    trainer(2).fit(federated(), data(0), ckpt_path=path)
    with pytest.raises(UserError, match=r"\(labels: \w{16} then, \w{16} now\)"):
        trainer(2).fit(federated(), other := data(1), ckpt_path=path)
    assert other.partition_hash == own.partition_hash
    trainer(2).fit(federated(strict_resume=False), other, ckpt_path=path)


def adam(rate: float, **options: Any) -> dict[str, Any]:
    return {"server_optimizer": lambda p: Adam(p, lr=rate, **options)}


@pytest.mark.parametrize(
    ("then", "now", "option", "steps"),
    [
        ({}, {"server_optimizer": lambda p: SGD(p, lr=1.0, momentum=0.9)}, ("momentum", 0.9), None),
        (adam(0.1), {}, ("momentum", 0), None),
        (adam(0.1), adam(0.2, betas=(0.5, 0.9)), ("betas", (0.5, 0.9)), 2),
        (adam(0.1), {"server_optimizer": lambda p: Adagrad(p, lr=0.1)}, ("eps", 1e-10), 1),
    ],
)
def test_new_options_of_the_server_optimizer_hold(
    tmp_path: Path, then: Any, now: Any, option: tuple[str, Any], steps: int | None
) -> None:
    fit([], rounds=1, folder=str(tmp_path), **then)
    module = fit([], rounds=2, folder=str(tmp_path), resume=True, strict_resume=False, **now)
    (optimizer,) = module.trainer.optimizers
    assert optimizer.param_groups[0][option[0]] == option[1]
    (state,) = optimizer.state.values() or [{}]
    assert steps == state.get("step")
    lost = then and steps != 2
    assert any("begins anew" in note for note in module.notes) == bool(lost)
    again = fit([], rounds=3, folder=str(tmp_path), resume=True, **now)
    assert again.trainer.optimizers[0].param_groups[0][option[0]] == option[1]


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        (lambda p: Adam(p, lr=0.1), False),
        (lambda p: SGD(p, lr=0.1, momentum=0.5), True),
        (lambda p: SGD([{"params": p[:1]}, {"params": p[1:]}], lr=0.1, momentum=0.9), False),
    ],
)
def test_a_clients_state_of_another_optimizer_is_not_loaded(
    tmp_path: Path, now: Any, kept: bool
) -> None:
    arguments = {"folder": str(tmp_path), "keep_optimizer_state": True, "participation": "all"}
    fit([], rounds=1, client_optimizer=lambda p: SGD(p, lr=0.1, momentum=0.9), **arguments)
    module = fit([], rounds=2, resume=True, strict_resume=False, client_optimizer=now, **arguments)
    assert any("begin anew" in note for note in module.notes) != kept
    fit([], rounds=3, resume=True, client_optimizer=now, **arguments)
