"""What becomes of attributes that methods assign in their hooks and do not declare as state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fl_lightning.errors import UserError


def refuse_shared(callback: object, name: str) -> None:
    """Refuse an attribute that a method assigns while clients train that need not do so in order.

    Raises:
        UserError: always.
    """
    raise UserError(
        f"method: {type(callback).__name__} sets self.{name} while clients train. All clients "
        "share it, so what they find there would depend on their order. Declare it (Scratch, "
        "ClientState, Upload), use clients.log, or give engine='sequential' or workers=1."
    )


def noting(
    callbacks: Iterable[object], note: Callable[[str], None]
) -> Callable[[object, str], None]:
    """Return a function that notes attributes which a method of a resumed run assigns, and which it
    had before.

    An attribute that it did not have begins in this fit, as it did in the first one.
    """
    had: dict[Any, set[str]] = {id(callback): set(dir(callback)) for callback in callbacks}

    def assigned(callback: object, name: str) -> None:
        if name in had.get(id(callback), ()):
            note(
                f"{type(callback).__name__} sets self.{name} in a hook, and does not declare it, "
                "so the checkpoint does not hold it. If its value counts in a later round, this "
                "resumed run differs from one that was never interrupted. Declare it as a "
                "ServerState (or ClientState); fl-lightning check finds whether it counts"
            )

    return assigned
