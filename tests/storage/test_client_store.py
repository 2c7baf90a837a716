"""The store against a dict, and against kills, cut files and flipped bits."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning.callbacks import DivergenceLogger, RelaxedInitialization
from fl_lightning.errors import UserError
from fl_lightning.storage import held_rows
from fl_lightning.storage.client_store import ClientStore
from fl_lightning.storage.segments import Index, merge_indices
from tests.helpers.learners import Lit, blobs, client_rows, federated, last_checkpoint, trainer
from tests.helpers.rows import bits, filled

torch.set_num_threads(1)
NAMES = {
    "A.c": (torch.float32, (3,)),
    "A.k": (torch.int64, ()),
    "B.c": (torch.float32, (3,)),  # often with the bytes of A.c
    "B.m": (torch.bfloat16, (2, 2)),
}


def row_of(name: str, value: int) -> Tensor:
    dtype, shape = NAMES[name]
    return torch.full(shape, value / 3 if dtype.is_floating_point else 2**53 + value, dtype=dtype)


def agree(store: ClientStore, model: dict[tuple[str, int], Tensor]) -> None:
    assert store.names() == sorted({name for name, _ in model})
    for name in NAMES:
        assert store.clients(name).tolist() == sorted(c for n, c in model if n == name)
        for client in range(6):
            row, wanted = store.read(name, client), model.get((name, client))
            assert (row is None) == (wanted is None)
            if row is not None and wanted is not None:
                assert bits(row) == bits(wanted)


commits = st.tuples(
    st.just("commit"),
    st.dictionaries(
        st.tuples(st.sampled_from(sorted(NAMES)), st.integers(0, 5)), st.integers(0, 99)
    ),
)
steps = st.lists(
    commits
    | st.tuples(st.sampled_from(["flush", "checkpoint", "collect"]), st.integers(0, 1))
    | st.tuples(st.just("load"), st.integers(0, 9)),
    min_size=5,
    max_size=25,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps, st.sampled_from([0, 40, 1 << 20]), st.sampled_from([1, held_rows.SHARED_FROM]))
def test_any_sequence_of_operations_equals_a_dict(sequence, budget, shared_from) -> None:
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_rows, "SHARED_FROM", shared_from)
        folders = [Path(root, "a"), Path(root, "b")]
        store, model = ClientStore(budget), dict[tuple[str, int], Tensor]()
        checkpoints: list[tuple[Path, Index, dict[tuple[str, int], Tensor]]] = []
        for what, argument in sequence:
            if what == "commit":
                rows: dict[str, dict[int, Tensor]] = {}
                for (name, client), value in argument.items():
                    rows.setdefault(name, {})[client] = row_of(name, value)
                    model[name, client] = row_of(name, value)
                store.commit(rows)
            elif what == "load":
                if checkpoints:
                    folder, index, model = checkpoints[argument % len(checkpoints)]
                    model = dict(model)
                    store = ClientStore(budget) if argument % 2 else store
                    store.load(index, folder)
            else:
                store.flush(folders[argument])
                if what == "checkpoint":
                    made = (folders[argument], store.index(), dict(model))
                    checkpoints = [*checkpoints[-1:], made]
                elif what == "collect":
                    for folder in folders:
                        kept = [index for where, index, _ in checkpoints if where == folder]
                        store.collect(folder, kept)
            agree(store, model)
        for folder, index, then in checkpoints:  # those that were kept are still whole
            other = ClientStore()
            other.load(index, folder)
            agree(other, then)


def test_rows_of_a_client_with_the_same_bytes_are_one_in_memory_and_on_disk(tmp_path: Path) -> None:
    """Also those that come back from disk, as long as both are still the same."""
    size = 8000
    store = ClientStore()
    vectors = {i: torch.arange(2000.0) + i for i in range(5)}
    both = {name: {i: v.clone() for i, v in vectors.items()} for name in ("A.last", "B.last")}
    store.commit({**both, "C.zero": {0: torch.zeros(2000)}, "D.zero": {0: -torch.zeros(2000)}})
    assert store._dirty.bytes == (5 + 2) * size, "0.0 and -0.0 differ"
    path = store.flush(tmp_path)
    assert path is not None and (5 + 2) * size < path.stat().st_size < (5 + 2) * size + 2000
    again = ClientStore()
    again.load(store.index(), tmp_path)
    assert again.read("B.last", 3) is again.read("A.last", 3) and again._clean.bytes == size
    for i, vector in vectors.items():
        assert torch.equal(again.read("A.last", i), vector)
        assert torch.equal(again.read("B.last", i), vector)
    assert bits(again.read("D.zero", 0)) == bits(-torch.zeros(2000))
    again.commit({"A.last": {3: torch.ones(2000)}})
    assert torch.equal(again.read("B.last", 3), vectors[3])
    again.flush(tmp_path)
    again.load(again.index(), tmp_path)
    assert torch.equal(again.read("B.last", 3), vectors[3])
    assert torch.equal(again.read("A.last", 3), torch.ones(2000))
    assert again._clean.bytes == 2 * size


def test_rows_that_two_callbacks_keep_alike_are_stored_once_and_a_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, *loggers: Any, rounds: int = 3, start: Path | None = None) -> Any:
        folder = tmp_path / name
        callbacks = [RelaxedInitialization(0.1), *loggers, last_checkpoint(folder)]
        fit = trainer(rounds, callbacks, default_root_dir=folder, enable_checkpointing=True)
        fit.fit(module := federated(Lit(hidden=100)), blobs(), ckpt_path=start)
        rows = {key: bits(row) for key, row in client_rows(module).items()}
        metrics = fit.callback_metrics.items()
        logged = {key: float(v) for key, v in metrics if not key.startswith("time")}
        return rows, logged, sum(path.stat().st_size for path in (folder / "state").iterdir())

    _, _, alone = run("alone")
    rows, logged, together = run("together", DivergenceLogger(True))
    assert together < 1.1 * alone
    run("resumed", DivergenceLogger(True), rounds=2)
    start = tmp_path / "resumed/checkpoints/last.ckpt"
    assert run("resumed", DivergenceLogger(True), start=start)[:2] == (rows, logged)
    monkeypatch.setattr(held_rows, "SHARED_FROM", 1 << 40)
    apart = run("apart", DivergenceLogger(True))
    assert apart[:2] == (rows, logged) and apart[2] > 1.9 * alone
    assert logged["divergence/all"] > 0


def test_a_missing_segment_is_found_when_loading(tmp_path: Path) -> None:
    store, path = filled(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=rf"client 0 .*{path.name}: the file is missing"):
        ClientStore().load(store.index(), tmp_path)


def test_a_commit_with_one_bad_row_changes_nothing() -> None:
    store = ClientStore()
    store.commit({"M.s": {1: torch.zeros(2)}})
    with pytest.raises(ValueError, match="cannot be stored"):
        store.commit({"M.s": {1: torch.ones(2), 2: torch.ones(2, dtype=torch.complex128)}})
    row = store.read("M.s", 1)
    assert row is not None and row.sum() == 0 and store.clients("M.s").tolist() == [1]


def test_a_flush_costs_what_changed(tmp_path: Path) -> None:
    store, first = filled(tmp_path, clients=50)
    store.commit({"M.s": {3: torch.zeros(1000)}})
    second = store.flush(tmp_path)
    assert second is not None and second.stat().st_size < first.stat().st_size / 40
    assert store.flush(tmp_path) is None and len(list(tmp_path.iterdir())) == 2


def test_rows_over_the_budget_lie_on_disk_and_move_to_the_folder(tmp_path: Path) -> None:
    store = ClientStore(budget_bytes=3 * 4000)
    for i in range(10):
        store.commit({"M.s": {i: torch.full((1000,), float(i))}})
    held = sum(row.nbytes for row in [*store._dirty.values(), *store._clean.values()])
    assert held <= 3 * 4000
    store.flush(tmp_path)
    again = ClientStore()
    again.load(store.index(), tmp_path)
    for i in range(10):
        row = again.read("M.s", i)
        assert row is not None and row[0] == i


def test_processes_share_a_folder(tmp_path: Path) -> None:
    stores = [ClientStore(rank=r, world_size=2) for r in range(2)]
    for turn in range(2):
        for rank, store in enumerate(stores):
            store.commit(
                {"M.s": {rank + 2 * k: torch.tensor([turn, rank]) for k in range(turn, 3)}}
            )
            store.flush(tmp_path)
    index = merge_indices([store.index() for store in stores])
    assert index["M.s"]["clients"].tolist() == list(range(6))
    for store in stores:
        store.load(index, tmp_path)
        store.collect(tmp_path, [index])
    assert [store.clients("M.s").tolist() for store in stores] == [[0, 2, 4], [1, 3, 5]]
    single = ClientStore()  # resumed in one process: it owns all and also clears the other's files
    single.load(index, tmp_path)
    assert [single.read("M.s", i).tolist() for i in range(6)] == [
        [0, 0], [0, 1], [1, 0], [1, 1], [1, 0], [1, 1],
    ]  # fmt: skip
    single.commit({"M.s": {i: torch.zeros(1) for i in range(6)}})
    single.flush(tmp_path)
    single.collect(tmp_path, [single.index()])
    assert len(list(tmp_path.iterdir())) == 1


def test_of_two_indices_with_one_row_the_newer_segment_counts() -> None:
    old = {"M.s": {"clients": torch.tensor([1, 2]), "segments": torch.tensor([9, 9])}}
    new = {"M.s": {"clients": torch.tensor([2]), "segments": torch.tensor([70000])}}
    for order in ([old, new], [new, old]):
        merged = merge_indices(order)["M.s"]
        assert merged["clients"].tolist() == [1, 2] and merged["segments"].tolist() == [9, 70000]


def test_threads_read_while_rows_are_committed_flushed_and_collected(tmp_path: Path) -> None:
    store, _ = filled(tmp_path, clients=20, size=50)
    store.budget_bytes = 1000  # nearly everything is read from disk
    wrong: list[str] = []
    done = threading.Event()

    def reads(seed: int) -> None:
        draw = np.random.default_rng(seed)
        while not done.is_set():
            client = int(draw.integers(20))
            try:
                row = store.read("M.s", client)
                if row is None or row[1] - row[0] != 1 or (row[0] - client) % 20:
                    wrong.append(f"{client}: {row}")
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=reads, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(1, 40):
        rows = {
            i: torch.arange(50, dtype=torch.float32) + i + 20 * turn for i in range(turn % 7, 20, 3)
        }
        store.commit({"M.s": rows})
        store.flush(tmp_path)
        store.collect(tmp_path, [store.index()])
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong


KILLED = """
import os, sys, torch
from pathlib import Path
from tests.helpers.rows import bits, filled
from fl_lightning.storage.client_store import ClientStore
torch.set_num_threads(1)
where, folder = sys.argv[1], Path(sys.argv[2])
store = ClientStore()
store.load(torch.load(folder / "index.pt", weights_only=True), folder / "state")
store.commit({"M.s": {0: torch.zeros(1000), 9: torch.zeros(1000)}})
calls = {"fsync": 0}
real_fsync, real_replace = os.fsync, os.replace
def fsync(descriptor):
    calls["fsync"] += 1
    if where == f"fsync {calls['fsync']}":
        os._exit(9)
    real_fsync(descriptor)
def replace(*names):
    if where == "before replace":
        os._exit(9)
    real_replace(*names)
    if where == "after replace":
        os._exit(9)
os.fsync, os.replace = fsync, replace
store.flush(folder / "state")
os._exit(0)
"""


def test_killed_in_a_flush_the_last_checkpoint_is_whole(python: str, tmp_path: Path) -> None:
    store, first = filled(tmp_path / "state")
    torch.save(store.index(), tmp_path / "index.pt")
    for where in ["fsync 1", "before replace", "after replace"]:
        command = [python, "-c", KILLED, where, str(tmp_path)]
        assert subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 9
        again = ClientStore()
        again.load(store.index(), tmp_path / "state")
        row = again.read("M.s", 0)
        assert row is not None and row[1] == 1 and again.read("M.s", 9) is None
    again.commit({"M.s": {9: torch.ones(2)}})
    again.flush(tmp_path / "state")
    again.collect(tmp_path / "state", [again.index()])
    left = sorted(os.listdir(tmp_path / "state"))
    assert left[0] == first.name and len(left) == 2  # neither orphans nor temporary files


def test_a_folder_that_cannot_be_written_is_named_and_the_rows_stay(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ClientStore()
    store.commit({"M.s": {1: torch.ones(2)}})
    with pytest.raises(UserError, match=r"Cannot write .*file"):
        store.flush(tmp_path / "file" / "state")
    assert store.flush(tmp_path / "state") is not None
