"""Our messages inside Flower's: one array of bytes, which is never unpickled."""

from __future__ import annotations

from typing import Any

import numpy as np

from fl_lightning.deploy.transport import Message, opened, packed, visible, words
from fl_lightning.errors import UserError

KEY = "fl_lightning"


def content(data: bytes) -> Any:
    """Return Flower's record that holds a message's bytes."""
    from flwr.app import Array, ArrayRecord, RecordDict

    return RecordDict({KEY: ArrayRecord({KEY: Array(np.frombuffer(data, np.uint8))})})


def enclosed(message: Message) -> Any:
    """Return the record of a message."""
    return content(packed(message))


def bytes_in(record: Any, site: str) -> bytes:
    """A message's bytes.

    Raises:
        UserError: it is the record of another app.
    """
    try:
        # Flower reads the array with NumPy, and does not allow pickles.
        return bytes(record[KEY][KEY].numpy().astype(np.uint8, copy=False))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"site {site}: the data that arrived are not a message of fl-lightning "
            f"({visible(error)}). Run the app that `fl-lightning deploy flower` wrote."
        ) from error


def message_in(record: Any, site: str) -> Message:
    """Return the message in a record; ``damaged``, with the reason, if there is none."""
    try:
        return opened(bytes_in(record, site), site)
    except UserError as error:
        return Message("damaged", site, arrays={"text": words(str(error))})
