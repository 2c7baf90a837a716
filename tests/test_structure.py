"""Imports point one way, with no circle, not even for types.

Each file can be read in one sitting.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fl_lightning"

# from the ground up: a file may import what stands on an earlier line, and of its own package
# anything but a circle
# Three storeys: the core runs any method, parts are what a run is made of, the workbench is
# around runs.
CORE = """
errors lightning given
machine sampling schedules metrics storage
optim learner
checks
virtual
round
callback
methods
engines aggregation
systems
loop checkpoint
evaluation
description
run
module
"""
PARTS = """
configs record
models datamodules callbacks
contracts
testing
"""
WORKBENCH = """
cli
check_command
report
sweep analysis
deploy
__main__ __init__
"""
LAYERS = CORE + PARTS + WORKBENCH
LEVEL = {name: level for level, line in enumerate(LAYERS.split("\n")) for name in line.split()}


def name_of(path: Path) -> str:
    """``fl_lightning/round/clients.py`` → ``round.clients``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


# links too
FOLDERS = [
    entry for entry in sorted(PACKAGE.iterdir()) if entry.is_dir() and entry.name != "__pycache__"
]
FILES = {
    name_of(path): path
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
    """Which of our modules each imports; read where a test asks, not wherever tests are listed."""
    return {name: set(imported(path)) - {name} for name, path in FILES.items()}


def top(name: str) -> str:
    return name.split(".")[0]


def test_every_file_has_its_place() -> None:
    assert {top(name) for name in FILES} == set(LEVEL)


def test_imports_point_down() -> None:
    upwards = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if top(other) != top(name) and LEVEL[top(other)] > LEVEL[top(name)]
    ]
    assert not upwards


def test_the_core_stands_without_parts_and_workbench_and_parts_without_the_workbench() -> None:
    """Nowhere in a file: not in functions, and not for types."""
    upwards = []
    for name, others in graph().items():
        above = set(WORKBENCH.split())
        if top(name) in CORE.split():
            above |= set(PARTS.split())
        if top(name) not in WORKBENCH.split():
            upwards += [f"{name} imports {other}" for other in others if top(other) in above]
    assert not upwards


def test_there_is_no_circle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in sorted(graph().get(name, ())):
                visit(other, (*path, name))
            done.add(name)

    for name in graph():
        visit(name, ())
    packages = {
        top(name): {top(o) for n in graph() if top(n) == top(name) for o in graph()[n]}
        - {top(name)}
        for name in graph()
    }
    for name in packages:
        assert not [other for other in packages[name] if name in packages.get(other, ())], name


def test_packaged_methods_import_the_callback_alone() -> None:
    shown = ("progress_bar", "run_card", "__init__")  # what is drawn for a reader
    # after a round
    measures = {
        "checks",
        "errors",
        "metrics",
        "machine.processes",
        "sampling",
        "round.sums",
        "storage.files",
    }
    for name, others in graph().items():
        if name.startswith("callbacks.") and name.split(".")[-1] not in shown:
            own = {other for other in others if not other.startswith("evaluation.")}
            assert own <= ({"callback"} if own == others else measures), name


def test_the_fast_ways_have_one_door() -> None:
    within = "engines.fast"
    entering = {
        name
        for name, others in graph().items()
        if not name.startswith(within) and any(other.startswith(within) for other in others)
    }
    assert entering == {"engines.door"}
