"""One segment: an immutable, checksummed file of client rows in the safetensors format.

Rows of one name, dtype and shape are stacked as one tensor. The header's metadata gives the client
of each row, and a checksum over its bytes and its identity, so one row can be read and verified by
itself. If all rows of two names are the same tensors, the file has them once, under both names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.storage.atomic_files import written_aside

WAY_OUT = (
    "Resume from an older checkpoint (such as checkpoints/best.ckpt of the same run), "
    "or start anew."
)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


_FILE = re.compile(r"rows-(\d{8,})-r(\d+)\.safetensors")
# A segment's number in an index is its number in the folder * RANKS + the rank that wrote it.
RANKS = 1 << 16


@dataclass(frozen=True)
class SegmentGroup:
    """Rows of one name, dtype and shape: ``clients`` ascending, ``checksums``, the first byte."""

    clients: np.ndarray[Any, np.dtype[np.int64]]
    checksums: list[int]
    dtype: str
    shape: tuple[int, ...]
    offset: int


# name -> {"clients": ids ascending, "segments": segment numbers}
Index = dict[str, dict[str, Tensor]]
Header = dict[str, list[SegmentGroup]]  # name -> its groups


def storable(dtype: torch.dtype) -> bool:
    return dtype in _CODES


def segment_name(segment: int) -> str:
    return f"rows-{segment // RANKS:08d}-r{segment % RANKS}.safetensors"


def segment_number(file_name: str) -> int | None:
    match = _FILE.fullmatch(file_name)
    return int(match[1]) * RANKS + int(match[2]) if match else None


def copy(source: Path, target: Path) -> None:
    try:
        with open(source, "rb") as file, written_aside(target) as out:
            shutil.copyfileobj(file, out, 1 << 20)
    except OSError as error:
        raise UserError(
            f"Cannot read the client state file {source}: {error.strerror}. {WAY_OUT}"
        ) from error


def write(path: Path, rows: Mapping[tuple[str, int], Tensor], durable: bool = True) -> None:
    """Write rows {(name, client): contiguous CPU tensor} as one segment."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[tuple[int, Tensor]]] = {}
    for (name, client), row in rows.items():
        groups.setdefault((name, _CODES[row.dtype], tuple(row.shape)), []).append((client, row))
    # Wide dtypes come first, so that every tensor is aligned to its item size.
    ordered = sorted(groups.items(), key=lambda item: (-_DTYPES[item[0][1]].itemsize, item[0]))
    header: dict[str, Any] = {}
    about: dict[str, Any] = {}
    payload: list[memoryview] = []
    written: dict[tuple[tuple[int, int], ...], str] = {}  # clients and tensors -> their key
    offset = 0
    for (name, dtype, shape), members in ordered:
        members.sort(key=lambda member: member[0])
        blocks = [row.reshape(-1).view(torch.uint8).numpy().data for _, row in members]
        clients = [client for client, _ in members]
        key = name if name not in header else f"{name}#{len(header)}"
        checksums = [
            _checksum(name, client, dtype, shape, block)
            for client, block in zip(clients, blocks, strict=True)
        ]
        first = written.setdefault(tuple((client, id(row)) for client, row in members), key)
        if first != key:
            about[first].setdefault("also", {})[name] = checksums
            continue
        about[key] = {"name": name, "clients": clients, "crc32": checksums}
        end = offset + sum(block.nbytes for block in blocks)
        header[key] = {
            "dtype": dtype,
            "shape": [len(members), *shape],
            "data_offsets": [offset, end],
        }
        payload += blocks
        offset = end
    entries = {"__metadata__": {"rows": json.dumps(about)}, **header}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Fill the header with spaces, so that the first tensor is aligned.
    text += b" " * (-len(text) % 8)
    with written_aside(path, durable) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for block in payload:
            file.write(block)


def read_header(path: Path) -> Header:
    """Return the header of a segment: the clients of its rows, and their places in the file.

    Raises:
        UserError: the segment is missing or damaged.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(min(length, size)))
        header: Header = {}
        about = json.loads(entries.pop("__metadata__")["rows"])
        for key, entry in entries.items():
            rows = about[key]
            clients = np.asarray(rows["clients"], dtype=np.int64)
            shape = tuple(int(d) for d in entry["shape"][1:])
            first = 8 + length + entry["data_offsets"][0]
            for name, checksums in {rows["name"]: rows["crc32"], **rows.get("also", {})}.items():
                if 8 + length + entry["data_offsets"][1] > size or len(checksums) != len(clients):
                    raise ValueError("it is shorter than its header says")
                group = SegmentGroup(clients, checksums, entry["dtype"], shape, first)
                header.setdefault(name, []).append(group)
        return header
    except FileNotFoundError:
        raise UserError(f"The client state file {path} is missing. {WAY_OUT}") from None
    except Exception as error:  # damage shows in many ways
        raise UserError(
            f"The client state file {path} is damaged: {str(error)[:100]}. {WAY_OUT}"
        ) from error


def read_row(path: Path, header: Header, name: str, client: int) -> Tensor:
    """Return one row, read and verified by itself.

    Raises:
        UserError: it names the file, the client and the reason.
    """
    found = _find(header, name, client)
    if found is None:
        raise damaged(path, name, client, "the row is not in it")
    group, position = found
    if group.dtype not in _DTYPES or min(group.shape, default=0) < 0:
        raise damaged(path, name, client, "its header makes no sense")
    dtype = _DTYPES[group.dtype]
    nbytes = int(np.prod(group.shape, dtype=np.int64)) * dtype.itemsize
    try:
        with open(path, "rb") as file:
            start = group.offset + position * nbytes
            if not 0 <= nbytes <= os.fstat(file.fileno()).st_size - start:
                raise damaged(path, name, client, "the file is cut short")
            raw = torch.empty(nbytes, dtype=torch.uint8)
            block = raw.numpy().data
            file.seek(start)
            file.readinto(block)
    except OSError as error:
        raise damaged(path, name, client, error.strerror or str(error)) from error
    if _checksum(name, client, group.dtype, group.shape, block) != group.checksums[position]:
        raise damaged(path, name, client, "the row's checksum does not match")
    return raw.view(dtype).reshape(group.shape)


def names_of(header: Header, name: str, client: int, row: Tensor) -> list[str]:
    """Return ``name``, and the other names under which the file has this row of the client."""
    place = _place(_find(header, name, client))
    names = [name]
    for other in header:
        found = _find(header, other, client)
        if other == name or found is None or _place(found) != place:
            continue
        group, position = found
        block = row.reshape(-1).view(torch.uint8).numpy().data
        if _checksum(other, client, group.dtype, group.shape, block) == group.checksums[position]:
            names.append(other)
    return names


def _find(header: Header, name: str, client: int) -> tuple[SegmentGroup, int] | None:
    """Return the group that has a row, and the row's position in it."""
    for group in header.get(name, []):
        position = int(np.searchsorted(group.clients, client))
        if position < len(group.clients) and group.clients[position] == client:
            return group, position
    return None


def _place(found: tuple[SegmentGroup, int] | None) -> tuple[int, int] | None:
    return None if found is None else (found[0].offset, found[1])


def damaged(path: Path, name: str, client: int, why: str) -> UserError:
    return UserError(f"Cannot read {name!r} of client {client} from {path}: {why}. {WAY_OUT}")


def _checksum(name: str, client: int, dtype: str, shape: tuple[int, ...], block: memoryview) -> int:
    # The checksum includes client and name, so that a flipped bit in a header cannot assign a row
    # to another client.
    return zlib.crc32(block, zlib.crc32(f"{name}/{client}/{dtype}/{shape}".encode()))


def merge_indices(indices: Iterable[Index]) -> Index:
    by_name: dict[str, list[dict[str, Tensor]]] = {}
    for index in indices:
        for name, entry in index.items():
            by_name.setdefault(name, []).append(entry)
    merged: Index = {}
    for name, entries in sorted(by_name.items()):
        clients = np.concatenate([entry["clients"].numpy() for entry in entries])
        where = np.concatenate([entry["segments"].numpy() for entry in entries])
        # Sort by client, then by segment: if two segments have a row, the last one is newer.
        order = np.lexsort((where, clients))
        clients = clients[order]
        where = where[order]
        last = np.append(clients[1:] != clients[:-1], True)[: len(clients)]
        merged[name] = {
            "clients": torch.from_numpy(clients[last]),
            "segments": torch.from_numpy(where[last]),
        }
    return merged
