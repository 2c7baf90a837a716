"""The facts of a round: rates after decay, and the values of states that were never written."""

from __future__ import annotations

import pytest
import torch

from fl_lightning.callback import Clients, FederatedCallback, ServerState
from fl_lightning.callback_list import CallbackList
from fl_lightning.errors import UserError
from fl_lightning.round.client_schedule import ClientSchedule
from fl_lightning.round.context import ClientRates
from tests.helpers.rounds import LAST, D, a_group, a_round, parts


def test_rates_decay_and_a_method_that_needs_one_refuses_several() -> None:
    rates = ClientRates(1.0, torch.tensor(0.5)).in_round(0, 0.25, 1)
    assert float(rates.lr) == 0.125 and rates.factor == 0.25
    rates.require_one("FedProx")
    with pytest.raises(UserError, match="several values of lr"):
        ClientRates(1.0, torch.tensor(0.5), several="lr (0.1, 0.2)").require_one("FedProx")


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


def test_all_is_averaged_unless_there_are_parts() -> None:
    assert a_round().averaged is None
    kept = a_round(t=0, parts=parts((LAST, 2))).averaged
    assert kept is not None and kept.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
def test_sums_are_at_least_of_single_precision(dtype: torch.dtype, wide: torch.dtype) -> None:
    assert a_round(w=torch.ones(D, dtype=dtype)).wide == wide


def test_the_steps_rates_add_up() -> None:
    rates = ClientRates(1.0, torch.tensor(0.5, dtype=torch.float32))
    elapsed = rates.elapsed(torch.tensor([[2.0], [4.0]], dtype=torch.float64))
    assert elapsed.tolist() == [[1.0], [2.0]] and elapsed.dtype == torch.float64


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
