"""The runner of faults calls caught what a test or the fault itself ended, and nothing that
happened to it."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.faults import planting
from tests.faults.adapter_faults import ADAPTER_FAULTS
from tests.faults.checks import CORE
from tests.faults.decentralised_faults import DECENTRALISED_FAULTS
from tests.faults.faults_list import FAULTS
from tests.faults.gpu_faults import GPU_FAULTS
from tests.faults.hook_faults import HOOK_FAULTS
from tests.faults.looking_faults import LOOKING_FAULTS
from tests.faults.modern_faults import MODERN_FAULTS
from tests.faults.mutants import mutants
from tests.faults.personal_faults import PERSONAL_FAULTS
from tests.faults.plant import SURVIVORS, Tally, edited, right
from tests.faults.planting import (
    DIED,
    ENDLESS,
    ROOT,
    Use,
    first_failure_in_a_copy,
    in_children,
    prepare,
    run_tests,
)

# What stands under tests/ is collected with the conftest.py of a run.
IMPORTING = "tests/test_schedules.py"
TESTS = """
def test_quick():
    pass

def test_endless():
    while True:
        pass

def test_interrupted():
    raise KeyboardInterrupt
"""


def test_only_a_test_an_endless_one_and_the_end_of_the_process_are_a_catch() -> None:
    tally, tests = Tally(), {"a.py::test_a"}
    for answer in (
        "a.py::test_a",
        ENDLESS + "a.py::test_a",
        f"{DIED} (6)",
        "",
        "ERROR MemoryError: ",
        "a.py (collection)",
    ):
        tally.count(answer, tests)
    assert (tally.caught, tally.endless, tally.died, tally.not_run) == (3, 1, 1, 2)


def test_each_fault_of_the_list_has_its_place_in_the_code() -> None:
    for fault in [
        *FAULTS,
        *PERSONAL_FAULTS,
        *LOOKING_FAULTS,
        *HOOK_FAULTS,
        *MODERN_FAULTS,
        *ADAPTER_FAULTS,
        *DECENTRALISED_FAULTS,
        *GPU_FAULTS,
    ]:
        assert edited(fault), fault.name
    keys = {
        mutant.key
        for file in {file for file, _, _ in SURVIVORS}
        for mutant in mutants(file, right(file), core=file in CORE)
    }
    assert SURVIVORS.keys() <= keys


def test_a_fault_outside_functions_meets_tests_that_import_it() -> None:
    """An attribute of a class, which who inherits it has read when tests are imported."""
    (fault,) = (f for f in HOOK_FAULTS if f.name == "IFCA: who never took part has w")
    file = "tests/callbacks/test_clustered_models.py"
    test = f"{file}::test_who_never_took_part_has_the_centre_of_least_loss"
    assert first_failure_in_a_copy(edited(fault), [test]) == test


def test_children_say_what_became_of_them(python: str, tmp_path: Path) -> None:
    """In a process of its own, which has no other children."""
    file = tmp_path / "test_here.py"
    file.write_text(TESTS, "utf-8")
    command = [python, "-m", "tests.faults.test_runner", str(file)]
    said = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    ).stdout
    answers = ast.literal_eval(said)
    assert "fl_lightning/schedules.py" in answers["changed"], "what is imported can be made wrong"
    assert answers["killed"].startswith("ERROR"), "by what else runs here"
    assert answers["left"].startswith(DIED)
    assert answers["test_quick"] == "[]"
    assert answers["test_endless"].startswith(ENDLESS) and answers["test_endless"].endswith(
        "::test_endless"
    )
    assert "::test_interrupted" in answers["test_interrupted"]


def children(file: str) -> dict[str, str]:
    """What children say that run these tests, or end otherwise."""
    planting.SLACK = 1, 4
    _, functions = prepare([IMPORTING])
    known = {test: Use(set(), 0.0, 0.0) for test in run_tests([file], "--collect-only").collected}

    def failed(name: str) -> str:
        return str(run_tests([f"{file}::{name}"], "-x", known=known).failed)

    def killed() -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return "unreached"

    tests = [(name, partial(failed, name)) for name in (test.rpartition("::")[2] for test in known)]
    answers = dict(in_children([*tests, ("killed", killed), ("left", lambda: os._exit(3))]))
    return answers | {"changed": " ".join(sorted({file for file, _ in functions}))}


if __name__ == "__main__":
    print(children(sys.argv[1]))
