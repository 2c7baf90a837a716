"""What clients and server have in common: they know whose hook is running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fl_lightning.introspection.hook_arguments import unasked


class HookSubject:
    """The clients or the server, as a hook gets them."""

    __slots__ = ("_hook",)

    def __init__(self) -> None:
        self._hook: Callable[..., Any] | None = None  # the hook that is being called

    @property
    def _caller(self) -> str:
        """Return the class whose hook is being called."""
        if self._hook is None:
            return "a method of this run"
        return type(getattr(self._hook, "__self__", self._hook)).__name__

    def _check_asked(self, value: str) -> None:
        """Refuse a method that reads a value for which it does not ask.

        A hook that is a function of its own, and of no method, is not refused.

        Raises:
            UserError: it shows the line to write.
        """
        callback = getattr(self._hook, "__self__", None)
        asks_for = getattr(callback, "asks_for", None)
        if asks_for is not None and not asks_for(value):
            assert self._hook is not None
            raise unasked(callback, value, self._hook)
