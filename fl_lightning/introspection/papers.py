"""The papers that a class implements or a data set comes from, as the class declares them.

``paper = Paper("li2020fedprox")`` stands in the class body. The report and ``fl-lightning cite``
read the declarations of the packaged classes from their source, because importing the classes
imports torch, which takes seconds.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any


class Paper:
    """The references of a class, and how its paper counts communication.

    Args:
        keys: keys in ``lab/cli/references.bib``.
        by: the class's arguments in a config → further keys, or None for no key. The function may
            use no names but builtins.
        beside: class name → the key of a paper about both classes together.
        vectors: number of vectors of the model's size that a client sends per round, as papers
            count it: one direction stands for both. None: papers count the parameters that are
            sent.
    """

    def __init__(
        self,
        *keys: str,
        by: Callable[[Mapping[str, Any]], Collection[str | None]] | None = None,
        beside: Mapping[str, str] | None = None,
        vectors: int | None = 1,
    ) -> None:
        self.keys = keys
        self.by = by
        self.beside = beside or {}
        self.vectors = vectors

    def cited(self, arguments: Mapping[str, Any], others: Collection[str]) -> list[str]:
        """Return the keys for a config with these arguments and these other classes."""
        found = [*self.keys, *(() if self.by is None else self.by(arguments))]
        return [key for key in found if key] + [
            key for name, key in self.beside.items() if name in others
        ]


@cache
def declared(attribute: str) -> Mapping[str, Any]:
    """Return the value of a class attribute by class name, for the packaged classes that
    declare it.
    """
    found: dict[str, Any] = {}
    for tree in _sources(attribute):
        for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for base in cls.bases:
                if isinstance(base, ast.Name) and base.id in found:
                    found[cls.name] = found[base.id]
            for line in cls.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == attribute:
                    value = compile(ast.Expression(line.value), cls.name, "eval")
                    found[cls.name] = eval(value, {"Paper": Paper})
    return found


def _sources(attribute: str) -> Iterator[ast.Module]:
    package = files("fl_lightning")
    kinds = [entry for entry in package.joinpath("callbacks").iterdir() if entry.is_dir()]
    data = [entry for entry in package.joinpath("datamodules").iterdir() if entry.is_dir()]
    folders = [package, package.joinpath("virtual"), *data, *kinds]
    for folder in folders:
        for file in folder.iterdir():
            text = file.read_text("utf-8") if file.name.endswith(".py") else ""
            if f"    {attribute} = " in text:
                yield ast.parse(text)
