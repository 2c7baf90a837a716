"""Who takes part by the choice of a method. From what the server knows, the same everywhere, kept
for a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import UserError
from fl_lightning.callback import ClientState, FederatedCallback, ServerState
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


class LeastMoved(FederatedCallback):
    """The clients that have moved least so far; of equals one that is drawn."""

    moved = ClientState(shape=(), initial=lambda w: -torch.ones(()), synchronised=False)
    rounds = ServerState(shape=(), synchronised=False)

    def select(self, server: Any, available: Tensor, n: int) -> Tensor:
        self.rounds += 1
        tie = torch.from_numpy(server.generator("tie").random(len(available)))
        server.log("known", self.moved.rows(server, available).sum())
        return available[(self.moved.rows(server, available) + 1e-3 * tie).argsort()[:n]]

    def on_local_end(self, clients: Any) -> None:
        self.moved[clients] = clients.norm(clients.x - clients.w)[:, 0]


def chosen(module: Any, rounds: int) -> list[tuple[int, ...]]:
    return [module.participants(t) for t in range(rounds)]


def test_a_method_chooses_from_committed_rows_and_its_choices_are_known_afterwards() -> None:
    module = tiny_run(LeastMoved(), rounds=4)
    told = chosen(module, 4)
    assert sorted(told[0] + told[1]) == list(range(6)), "those who never moved come first"
    rows = {i: float(module.client_rows.read("LeastMoved.moved", i)) for i in range(6)}
    assert set(told[0]) != set(told[2]) or set(told[1]) != set(told[3])
    assert (
        all(row > 0 for row in rows.values())
        and int(module.server_states["LeastMoved.rounds"]) == 4
    )
    with pytest.raises(UserError, match=r"participants\(4\).*rounds 0 to 3"):
        module.participants(4)


def test_one_and_two_processes_choose_alike_and_leave_the_same_bits() -> None:
    def job(world: int) -> Outcome:
        module = fit([LeastMoved()], rounds=4, trainer={"strategy": "federated", "devices": world})
        return {**outcome(module), "chosen": torch.tensor(chosen(module, 4))}

    with quiet():
        alone = fit([LeastMoved()], rounds=4)
        plain = {**outcome(alone), "chosen": torch.tensor(chosen(alone, 4))}
        for world in (2,):
            require_same(
                plain,
                in_processes(world, lambda world=world: job(world)),
                0.0,
                f"{world} processes",
                "",
            )


def test_choices_are_resumed_with_the_run(tmp_path: Path) -> None:
    with quiet():
        whole = fit([LeastMoved()], rounds=4)
        fit([LeastMoved()], rounds=2, folder=str(tmp_path))
        went_on = fit([LeastMoved()], rounds=4, folder=str(tmp_path), resume=True)
    assert chosen(went_on, 4) == chosen(whole, 4)
    require_same(outcome(whole), outcome(went_on), 0.0, "resumed", "")


def test_a_round_that_failed_chooses_again_and_the_choice_of_the_present_round_is_known() -> None:
    seen: list[Any] = []

    class Failing(LeastMoved):
        def on_round_end(self, server: Any) -> None:
            seen.append(module.participants(server.round))
            if len(seen) == 2:
                raise KeyError("once")

    module, method = federated(Lit(), engine="sequential"), Failing()
    with pytest.raises(KeyError):
        trainer(2, [method]).fit(module, blobs())
    assert seen[0] == module.participants(0) and len(seen[1]) == 3
    with pytest.raises(UserError, match=r"participants\(2\)"):
        module.participants(2)


@pytest.mark.parametrize(
    "returned",
    [
        lambda available, n: available[:1],
        lambda available, n: [0] * n,
        lambda available, n: [0, 1, 99],
        lambda available, n: None,
    ],
)
def test_a_choice_has_to_be_n_distinct_available_clients(returned: Any) -> None:
    method = type(
        "Wrong",
        (FederatedCallback,),
        {"select": lambda self, server, available, n: returned(available, n)},
    )()
    with pytest.raises(TypeError, match="3 distinct ids of the 10 available clients"):
        trainer(1, [method]).fit(federated(), blobs())
