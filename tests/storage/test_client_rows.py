"""Rows over processes: client i's lie with process i mod W, and travel to whoever trains it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.storage.client_rows import ClientRows
from fl_lightning.storage.client_store import ClientStore
from tests.helpers.processes import grouped, launched

torch.set_num_threads(1)
ROUNDS = [[0, 1, 2, 3], [1, 3, 5], [5], [0, 2, 3, 4, 5, 7, 8]]
NAMES = ("M.a", "M.b")


def trained(row: Tensor | None, t: int, client: int, name: str) -> Tensor | None:
    """A row that shows in which rounds it was written; client 3 never writes the second."""
    if client == 3 and name == "M.b":
        return None
    return torch.tensor([float(client), 0.0]) if row is None else 10 * row + t


def rounds(folder: Path, rank: int, world: int) -> None:
    rows = ClientRows(ClientStore(rank=rank, world_size=world), rank, world)
    for t, ids in enumerate(ROUNDS):
        rows.fetch(ids)
        staged: dict[str, dict[int, Tensor]] = {}
        for client in ids[rank::world]:
            for name in NAMES:
                row = trained(rows.read(name, client), t, client, name)
                if row is not None:
                    staged.setdefault(name, {})[client] = row
        rows.commit(rows.bring_home(staged))
        assert all(
            rows.read(name, client) is None
            for client in ids
            if client % world != rank
            for name in NAMES
        )
    held = {
        name: {int(i): rows.read(name, int(i)) for i in rows.store.clients(name)}
        for name in rows.names()
    }
    torch.save(held, folder / f"{world}-{rank}.pt")


class Deaf(dist.ProcessGroup):
    """A default group that carries nothing of a CPU's, as one of GPUs."""


def rounds_beside_gpus(folder: Path, rank: int, world: int) -> None:
    dist.Backend.register_backend(
        "deaf", lambda _store, rank, size, _timeout: Deaf(rank, size), devices=["cpu"]
    )
    dist.init_process_group("deaf")
    rounds(folder, rank, world)


def test_rows_travel_over_a_group_of_their_own(tmp_path: Path) -> None:
    assert launched(rounds_beside_gpus, 2, tmp_path) == [0, 0]


@pytest.mark.parametrize("world", [2, 3])
def test_the_rows_of_all_processes_are_those_of_one(tmp_path: Path, world: int) -> None:
    rounds(tmp_path, 0, 1)
    expected = torch.load(tmp_path / "1-0.pt", weights_only=True)
    assert expected["M.a"][5].tolist() == [523.0, 23.0] and 3 not in expected["M.b"]
    grouped(rounds, world, tmp_path)
    found: dict[str, dict[int, Tensor]] = {name: {} for name in NAMES}
    for rank in range(world):
        for name, of_rank in torch.load(tmp_path / f"{world}-{rank}.pt", weights_only=True).items():
            assert all(client % world == rank for client in of_rank)
            found[name].update(of_rank)
    for name in NAMES:
        assert found[name].keys() == expected[name].keys()
        assert all(torch.equal(row, expected[name][client]) for client, row in found[name].items())


def test_what_was_never_committed_reads_as_nothing() -> None:
    rows = ClientRows(ClientStore())
    assert rows.read("M.a", 0) is None and rows.names() == []
    rows.commit(rows.bring_home({}))
    assert rows.read("M.a", 0) is None


def test_a_row_is_at_home_with_one_process_alone() -> None:
    homes = [ClientRows(ClientStore(rank=rank, world_size=2), rank, 2) for rank in range(2)]
    for client in (3, 4):
        homes[client % 2].commit({"M.a": {client: torch.full((2,), float(client))}})
    for rank, rows in enumerate(homes):
        for client in (3, 4):
            row = rows.at_home("M.a", client)
            expected = [client, client] if client % 2 == rank else None
            assert (None if row is None else row.tolist()) == (expected)
