"""The one door to `engines/fast`, whose ways only save time, and whether it is open."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from fl_lightning.errors import UserError

SWITCH = "FL_LIGHTNING_FAST"
FOLDER = "fl_lightning.engines.fast"


def why_closed() -> str:
    """Why the fast ways are not used; empty: they may be."""
    if os.environ.get(SWITCH, "").strip() == "0":
        return f"{SWITCH}=0 switches them off"
    return "" if find_spec(FOLDER) else f"{FOLDER} is not installed"


def fast_ways() -> Any:
    """The package of the fast ways, where the door is open."""
    from fl_lightning.engines import fast

    return fast


def refused(asked: str, instead: str) -> UserError:
    """The error if you ask for a fast way of training while these are switched off."""
    return UserError(
        f"{asked} is one of the fast ways of training (recorded steps, streams of a GPU, stacked "
        f"clients), and {why_closed()}. They only save time: use {instead}, or leave {SWITCH} out "
        "of the environment."
    )
