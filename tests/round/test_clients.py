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
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.clients import Clients
from fl_lightning.round.context import ClientRates
from tests.helpers.rounds import LAST, D, a_group, a_round, parts

ONES = torch.ones(D, dtype=torch.float64)


def test_displacement_over_rate_and_steps_is_the_mean_gradient_or_zero_where_nothing_elapsed() -> (
    None
):
    group = a_group(a_round())
    clients = Clients(group)
    clients.x -= ONES
    assert clients.elapsed.tolist() == [[1.0], [2.0]]
    assert clients.mean_gradient.tolist() == [[1.0] * D, [0.5] * D]
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


def quoted(line: str) -> list[str]:
    """What stands in backticks in the first cell of a table's line."""
    return line.split("|")[1].split("`")[1::2]


def test_what_an_author_finds_on_clients_is_what_the_page_of_methods_names() -> None:
    page = (Path(__file__).parents[2] / "docs/hooks.md").read_text("utf-8")
    table = page.split("A hook reads these attributes of `clients`")[1].split("\n\n")[1]
    named = {name.split("(")[0] for cell in table.split("\n")[2:] for name in quoted(cell)}
    assert named == {name for name in dir(Clients) if name[0] != "_"}
