"""What each family of tests costs: `PYTEST_ADDOPTS="-p tests.costs" make test`, or `make test-all`.

Processor seconds of the process that runs a test, and of those it has started and waited for. What
`cli` and `python` run is forked from another process (tests/conftest.py), and is not in them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest

# The beginning of a test's file; of two, the longer one holds. Else it is the folder.
FAMILIES = {
    "fl_lightning": "docstrings",
    "tests/callbacks": "methods",
    "tests/callbacks/test_compositions": "compositions",
    "tests/callbacks/test_docs": "pages and examples",
    "tests/callbacks/test_oracle": "oracle",
    "tests/analysis": "report",
    "tests/benchmarks": "papers' replays",
    "tests/cli": "command line",
    "tests/checks": "run and learner",
    "tests/client": "engines",
    "tests/deploy": "sites",
    "tests/machine": "processes",
    "tests/oracles": "oracle",
    "tests/record": "run and learner",
    "tests/sweep": "command line",
    "tests/test_": "run and learner",
    "tests/test_examples": "pages and examples",
    "tests/test_notebook": "pages and examples",
    "tests/test_pages": "pages and examples",
    "tests/test_packaging": "packaging and release",
    "tests/test_release": "packaging and release",
    "tests/test_site": "pages and examples",
    "tests/learner": "run and learner",
}
BEGAN, SPENT = pytest.StashKey[float](), "processor seconds"


def family(test: str) -> str:
    """The family of a test by its id.

    >>> [family(f"tests/{name}.py::test_x") for name in ("test_loop", "storage/test_rows")]
    ['run and learner', 'storage']
    """
    beginnings = [place for place in FAMILIES if test.startswith(place)]
    if beginnings:
        return FAMILIES[max(beginnings, key=len)]
    folder = test.partition("::")[0].split("/")[1:-1]
    return folder[0] if folder else "the tests' own"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGAN] = sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append((SPENT, sum(os.times()[:4]) - item.stash[BEGAN]))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    tests: dict[str, list[float]] = defaultdict(list)
    for reports in terminalreporter.stats.values():
        for report in reports:
            spent = dict(getattr(report, "user_properties", [])).get(SPENT)
            if spent is not None:
                tests[family(report.nodeid)].append(spent)
    together = sum(map(sum, tests.values()))
    terminalreporter.write_line("| family | tests | processor seconds | share |\n|---|---|---|---|")
    for name, spent in sorted(tests.items(), key=lambda row: -sum(row[1])):
        line = f"| {name} | {len(spent)} | {sum(spent):.0f} | {sum(spent) / together:.0%} |"
        terminalreporter.write_line(line)
    count = sum(map(len, tests.values()))
    terminalreporter.write_line(f"| together | {count} | {together:.0f} | |")
