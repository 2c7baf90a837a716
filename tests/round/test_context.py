"""The facts of a round: rates after decay, and the values of states that were never written."""

from __future__ import annotations

import pytest
import torch

from fl_lightning.callback import Clients, FederatedCallback, ServerState
from fl_lightning.callback_list import CallbackList
from fl_lightning.errors import UserError
from fl_lightning.round.client_schedule import ClientSchedule
from fl_lightning.round.context import ClientRates
from tests.helpers.rounds import D, a_group, a_round


def test_a_state_begins_as_its_declaration_says() -> None:
    round = a_round()
    zeros = ServerState().first(round)
    assert zeros.shape == (D,) and zeros.dtype == torch.float64 and not zeros.any()
    whole = ServerState(shape=(2, 3), dtype=torch.int64).first(round)
    assert whole.shape == (2, 3) and whole.dtype == torch.int64
    assert torch.equal(ServerState("initial_model").first(round), round.w0)
    assert torch.equal(ServerState("current_model").first(round), round.w)
    both = ServerState("initial_model", shape=(2, "D")).first(round)
    assert torch.equal(both, torch.stack([round.w0, round.w0])), "it stands in every row"
    made = ServerState(lambda w: w.sum(), shape=(2,), dtype=torch.float32).first(round)
    assert made.tolist() == [10.0, 10.0] and made.dtype == torch.float32


def test_a_refusal_names_the_method_that_asked() -> None:
    rates = ClientRates(1.0, torch.tensor(0.5), several="lr (0.1, 0.2)")

    class Needy(FederatedCallback):
        def on_local_start(self, clients: Clients) -> None:
            _ = clients.lr

    class Content(FederatedCallback):
        def on_local_start(self, clients: Clients) -> None:
            """It asks for nothing, before and after the one that does."""

    clients = Clients(a_group(a_round(rates=rates)))
    with pytest.raises(UserError, match="and Needy needs a single"):
        CallbackList([Content(), Needy()]).run("on_local_start", clients)
    with pytest.raises(UserError, match="and a method of this run needs a single"):
        _ = Clients(a_group(a_round(rates=rates))).weight_decay


def test_a_schedule_by_rounds_is_filled_as_far_as_the_round() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    given = [dict(group) for group in optimizer.param_groups]
    halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rates = ClientRates(
        1.0, torch.tensor(1.0), schedule=ClientSchedule(optimizer, [(halving, 1)], "rounds", given)
    )
    assert [float(rates.in_round(t, 3.0, 1).lr) for t in (0, 5, 2)] == [3.0, 3.0 / 32, 3.0 / 4]
