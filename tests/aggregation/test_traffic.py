"""What a round sends, against counts on paper: a model of four doubles, clients 3 and 5."""

from __future__ import annotations

from typing import Any

import torch

from fl_lightning.aggregation import traffic
from fl_lightning.callback import FederatedCallback, ServerState, Upload
from fl_lightning.callback_list import CallbackList
from fl_lightning.callbacks import DriftLogger
from fl_lightning.round.clients import Clients
from fl_lightning.round.transaction import RoundTransaction
from tests.helpers.rounds import LAST, D, a_group, a_round, parts

BUFFERS = {"mean": torch.zeros(3, dtype=torch.float64), "seen": torch.zeros((), dtype=torch.int64)}
UPLOADS = {"M.whole": Upload(), "M.two": Upload(shape=(2,))}


def counts(
    uploads: dict[str, Any] | None = None, sent: tuple[Any, Any] = (None, None), **given: Any
) -> list[int]:
    group = a_group(a_round(**given), [3])
    Clients(group).sent(*sent)
    for key, value in (uploads or {}).items():
        group.upload(key, UPLOADS.get(key, Upload(shape=(3,))), value)
    found = traffic.of_client(group, BUFFERS, CallbackList([]))
    sending = type("M", (FederatedCallback,), {"whole": Upload(), "two": Upload(shape=(2,))})
    traffic.add_upload(found, group, CallbackList([sending()]))
    assert found.pop() == 0, "no method has a base"
    assert found.pop() == 0, "no method asked for a pass"
    return found


def test_a_client_is_sent_the_model_and_buffers_and_sends_its_update() -> None:
    assert counts() == [D, 1, D, 8 * D, 2 * (3 * 8 + 8), 2]


def test_uploads_that_are_counted_add_to_it() -> None:
    given = {
        "M.whole": torch.ones(1, D, dtype=torch.float64),
        "M.two": torch.ones(1, 2),
        "M.derived": torch.ones(1, 3),
    }
    assert counts(given) == [D, 1, D + D + 2, 8 * (D + D + 2), 64, 2]


def test_a_method_says_how_much_it_sends_in_place_of_its_update() -> None:
    assert counts(sent=(1.5, None)) == [D, 1, 2, 12, 64, 2]
    assert counts(sent=(3, 5.4)) == [D, 1, 3, 5, 64, 2]


def test_a_part_that_is_kept_is_neither_sent_nor_received() -> None:
    """In round 0 it is received, since nobody has a copy, and not sent."""
    assert counts(parts=parts((LAST, 2)))[:4] == [D, 1, 2, 16]
    values = {
        "parts.x": torch.zeros(2),
        "parts.origin": torch.zeros(2),
        "parts.elapsed": torch.zeros(1),
    }
    rows = {(name, 3): value for name, value in {**values, "parts.round": torch.tensor(0)}.items()}
    whole = {"M.whole": torch.ones(1, D, dtype=torch.float64)}
    assert counts(t=1, parts=parts((LAST, 3)), rows=rows)[:4] == [2, 1, 2, 16]
    assert counts(whole, t=1, parts=parts((LAST, 3)), rows=rows)[:4] == [2, 1, 4, 32]


class M(FederatedCallback):
    whole, two, never = (
        ServerState(sent=True),
        ServerState(sent=True, shape=(2,)),
        ServerState(sent=True),
    )
    own = ServerState()


def test_a_round_sends_each_client_the_server_states_that_exist() -> None:
    states = {
        "M.whole": torch.zeros(D, dtype=torch.float64),
        "M.own": torch.zeros(D, dtype=torch.float64),
    }
    transaction = RoundTransaction(a_round(server_states=states))
    transaction.server["M.two"] = torch.zeros(2)  # made in this round: four bytes a number
    transaction.total.traffic = torch.tensor([2 * D, 2, 11, 90, 64, 0, 0, 0])
    assert traffic.of_round(transaction, CallbackList([M()])) == {
        "down_parameters": 2 * D + 2 * D + 2 * 2,
        "down_bytes": 8 * 2 * D + 8 * 2 * D + 4 * 2 * 2,
        "up_parameters": 11,
        "up_bytes": 90,
        "buffers_bytes": 64,
    }


def test_what_a_participant_keeps_is_counted_at_the_first_that_was_trained_here() -> None:
    methods = CallbackList([DriftLogger()])
    transaction = RoundTransaction(a_round())
    assert traffic.kept_vectors(transaction, methods) == 0.0, "nobody was trained here"
    transaction.rows = {"M.whole": {1: torch.zeros(D)}}
    assert traffic.kept_vectors(transaction, methods) == 0.0, "nobody finished"
    transaction.rows = {
        "M.whole": {5: torch.zeros(D), 3: torch.zeros(2 * D)},
        "M.half": {5: torch.zeros(D // 2)},
        "M.seldom": {3: torch.zeros(D)},
        "DriftLogger.own": {5: torch.zeros(D)},
    }
    transaction.finished = [2, 5, 3]  # 2 was trained elsewhere
    assert traffic.kept_vectors(transaction, methods) == 1.5
