"""The suite under the other Lightning. ``pytorch_lightning``, as tests import it, is
``lightning.pytorch``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class StandIn(MetaPathFinder, Loader):
    """Finds ``pytorch_lightning.x`` in ``lightning.pytorch.x``: one module under two names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0] in NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        top, _, rest = spec.name.partition(".")
        module = import_module(".".join(filter(None, (NAMES[top], rest))))
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def stand_in() -> None:
    """From here on; before anything imports Lightning."""
    assert not NAMES.keys() & sys.modules.keys(), "pytorch_lightning was imported before"
    import_module("lightning.pytorch")
    sys.meta_path.insert(0, StandIn())
