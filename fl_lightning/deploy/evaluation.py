"""Sites' measurements of their clients' own models: only numbers, by client and metric.

The numbers of a message are ``CLIENT/before/METRIC``, ``CLIENT/after/METRIC`` (after fine-tuning)
and ``mode/METRIC`` (1: greater is better, -1: less is). The message's arrays are the clients and
the number of test samples of each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from fl_lightning.deploy.transport import Message
from fl_lightning.errors import UserError
from fl_lightning.metrics import MODES

# client → "" or "_finetuned" → metric → value, as evaluation.personal.measured gives them
Values = dict[int, dict[str, dict[str, float]]]
KINDS = {"before": "", "after": "_finetuned"}
_SIGNS = dict(zip(MODES, (1, -1), strict=True))


def pack(
    answer: Message, values: Values, samples: Mapping[int, int], modes: Mapping[str, str]
) -> None:
    """Put the measurements of these clients into the message.

    Args:
        samples: each client's number of test samples; ``modes``: better directions of metrics, as
            far as known.
    """
    answer.arrays["clients"] = np.asarray(list(values), np.int64)
    answer.arrays["tests"] = np.asarray([samples[client] for client in values], np.int64)
    for client, kinds in values.items():
        for word, kind in KINDS.items():
            for name, value in kinds.get(kind, {}).items():
                answer.numbers[f"{client}/{word}/{name}"] = value
    for name, mode in modes.items():
        answer.numbers["mode/" + name] = _SIGNS[mode]


def unpacked(
    answer: Message, clients: Collection[int]
) -> tuple[dict[int, tuple[int, dict[str, dict[str, float]]]], dict[str, str]]:
    """Return each client's number of test samples and its values, as :func:`pack` put them in; and
    the modes.

    Args:
        clients: the clients that the site was asked about.

    Raises:
        UserError: the answer does not match the question to the site.
    """
    try:
        who = [int(client) for client in answer.arrays["clients"]]
        samples = dict(zip(who, map(int, answer.arrays["tests"]), strict=True))
        there = {client: (samples[client], dict[str, dict[str, float]]()) for client in clients}
        modes: dict[str, str] = {}
        for key, number in answer.numbers.items():
            first, _, rest = key.partition("/")
            if first == "mode":
                modes[rest] = MODES[number < 0]
            elif first.isdecimal():
                word, _, name = rest.partition("/")
                there[int(first)][1].setdefault(KINDS[word], {})[name] = float(number)
        for client, (count, kinds) in there.items():
            if count < 0 or (count > 0) != bool(kinds):
                raise ValueError(f"client {client} has {count} test samples and {len(kinds)} rows")
        return there, modes
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise UserError(
            f"site {answer.site}: its measurements of its clients {list(clients)} do not match the "
            f"server's question ({type(error).__name__}: {str(error)[:100]}). Server and site need "
            "the same config and version."
        ) from error
