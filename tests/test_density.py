"""Code that breathes: how much a line, a statement and a function may hold.

``python -m tests.test_density [FOLDER or FILE …]`` prints a table of what is counted.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST_LINE = 100
LONGEST_FUNCTION = 60
LONGEST_FILE = 600

# Code keeps every rule, tests and benchmarks the length of a line and of a file.
CODE = ("fl_lightning", "callbacks", "datamodules", "examples")
TRIALS = ("tests", "benchmarks")

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def files_of(folders: tuple[str, ...]) -> list[Path]:
    """Every Python file below `folders`; links to folders are not followed."""
    found: list[Path] = []
    for folder in folders:
        found.extend(sorted((ROOT / folder).rglob("*.py")))
    linked = [ROOT / "fl_lightning" / name for name in ("callbacks", "datamodules", "configs")]
    return [path for path in found if not any(link in path.parents for link in linked)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_tuple_assignment(node: ast.AST) -> bool:
    """Tells whether `node` is ``a, b = x, y``; unpacking a call is none."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
    )


def is_nested(node: ast.AST) -> bool:
    """Tells whether the comprehension `node` has another inside it, or two ``for``."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    inner = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS)]
    return len(inner) > 1 or len(node.generators) > 1


def is_chained(node: ast.AST) -> bool:
    """Tells whether the ternary `node` has another one as one of its three parts."""
    return isinstance(node, ast.IfExp) and any(
        isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse)
    )


def length_of(function: ast.AST) -> int:
    """The lines of a function from ``def`` to its last one; 0 for other nodes."""
    if not isinstance(function, FUNCTIONS) or function.end_lineno is None:
        return 0
    return function.end_lineno - function.lineno + 1


def breaches_of_lines(text: str) -> Iterator[str]:
    lines = text.splitlines()
    if len(lines) > LONGEST_FILE:
        yield f"{len(lines)}: the file has more than {LONGEST_FILE} lines"
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST_LINE:
            yield f"{number}: {len(line)} characters"


def breaches_of_statements(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if is_tuple_assignment(node) and len(node.value.elts) > 2:  # type: ignore[attr-defined]
            yield f"{node.lineno}: assigns a tuple of more than two values"
        if is_nested(node):
            yield f"{node.lineno}: a comprehension within a comprehension, or two `for`"
        if is_chained(node):
            yield f"{node.lineno}: a ternary within a ternary"
        if length_of(node) > LONGEST_FUNCTION:
            yield f"{node.lineno}: `{node.name}` has {length_of(node)} lines"


@pytest.mark.parametrize(
    "text, rules",
    [
        ("a, b, c = 1, 2, 3", 1),
        ("a, b = 1, 2", 0),
        ("a, b, c = point()", 0),
        ("rows = [[x for x in row] for row in table]", 1),
        ("flat = [x for row in table for x in row]", 1),
        ("size = 1 if a else 2 if b else 3", 1),
        ("size = 1 if a else 2", 0),
        ("def f():\n" + "    x = 1\n" * LONGEST_FUNCTION, 1),
        ("def f():\n" + "    x = 1\n" * (LONGEST_FUNCTION - 1), 0),
    ],
)
def test_rules_tell_dense_code_from_plain(text: str, rules: int) -> None:
    assert len(list(breaches_of_statements(text))) == rules


@pytest.mark.parametrize("path", files_of(CODE), ids=name_of)
def test_code_breathes(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not [*breaches_of_lines(text), *breaches_of_statements(text)]


@pytest.mark.parametrize("path", files_of(TRIALS), ids=name_of)
def test_tests_and_benchmarks_have_short_lines(path: Path) -> None:
    assert not list(breaches_of_lines(path.read_text("utf-8")))


def lines_of_docstrings(tree: ast.AST) -> set[int]:
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            numbers.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return numbers


def count(path: Path) -> dict[str, int]:
    """What one file adds to the table: lines, comments, and the constructs that the rules limit."""
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    comments: set[int] = set()
    alone: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
            if not token.line[: token.start[1]].strip():
                alone.add(token.start[0])
        elif token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
            tokens += 1
    lines = text.splitlines()
    written = {number for number, line in enumerate(lines, start=1) if line.strip()} - alone
    nodes = list(ast.walk(tree))
    return {
        "lines": len(lines),
        "written": len(written),
        "code": len(written - lines_of_docstrings(tree)),
        "comments": len(comments),
        "long": sum(len(line) > LONGEST_LINE for line in lines),
        "tuples": sum(map(is_tuple_assignment, nodes)),
        "comprehensions": sum(isinstance(node, COMPREHENSIONS) for node in nodes),
        "nested": sum(map(is_nested, nodes)),
        "ternaries": sum(isinstance(node, ast.IfExp) for node in nodes),
        "chained": sum(map(is_chained, nodes)),
        "functions": sum(length_of(node) > LONGEST_FUNCTION for node in nodes),
        "tokens": tokens,
    }


def table(places: list[str]) -> Iterator[str]:
    """The table, a row a place (a folder, or a file) and one for all of them together."""
    heads = "lines tuples compr. (nested) ternaries (chained) comments long func>60 tokens"
    yield f"{'':32s} " + " ".join(f"{head:>9s}" for head in heads.split())
    whole: dict[str, int] = {}
    for place in places:
        paths = files_of((place,)) if (ROOT / place).is_dir() else [ROOT / place]
        sums: dict[str, int] = {}
        for path in paths:
            for key, number in count(path).items():
                sums[key] = sums.get(key, 0) + number
        for key, number in sums.items():
            whole[key] = whole.get(key, 0) + number
        yield row(place, sums)
    if len(places) > 1:
        yield row("all", whole)


def row(name: str, sums: dict[str, int]) -> str:
    """One row: constructs per 1,000 lines neither blank nor comment, comments per 100 of code."""
    thousand = max(sums["written"], 1) / 1000
    constructs = ("tuples", "comprehensions", "nested", "ternaries", "chained")
    figures = [f"{sums[key] / thousand:9.1f}" for key in constructs]
    comments = 100 * sums["comments"] / max(sums["code"], 1)
    figures = [f"{sums['lines']:9d}", *figures, f"{comments:9.1f}"]
    figures += [f"{sums[key]:9d}" for key in ("long", "functions", "tokens")]
    return f"{name:32s} " + " ".join(figures)


if __name__ == "__main__":
    print("\n".join(table(sys.argv[1:] or list(CODE))))
