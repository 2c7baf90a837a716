"""Sites' measurements of their clients' own models: only numbers, by client and metric.

The numbers of a message are ``CLIENT/before/METRIC`` and ``CLIENT/after/METRIC`` (after
fine-tuning). The message's arrays are the clients and the number of test samples of each.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fl_lightning.deploy.answers import KINDS, Values
from fl_lightning.deploy.transport import Message


def pack(answer: Message, values: Values, samples: Mapping[int, int]) -> None:
    """Put the measurements of these clients into the message, with each one's number of test
    samples.
    """
    answer.arrays["clients"] = np.asarray(list(values), np.int64)
    answer.arrays["tests"] = np.asarray([samples[client] for client in values], np.int64)
    for client, kinds in values.items():
        for word, kind in KINDS.items():
            for name, value in kinds.get(kind, {}).items():
                answer.numbers[f"{client}/{word}/{name}"] = value
