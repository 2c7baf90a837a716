"""Every arithmetic line of a source file, made wrong in one place at a time: sign, factor, operand, or left out."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
SETUP = ("__init__", "on_fit_start")


@dataclass(frozen=True)
class Mutant:
    """One wrong version of a file; ``line`` is the right line's text."""

    file: str
    line: str
    what: str
    source: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.line, self.what


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of a file, in the order of its lines; texts of errors and notes are left alone."""
    tree, lines, found = ast.parse(source), source.splitlines(), []
    nodes: list[Any] = list(ast.walk(tree))
    skipped = {id(n) for node in nodes if isinstance(node, ast.Raise | ast.JoinedStr) for n in ast.walk(node)}
    function = {id(n): node.name for node in nodes if isinstance(node, ast.FunctionDef) for n in ast.walk(node)}
    for number, node in enumerate(nodes):
        if id(node) in skipped or id(node) not in function:
            continue
        for what, change in _changes(node, function[id(node)]):
            altered: ast.AST = copy.deepcopy(tree)
            target = list(ast.walk(altered))[number]
            replacement = change(target)
            if replacement is not target:
                altered = _Replace(target, replacement).visit(altered)
            text = ast.unparse(ast.fix_missing_locations(altered))
            line = lines[node.lineno - 1]
            place = node.col_offset - len(line) + len(line.lstrip())
            found.append((node.lineno, Mutant(file, line.strip(), f"{what} (column {place})", text)))
    return [mutant for _, mutant in sorted(found, key=lambda pair: pair[0])]


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
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SWAPPED:
        yield f"{SWAPPED[node.func.attr]} instead: {ast.unparse(node)}", _swap_method
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE:
        yield f"sign: {ast.unparse(node)}", _opposite_method
        yield f"left out: {ast.unparse(node)}", lambda n: n.func.value
        yield f"factor: {ast.unparse(node)}", _double_argument
    elif _stores(node) and function not in SETUP:
        yield f"left out: {ast.unparse(node)}", lambda n: ast.Pass()
        yield f"factor: {ast.unparse(node)}", _double_value


def _stores(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript | ast.Attribute)


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


def _set_comparison(node: Any) -> Any:
    node.ops[0] = COMPARED[type(node.ops[0])]()
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
