"""What the hooks of a callback read and set, found in their source."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

# What hooks assign at `clients` and `server`.
OF_THE_RUN = ("x", "update", "updates")
# Methods that change a list, a dict, a set or a deque.
CHANGING = (
    *("append", "appendleft", "extend", "insert", "pop", "popleft", "remove"),
    *("add", "discard", "update", "setdefault", "popitem"),
)


def of_self(callback: object, hook: Callable[..., Any]) -> Iterator[str]:
    """Return the attributes of ``self`` that a hook reads, also in methods that it calls."""
    for node, own in _attributes(callback, hook):
        if _name(node) == own and isinstance(node.ctx, ast.Load):
            yield node.attr


def set_of_self(callback: object, hook: Callable[..., Any]) -> Iterator[str]:
    """Return the attributes of ``self`` that a hook assigns, also in methods that it calls.

    A program that Python reads from its input has no source. Then these are the attributes that the
    hook's own code stores, without the methods that it calls.
    """
    function = inspect.unwrap(getattr(hook, "__func__", hook))
    if not _parsed(hook)[1] and inspect.isfunction(function):
        yield from _stored(function)
    for node, own in _attributes(callback, hook):
        if _name(node) == own and isinstance(node.ctx, ast.Store):
            yield node.attr


def moved_on(hook: Callable[..., Any]) -> tuple[set[str], set[str]]:
    """Return the attributes of ``self`` that a hook computes from their value before, as in
    ``self.k += 1`` and ``self.k = 0.9 * self.k``, and those that it sets anew.
    """
    moved, anew = set[str](), set[str]()
    tree, own = _parsed(hook)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AugAssign):
            continue
        read = {n.attr for n in ast.walk(node.value) if isinstance(n, ast.Attribute)}
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Attribute) and _name(target) == own:
                goes_on = isinstance(node, ast.AugAssign) or target.attr in read
                (moved if goes_on else anew).add(target.attr)
    return moved, anew


def assigned(hook: Callable[..., Any]) -> Iterator[str]:
    """Return the attributes of ``self`` that a hook always assigns, under no condition."""
    tree, own = _parsed(hook)
    for function in ast.iter_child_nodes(tree):
        for statement in getattr(function, "body", []):
            for target in getattr(statement, "targets", [getattr(statement, "target", None)]):
                if isinstance(target, ast.Attribute) and _name(target) == own:
                    yield target.attr


def stores(function: Any) -> Iterator[tuple[str, bool]]:
    """Return each attribute that a function itself assigns, also by ``setattr`` with its name, and
    whether it is one of ``self``.

    Without a source these are the attributes that the function's code stores, of any object.
    """
    tree, own = _parsed(function)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, _name(node) == own != ""
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            name = getattr(node.args[1], "value", None) if len(node.args) > 1 else None
            if isinstance(name, str):
                yield name, getattr(node.args[0], "id", "") == own != ""
    if not getattr(tree, "body", ()):
        for code in _codes(function.__code__):
            for each in dis.get_instructions(code):
                if each.opname == "STORE_ATTR":
                    yield each.argval, False
            if "setattr" in code.co_names:
                yield from ((each, False) for each in code.co_consts if isinstance(each, str))


def uses(function: Any) -> set[str]:
    """Return the names of all attributes and globals in a function's code."""
    return set().union(*(code.co_names for code in _codes(function.__code__)))


def named(function: Any) -> Iterator[FunctionType]:
    """Return the functions that a function uses as globals, or of the functions around it."""
    found = [function.__globals__.get(name) for name in uses(function)]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    yield from (each for each in found if isinstance(each, FunctionType))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Return a function's code and that of the functions within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _stored(function: Any) -> Iterator[str]:
    own = function.__code__.co_varnames[:1]
    instructions = dis.get_instructions(function)
    for before, this in pairwise(instructions):
        # `self.k += 1` exchanges the object and the value; `clients.x += 1` does so, too.
        exchanged = before.opname in ("SWAP", "ROT_TWO") and this.argval not in OF_THE_RUN
        # Newer versions of Python load the value and the object at once.
        loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)
        if this.opname == "STORE_ATTR" and (exchanged or loaded[-1:] == own):
            yield this.argval


def _name(node: ast.Attribute) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""


def moved_by(of: object, hook: Callable[..., Any]) -> set[str]:
    """Return the attributes of ``self`` that a hook assigns, or whose content it changes, as in
    ``self.outs.append(…)`` and ``self.sums["loss"] += …``, also in methods that it calls.
    """
    moved = set(set_of_self(of, hook))
    for tree, own in _sources(of, hook):
        for node in ast.walk(tree):
            stored = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
            called = isinstance(node, ast.Attribute) and node.attr in CHANGING
            inner: Any = getattr(node, "value", None) if stored or called else None
            while isinstance(inner, ast.Subscript):
                inner = inner.value
            if isinstance(inner, ast.Attribute) and _name(inner) == own:
                moved.add(inner.attr)
    return moved


def read_first(hook: Callable[..., Any]) -> set[str]:
    """Return the attributes of ``self`` that a hook itself reads before it assigns them."""
    tree, own = _parsed(hook)
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _name(n) == own]
    first: dict[str, ast.Attribute] = {}
    for node in sorted(nodes, key=lambda n: (n.lineno, n.col_offset)):
        first.setdefault(node.attr, node)
    return {name for name, node in first.items() if isinstance(node.ctx, ast.Load)}


def _attributes(callback: object, hook: Callable[..., Any]) -> Iterator[tuple[ast.Attribute, str]]:
    """Return the attributes in a hook and the methods that it calls, each with the name of
    ``self``.
    """
    for tree, own in _sources(callback, hook):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                yield node, own


def _sources(callback: object, hook: Callable[..., Any]) -> Iterator[tuple[ast.AST, str]]:
    """Return the source of a hook and of the methods that it calls, each with the name of
    ``self``.
    """
    # A method may choose its hook when it is built, so inspect the hook that it has.
    waiting = [hook]
    seen = set[str]()
    while waiting:
        tree, own = _parsed(waiting.pop())
        yield tree, own
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            called = getattr(type(callback), node.attr, None)
            if _name(node) == own and inspect.isfunction(called) and node.attr not in seen:
                seen.add(node.attr)
                waiting.append(called)


def _parsed(hook: Callable[..., Any]) -> tuple[ast.AST, str]:
    """Return a function's source as a tree, empty if there is none, and its name for ``self``."""
    return _tree(inspect.unwrap(getattr(hook, "__func__", hook)))


@lru_cache(1000)
def _tree(function: Any) -> tuple[ast.AST, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], []), ""
    names = getattr(function, "__code__").co_varnames  # noqa: B009  # any callable may stand here
    return tree, names[0] if names else ""
