"""Plant faults and see that the tests find them: `make faults`, or `python -m tests.faults.plant [NAME …]`.

First the faults that public implementations of these methods have (FAULTS); then every arithmetic line of callbacks/
is made wrong in one place at a time. The package is imported once; each fault lives in a forked child, which runs the
tests that use what was changed until one fails. Exit status 1: a fault of the list was not caught, fewer than 95 % of
the mutants were, or one survived without a reason in SURVIVORS.
"""

from __future__ import annotations

import ast
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning.callback import FederatedCallback
from tests.faults.faults_list import FAULTS, SURVIVORS, Fault
from tests.faults.mutants import Mutant, mutants

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
SHOWN = {"progress_bar.py", "run_card.py", "__init__.py"}  # what is drawn for a reader; no method's arithmetic
CHECKS = ["tests/callbacks", "tests/contracts"]
WORKERS, LIMIT = 2, 600  # children at once; seconds for one of them
FIRST, MOST = 8, 60  # tests run before all others, where most faults end; tests of one fault, of each of CHECKS
Uses = dict[str, tuple[set[str], float]]  # test -> (callback classes it makes, seconds)


class Recorder:
    """A pytest plugin: which callback classes each test makes, and the first test that fails."""

    def __init__(self) -> None:
        self.uses: Uses = {}
        self.failed = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        made: set[str] = set()
        plain = FederatedCallback.__new__

        def recording(cls: type, *args: object, **kwargs: object) -> Any:
            made.add(cls.__name__)
            return plain(cls)

        began, FederatedCallback.__new__ = time.perf_counter(), recording
        try:
            return (yield)
        finally:
            FederatedCallback.__new__ = plain
            self.uses[item.nodeid] = (made, time.perf_counter() - began)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} (collection)"


def run_tests(selected: list[str]) -> Recorder:
    recorder = Recorder()
    os.chdir(ROOT)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        status = pytest.main(
            [*selected, "-x", "-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception"], plugins=[recorder]
        )
    if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
        raise RuntimeError(f"pytest could not run {selected[:2]}: {status!r}")
    return recorder


def forget_tests() -> None:
    """Test modules hold on to what they imported: import them again."""
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(TESTS) and not name.startswith("__"):
            del sys.modules[name]


def in_children(jobs: Iterable[tuple[str, Callable[[], str]]]) -> Iterable[tuple[str, str]]:
    """Run each job in a forked child, a few at once; gives (name, what the job returned) in order of arrival."""
    running: dict[int, tuple[str, Path]] = {}
    with tempfile.TemporaryDirectory() as folder:
        waiting = iter(jobs)
        while True:
            while len(running) < WORKERS and (job := next(waiting, None)) is not None:
                answer = Path(folder) / f"{time.monotonic_ns()}"
                running[_fork(job[1], answer)] = (job[0], answer)
            if not running:
                return
            child, status = os.wait()
            name, answer = running.pop(child)
            yield name, answer.read_text("utf-8") if answer.exists() else f"the process died ({status})"


def _fork(job: Callable[[], str], answer: Path) -> int:
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            signal.signal(signal.SIGALRM, lambda *_: (answer.write_text("it does not end", "utf-8"), os._exit(1)))
            signal.alarm(LIMIT)
            text = job()
            signal.alarm(0)
            answer.write_text(text, "utf-8")
        finally:
            os._exit(0)
    return child


def plant(changed: dict[str, str]) -> None:
    """Execute changed sources ``{module: text}`` in the imported modules; everybody who imported from them sees it."""
    for name, source in changed.items():
        module = sys.modules[name]
        before = {k: v for k, v in vars(module).items() if getattr(v, "__module__", None) == name}
        exec(compile(source, str(module.__file__), "exec"), vars(module))
        for other in [m for n, m in sys.modules.items() if n.startswith("fl_lightning") and m is not module]:
            for key, value in list(vars(other).items()):
                if any(value is old for old in before.values()):
                    setattr(other, key, vars(module)[key])


def module_of(file: str) -> str:
    return "fl_lightning." + file.removeprefix("fl_lightning/").removesuffix(".py").removesuffix("/__init__").replace(
        "/", "."
    )


def usual_tests() -> Uses:
    """Every check once, without a fault; what each test uses."""

    def job(path: str) -> Callable[[], str]:
        def measured() -> str:
            recorder = run_tests([path])
            return repr((recorder.failed, recorder.uses))

        return measured

    uses: Uses = {}
    for _, text in in_children([(path, job(path)) for path in CHECKS]):
        failed, found = ast.literal_eval(text)
        if failed:
            raise SystemExit(f"without any fault, {failed} fails: mend that first")
        uses |= found
    # The cells of one method's row of contracts share a report, which the first of them makes.
    rows: dict[str, set[str]] = {}
    for test, (made, _) in uses.items():
        rows.setdefault(_row(test), set()).update(made)
    return {test: (rows[_row(test)], seconds) for test, (_, seconds) in uses.items()}


def _row(test: str) -> str:
    return test.rpartition("-")[0] if "keep_the_contracts" in test else test


def fitting(uses: Uses, classes: set[str]) -> list[str]:
    """Tests that make one of these classes, preferably those that make few others."""
    mine = [(test, len(made), seconds) for test, (made, seconds) in uses.items() if made & classes]
    mine = sorted(mine, key=lambda use: (use[1], use[2]))
    kinds = [[use for use in mine if (CHECKS[1] in use[0]) == contract][:MOST] for contract in (False, True)]
    return [test for test, _, _ in sorted((use for kind in kinds for use in kind), key=_when)]


def _when(use: tuple[str, int, float]) -> tuple[bool, bool, bool, float]:
    """The oracle's tests before others, then the contracts, then what takes long."""
    test, _, seconds = use
    return seconds > 3, CHECKS[1] in test, "oracle" not in test, seconds


def verdict(changed: dict[str, str], tests: list[str]) -> str:
    """The first test that fails with these sources, or nothing."""
    try:
        plant(changed)
    except Exception as error:
        return f"its import fails: {error}"
    return run_tests(tests[:FIRST]).failed or (run_tests(tests[FIRST:]).failed if tests[FIRST:] else "")


def planted(fault: Fault) -> dict[str, str]:
    changed: dict[str, str] = {}
    for file, old, new in fault.edits:
        source = changed.get(module_of(file)) or (ROOT / file).read_text("utf-8")
        if source.count(old) != 1:
            raise SystemExit(f"{fault.name}: {file} has {source.count(old)} times {old!r}; adapt the list of faults")
        changed[module_of(file)] = source.replace(old, new)
    return changed


def classes_in(file: str) -> set[str]:
    module = sys.modules[module_of(file)]
    return {k for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__}


def main(names: list[str]) -> int:
    for file in ["testing.py", *(f"callbacks/{path.name}" for path in (ROOT / "callbacks").glob("[a-z]*.py"))]:
        importlib.import_module(module_of(file))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    run_tests([f"{TESTS}/conftest.py"])  # pytest's own modules are imported once too
    forget_tests()
    began, uses = time.monotonic(), usual_tests()
    print(f"{len(uses)} checks pass without a fault ({time.monotonic() - began:.0f} s)\n\nfault → caught by")
    missed = []
    faults = [f for f in FAULTS if not names or any(n in f.name for n in names)]
    jobs = [(f.name, lambda f=f: verdict(planted(f), fitting(uses, set(f.classes)))) for f in faults]
    for name, caught in in_children(jobs):
        print(f"  {name} → {caught or 'NOT CAUGHT'}", flush=True)
        missed += [] if caught else [name]

    found: list[Mutant] = []
    for path in sorted((ROOT / "callbacks").glob("*.py")):
        if path.name not in SHOWN:
            found += mutants(f"callbacks/{path.name}", path.read_text("utf-8"))
    found = [m for m in found if not names or any(n in m.file for n in names)]
    jobs = [
        (str(k), lambda m=m: verdict({module_of(m.file): m.source}, fitting(uses, classes_in(m.file))))
        for k, m in enumerate(found)
    ]
    survivors = []
    for done, (k, caught) in enumerate(in_children(jobs), 1):
        survivors += [] if caught else [found[int(k)]]
        print(f"\r{done} of {len(found)} mutants, {len(survivors)} survive", end="", file=sys.stderr, flush=True)
    share = 1 - len(survivors) / max(len(found), 1)
    print(f"\nmutants of callbacks/: {len(found) - len(survivors)} of {len(found)} caught, {share:.1%}")
    for mutant in survivors:
        reason = SURVIVORS.get(mutant.key, "NO REASON KNOWN")
        print(f"  {mutant.file}: {mutant.what}\n    {mutant.line}\n    {reason}")
    print(f"\n{time.monotonic() - began:.0f} s")
    return int(bool(missed) or share < 0.95 or any(m.key not in SURVIVORS for m in survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
