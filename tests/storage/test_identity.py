"""A run goes on with the methods that it began with, whether they keep state or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning import FederatedCallback, ServerState, UserError
from fl_lightning.callbacks import (
    ByzantineClients,
    ControlVariates,
    PartialAveraging,
    ProximalTerm,
    RobustAggregation,
    SharpnessAwareMinimization,
)
from fl_lightning.contracts.federation import fit


class Scaled(FederatedCallback):
    """Keeps an argument that has no text of its own."""

    def __init__(self, by: object) -> None:
        super().__init__()
        self.by = by

    def on_local_gradient(self, clients: Any, gradient: Any) -> None:
        gradient.mul_(0.5)


class Looking(FederatedCallback):
    def on_round_end(self, server: Any) -> None:
        server.log("moved", (server.w - server.w_before).norm())


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (
            ProximalTerm(0.1),
            ProximalTerm(0.2),
            r"ProximalTerm\(mu=0\.1\) then, ProximalTerm\(mu=0\.2\) now",
        ),
        (
            RobustAggregation("krum", mixing=True),
            RobustAggregation("krum"),
            "mixing=True.* then, .*mixing=False.* now",
        ),
        (
            ByzantineClients("alie"),
            ByzantineClients("label_flip"),
            "'alie'.* then, .*'label_flip'.* now",
        ),
        (
            PartialAveraging(period=3),
            PartialAveraging(period=2),
            "period=3.* then, .*period=2.* now",
        ),
        (SharpnessAwareMinimization(0.1), None, "then, none now"),
        (None, RobustAggregation(), r"none then, RobustAggregation\("),
        (ControlVariates(), None, "ControlVariates: .* then, absent now"),
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
    with pytest.warns(UserWarning, match=r"w\^0 of this run was not kept"):
        fit([First()], rounds=4, folder=str(tmp_path), resume=True, strict_resume=False)
    fit([First()], rounds=5, folder=str(tmp_path), resume=True)
    assert len(met) == 3 and all(torch.equal(first, before) for first in met)


def test_what_only_looks_may_come_and_go_and_so_may_objects_without_a_text(tmp_path: Path) -> None:
    fit([Scaled(object()), ProximalTerm(0.1), Looking()], rounds=1, folder=str(tmp_path))
    fit([ProximalTerm(0.1), Scaled(object())], rounds=2, folder=str(tmp_path), resume=True)


def test_checkpoints_of_before_go_on(tmp_path: Path) -> None:
    fit([ProximalTerm(0.1)], rounds=1, folder=str(tmp_path))
    path = tmp_path / "checkpoints" / "last.ckpt"
    old = torch.load(path, weights_only=True)
    del old["federated"]["arguments"]["methods without state"]
    torch.save(old, path)
    assert (
        fit([ProximalTerm(0.1)], rounds=2, folder=str(tmp_path), resume=True).trainer.current_epoch
        == 2
    )
