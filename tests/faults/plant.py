"""Plant faults and see that the tests find them: `make faults`, or `python -m tests.faults.plant [NAME …]`.

First the faults that public implementations of these methods have (FAULTS); then the methods' arithmetic and the
core's decisions are made wrong in one place at a time. Each fault runs the tests that call what was changed (CORE,
METHODS), the quickest first, until one fails. A NAME is a part of a fault's name or of a file's path. Exit status 1: a
fault of the list was not caught, fewer than 97 % of the mutants were, or one survived without a reason in SURVIVORS.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

from tests.faults.checks import CORE, METHODS, OTHERS
from tests.faults.faults_list import FAULTS, SURVIVORS, Fault
from tests.faults.mutants import Mutant, mutants
from tests.faults.personal_faults import PERSONAL_FAULTS
from tests.faults.planting import (
    ROOT,
    Function,
    Uses,
    first_failure,
    fitting,
    in_children,
    measured,
    outer_codes,
    plant,
    prepare,
)

SHOWN = {"progress_bar.py", "run_card.py", "__init__.py"}  # what is drawn for a reader; no method's arithmetic
METHOD_FILES = [f"callbacks/{p.name}" for p in sorted((ROOT / "callbacks").glob("*.py")) if p.name not in SHOWN]
ENOUGH = 0.97


def right(file: str) -> str:
    return (ROOT / file).read_text("utf-8")


def edited(fault: Fault) -> dict[str, str]:
    """The sources that a fault of the list changes."""
    sources: dict[str, str] = {}
    for file, old, new in fault.edits:
        source = sources.get(file) or right(file)
        if source.count(old) != 1:
            raise SystemExit(f"{fault.name}: {file} has {source.count(old)} times {old!r}; adapt the list of faults")
        sources[file] = source.replace(old, new)
    return sources


def around(file: str, number: int) -> set[Function]:
    """The function that a line stands in."""
    return {(file, max(line for line in outer_codes(right(file)) if line <= number))}


class Planted:
    """Which tests each file has, what they call, and what a fault in it is caught by."""

    def __init__(self, checks: dict[str, list[str]]) -> None:
        self.checks = checks = {f: [c for c in paths if (ROOT / c).exists()] for f, paths in checks.items()}
        wanted = {check for paths in checks.values() for check in paths}
        self.all = sorted(c for c in wanted if not any(c.startswith(other + "/") for other in wanted))
        self.functions = prepare(self.all)
        self.uses: Uses = measured(self.functions, checks, self.all)

    def caught(self, sources: dict[str, object], called: set[Function]) -> str:
        """In a child: the first test that fails with these sources, or nothing."""
        for file, wrong in sources.items():
            plant(self.functions, file, wrong)
        (first, *_) = sources
        return first_failure(fitting(self.uses, self.checks[first], called), self.uses)

    def by_fault(self, fault: Fault) -> str:
        sources = edited(fault)
        called = {
            (file, line)
            for file, wrong in sources.items()
            for line, code in outer_codes(wrong).items()
            if code != outer_codes(right(file)).get(line)
        }
        return self.caught(dict(sources), called)

    def by_mutant(self, mutant: Mutant) -> str:
        return self.caught({mutant.file: mutant.wrong()}, around(mutant.file, mutant.number))


def of_file(file: str, planted: Planted) -> tuple[int, list[Mutant]]:
    """How many mutants a file has, and those that survive."""
    found = mutants(file, right(file), core=file in CORE)
    jobs: list[tuple[str, Callable[[], str]]] = [(str(k), partial(planted.by_mutant, m)) for k, m in enumerate(found)]
    survivors, began = [], time.monotonic()
    for done, (k, caught) in enumerate(in_children(jobs), 1):
        mutant = found[int(k)]
        if caught.startswith("ERROR"):
            raise SystemExit(f"{file}: {mutant.what}: {caught}")
        if not caught:
            survivors.append(mutant)
            reason = SURVIVORS.get(mutant.key, "NO REASON KNOWN")
            print(f"  {file}:{mutant.number}: {mutant.what}\n    {mutant.line}\n    {reason}", flush=True)
        print(f"\r{done} of {len(found)} mutants, {len(survivors)} survive", end="", file=sys.stderr, flush=True)
    print("\r", end="", file=sys.stderr)
    caught_here, seconds = len(found) - len(survivors), time.monotonic() - began
    print(f"{file}: {caught_here} of {len(found)} caught ({seconds:.0f} s)", flush=True)
    return len(found), survivors


def main(names: list[str]) -> int:
    faults = [f for f in [*FAULTS, *PERSONAL_FAULTS] if not names or any(n in f.name for n in names)]
    files = [f for f in [*CORE, *METHOD_FILES] if not names or any(n in f for n in names)]
    involved = {*files, *(file for fault in faults for file, _, _ in fault.edits)}
    if not involved:
        raise SystemExit(f"nothing here is named like {', '.join(names)}")
    began = time.monotonic()
    planted = Planted({file: {**CORE, **OTHERS}.get(file, METHODS) for file in sorted(involved)})
    print(f"{len(planted.uses)} checks pass without a fault ({time.monotonic() - began:.0f} s)\n\nfault → caught by")

    missed = []
    for name, caught in in_children([(f.name, partial(planted.by_fault, f)) for f in faults]):
        print(f"  {name} → {caught or 'NOT CAUGHT'}", flush=True)
        missed += [] if caught and not caught.startswith("ERROR") else [name]

    print("\nmutants")
    total, survivors = 0, list[Mutant]()
    for file in files:
        number, alive = of_file(file, planted)
        total, survivors = total + number, survivors + alive
    share = 1 - len(survivors) / max(total, 1)
    print(f"\n{total - len(survivors)} of {total} mutants caught, {share:.1%}; {time.monotonic() - began:.0f} s")
    return int(bool(missed) or share < ENOUGH or any(m.key not in SURVIVORS for m in survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
