"""Segments on disk: exact, readable by others, and no damage goes unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fl_lightning.errors import UserError
from fl_lightning.storage import held_rows
from fl_lightning.storage.client_store import ClientStore
from tests.helpers.rows import bits, filled

torch.set_num_threads(1)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
DTYPES += [torch.complex64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3)], ids=str)
def test_rows_come_back_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    raw = torch.randint(
        0, 2 if dtype == torch.bool else 256, (torch.Size(shape).numel(), dtype.itemsize)
    )
    row = raw.to(torch.uint8).reshape(-1).view(dtype).reshape(shape)
    store = ClientStore()
    store.commit({"M.s": {7: row.clone(), 3: torch.zeros(5)}})
    path = store.flush(tmp_path)
    again = ClientStore()
    again.load(store.index(), tmp_path)
    back = again.read("M.s", 7)
    assert back is not None and bits(back) == bits(row)
    assert path is not None
    with safe_open(str(path), framework="pt") as file:  # any reader of the format can open it
        keys = file.keys()
        assert any(bits(file.get_tensor(key)[0]) == bits(row) for key in keys)


@pytest.mark.parametrize("keep", [0, 5, 60, 0.5, -1])
def test_a_cut_segment_is_named_with_the_client(tmp_path: Path, keep: float) -> None:
    store, path = filled(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    again = ClientStore()
    again.load(store.index(), tmp_path)
    with pytest.raises(UserError) as error:
        again.read("M.s", 7)
    assert str(path) in str(error.value) and "client 7" in str(error.value)


def test_every_flipped_bit_is_found_or_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if two names have the same rows, which the file holds once."""
    names = ["M.s", "N.s"]
    monkeypatch.setattr(held_rows, "SHARED_FROM", 1)
    store, path = filled(tmp_path, clients=4, size=6, names=names)
    wanted = {(name, i): store.read(name, i) for name in names for i in range(4)}
    whole = path.read_bytes()
    found = 0
    for position in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[position // 8] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        again = ClientStore()
        again.load(store.index(), tmp_path)
        for (name, client), row in wanted.items():
            try:
                back = again.read(name, client)
            except UserError as error:
                found += 1
                assert path.name in str(error) and f"client {client}" in str(error)
            else:
                assert back is not None and row is not None and bits(back) == bits(row)
    assert found >= 8 * 4 * 6 * 4  # at least all of the data
