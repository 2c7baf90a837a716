"""The one way to `engines/fast`, which only saves time, and whether it is switched on."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

SWITCH = "FL_LIGHTNING_FAST"
FOLDER = "fl_lightning.engines.fast"


def why_off() -> str:
    """Why the fast ways are not used; empty: they may be."""
    if os.environ.get(SWITCH, "").strip() == "0":
        return f"{SWITCH}=0 switches them off"
    return "" if find_spec(FOLDER) else f"{FOLDER} is not installed"


def fast_package() -> Any:
    """The package of the fast ways; call it only if :func:`why_off` is empty."""
    from fl_lightning.engines import fast

    return fast


def refusal(asked: str, instead: str = "engine='auto'") -> str | None:
    """The error for a user who asks for a fast way while these are switched off; None: they are on.

    Args:
        asked: the option, such as ``"engine='stacked'"``.
        instead: the option that works.
    """
    if not (closed := why_off()):
        return None
    return (
        f"{asked} is one of the fast ways of training (recorded steps, streams of a GPU, stacked "
        f"clients), and {closed}. They only save time: use {instead}, or leave {SWITCH} out "
        "of the environment."
    )
