"""Code that breathes, and imports that point one way: what ruff and mypy cannot check.

``python -m tests.lint`` prints each breach as ``file:line: what`` and fails if there is one; it is
a part of ``make check``. ``python -m tests.lint FOLDER or FILE …`` prints a table of what is
counted: lines, constructs, tokens.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fl_lightning"
LONGEST_LINE = 100
LONGEST_FUNCTION = 60


# Code keeps every rule, tests and benchmarks the length of a line.
CODE = ("fl_lightning", "callbacks", "datamodules", "examples")
TRIALS = ("tests", "benchmarks", "studies")

# From the ground up: a file may import what stands on an earlier line, and of its own package
# anything but a circle
# Three storeys: the core runs any method, parts are what a run is made of, the workbench is
# around runs.
CORE = """
errors
introspection
sampling
machine
schedules metrics storage topologies
record
optim learner
checks
virtual
round
callback
callback_list
aggregation
client
engines
systems
loop checkpoint
evaluation
run
module
"""
PARTS = """
configs
models datamodules callbacks
"""
WORKBENCH = """
lab
lab.contracts
testing
lab.cli
lab.report
lab.sweep lab.analysis
deploy
__main__ __init__
"""
LAYERS = CORE + PARTS + WORKBENCH
LEVEL = {name: level for level, line in enumerate(LAYERS.split("\n")) for name in line.split()}

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
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST_LINE:
            yield f"{number}: {len(line)} characters"


def breaches_of_statements(text: str) -> Iterator[str]:
    """What one file's statements hold too much of.

    >>> [*breaches_of_statements("a, b, c = 1, 2, 3")]
    ['1: assigns a tuple of more than two values']
    >>> [*breaches_of_statements("a, b = 1, 2")], [*breaches_of_statements("a, b, c = point()")]
    ([], [])
    >>> [*breaches_of_statements("flat = [x for row in table for x in row]")]
    ['1: a comprehension within a comprehension, or two `for`']
    >>> [*breaches_of_statements("size = 1 if a else 2 if b else 3")]
    ['1: a ternary within a ternary']
    >>> [*breaches_of_statements("def f():\\n" + "    x = 1\\n" * LONGEST_FUNCTION)]
    ['1: `f` has 61 lines']
    """
    for node in ast.walk(ast.parse(text)):
        if is_tuple_assignment(node) and len(node.value.elts) > 2:  # type: ignore[attr-defined]
            yield f"{node.lineno}: assigns a tuple of more than two values"
        if is_nested(node):
            yield f"{node.lineno}: a comprehension within a comprehension, or two `for`"
        if is_chained(node):
            yield f"{node.lineno}: a ternary within a ternary"
        if length_of(node) > LONGEST_FUNCTION:
            yield f"{node.lineno}: `{node.name}` has {length_of(node)} lines"


def breaches_of_arguments(text: str) -> Iterator[str]:
    """Arguments whose line below ``Args:`` has run together with the one before it.

    The command line shows these lines as its help.

    >>> held = "class C:\\n    '''C.\\n\\n    Args:\\n        a: x. b, c: y.\\n    '''\\n"
    >>> [*breaches_of_arguments(held + "    def __init__(self, a, b, c): pass")]
    ["1: `C` documents `b, c` on another argument's line"]
    """
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            continue
        documented = (ast.get_docstring(node) or "").partition("Args:\n")[2].partition("\n\n")[0]
        line = " ".join(documented.split())
        for names in re.findall(r"[.;…] (\w+(?:, \w+)*):(?= |$)", line):
            own = re.search(rf"^ {{4}}{names}:", documented, re.MULTILINE)
            if own is None and set(names.split(", ")) <= arguments_of(node):
                yield f"{node.lineno}: `{node.name}` documents `{names}` on another argument's line"


def arguments_of(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The names of a function's arguments, or of a class's, also where it is a dataclass."""
    if isinstance(node, FUNCTIONS):
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return {one.arg for one in given} - {"self", "cls"}
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            return arguments_of(child)
    return set()


def module_of(path: Path) -> str:
    """``fl_lightning/round/clients.py`` → ``round.clients``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


# links too
FOLDERS = [
    entry for entry in sorted(PACKAGE.iterdir()) if entry.is_dir() and entry.name != "__pycache__"
]
FILES = {
    module_of(path): path
    for path in [
        *PACKAGE.glob("*.py"),
        *(path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))),
    ]
}


def imported(path: Path) -> Iterator[str]:
    """Our modules that a file imports, wherever in it: at the top, in a function, for types."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("fl_lightning.")
                for alias in node.names
                if alias.name in _ours()
            )
        elif (
            isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fl_lightning"
        ):
            base = (node.module or "").removeprefix("fl_lightning").removeprefix(".")
            for alias in node.names:
                whole = f"{base}.{alias.name}".removeprefix(".")
                yield whole if whole in FILES else base or "__init__"


def _ours() -> set[str]:
    return {f"fl_lightning.{name}" for name in FILES}


@cache
def graph() -> dict[str, set[str]]:
    """Which of our modules each imports."""
    return {name: set(imported(path)) - {name} for name, path in FILES.items()}


def top(name: str) -> str:
    """The part of the package that a module belongs to; ``lab`` has several."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "lab" else 1])


def breaches_of_place() -> Iterator[str]:
    for name in sorted({top(name) for name in FILES} ^ set(LEVEL)):
        yield f"{name}: stands in the order of imports or on the disk, not in both"


def breaches_of_direction() -> Iterator[str]:
    """Imports that point up, wherever in a file: at the top, in functions, for types."""
    core = set(CORE.split())
    parts = set(PARTS.split())
    workbench = set(WORKBENCH.split())
    for name, others in graph().items():
        above = workbench | parts if top(name) in core else workbench
        for other in sorted(others):
            if top(other) == top(name):
                continue
            if LEVEL.get(top(other), 0) > LEVEL.get(top(name), 0):
                yield f"{name}: imports {other}, which stands above it"
            elif top(name) not in workbench and top(other) in above:
                yield f"{name}: imports {other}, which is of a higher storey"


def breaches_of_circles() -> Iterator[str]:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Iterator[str]:
        if name in path:
            yield " → ".join((*path[path.index(name) :], name)) + ": a circle of imports"
        elif name not in done:
            for other in sorted(graph().get(name, ())):
                yield from visit(other, (*path, name))
            done.add(name)

    for name in graph():
        # One circle shows in many ways, of which the first is enough.
        yield from islice(visit(name, ()), 1)
    packages: dict[str, set[str]] = {}
    for name, others in graph().items():
        packages.setdefault(top(name), set()).update(top(other) for other in others)
    for name, others in packages.items():
        for other in sorted(others - {name}):
            if name in packages.get(other, ()):
                yield f"{name}: a circle of packages with {other}"


def breaches_of_methods() -> Iterator[str]:
    """A packaged method imports only ``fl_lightning.callback``, and its folder's base class.

    A method without a server is given a graph, of ``fl_lightning.topologies``.

    A logger that measures after a round may import what measuring needs.
    """
    shown = ("progress_bar", "run_card", "__init__")  # what is drawn for a reader
    measures = {
        "introspection.accepted",
        "errors",
        "metrics",
        "machine.processes",
        "sampling",
        "round.quantization",
    }
    measures.add("storage.atomic_files")
    decentralised = {"topologies", "callbacks.decentralised.without_server"}
    for name, others in graph().items():
        if name.startswith("callbacks.decentralised."):
            others = others - decentralised
        if not name.startswith("callbacks.") or name.split(".")[-1] in shown:
            continue
        own = {other for other in others if not other.startswith("evaluation.")}
        for other in sorted(own - ({"callback"} if own == others else measures)):
            yield f"{name}: imports {other}; a method imports only fl_lightning.callback"


def breaches_of_names() -> Iterator[str]:
    """Two files of the source with one name, or two classes: a reader would ask which is meant."""
    files: dict[str, str] = {}
    classes: dict[str, str] = {}
    for path in files_of(CODE[:3]):
        if path.stem != "__init__" and files.setdefault(path.stem, name_of(path)) != name_of(path):
            yield f"{name_of(path)}: has the name of {files[path.stem]}"
        for node in ast.parse(path.read_text("utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            place = f"{name_of(path)}:{node.lineno}"
            if classes.setdefault(node.name, place) != place:
                yield f"{place}: `{node.name}` is also a class in {classes[node.name]}"


def breaches() -> Iterator[str]:
    """Every breach of a rule in this checkout."""
    for path in files_of(CODE + TRIALS):
        text = path.read_text("utf-8")
        found = list(breaches_of_lines(text))
        if path.relative_to(ROOT).parts[0] in CODE:
            found += breaches_of_statements(text)
            found += breaches_of_arguments(text)
        for breach in found:
            yield f"{name_of(path)}:{breach}"
    yield from breaches_of_place()
    yield from breaches_of_direction()
    yield from breaches_of_circles()
    yield from breaches_of_methods()
    yield from breaches_of_names()


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


def main(places: list[str]) -> int:
    if places:
        print("\n".join(table(places)))
        return 0
    found = list(breaches())
    print("\n".join(found) if found else "code breathes, and imports point one way")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
