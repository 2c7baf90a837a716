"""The communication of a round in parameters and bytes, counted from what methods declare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain

from torch import Tensor

from fl_lightning.callback_list import CallbackList
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.context import Round
from fl_lightning.round.declared_state import Exchanged
from fl_lightning.round.transaction import RoundTransaction
from fl_lightning.virtual.planned_round import Planned

DOWN_PARAMETERS, CLIENTS, UP_PARAMETERS, UP_BYTES, BUFFER_BYTES, GRADIENTS, FORWARDS, BASE = range(
    8
)
COUNTS = 8


def of_client(group: ClientGroup, methods: CallbackList) -> list[int]:
    # Coordinates of which the client has a valid copy are not sent.
    down = group.round.layout.size
    if group.kept_mask is not None:
        down -= int(group.kept_mask[0].sum())
    if group.untrained is not None and methods.partial_training.untrained == "zero":
        down = int((~group.untrained).sum())
    counts = sent_down(group.round, group.ids[0], methods, down)
    counts[GRADIENTS] = sum(map(group.gradients, group.ids))
    counts[FORWARDS] = sum(map(group.passes, group.ids))
    counts[BUFFER_BYTES] *= 2  # sent down, and sent up again
    return counts


def _bytes_of(buffers: Mapping[str, Tensor], round: Round) -> int:
    own = round.own_buffers
    return sum(v.numel() * v.element_size() for name, v in buffers.items() if name not in own)


def count_down(counts: list[int], round: Round, client: int | None, methods: CallbackList) -> None:
    """Set the counts that depend on the round in which a client was last sent w: base, and
    methods' rules. ``client``: None: one that was never sent it.
    """
    last = None if client is None else round.sent.get(client)
    if round.base_due is not None:
        counts[BASE] = round.base_due(round.t, last)
    for callback in methods.callbacks:
        number = callback.numbers_down(round.layout, round.t, last)
        if number is not None:
            counts[DOWN_PARAMETERS] = number
            return


def add_upload(
    counts: list[int], group: ClientGroup, where: Tensor | None, methods: CallbackList
) -> None:
    """Add a client's upload: update, uploads, and rows that are sent up.

    ``where`` ``(D,)`` bool: the coordinates that it sends; None: all.
    """
    going_up = methods.going_up()
    size = group.x.element_size()
    everywhere = group.round.layout.size if where is None else int(where.sum())
    parameters, number = group.transmitted
    # The client's results have been collected by now, so reading this tensor does not wait.
    up = everywhere if parameters is None else float(parameters)
    up_bytes = up * size if number is None else float(number)
    for key, value in chain(group.uploads.items(), group.written()):
        if key in going_up:
            count = everywhere if going_up[key].by_coordinate else value[0].numel()
            up = up + count
            up_bytes = up_bytes + count * value.element_size()
    counts[UP_PARAMETERS] = round(up)
    counts[UP_BYTES] = round(up_bytes)


def counted(transaction: RoundTransaction, what: int) -> int:
    """Return how many ``GRADIENTS``, each of one batch, the round's participants evaluated
    together; or ``FORWARDS``, passes without a gradient that methods asked for.
    """
    counts = transaction.total.traffic
    return 0 if counts is None else int(counts[what])


def kept_vectors(transaction: RoundTransaction, methods: CallbackList) -> float:
    """Return the memory of a participant until its next round, in vectors of D numbers.

    The memory is counted for the first participant that this process has trained, and is 0 if this
    process trained none. Rows of callbacks that only measure do not belong to the method, and do
    not count.
    """
    for client in transaction.finished:
        numbers = transaction.kept.get(client)
        if not transaction.rows_elsewhere:
            rows = {key: rows[client] for key, rows in transaction.rows.items() if client in rows}
            numbers = kept_numbers(rows, methods)
        if numbers is not None:
            return numbers / transaction.round.w.numel()
    return 0.0


def kept_numbers(rows: Mapping[str, Tensor], methods: CallbackList) -> int | None:
    """How many numbers a client keeps in these rows for its methods; None: it keeps no row."""
    if not rows:
        return None
    counted = [key for key in rows if key.split(".")[0] not in methods.measuring]
    return sum(rows[key].numel() for key in counted)


def of_round(transaction: RoundTransaction, methods: CallbackList) -> dict[str, int]:
    """Return parameters and bytes of this round, for all participants together."""
    if methods.owner("neighbours") is not None:
        return _of_exchange(transaction, methods)
    counts = transaction.total.traffic
    if counts is None and transaction.planned is None:
        names = ("down_parameters", "down_bytes", "up_parameters", "up_bytes", "buffers_bytes")
        return dict.fromkeys(names, 0)
    count = [0] * COUNTS if counts is None else [int(c) for c in counts]
    size = transaction.round.w.element_size()
    buffers_bytes = count[BUFFER_BYTES]
    if transaction.planned is not None:
        buffers_bytes = _as_planned(count, transaction, transaction.planned, methods)
    down = count[DOWN_PARAMETERS]
    down_bytes = count[DOWN_PARAMETERS] * size
    if transaction.sent is not None:
        parameters, number = transaction.sent
        each = transaction.round.layout.size if parameters is None else parameters
        down = round(count[CLIENTS] * each)
        down_bytes = round(count[CLIENTS] * (each * size if number is None else number))
    for key, declared in methods.sent_to_clients().items():
        if declared.goes_down == "known":
            continue
        value = transaction.written_server(key)
        if value is None:  # never written, so there is nothing to send
            continue
        numbers = count[CLIENTS] * value.numel()
        if declared.by_coordinate:
            numbers = count[DOWN_PARAMETERS]
        down = down + numbers
        down_bytes = down_bytes + numbers * value.element_size()
    down = down + count[BASE]
    down_bytes = down_bytes + count[BASE] * size
    return {
        "down_parameters": down,
        "down_bytes": down_bytes,
        "up_parameters": count[UP_PARAMETERS],
        "up_bytes": count[UP_BYTES],
        "buffers_bytes": buffers_bytes,
    }


def _of_exchange(transaction: RoundTransaction, methods: CallbackList) -> dict[str, int]:
    """Count the messages of a round without a server, each by its sender."""
    numbers = number_bytes = 0
    given = transaction.neighbourhood
    messages = 0 if given is None else given.messages(len(transaction.finished))
    for declared in methods.declared.values():
        if isinstance(declared, Exchanged):
            size = transaction.round.layout.size
            if declared.shape is not None:
                size = math.prod(declared.sized(size))
            elif given is not None and given.shared is not None:
                size = int(given.shared.sum())
            numbers += messages * size
            number_bytes += messages * size * (declared.dtype or transaction.w.dtype).itemsize
    return {
        "down_parameters": 0,
        "down_bytes": 0,
        "up_parameters": numbers,
        "up_bytes": number_bytes,
        "buffers_bytes": 0,
    }


def _as_planned(
    count: list[int], transaction: RoundTransaction, planned: Planned, methods: CallbackList
) -> int:
    """Count every client that was sent the model, and every update that arrived.

    Before this call only the clients whose update was used are counted.

    Returns:
        The bytes of buffers, in both directions.
    """
    round = transaction.round
    trained = count[CLIENTS]
    # Clients whose updates were not used sent and received the same amount on average. If no update
    # was used, full vectors are counted.
    each = [round.layout.size, round.layout.size * round.w.element_size()]
    buffers = _bytes_of(round.buffers, round)
    for client in planned.others:
        for place, number in enumerate(sent_down(round, client, methods)):
            count[place] += number
    # Of asynchronous rounds it is not known who is sent the model.
    unknown = planned.downloads - trained - len(planned.others)
    count[DOWN_PARAMETERS] += unknown * sent_down(round, None, methods)[DOWN_PARAMETERS]
    count[CLIENTS] = planned.downloads
    for place, way in enumerate((UP_PARAMETERS, UP_BYTES)):
        share = count[way] / trained if trained else each[place]
        count[way] += int((planned.uploads - trained) * share)
    return buffers * (planned.downloads + planned.uploads)


def sent_down(
    round: Round, client: int | None, methods: CallbackList, numbers: int | None = None
) -> list[int]:
    """Return the counts of a client that is sent the model, and sends nothing back; ``client`` as
    in :func:`count_down`; ``numbers``: how many of w it is sent; None: all.
    """
    counts = [0] * COUNTS
    counts[DOWN_PARAMETERS] = round.layout.size if numbers is None else numbers
    counts[CLIENTS] = 1
    counts[BUFFER_BYTES] = _bytes_of(round.buffers, round)
    count_down(counts, round, client, methods)
    return counts


def whole(methods: CallbackList, round_vector: Tensor) -> tuple[int, int]:
    """Return the bytes that a participant is sent and sends, as whole vectors, whatever their
    content.

    If clients train from a method's own models, which its ``broadcast`` declares, w is not sent.
    """
    numbers = round_vector.numel()
    vector = numbers * round_vector.element_size()
    own_models = bool(methods.gives_models) and methods.owner("broadcast") is not None
    given = 0 if own_models else vector
    ways = []
    down = [each for each in methods.sent_to_clients().values() if each.goes_down != "known"]
    for total, declared in ((given, down), (vector, methods.going_up().values())):
        ways.append(total + sum(each.bytes(round_vector) for each in declared))
    return ways[0], ways[1]
