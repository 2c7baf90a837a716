"""Plant faults and see that the tests find them: `make faults`, or `python -m tests.faults.plant
[--named] [NAME …]`.

First the faults that public implementations of these methods have (FAULTS); then the methods'
arithmetic and the core's decisions are made wrong in one place at a time. Each fault runs the tests
that call what was changed (CORE, METHODS), the file's own first, until one fails, and those alone
where SURVIVORS says why no test can tell it; tests that failed are run again without a fault. A
NAME is a part of a fault's name or of a file's path, or path:line; files run in the order of their
names; `--named` plants no mutants. Exit status 1: a fault of the list was not caught, fewer than
97 % of the mutants were, one survived without a reason in SURVIVORS, one could not be planted, or a
test failed without a fault.
"""

from __future__ import annotations

import ast
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container
from dataclasses import dataclass, field, fields
from functools import cache, partial

from tests.faults.adapter_faults import ADAPTER_FAULTS
from tests.faults.checks import CORE, OTHERS, of_method
from tests.faults.decentralised_faults import DECENTRALISED_FAULTS
from tests.faults.faults_list import FAULTS, Fault
from tests.faults.gpu_faults import GPU_FAULTS
from tests.faults.hook_faults import HOOK_FAULTS
from tests.faults.looking_faults import LOOKING_FAULTS
from tests.faults.modern_faults import MODERN_FAULTS
from tests.faults.mutants import Mutant, mutants
from tests.faults.personal_faults import PERSONAL_FAULTS
from tests.faults.planting import (
    DIED,
    ENDLESS,
    ROOT,
    Function,
    Uses,
    first_failure,
    first_failure_in_a_copy,
    fitting,
    in_children,
    measured,
    outer_codes,
    outside_functions,
    plant,
    prepare,
    within,
)
from tests.faults.survivors import SURVIVORS

# what is drawn for a reader; no method's arithmetic
SHOWN = {"progress_bar.py", "run_card.py", "__init__.py"}
METHOD_FILES = [
    p.relative_to(ROOT).as_posix()
    for p in sorted((ROOT / "callbacks").rglob("*.py"))
    if p.name not in SHOWN
]
ENOUGH = 0.97
NAMED = "--named"


def right(file: str) -> str:
    return (ROOT / file).read_text("utf-8")


def edited(fault: Fault) -> dict[str, str]:
    """The sources that a fault of the list changes."""
    sources: dict[str, str] = {}
    for file, old, new in fault.edits:
        source = sources.get(file) or right(file)
        if source.count(old) != 1:
            raise SystemExit(
                f"{fault.name}: {file} has {source.count(old)} times {old!r}; adapt the list "
                "of faults"
            )
        sources[file] = source.replace(old, new)
    return sources


@cache
def around(file: str, number: int) -> Function:
    """The function that a line stands in."""
    return file, max(line for line in outer_codes(right(file)) if line <= number)


class Planted:
    """Which tests each file has, what they call, and what a fault in it is caught by."""

    def __init__(self, checks: dict[str, list[str]]) -> None:
        self.checks = checks = {
            f: [c for c in paths if (ROOT / c).exists()] for f, paths in checks.items()
        }
        wanted = {check for paths in checks.values() for check in paths}
        self.all = sorted(
            c for c in wanted if not any(c.startswith(other + "/") for other in wanted)
        )
        collected, self.functions = prepare(self.all)
        self.tests = collected.collected
        self.whole = collected.whole  # those that only `make test-all` runs
        self.uses: Uses = {}
        self.failing: list[str] = []  # tests, without a fault
        self.now: list[str] = []  # the checks that faults meet
        # what caught mutants of a function
        self.catchers: dict[Function, Counter[str]] = defaultdict(Counter)

    def see(self, file: str, own: bool, fast: bool = False) -> None:
        """Run the file's own tests, or all that it is checked by, where they were not yet, to know
        what they call.

        ``fast``: only those of the fast tier.
        """
        began = time.monotonic()
        self.now = self.checks[file][:1] if own else self.checks[file]
        mine = [test for test in self.tests if any(within(test, check) for check in self.now)]
        if fast:
            mine = [test for test in mine if test not in self.whole]
        self.tests = [test for test in self.tests if test not in mine]
        self.uses |= measured(self.functions, self.checks, mine)
        self.failing += [test for test in mine if test not in self.uses]
        if mine:
            print(
                f"{file}: {len(mine)} tests without a fault ({time.monotonic() - began:.0f} s)",
                flush=True,
            )

    def caught(
        self, sources: dict[str, ast.Module | str], called: set[Function], like_it: Counter[str]
    ) -> str:
        """In a child: the first test that fails with these sources, or nothing."""
        for file, wrong in sources.items():
            plant(self.functions, file, wrong)
        return first_failure(fitting(self.uses, self.now, called, like_it), self.uses)

    def by_fault(self, fault: Fault) -> str:
        sources = edited(fault)
        if any(outside_functions(sources[f]) != outside_functions(right(f)) for f in sources):
            tests = fitting(self.uses, self.now, set(), Counter())
            return first_failure_in_a_copy(sources, tests)
        called = {
            (file, line)
            for file, wrong in sources.items()
            for line, code in outer_codes(wrong).items()
            if code != outer_codes(right(file)).get(line)
        }
        return self.caught(dict(sources), called, Counter())

    def by_mutant(self, mutant: Mutant) -> str:
        function = around(mutant.file, mutant.number)
        return self.caught({mutant.file: mutant.wrong()}, {function}, self.catchers[function])

    def false_alarm(self, catchers: set[str]) -> bool:
        """Whether one of the tests that failed, or did not end, does so without a fault.

        It is shown.
        """
        unharmed = partial(first_failure, sorted(catchers), self.uses)
        ((_, alarm),) = in_children([("without a fault", unharmed)])
        if alarm:
            print(f"  FALSE ALARM, without a fault: {alarm}", flush=True)
        return bool(alarm)


@dataclass
class Tally:
    """What became of mutants."""

    planted: int = 0
    caught: int = 0  # those that did not end, or ended the process, among them
    endless: int = 0
    died: int = 0
    not_run: int = 0
    false_alarms: int = 0
    alive: list[Mutant] = field(default_factory=list)

    def count(self, answer: str, tests: Container[str]) -> None:
        """What the child of a mutant answered.

        One of the tests, what its process did, or why it was not tried.
        """
        ended = answer.startswith((ENDLESS, DIED))
        self.endless += answer.startswith(ENDLESS)
        self.died += answer.startswith(DIED)
        self.caught += answer in tests or ended
        self.not_run += bool(answer) and answer not in tests and not ended

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def unexplained(self) -> int:
        return sum(mutant.key not in SURVIVORS for mutant in self.alive)

    def __str__(self) -> str:
        return (
            f"{self.caught} of {self.planted} mutants caught ({self.endless} did not end, "
            f"{self.died} ended the "
            f"process), {len(self.alive)} survive ({self.unexplained} without a reason), "
            f"{self.not_run} not run"
        )


def try_alive(file: str, tally: Tally, planted: Planted, own: bool) -> None:
    """Each mutant that is alive in a child of its own.

    Against the file's own tests, or against all.
    """
    known = [] if own else [mutant for mutant in tally.alive if mutant.key in SURVIVORS]
    tried = [mutant for mutant in tally.alive if mutant not in known]
    if not tried:
        return
    planted.see(file, own)
    began, catchers = time.monotonic(), set[str]()
    jobs: list[tuple[str, Callable[[], str]]] = [
        (str(k), partial(planted.by_mutant, m)) for k, m in enumerate(tried)
    ]
    tally.alive = known
    for done, (k, answer) in enumerate(in_children(jobs), 1):
        mutant = tried[int(k)]
        tally.count(answer, planted.uses)
        catchers |= {answer.removeprefix(ENDLESS)} & planted.uses.keys()
        if not answer:
            tally.alive.append(mutant)
        elif answer in planted.uses:
            planted.catchers[around(file, mutant.number)][answer] += 1
        else:
            show(mutant, answer)
        print(
            f"\r{done} of {len(tried)} mutants, {len(tally.alive)} survive",
            end="",
            file=sys.stderr,
            flush=True,
        )
    print("\r", end="", file=sys.stderr)
    tally.false_alarms += planted.false_alarm(catchers)
    for mutant in tally.alive:
        show(mutant, SURVIVORS.get(mutant.key, "NO REASON KNOWN"))
    whose = "its own" if own else "all"
    print(f"{file}, by {whose} tests: {tally}; {time.monotonic() - began:.0f} s", flush=True)


def show(mutant: Mutant, what: str) -> None:
    print(
        f"  {mutant.file}:{mutant.number}: {mutant.what}\n    {mutant.line}\n    {what}", flush=True
    )


def missed(faults: list[Fault], planted: Planted) -> int:
    """How many faults of the list no test sees, and how often one fails without them.

    The fast tier's tests meet all faults first, then the others those that are left. Each fault is
    shown with what caught it, and how many each tier catches.
    """
    alive: dict[str, dict[str, Fault]] = {}
    for fault in faults:
        alive.setdefault(fault.edits[0][0], {})[fault.name] = fault
    catchers: set[str] = set()
    for tier in ("fast", "whole"):
        for file, mine in alive.items():
            for own in (True, False):
                if mine:
                    planted.see(file, own, fast=tier == "fast")
                catchers |= caught_of(mine, planted)
        left = [name for mine in alive.values() for name in mine]
        tests = "make test" if tier == "fast" else "make test-all"
        print(f"{tests}: {len(faults) - len(left)} of {len(faults)} faults caught", flush=True)
    for name in left:
        print(f"  {name} → NOT CAUGHT", flush=True)
    return len(left) + planted.false_alarm(catchers)


def caught_of(alive: dict[str, Fault], planted: Planted) -> set[str]:
    """Plant one file's faults, and take those that are caught out of ``alive``.

    Gives the tests that caught them.
    """
    catchers: set[str] = set()
    jobs = [(name, partial(planted.by_fault, fault)) for name, fault in alive.items()]
    for name, caught in in_children(jobs):
        if caught:
            print(f"  {name} → {caught}", flush=True)
        if caught in planted.uses or caught.startswith((ENDLESS, DIED)):
            catchers |= {caught.removeprefix(ENDLESS)} & planted.uses.keys()
            del alive[name]
    return catchers


def main(arguments: list[str]) -> int:
    names = [name for name in arguments if name != NAMED]
    listed = [
        *FAULTS,
        *PERSONAL_FAULTS,
        *LOOKING_FAULTS,
        *HOOK_FAULTS,
        *MODERN_FAULTS,
        *ADAPTER_FAULTS,
        *DECENTRALISED_FAULTS,
        *GPU_FAULTS,
    ]
    faults = [f for f in listed if not names or any(n in f.name for n in names)]
    every = [*CORE, *METHOD_FILES]
    asked = [name.partition(":") for name in names] or [("", "", "")]
    files: dict[str, list[int]] = {}
    for part, _, line in asked:
        for file in (f for f in every if part in f and NAMED not in arguments):
            files.setdefault(file, []).extend([int(line)] if line.isdigit() else [])
    involved = {*files, *(file for fault in faults for file, _, _ in fault.edits)}
    if not involved:
        raise SystemExit(f"nothing here is named like {', '.join(names)}")
    began = time.monotonic()
    planted = Planted(
        {file: {**CORE, **OTHERS}.get(file) or of_method(file) for file in sorted(involved)}
    )
    print("fault → caught by" if faults else "", flush=True)
    not_seen = missed(faults, planted)

    print("\nmutants" if files else "", flush=True)
    tallies = {}
    for file, lines in files.items():
        found = [
            m
            for m in mutants(file, right(file), core=file in CORE)
            if not lines or m.number in lines
        ]
        tallies[file] = Tally(planted=len(found), alive=found)
        try_alive(file, tallies[file], planted, own=True)
    for file, tally in tallies.items():
        if len(planted.checks[file]) > 1:
            try_alive(file, tally, planted, own=False)
    total = sum(tallies.values(), Tally())
    if files and not total.planted:
        raise SystemExit(f"no mutant is made of {', '.join(names)}")
    share = total.caught / total.planted if total.planted else 1.0
    print(
        "\n"
        + "\n".join(f"{file}: {tally}" for file, tally in [*tallies.items(), ("together", total)])
    )
    print(f"{share:.1%}; {time.monotonic() - began:.0f} s")
    return int(
        share < ENOUGH
        or any((not_seen, total.unexplained, total.not_run, total.false_alarms, planted.failing))
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
