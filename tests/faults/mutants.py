"""A source file made wrong in one place at a time.

A method's arithmetic, thoroughly: sign, factor, operand, or left out. The core's decisions, once
each: a sign, a boundary, a condition turned, a statement left out, two arguments swapped.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
ARITHMETIC = (*SIGNS, ast.Pow, ast.FloorDiv, ast.MatMult, ast.Mod)
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Gt: ast.Lt,
    ast.Lt: ast.Gt,
    ast.GtE: ast.Lt,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
SWAPPED = {"mean": "sum", "sum": "mean", "weighted": "sum"}
IN_PLACE = {"add_": "sub_", "sub_": "add_", "mul_": "div_", "div_": "mul_"}
BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
}
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **COMPARED,
    ast.Gt: ast.LtE,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPPOSITE = {
    "ceil": "floor",
    "floor": "ceil",
    "max": "min",
    "min": "max",
    "maximum": "minimum",
    "any": "all",
    "all": "any",
}
EITHER_WAY = ("max", "min", "maximum", "minimum", "equal", "promote_types")  # of two arguments
SETUP = ("__init__", "on_fit_start")


@dataclass(frozen=True)
class Mutant:
    """One wrong version of a file; ``line`` is the right line's text, ``number`` where it is."""

    file: str
    line: str
    what: str
    number: int
    wrong: Callable[[], ast.Module] = field(compare=False)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.line, self.what


def mutants(file: str, source: str, core: bool = False) -> list[Mutant]:
    """All mutants of a file, in the order of its lines.

    Texts of errors and notes are left alone.
    """
    tree, lines, found = ast.parse(source), source.splitlines(), []
    nodes: list[Any] = list(ast.walk(tree))
    skipped = {id(n) for node in nodes for root in _not_run(node) for n in ast.walk(root)}
    function = {
        id(n): node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        for n in ast.walk(node)
    }
    changes = _changes_of_core if core else _changes
    for number, node in enumerate(nodes):
        if id(node) in skipped or id(node) not in function:
            continue
        for what, change in changes(node, function[id(node)]):
            line = lines[node.lineno - 1]
            place = node.col_offset - len(line) + len(line.lstrip())
            wrong = partial(_altered, tree, number, change)
            found.append(Mutant(file, line.strip(), f"{what} (column {place})", node.lineno, wrong))
    return sorted(found, key=lambda mutant: mutant.number)


def _altered(tree: ast.Module, number: int, change: Callable[[Any], ast.AST]) -> ast.Module:
    altered: Any = copy.deepcopy(tree)
    target = list(ast.walk(altered))[number]
    replacement = change(target)
    if replacement is not target:
        ast.copy_location(replacement, target)
        altered = _Replace(target, replacement).visit(altered)
    whole: ast.Module = ast.fix_missing_locations(altered)
    return whole


def _not_run(node: ast.AST) -> list[ast.AST]:
    """What of a node is text for people or for the type checker."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
        return [node]
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "cast")
    ):
        return [node]
    given = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    return [part for part in given if part is not None]


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, replacement: ast.AST) -> None:
        self.target, self.replacement = target, replacement

    def visit(self, node: ast.AST) -> ast.AST:
        return self.replacement if node is self.target else self.generic_visit(node)


def _changes(node: ast.AST, function: str) -> Iterator[tuple[str, Callable[[Any], ast.AST]]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC) and not _text(node):
        shown = ast.unparse(node)
        if type(node.op) in SIGNS:
            yield f"sign: {shown}", _set_op
        yield f"left operand alone: {shown}", lambda n: n.left
        yield f"right operand alone: {shown}", lambda n: n.right
        if isinstance(node.op, ast.Add | ast.Sub):
            yield f"factor: twice the right of {shown}", _double_right
    elif isinstance(node, ast.AugAssign) and not _text(node):
        shown = ast.unparse(node)
        if type(node.op) in SIGNS:
            yield f"sign: {shown}", _set_op
        yield f"factor: {shown}", _double_value
        yield f"left out: {shown}", lambda n: ast.Pass()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield f"sign: {ast.unparse(node)}", lambda n: n.operand
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield f"comparison: {ast.unparse(node)}", _set_comparison
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in SWAPPED
    ):
        yield f"{SWAPPED[node.func.attr]} instead: {ast.unparse(node)}", _swap_method
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in IN_PLACE
    ):
        yield f"sign: {ast.unparse(node)}", _opposite_method
        yield f"left out: {ast.unparse(node)}", lambda n: n.func.value
        yield f"factor: {ast.unparse(node)}", _double_argument
    elif _stores(node) and function not in SETUP:
        yield f"left out: {ast.unparse(node)}", lambda n: ast.Pass()
        yield f"factor: {ast.unparse(node)}", _double_value


def _changes_of_core(
    node: ast.AST, function: str
) -> Iterator[tuple[str, Callable[[Any], ast.AST]]]:
    """As :func:`_changes`, one or two of each place, and of decisions and statements rather than of
    factors."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and not _text(node):
        shown = ast.unparse(node)
        if type(node.op) in SIGNS:
            yield f"sign: {shown}", _set_op
        elif isinstance(node, ast.BinOp):
            yield f"left operand alone: {shown}", lambda n: n.left
        else:
            yield f"left out: {shown}", lambda n: ast.Pass()
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd):
        yield f"without {type(node.op).__name__}: {ast.unparse(node)}", lambda n: n.operand
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
        yield f"turned: {ast.unparse(node)}", lambda n: _set_comparison(n, TURNED)
        if type(node.ops[0]) in BOUNDARY:
            yield f"boundary: {ast.unparse(node)}", lambda n: _set_comparison(n, BOUNDARY)
    elif isinstance(node, ast.BoolOp):
        yield f"and ↔ or: {ast.unparse(node)}", _other_junction
    elif isinstance(node, ast.If | ast.IfExp) and isinstance(
        node.test, ast.Name | ast.Attribute | ast.Call
    ):
        yield f"condition turned: {ast.unparse(node.test)}", _turn_condition
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield f"left out: {ast.unparse(node)}", lambda n: ast.Pass()
    elif isinstance(node, ast.Call):
        yield from _changes_of_call(node)
    elif _stores(node) and function not in SETUP:
        yield f"left out: {ast.unparse(node)}", lambda n: ast.Pass()


def _changes_of_call(node: ast.Call) -> Iterator[tuple[str, Callable[[Any], ast.AST]]]:
    shown = ast.unparse(node)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in OPPOSITE:
        yield f"{OPPOSITE[name]} instead: {shown}", lambda n: _rename(n, OPPOSITE)
    elif isinstance(node.func, ast.Attribute) and name in SWAPPED:
        yield f"{SWAPPED[name]} instead: {shown}", _swap_method
    elif isinstance(node.func, ast.Attribute) and name in IN_PLACE:
        yield f"sign: {shown}", _opposite_method
    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    if (
        len(node.args) > 1
        and not starred
        and name not in EITHER_WAY
        and ast.dump(node.args[-1]) != ast.dump(node.args[-2])
    ):
        yield f"last two arguments swapped: {shown}", _swap_arguments


def _other_junction(node: Any) -> Any:
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def _turn_condition(node: Any) -> Any:
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node


def _swap_arguments(node: Any) -> Any:
    node.args[-2:] = reversed(node.args[-2:])
    return node


def _rename(node: Any, names: dict[str, str]) -> Any:
    if isinstance(node.func, ast.Attribute):
        node.func.attr = names[node.func.attr]
    else:
        node.func.id = names[node.func.id]
    return node


def _stores(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(
        node.targets[0], ast.Subscript | ast.Attribute
    )


def _text(node: ast.BinOp | ast.AugAssign) -> bool:
    """Whether this joins strings or lists."""
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
    return any(
        isinstance(n, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple)
        or (isinstance(n, ast.Constant) and isinstance(n.value, str))
        for part in parts
        for n in ast.walk(part)
    )


def _set_op(node: Any) -> Any:
    node.op = SIGNS[type(node.op)]()
    return node


def _twice(value: ast.expr) -> ast.expr:
    return ast.BinOp(ast.Constant(2), ast.Mult(), value)


def _double_right(node: Any) -> Any:
    node.right = _twice(node.right)
    return node


def _double_value(node: Any) -> Any:
    node.value = _twice(node.value)
    return node


def _set_comparison(node: Any, to: dict[type[ast.cmpop], type[ast.cmpop]] = COMPARED) -> Any:
    node.ops[0] = to[type(node.ops[0])]()
    return node


def _opposite_method(node: Any) -> Any:
    node.func.attr = IN_PLACE[node.func.attr]
    return node


def _double_argument(node: Any) -> Any:
    node.args[0] = _twice(node.args[0])
    return node


def _swap_method(node: Any) -> Any:
    node.func.attr = SWAPPED[node.func.attr]
    return node
