"""What local hooks see: columns, starts, displacements, rows of states as they are read, written
and carried on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning.callback import ClientState, Scratch, Upload
from fl_lightning.errors import UserError
from fl_lightning.round.client_group import LOSS, ClientGroup
from fl_lightning.round.clients import Clients
from fl_lightning.round.context import ClientRates
from tests.helpers.rounds import LAST, D, a_group, a_round, parts

ONES = torch.ones(D, dtype=torch.float64)


def test_columns_are_of_who_trains_together() -> None:
    both = Clients(a_group(a_round()))
    one = Clients(a_group(a_round(), [5]))
    assert (
        both.steps.tolist() == [[2], [4]]
        and both.sizes.tolist() == [[10], [30]]
        and one.steps.tolist() == [[4]]
    )
    assert both.weights.tolist() == [[0.25], [0.75]] and one.weights.tolist() == [[0.75]]
    assert (
        both.ids.tolist() == [3, 5]
        and both.ids.dtype == torch.int64
        and both.steps.dtype == torch.float64
    )


def test_models_are_assigned_by_value() -> None:
    group = a_group(a_round())
    clients = Clients(group)
    x = clients.x
    clients.x = clients.x
    clients.x = 2 * x
    assert clients.x is x and x[1].tolist() == [2, 4, 6, 8]


def test_the_start_is_known_from_the_first_step_on() -> None:
    group = ClientGroup(a_round(), [3], torch.zeros(1, D, dtype=torch.float64))
    clients = Clients(group)
    with pytest.raises(RuntimeError, match="not in on_local_start"):
        _ = clients.start
    group.begin(own_starts=True)
    clients.x += 1
    assert not clients.start.any()
    elsewhere = ClientGroup(a_round(), [3], torch.zeros(1, D, dtype=torch.float64))
    elsewhere.begin(own_starts=False)
    assert torch.equal(
        Clients(elsewhere).start[0], elsewhere.round.w
    )  # where no method moves starts, that is w


def test_displacement_over_rate_and_steps_is_the_mean_gradient_or_zero_where_nothing_elapsed() -> (
    None
):
    group = a_group(a_round())
    clients = Clients(group)
    clients.x -= ONES
    assert not group.mean_gradient_readers and clients.elapsed.tolist() == [[1.0], [2.0]]
    assert clients.mean_gradient.tolist() == [[1.0] * D, [0.5] * D] and group.mean_gradient_readers
    stopped = ClientRates(0.0, torch.tensor(0.0, dtype=torch.float64))
    still = Clients(a_group(a_round(rates=stopped)))
    still.x -= ONES
    assert not still.mean_gradient.any()


def test_where_rates_differ_the_rate_and_all_that_needs_it_are_refused() -> None:
    group = a_group(a_round(rates=ClientRates(1.0, torch.tensor(0.5), several="lr (0.1, 0.2)")))
    clients = Clients(group)
    for name in ("lr", "momentum", "weight_decay", "elapsed", "mean_gradient"):
        with pytest.raises(UserError, match="several values"):
            getattr(clients, name)


def test_whoever_trains_the_clients_gives_their_full_gradient() -> None:
    group = ClientGroup(a_round(), [3], torch.zeros(1, D), lambda who, x: x * Clients(who).sizes)
    clients = Clients(group)
    assert clients.full_gradient(torch.ones(1, D)).tolist() == [[10.0] * D]


def test_logs_and_uploads_have_a_row_a_client() -> None:
    group = a_group(a_round())
    clients = Clients(group)
    clients.log("flat", torch.ones(2))
    clients.log("column", torch.ones(2, 1, requires_grad=True))
    assert (
        group.logs["flat"].shape == group.logs["column"].shape == (2,)
        and not group.logs["column"].requires_grad
    )
    group.upload("M.u", Upload(), ONES.float())
    group.upload("M.n", Upload(shape=(), dtype=torch.int64), clients.ids)
    assert group.uploads["M.u"].shape == (2, D) and group.uploads["M.u"].dtype == torch.float64
    assert group.uploads["M.n"].tolist() == [3, 5] and group.uploads["M.n"].dtype == torch.int64
    assert len(group.given()) == 4
    clients.sent(bytes=7)
    assert group.transmitted == (None, 7)


@pytest.mark.parametrize(
    ("state", "first"),
    [
        (ClientState(), [0.0] * D),
        (ClientState("current_model"), [1.0, 2.0, 3.0, 4.0]),
        (ClientState("initial_model"), [-1.0, -2.0, -3.0, -4.0]),
        (ClientState(shape=(2,), dtype=torch.float32), [0.0, 0.0]),
        (ClientState(lambda w: w.sum(), shape=(2,)), [10.0, 10.0]),
    ],
)
def test_a_row_is_the_committed_one_or_else_how_its_state_begins(
    state: ClientState, first: Any
) -> None:
    held = torch.full_like(torch.tensor(first), 9.0)
    group = a_group(a_round(rows={("M.s", 5): held}))
    rows = group.read("M.s", state)
    assert rows.tolist() == [first, held.tolist()] and group.read("M.s", state) is rows
    assert rows.dtype == (
        state.dtype or (torch.float64 if state.initial != "zeros" else rows.dtype)
    )
    assert list(group.written()) == []  # nothing outlives a round by being read


def test_rows_that_were_assigned_or_changed_in_place_outlive_the_round_and_scratch_does_not() -> (
    None
):
    assigned, in_place, scratch = ClientState(), ClientState(), Scratch()
    group = a_group(a_round(rows={("M.read", 3): ONES}))
    group.read("M.read", ClientState())
    group.write("M.assigned", assigned, 2 * torch.ones(2, D))
    rows = group.read("M.in_place", in_place)
    rows += 3
    group.write("M.scratch", scratch, torch.ones(2, D))
    group.read("M.scratch", scratch).add_(1)
    same = group.read("M.same", in_place)
    group.write("M.same", in_place, same)
    found = {key: value[0, 0].item() for key, value in group.written()}
    assert found == {"M.assigned": 2.0, "M.in_place": 3.0, "M.same": 0.0}
    assert group.read("M.scratch", scratch).tolist() == [[2.0] * D] * 2
    assert group.read("M.other", scratch).tolist() == [[0.0] * D] * 2


def test_a_local_step_may_read_columns_starts_and_rows() -> None:
    group = a_group(a_round())
    clients = Clients(group)
    rows, steps = group.read("M.s", ClientState()), clients.steps
    found = group.step_tensors()
    assert found["M.s"] is rows and any(value is steps for value in found.values())
    assert any(value is clients.start for value in found.values()) and "_x" not in found


def kept(**given: Any) -> tuple[Any, dict[tuple[str, int], torch.Tensor]]:
    """Round 1 of a part of period 3.

    Client 3 kept a copy of it at the end of round 0, client 5 has none.
    """
    group = a_group(a_round(parts=parts((LAST, 3))), [3])
    clients = Clients(group)
    clients.x += 6
    rows = {(name, 3): row for name, row in group.kept_parts().items()}
    return a_round(t=1, w=10 * ONES, parts=parts((LAST, 3)), rows=rows, **given), rows


def test_a_client_goes_on_from_the_parts_that_it_keeps_and_knows_since_when() -> None:
    round, rows = kept()
    assert {name: row.tolist() for (name, _), row in rows.items()} == {
        "parts.x": [9.0, 10.0],
        "parts.origin": [3.0, 4.0],
        "parts.elapsed": [1.0],
        "parts.round": 0,
    }
    group = a_group(round)
    clients = Clients(group)
    assert clients.x.tolist() == [[10, 10, 9, 10], [10] * D] and group.kept_mask is not None
    assert group.kept_mask.tolist() == [LAST.tolist(), [False] * D]
    assert clients.start.tolist() == clients.x.tolist()
    assert clients.origin.tolist() == [[10, 10, 3, 4], [10] * D]
    assert clients.elapsed.tolist() == [[1, 1, 2, 2], [2] * D]


def test_a_copy_that_has_been_averaged_since_is_not_taken() -> None:
    _, rows = kept()
    group = a_group(a_round(t=3, w=10 * ONES, parts=parts((LAST, 3)), rows=rows))
    clients = Clients(group)
    assert clients.x.tolist() == clients.origin.tolist() == [[10.0] * D] * 2
    assert clients.elapsed.tolist() == [[1.0] * D, [2.0] * D]


def test_without_parts_nothing_is_kept() -> None:
    assert (
        a_group(a_round(), [3]).kept_parts()
        == {}
        == a_group(a_round(parts=parts()), [3]).kept_parts()
    )
    group = a_group(a_round())
    clients = Clients(group)
    assert group.kept_mask is None and clients.origin is clients.start


def test_who_asked_for_numbers_is_known_since_its_step_is_not_replayed_for_others() -> None:
    group = a_group(a_round())
    clients = Clients(group)
    assert not group.looked_up
    assert clients.client_ids == [3, 5] and group.looked_up


@pytest.mark.parametrize("state", [ClientState(), Scratch()])
def test_rows_keep_their_storage_when_they_are_assigned(state: Any) -> None:
    group = a_group(a_round())
    rows = group.read("M.s", state)
    group.write("M.s", state, 2 * torch.ones(2, D))
    assert group.read("M.s", state) is rows and rows.tolist() == [[2.0] * D] * 2


class Step:
    """A client's local step that is under way."""

    index = 0

    def __init__(self, first: bool) -> None:
        self.first = first

    def gradient_at(self, x: Tensor) -> Tensor:
        return x


def test_gradients_are_counted_with_those_of_the_whole_objective() -> None:
    """Client 5 takes 4 steps, and its objective has 7 batches.

    Once before its steps, once in each of them.
    """
    round = a_round(epoch_batches=lambda client: 7)
    group = ClientGroup(round, [5], ONES.view(1, -1).clone(), full_gradient=lambda group, x: x)
    clients = Clients(group)
    assert group.gradients(5) == 4
    group.gradients_a_step = 2
    clients.full_gradient(clients.x)
    assert group.gradients(5) == 4 * 2 + 7
    for first in (True, False, False):
        group.local_step = Step(first)
        clients.full_gradient(clients.x)
    assert group.gradients(5) == 4 * 2 + 7 + 4 * 7, "what the first step asks for, every step does"


def test_the_loss_of_local_steps_is_a_column_where_it_was_gathered() -> None:
    group = a_group(a_round())
    clients = Clients(group)
    with pytest.raises(RuntimeError, match="only in on_local_end"):
        _ = clients.loss
    clients.log(LOSS, torch.tensor([0.5, 2.0]))
    assert clients.loss.tolist() == [[0.5], [2.0]]


def test_whoever_trains_the_clients_evaluates_them() -> None:
    def evaluated(clients: Any, x: Tensor, what: str) -> dict[str, Tensor]:
        return {what: x.sum(1, keepdim=True)}

    group = ClientGroup(a_round(), [3, 5], torch.stack([ONES, 2 * ONES]), evaluate=evaluated)
    clients = Clients(group)
    assert clients.evaluate(clients.x, "test")["test"].tolist() == [[4.0], [8.0]]


def test_scratch_is_forgotten_once_nobody_reads_it_and_states_are_not() -> None:
    group = a_group(a_round())
    group.write("M.kept", ClientState(), torch.ones(2, D))
    group.write("M.scratch", Scratch(), torch.ones(2, D))
    group.drop_scratch()
    assert {"M.kept", "M.scratch"} & set(group.step_tensors()) == {"M.kept"}


def quoted(line: str) -> list[str]:
    """What stands in backticks in the first cell of a table's line."""
    return line.split("|")[1].split("`")[1::2]


def test_what_an_author_finds_on_clients_is_what_the_page_of_methods_names() -> None:
    page = (Path(__file__).parents[2] / "docs/hooks.md").read_text("utf-8")
    table = page.split("A hook reads these attributes of `clients`")[1].split("\n\n")[1]
    named = {name.split("(")[0] for cell in table.split("\n")[2:] for name in quoted(cell)}
    assert named == {name for name in dir(Clients) if name[0] != "_"}


def test_what_a_hook_puts_on_its_clients_is_there_for_its_later_hooks() -> None:
    group = a_group(a_round())
    Clients(group).remembered = ONES  # type: ignore[attr-defined]
    assert Clients(group).remembered is ONES  # type: ignore[attr-defined]
    assert group.step_tensors()["remembered"] is ONES, "a step may read it, so a replay gives it"
    assert not hasattr(Clients(a_group(a_round())), "remembered")
