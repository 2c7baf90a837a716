"""A process that ends with its parent, however that ended."""

from __future__ import annotations

import os
import select
import threading


def end_with(parent: int) -> None:
    """End this process at once when its parent has ended; everything that counts is on disk at
    any time.
    """
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(0)

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
