"""What a round stages: nothing of it is the run's state before the commit, and parts not averaged
stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_lightning.callback import ClientState, ServerState, Upload
from fl_lightning.round.transaction import RoundTransaction
from tests.helpers.rounds import LAST, D, a_round, parts

OWN, SHARED = ServerState(synchronised=False), ServerState(synchronised=True)
NEW = ServerState(initial="current_model", synchronised=True)
# round 0: the last two coordinates are not averaged
PARTLY: dict[str, Any] = {"parts": parts((LAST, None))}
EIGHTS = torch.full((D,), 8.0, dtype=torch.float64)


def test_server_state_is_a_copy_in_server_hooks_and_the_state_itself_elsewhere() -> None:
    held = torch.ones(D, dtype=torch.float64)
    transaction = RoundTransaction(a_round(server_states={"M.a": held}))
    assert transaction.server_state("M.a", OWN) is held
    with transaction.server_hooks():
        copy = transaction.server_state("M.a", OWN)
        assert (
            copy is not held
            and torch.equal(copy, held)
            and transaction.server_state("M.a", OWN) is copy
        )
        copy += 1
    assert torch.equal(held, torch.ones(D, dtype=torch.float64))
    assert torch.equal(transaction.server_states_to_commit({"M.a": OWN})["M.a"], held + 1)


def test_server_state_is_assigned_in_server_hooks_alone() -> None:
    transaction = RoundTransaction(a_round())
    with pytest.raises(RuntimeError, match=r"M\.a was assigned in a hook that takes clients"):
        transaction.set_server_state("M.a", OWN, EIGHTS)
    with transaction.server_hooks():
        transaction.set_server_state("M.a", OWN, EIGHTS)
        given = transaction.server_state("M.a", OWN)
        assert torch.equal(given, EIGHTS) and given is not EIGHTS
        transaction.set_server_state("M.a", OWN, 2 * given)
    with pytest.raises(RuntimeError, match="was assigned"):
        transaction.set_server_state("M.a", OWN, EIGHTS)
    assert torch.equal(transaction.server_state("M.a", OWN), 2 * EIGHTS)
    assert torch.equal(transaction.server_states_to_commit({"M.a": OWN})["M.a"], 2 * EIGHTS)


def test_synchronised_server_state_keeps_its_value_where_a_part_is_not_averaged() -> None:
    short = ServerState(synchronised=True, shape=(2,))
    declared = {"M.own": OWN, "M.shared": SHARED, "M.new": NEW, "M.short": short}
    held = {"M.own": EIGHTS / 2, "M.shared": EIGHTS / 2}
    transaction = RoundTransaction(a_round(server_states=held, **PARTLY))
    with transaction.server_hooks():
        for key in ("M.own", "M.shared", "M.new"):
            transaction.set_server_state(key, declared[key], EIGHTS)
        transaction.set_server_state("M.short", short, torch.tensor([8.0, 8.0]))
    settled = transaction.server_states_to_commit(declared)
    assert settled["M.own"].tolist() == [8, 8, 8, 8] and settled["M.short"].tolist() == [8, 8]
    assert settled["M.shared"].tolist() == [8, 8, 4, 4]
    assert settled["M.new"].tolist() == [8, 8, 3, 4]


def test_synchronised_client_rows_keep_their_value_where_a_part_is_not_averaged() -> None:
    own, shared = ClientState(synchronised=False), ClientState("current_model", synchronised=True)
    rows = {("M.shared", 3): EIGHTS / 2, ("M.shared", 5): None, ("M.own", 3): EIGHTS / 2}
    staged = {
        "M.shared": {3: EIGHTS, 5: EIGHTS},
        "M.own": {3: EIGHTS},
        "optimizer.0.step": {3: EIGHTS},
    }
    for given, expected in ((PARTLY, ([8, 8, 4, 4], [8, 8, 3, 4])), ({}, ([8.0] * 4, [8.0] * 4))):
        # None is what was never written.
        transaction = RoundTransaction(a_round(rows=rows, **given))  # type: ignore[arg-type]
        transaction.rows = {key: dict(by_client) for key, by_client in staged.items()}
        settled = transaction.rows_to_commit({"M.shared": shared, "M.own": own})
        assert (settled["M.shared"][3].tolist(), settled["M.shared"][5].tolist()) == expected
        assert torch.equal(settled["M.own"][3], EIGHTS) and torch.equal(
            settled["optimizer.0.step"][3], EIGHTS
        )
        # what methods still read is left alone
        assert torch.equal(transaction.rows["M.shared"][3], EIGHTS)


def test_uploads_are_summed_over_who_finished_and_zero_where_nobody_sent() -> None:
    transaction, sent = RoundTransaction(a_round()), Upload()
    transaction.finished = [3, 5]
    transaction.total.uploads["M.u"] = EIGHTS
    transaction.total.weight = torch.tensor(40.0, dtype=torch.float64)
    total, number = transaction.uploaded("M.u", sent)
    assert torch.equal(total, EIGHTS) and number == 2
    # weights are 1 each: one sum serves both
    assert transaction.uploaded_weighted("M.u", sent).tolist() == [0.2] * D
    transaction.total.weighted_uploads["M.u"] = 20 * EIGHTS
    assert transaction.uploaded_weighted("M.u", sent).tolist() == [4.0] * D
    counted, _ = transaction.uploaded("M.never", Upload(shape=(2,), dtype=torch.int64))
    assert counted.tolist() == [0, 0] and not counted.dtype.is_floating_point
