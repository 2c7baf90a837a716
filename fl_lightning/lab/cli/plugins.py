"""Packages by others: their short names and configs work like ours.

A package registers itself in the entry point group ``fl_lightning.plugins``. ``fl-lightning new``
writes such a package.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

GROUP = "fl_lightning.plugins"


@cache
def packages() -> tuple[str, ...]:
    """Return the names of the packages, each once, in alphabetical order."""
    return tuple(sorted({point.value.partition(":")[0] for point in entry_points(group=GROUP)}))


def config_folders() -> Iterator[Path]:
    """Return each package's folder ``configs``, if it has one; the package is not imported."""
    for name in packages():
        # find_spec imports the parents of a nested package, and nothing else.
        with suppress(ImportError):
            found = find_spec(name)
            for location in (found and found.submodule_search_locations) or []:
                if Path(location, "configs").is_dir():
                    yield Path(location, "configs")


@cache
def classes() -> dict[str, str]:
    """Return bare name → class path, for the public classes that the packages' modules define.

    If a package cannot be imported, stderr names it, and it is left out.
    """
    found: dict[str, str] = {}
    for name in packages():
        try:
            for module in _modules(name):
                for each in vars(module).values():
                    own = isinstance(each, type) and each.__module__ == module.__name__
                    if own and not each.__name__.startswith("_"):
                        found.setdefault(each.__name__, f"{each.__module__}.{each.__name__}")
        # Plugins are other people's code: if one fails, runs without it go on.
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print(f"the plugin {name} is left out: {reason}", file=sys.stderr)
    return found


def _modules(name: str) -> Iterator[ModuleType]:
    package = importlib.import_module(name)
    yield package
    # Do not import tests that a package contains.
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), f"{name}."):
        if not {"tests", "__main__"} & set(found.name.split(".")):
            yield importlib.import_module(found.name)
