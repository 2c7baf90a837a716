"""In a private run, only the packaged methods read values that clients sent or keep."""

from __future__ import annotations

import sys
from types import FrameType

from fl_lightning.errors import UserError

# A hook reads through these modules, so their frames lie between the hook and the refusal.
_BETWEEN = ("fl_lightning.round.", "fl_lightning.callback.")


def refuse_outsiders(what: str, caller: str = "", hint: str = "") -> None:
    """Refuse code from outside this package that reads ``what``, because it would reach w without
    noise.

    Raises:
        UserError: it names ``caller``, the class whose hook it is; if empty, the class is found
            from the code.
    """
    frame = sys._getframe(1)
    # The first frame outside these modules belongs to the hook that reads the state.
    while frame.f_back is not None and f"{_module(frame)}.".startswith(_BETWEEN):
        frame = frame.f_back
    if not _module(frame).startswith("fl_lightning."):
        raise UserError(
            f"method: {caller or _reader(frame)} reads {what} in a private run "
            "(DifferentialPrivacy), and the results would be published without noise. Read "
            "server.update and server.w, which have noise, or use only one of the two methods."
            f"{hint}"
        )


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _reader(frame: FrameType) -> str:
    """Return the class whose method this is, or the function."""
    if "self" in frame.f_locals:
        return type(frame.f_locals["self"]).__name__
    return frame.f_code.co_name
