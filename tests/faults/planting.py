"""Faults in forked children: tests are imported once.

A child changes the code of functions, and runs some of them. What a fault changes outside functions
(an attribute of a class) was used while the tests were imported: such a fault is planted in a copy
of the repository, whose tests a process of their own imports.
"""

from __future__ import annotations

import ast
import builtins
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import astuple, dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings

ROOT = Path(__file__).parents[2]
WORKERS = int(os.environ.get("WORKERS", 2))  # children at once
TOGETHER = 16  # tests that a child runs to see what they call
# seconds of the processor, and times what a test takes here and now, until its fault is given up
SLACK = 20, 4
WAITING = 90  # seconds of the clock, in place of 20
# bytes that a fault may take, above what is there: a test of its child fails by a MemoryError
MEMORY = 3 << 30
# what a fault may do in place of failing a test
ENDLESS, DIED = "it does not end: ", "the process died"
# tests run before all others, where most faults end; seconds of tests for one fault
FIRST, LONGEST = 6, 90.0
Function = tuple[str, int]  # file, its first line
CALLED: set[Function] = set()
FORKED: Function = ("a child process, and what that calls is not seen", 0)


@dataclass
class Use:
    """What a test calls of the marked functions, and its seconds of the processor and of the
    clock."""

    called: set[Function]
    seconds: float
    waited: float


Uses = dict[str, Use]  # by test


class Recorder:
    """A pytest plugin: which of the marked functions each test calls, and the first test that
    fails.

    ``known``: how long tests take without a fault; one that takes far longer ends the process.
    """

    def __init__(self, known: Uses | None = None) -> None:
        self.known = known or {}
        self.uses: Uses = {}
        self.failed: list[str] = []
        self.collected: list[str] = []
        self.whole: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = [item.nodeid for item in session.items]
        self.whole = {item.nodeid for item in session.items if item.get_closest_marker("whole")}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        if item.nodeid in self.known:
            usual = self.known[item.nodeid]
            signal.setitimer(signal.ITIMER_PROF, SLACK[0] + SLACK[1] * usual.seconds)
            signal.alarm(int(WAITING + SLACK[1] * usual.waited))
        began, waited = sum(os.times()[:4]), time.perf_counter()
        CALLED.clear()
        try:
            return (yield)
        finally:
            seconds = sum(os.times()[:4]) - began
            self.uses[item.nodeid] = Use(set(CALLED), seconds, time.perf_counter() - waited)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid} (collection)")


class Marked(ast.NodeTransformer):
    """Each function of a file, those within functions aside, says first that it was called."""

    def __init__(self, file: str) -> None:
        self.file = file

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        said = ast.parse(f"__called__.add(({self.file!r}, {line}))").body[0]
        for part in ast.walk(said):
            ast.copy_location(part, node.body[0])
        documented = isinstance(node.body[0], ast.Expr) and isinstance(
            node.body[0].value, ast.Constant
        )
        node.body.insert(1 if documented else 0, said)
        return node


def path_of(filename: str) -> str:
    """A source file of ours, relative to the repository and without links; "" for others."""
    if "fl_lightning" not in filename:
        return ""
    path = Path(filename).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


def run_tests(selected: list[str], *options: str, known: Uses | None = None) -> Recorder:
    recorder = Recorder(known)
    os.chdir(ROOT)
    quiet = [
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:unraisableexception",
        "-p",
        "no:threadexception",
    ]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        status = pytest.main([*selected, *quiet, *options], plugins=[recorder])
    # of which pytest reports none
    if status == pytest.ExitCode.INTERRUPTED and recorder.uses and not recorder.failed:
        recorder.failed.append(list(recorder.uses)[-1])
    if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
        raise RuntimeError(f"pytest could not run {selected[:2]}: {status!r}")
    return recorder


def prepare(checks: list[str]) -> tuple[Recorder, dict[Function, list[FunctionType]]]:
    """Import all that the checks need, here and once.

    Gives the recorder that has collected their tests, and the package's functions.
    """
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plain = [Phase.explicit, Phase.generate]  # a failure is a failure: no search for the smallest
    settings.register_profile(
        "faults", database=None, derandomize=True, phases=plain, deadline=None
    )
    settings.load_profile("faults")
    recorder = run_tests(checks, "--collect-only")
    if recorder.failed:
        raise SystemExit(f"{recorder.failed[0]} cannot be imported")
    functions: dict[Function, list[FunctionType]] = {}
    # Collecting tests froze what they import, which the collector then does not list.
    gc.unfreeze()
    for found in gc.get_objects():
        if isinstance(found, FunctionType) and (file := path_of(found.__code__.co_filename)):
            functions.setdefault((file, found.__code__.co_firstlineno), []).append(found)
    os.register_at_fork(after_in_parent=lambda: CALLED.add(FORKED))
    gc.freeze()  # children share this memory, which their collections would copy
    return recorder, functions


def outer_codes(tree: ast.Module | str) -> dict[int, CodeType]:
    """The code of functions of a module and of its classes, by first line."""
    found: dict[int, CodeType] = {}

    def visit(code: CodeType) -> None:
        for inner in code.co_consts:
            # a function's locals are fast: not a class's body
            if isinstance(inner, CodeType) and inner.co_flags & 2:
                found[inner.co_firstlineno] = inner
            elif isinstance(inner, CodeType):
                visit(inner)

    visit(compile(tree, "source", "exec"))
    return found


def plant(
    functions: dict[Function, list[FunctionType]], file: str, wrong: ast.Module | str
) -> None:
    """Give the functions of a file their wrong code, wherever they are held."""
    right = outer_codes((ROOT / file).read_text("utf-8"))
    changed = False
    for line, code in outer_codes(wrong).items():
        if code != right.get(line):
            for function in functions.get((file, line), []):
                here = function.__code__
                function.__code__ = code.replace(co_filename=here.co_filename)
                changed = True
    if not changed:
        raise LookupError(f"{file}: what the fault changes was not imported by any check")


def outside_functions(source: str) -> str:
    """A source without what stands in its functions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = []
    return ast.dump(tree)


def first_failure_in_a_copy(sources: dict[str, str], tests: list[str]) -> str:
    """The first of these tests that fails in a copy of the repository with these sources."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, symlinks=True, ignore=_not_code, dirs_exist_ok=True)
        for file, wrong in sources.items():
            Path(folder, file).write_text(wrong, "utf-8")
        program = (
            "import sys; from tests.faults.planting import run_tests; "
            "print(*run_tests(sys.argv[1:], '-x').failed)"
        )
        said = subprocess.run(
            [sys.executable, "-c", program, *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    return said.strip()


def _not_code(folder: str, names: list[str]) -> list[str]:
    """What a copy of the repository leaves out: hidden files, caches, and what runs have left."""
    left = {"build", "data", "dist", "runs"} if Path(folder) == ROOT else set[str]()
    return [n for n in names if n.startswith(".") or n == "__pycache__" or n in left]


def in_children(jobs: Iterable[tuple[str, Callable[[], str]]]) -> Iterable[tuple[str, str]]:
    """Run each job in a forked child, a few at once.

    Gives (name, what the job returned) in order of arrival.
    """
    running: dict[int, tuple[str, Path]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        waiting = iter(jobs)
        while True:
            while len(running) < WORKERS and (job := next(waiting, None)) is not None:
                answer = Path(folder) / f"{time.monotonic_ns()}"
                running[_fork(job[1], answer)] = (job[0], answer)
            if not running:
                return
            child, status = os.wait()
            name, answer = running.pop(child)
            # which no fault does: memory was short, or somebody was impatient
            killed = status == signal.SIGKILL
            unsaid = "ERROR the process was killed" if killed else f"{DIED} ({status})"
            yield name, answer.read_text("utf-8") if answer.exists() else unsaid


def _fork(job: Callable[[], str], answer: Path) -> int:
    child = os.fork()
    if not child:
        try:
            os.setpgid(0, 0)
            torch.set_num_threads(1)
            there = (
                int(Path("/proc/self/statm").read_text("utf-8").split()[0]) * resource.getpagesize()
            )
            resource.setrlimit(resource.RLIMIT_AS, (there + MEMORY, resource.RLIM_INFINITY))
            for timer in (signal.SIGALRM, signal.SIGPROF):
                signal.signal(timer, lambda *_: _end(answer))
            text = job()
            answer.write_text(text, "utf-8")
        except BaseException as error:
            answer.write_text(f"ERROR {type(error).__name__}: {error}", "utf-8")
        finally:
            os._exit(0)
    return child


def _end(answer: Path) -> None:
    """Write down which test does not end, and end the child with all that it has started."""
    answer.write_text(
        ENDLESS + os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0], "utf-8"
    )
    os.killpg(0, signal.SIGKILL)


def measured(
    functions: dict[Function, list[FunctionType]], files: Iterable[str], tests: Iterable[str]
) -> Uses:
    """Each test once, without a fault: what it calls of these files, and how long it takes."""
    vars(builtins)["__called__"] = CALLED
    marked = {f: Marked(f).visit(ast.parse((ROOT / f).read_text("utf-8"))) for f in files}

    def job(some: list[str]) -> Callable[[], str]:
        def run() -> str:
            for file, tree in marked.items():
                plant(functions, file, tree)
            recorder = run_tests(some)
            return repr(
                (recorder.failed, {test: astuple(use) for test, use in recorder.uses.items()})
            )

        return run

    uses: Uses = {}
    for first, text in in_children([(some[0], job(some)) for some in _groups(tests)]):
        if not text.startswith("("):
            raise SystemExit(f"without any fault, {first} and those after it: {text}")
        failed, found = ast.literal_eval(text)
        uses |= {test: Use(*use) for test, use in found.items() if test not in failed}
        for test in failed:
            print(f"without any fault, {test} fails: left out", flush=True)
    return uses


def _groups(tests: Iterable[str]) -> list[list[str]]:
    """Some tests of one file each."""
    groups: list[list[str]] = []
    for test in tests:
        last = groups[-1][-1] if groups else ""
        file = test.partition("::")[0]
        if file != last.partition("::")[0] or len(groups[-1]) >= TOGETHER:
            groups.append([])
        groups[-1].append(test)
    return groups


def fitting(
    uses: Uses, checks: list[str], called: set[Function], caught: Counter[str]
) -> list[str]:
    """The tests of these checks that call one of these functions, as many as end in time.

    First those that caught most like it, and the quickest; last, those that start processes, which
    may call them too. Without a function, all tests of these checks.
    """
    mine = [
        (not use.called & called, use.seconds / (1 + caught[test]), test)
        for test, use in uses.items()
        if any(within(test, check) for check in checks)
        and (use.called & called or FORKED in use.called or not called)
    ]
    taken, total = list[str](), 0.0
    for _, _, test in sorted(mine):
        total += uses[test].seconds
        if total > LONGEST and len(taken) >= FIRST:
            break
        taken.append(test)
    return taken


def within(test: str, check: str) -> bool:
    return test.startswith((check + "/", check + "::"))


def first_failure(tests: list[str], uses: Uses) -> str:
    for some in (tests[:FIRST], tests[FIRST:]):
        if some and (failed := run_tests(some, "-x", known=uses).failed):
            return failed[0]
    return ""
