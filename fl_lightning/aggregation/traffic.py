"""What a round communicates, in parameters and bytes, counted from what methods declare."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fl_lightning.methods import Methods
from fl_lightning.round.clients import Clients
from fl_lightning.round.ledger import Ledger
from fl_lightning.state import Upload

DOWN_PARAMETERS, CLIENTS, UP_PARAMETERS, UP_BYTES, BUFFER_BYTES, GRADIENTS = range(6)


def of_client(clients: Clients, buffers: Mapping[str, Tensor]) -> list[int]:
    """A client's six counts: coordinates of which it had no valid copy, 1 client, its buffers, its
    gradients.
    """
    counts = [0] * 6
    kept = 0 if clients.kept_mask is None else int(clients.kept_mask[0].sum())
    counts[DOWN_PARAMETERS] = clients.layout.size - kept
    counts[CLIENTS] = 1
    counts[GRADIENTS] = sum(map(clients.gradients, clients.client_ids))
    sent = (b for name, b in buffers.items() if name not in clients._round.own_buffers)
    counts[BUFFER_BYTES] = sum(b.numel() * b.element_size() for b in sent)
    return counts


def add_upload(counts: list[int], clients: Clients, counted: Mapping[str, Upload]) -> None:
    """Add what a client sends in the end: its update, where it is averaged, and the uploads that
    are counted.
    """
    averaged = clients._round.averaged
    size = clients.x.element_size()
    everywhere = clients.layout.size if averaged is None else int(averaged.sum())
    parameters, number = clients.transmitted
    up = everywhere if parameters is None else parameters
    up_bytes = up * size if number is None else number
    for key, value in clients.uploads.items():
        if key in counted:
            count = everywhere if counted[key].shape is None else value[0].numel()
            up = up + count
            up_bytes = up_bytes + count * value.element_size()
    counts[UP_PARAMETERS] = round(up)
    counts[UP_BYTES] = round(up_bytes)


def gradients(ledger: Ledger) -> int:
    """Gradients that the round's participants evaluated, all together, each of one batch."""
    counts = ledger.total.get("traffic")
    return 0 if counts is None else int(counts[GRADIENTS])


def kept_vectors(ledger: Ledger) -> float:
    """What a participant keeps until its next round, in vectors of D numbers, without what loggers
    let it keep.

    Counted at the first that this process has trained; 0 where it has none.
    """
    client = next(
        (i for i in ledger.finished if any(i in rows for rows in ledger.rows.values())), -1
    )
    of_methods = (
        rows for key, rows in ledger.rows.items() if not key.split(".")[0].endswith("Logger")
    )
    return (
        sum(rows[client].numel() for rows in of_methods if client in rows) / ledger.round.w.numel()
    )


def of_round(ledger: Ledger, methods: Methods) -> dict[str, int]:
    """Parameters and bytes of this round, all participants together."""
    counts = ledger.total.get("traffic")
    if counts is None:
        return dict.fromkeys(
            ("down_parameters", "down_bytes", "up_parameters", "up_bytes", "buffers_bytes"), 0
        )
    count = [int(c) for c in counts]
    down = count[DOWN_PARAMETERS]
    down_bytes = count[DOWN_PARAMETERS] * ledger.round.w.element_size()
    for key, declared in methods.sent_to_clients().items():
        value = ledger.server.get(key, ledger.round.server_states.get(key))
        if value is None:  # never written: nothing to send
            continue
        if declared.shape is None:
            numbers = count[DOWN_PARAMETERS]
        else:
            numbers = count[CLIENTS] * value.numel()
        down = down + numbers
        down_bytes = down_bytes + numbers * value.element_size()
    return {
        "down_parameters": down,
        "down_bytes": down_bytes,
        "up_parameters": count[UP_PARAMETERS],
        "up_bytes": count[UP_BYTES],
        "buffers_bytes": 2 * count[BUFFER_BYTES],
    }
