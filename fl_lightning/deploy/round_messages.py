"""The content of a round's messages: the model and states down, each client's results up.

Kinds of messages: "hello" asks a site for its clients, and "here" lists them; "round" asks for a
round, and "trained" brings its results; "evaluate" asks for measurements of clients' own models,
and "evaluated" brings them; "whole" asks for the whole model; "lost" says that the site's process
has started again, and asks for "hello"; "failed" says why a site cannot go on.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.aggregation.update_accumulator import ClientResult
from fl_lightning.deploy.fields import tensor_of
from fl_lightning.deploy.transport import BFLOAT, Array, Message, said, words
from fl_lightning.errors import UserError
from fl_lightning.round.context import Round
from fl_lightning.round.declared_state import Declaration
from fl_lightning.round.quantization import as_array


def put(arrays: dict[str, Array], name: str, values: Tensor) -> None:
    """Put a tensor among the arrays, by value."""
    array = as_array(values).copy()
    arrays[name] = array.view(BFLOAT) if values.dtype == torch.bfloat16 else array


def under(arrays: Mapping[str, Array], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin so, by the rest of their names."""
    found = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
    return {name: tensor_of(array) for name, array in found.items()}


def shape_of(data: Any, client: int) -> tuple[int, ...]:
    """Return the shape of a sample's x, if that is one array; else nothing."""
    batch = data.one_batch(client, 1)
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    return tuple(x.shape[1:]) if isinstance(x, Tensor) else ()


def check_shape(where: str, shape: Iterable[int], data: Any) -> None:
    """Compare the shape of samples at the other end with that of these data."""
    there = tuple(int(size) for size in shape)
    here = shape_of(data, 0)
    if there != here:
        raise UserError(
            f"{where}: x of a sample has the shape {there} there, and {here} here. Server and site "
            "need the same columns, in the same order."
        )


def names_of(data: Any) -> dict[str, Array]:
    """Return the names of the columns of x and of the classes, in their order, if the data have
    names.
    """
    return {
        kind: words("\n".join(getattr(data, kind)))
        for kind in ("column_names", "class_names")
        if getattr(data, kind, None)
    }


def check_names(server: Mapping[str, Array], data: Any) -> None:
    """Compare the server's names of columns and classes with those of a site's data.

    Raises:
        UserError: they differ, so a number would have another meaning there. The server gets the
            text, so it has no name that only the site has.
    """
    for kind, names in names_of(data).items():
        if kind not in server or said(server[kind]) == said(names):
            continue
        theirs, ours = (said(each).split("\n") for each in (server[kind], names))
        what, option = ("columns", "features") if kind == "column_names" else ("classes", "classes")
        lacks = _list([name for name in theirs if name not in ours])
        differ = [f"lack {lacks}, which the server's have"] if lacks else []
        if more := len({*ours} - {*theirs}):
            differ.append(f"have {more} that the server's do not")
        if not differ:
            differ = [f"are {_list(ours)}, and the server's {_list(theirs)}"]
        raise UserError(
            f"this site's {what} {', and '.join(differ)}: the run identifies them by their "
            f"positions. Give the server's by data.init_args.{option} in site.yaml; a column has "
            "to be in the site's table."
        )


def _list(names: list[str]) -> str:
    return ", ".join(names)[:300]


def packed_client(
    message: Message,
    home: ClientResult,
    round: Round,
    encoded: dict[str, Array] | None,
    declared: Mapping[str, Declaration],
) -> None:
    """Put a client's results into the message.

    :class:`~fl_lightning.deploy.client_results.Results` reads them.

    Args:
        declared: what the run's methods declare.
        encoded: its update in fewer numbers; None: it is sent as it is.
    """
    arrays = message.arrays
    at = f"{home.client}/"
    assert home.counts is not None
    arrays[at + "counts"] = np.asarray(home.counts, np.int64)
    numbers = message.numbers
    numbers[at + "finished"] = int(home.finished)
    if not home.finished:
        return
    assert home.update is not None
    where = home.sends(round)
    if encoded is not None:
        arrays |= {at + "code/" + name: array for name, array in encoded.items()}
    else:
        put(arrays, at + "update", _part(home.update, where))
    if home.holds is not None:
        put_mask(arrays, at + "holds", home.holds)
    for name, value in home.uploads.items():
        part = _part(value, where)
        # An upload may have numbers on other coordinates, too; then all of it is sent.
        whole = int(part.count_nonzero()) < int(value.count_nonzero())
        put(arrays, at + "upload/" + name, value if whole else part)
    for name, each in declared.items():
        if each.summed and name not in home.uploads:
            numbers[f"{at}absent/{name}"] = 1
    for name, value in home.buffers.items():
        put(arrays, at + "buffer/" + name, value)
    for name, value in home.maxima.items():
        put(arrays, at + "maximum/" + name, value)
    for name, value in home.rows.items():
        if name in declared and declared[name].comes_from_sites:
            put(arrays, at + "row/" + name, value)
    if home.kept is not None:
        numbers[at + "kept"] = home.kept
    if home.withheld:
        numbers[at + "withheld"] = 1
    else:
        _put_logs(message, at, home)


def _part(values: Tensor, where: Tensor | None) -> Tensor:
    """Return the values that are sent, from a vector of D numbers."""
    if where is None or values.shape != where.shape:
        return values
    return values[where.to(values.device)]


def spread(values: Tensor, shape: tuple[int, ...], where: Tensor | None) -> Tensor:
    """Return a vector from the values that were sent; zeros elsewhere."""
    if values.shape == shape:
        return values
    assert where is not None  # the shape has been checked
    spread = values.new_zeros(shape)
    spread[where.cpu()] = values
    return spread


def put_mask(arrays: dict[str, Array], name: str, mask: Tensor) -> None:
    """Put a mask among the arrays; rows and columns of adapters take a few bytes."""
    bits = np.packbits(mask.cpu().numpy())
    arrays[name] = np.frombuffer(zlib.compress(bits.tobytes()), np.uint8)


def _put_logs(message: Message, at: str, home: ClientResult) -> None:
    """Put what a client logs; lists of metrics, which would hold single samples, are empty."""
    # Logs are summed in float64, which represents each of their values.
    for name, value in home.logs.items():
        message.numbers[at + "log/" + name] = float(value)
    metrics = home.metrics
    if metrics is None:
        return
    message.numbers[at + "metrics"] = 1
    for j, (count, states) in metrics.states.items():
        message.numbers[f"{at}updates/{j}"] = count
        for name, value in states.items():
            if isinstance(value, Tensor):
                put(message.arrays, f"{at}state/{j}/{name}", value)
    for name, j in metrics.names.items():
        message.numbers[f"{at}name/{name}"] = j
    for name, value in metrics.alone.items():
        put(message.arrays, f"{at}alone/{name}", value)
