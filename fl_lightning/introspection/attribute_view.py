"""An object with some attributes exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


class View:
    """An object, except for some attributes, each of which a function computes.

    Assigning to an attribute, or deleting it, does so to the object's, after ``assigns`` was called
    with its name.
    """

    def __init__(
        self, of: Any, assigns: Callable[[str], None] | None = None, **own: Callable[[], Any]
    ) -> None:
        vars(self).update(_of=of, _own=own, _assigns=assigns)

    # `isinstance` reads this, so a view counts as an instance of its object's class.
    @property
    def __class__(self) -> Any:
        return type(self._of)

    @__class__.setter
    def __class__(self, kind: Any) -> NoReturn:
        raise TypeError("a view's class is that of its object")

    def __getattr__(self, name: str) -> Any:
        # copy and pickle read such names before the view has any attribute.
        if name.startswith("__") or "_own" not in vars(self):
            raise AttributeError(name)
        own = self._own.get(name)
        return getattr(self._of, name) if own is None else own()

    def __setattr__(self, name: str, value: Any) -> None:
        if self._assigns is not None:
            self._assigns(name)
        setattr(self._of, name, value)

    def __delattr__(self, name: str) -> None:
        if self._assigns is not None:
            self._assigns(name)
        delattr(self._of, name)

    def __repr__(self) -> str:
        return repr(self._of)
