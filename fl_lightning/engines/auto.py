"""Which engine trains the clients under ``engine="auto"``: the rows of ``TABLE``, tried in order.

What the bits of a run depend on is decided by rule: by the device, the learner's own steps and the
number of clients. Measured time chooses only among ways that give the same bits: each client uses
one thread, whether clients run in parallel or one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fl_lightning.engines.engine_context import LearnerCopies
from fl_lightning.engines.engine_plan import EnginePlan
from fl_lightning.engines.fast.capture import why_not_captured
from fl_lightning.engines.forked import why_not_forked
from fl_lightning.engines.registry import unsupported
from fl_lightning.engines.trials.dry_run import step_seconds
from fl_lightning.engines.trials.trial_steps import FirstSteps, Reason, what_clients_share
from fl_lightning.round.settings import CONCURRENT, SEQUENTIAL

# Below this many seconds of local work per round, threads cost more time than they save.
TINY_SECONDS = 0.02
# Below this many seconds of local work per round, forked processes cost more than they save.
FORK_SECONDS = 0.2
# A step that is not captured and is shorter than this is mostly Python, which one thread runs at a
# time.
PYTHON_SECONDS = 0.002


class Known:
    """The facts that the table's conditions need; each is computed when it is first read."""

    def __init__(self, copies: LearnerCopies, first_steps: FirstSteps) -> None:
        self.copies = copies
        self.context = copies.context
        self.untried = first_steps.untried
        self.shown_by_first_steps = first_steps.one_by_one
        self.device = self.context.w.device.type
        self.unsupported = unsupported(CONCURRENT, self.context)

    @property
    def wanted(self) -> int:
        """Clients to train side by side: ``workers``, or one a core; at most a round's clients."""
        context = self.context
        wanted = context.usable_cores if context.workers == "auto" else int(context.workers)
        return min(wanted, context.most_at_once)

    @property
    def one_client(self) -> bool:
        """Whether a process with several cores gets one client a round."""
        several = self.context.usable_cores > 1 and self.context.workers != 1
        return self.device == "cpu" and self.wanted < 2 and several

    @cached_property
    def shown_by_two_copies(self) -> Reason | None:
        """Why steps on two copies rule out training side by side; None: they allow it."""
        first = self.shown_by_first_steps
        return what_clients_share(self.copies, "" if first is None else first.text, proof=True)

    @property
    def draws(self) -> bool:
        """Whether steps or data draw random numbers, and nothing else stands against workers."""
        return self.shown_by_two_copies is not None and self.shown_by_two_copies.draws

    @cached_property
    def not_forked(self) -> str:
        """Why workers cannot be processes that are forked from the run; empty if they can."""
        return why_not_forked(self.context)

    @property
    def worth_processes(self) -> bool:
        """Whether a round's local steps take long enough that forking for them pays."""
        return self.wanted > 1 and self.seconds >= FORK_SECONDS and not self.not_forked

    @cached_property
    def milliseconds(self) -> float:
        """How long a local step takes on one thread."""
        return 1000 * step_seconds(self.copies)

    @property
    def seconds(self) -> float:
        """How long a round's local steps take, one after the other on one thread."""
        return sum(self.context.lengths()) * self.milliseconds / 1000

    @property
    def tiny(self) -> bool:
        return self.seconds < TINY_SECONDS

    @cached_property
    def not_captured(self) -> str:
        """Why local steps are not recorded and replayed; empty if they are."""
        return why_not_captured(self.copies)

    @property
    def waits_for_python(self) -> bool:
        return bool(self.not_captured) and self.milliseconds < 1000 * PYTHON_SECONDS


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        when: the condition, for a reader; ``holds``: the same for the program.
        threads: of a client: ``"one"``, or ``"all"`` that the process has. On one thread clients
            leave the same bits in both engines.
        reason: for the run's card; in braces what was found out.
        processes: whether workers are forked processes.
    """

    when: str
    holds: Callable[[Known], bool]
    engine: str
    threads: str
    reason: str
    processes: bool = False


TABLE = (
    Row(
        "the device is neither a CPU nor a CUDA GPU",
        lambda known: bool(known.unsupported),
        SEQUENTIAL,
        "all",
        "clients train side by side only on CPUs and CUDA GPUs",
    ),
    Row(
        "a process with several cores has one client a round",
        lambda known: known.one_client,
        SEQUENTIAL,
        "all",
        "one client for each process",
    ),
    Row(
        "no step can be tried before round 0",
        lambda known: bool(known.untried),
        SEQUENTIAL,
        "all",
        "{known.untried}",
    ),
    Row(
        "a trial step found state that clients share",
        lambda known: stands_against(known.shown_by_first_steps),
        SEQUENTIAL,
        "all",
        "{known.shown_by_first_steps.text}, so clients train one after the other",
    ),
    Row(
        "trial steps on two copies found state that clients share",
        lambda known: stands_against(known.shown_by_two_copies),
        SEQUENTIAL,
        "all",
        "{known.shown_by_two_copies.text}, so clients train one after the other",
    ),
    Row(
        "clients draw random numbers, and processes cannot be forked",
        lambda known: known.draws and bool(known.not_forked),
        SEQUENTIAL,
        "all",
        "{known.shown_by_two_copies.text}, and {known.not_forked}",
    ),
    Row(
        "clients draw random numbers, and there is one worker, or a round takes less than 200 ms",
        lambda known: known.draws and not known.worth_processes,
        SEQUENTIAL,
        "one",
        "a step of {known.milliseconds:.3g} ms, {known.wanted} at a time, is not worth processes",
    ),
    Row(
        "clients draw random numbers",
        lambda known: known.draws,
        CONCURRENT,
        "one",
        "{known.shown_by_two_copies.text}, and each process has its own generators",
        processes=True,
    ),
    Row(
        "the device is a GPU",
        lambda known: known.device == "cuda",
        CONCURRENT,
        "one",
        "on a GPU clients train on streams",
    ),
    Row(
        "a round's local steps take less than 20 ms",
        lambda known: known.tiny,
        SEQUENTIAL,
        "one",
        "a step of {known.milliseconds:.3g} ms is not worth threads",
    ),
    Row(
        "there is one worker",
        lambda known: known.wanted < 2,
        CONCURRENT,
        "one",
        "one at a time, as asked or one core",
    ),
    Row(
        "a step is not captured and takes less than 2 ms, and a round 200 ms or more",
        lambda known: known.waits_for_python and known.worth_processes,
        CONCURRENT,
        "one",
        "threads would wait for Python's lock, and each process has its own",
        processes=True,
    ),
    Row(
        "a step is not captured and takes less than 2 ms",
        lambda known: known.waits_for_python,
        SEQUENTIAL,
        "one",
        "clients side by side would wait for Python's lock",
    ),
    Row(
        "a step is captured",
        lambda known: not known.not_captured,
        CONCURRENT,
        "one",
        "it takes {known.milliseconds:.3g} ms, without Python's lock",
    ),
    Row(
        "a step is not captured and takes 2 ms or more",
        lambda known: True,
        CONCURRENT,
        "one",
        "of {known.milliseconds:.3g} ms Python's lock holds a small part",
    ),
)


def stands_against(reason: Reason | None) -> bool:
    """Whether clients have to train one after the other, in processes of their own too."""
    return reason is not None and not reason.draws


def decide(copies: LearnerCopies, first_steps: FirstSteps) -> tuple[EnginePlan, Reason | None]:
    """The plan by the first row that holds, and why clients have to train one after the other."""
    known = Known(copies, first_steps)
    try:
        row = next(row for row in TABLE if row.holds(known))
    except Exception as error:  # If it fails here, the first round will fail too, and report where.
        why = f"a trial before round 0 failed ({type(error).__name__}: {error})"
        plan = EnginePlan(SEQUENTIAL, why, threads=torch.get_num_threads())
        return plan, known.shown_by_first_steps
    plan = EnginePlan(
        row.engine,
        f"{row.when}: {row.reason.format(known=known)}",
        threads=torch.get_num_threads() if row.threads == "all" else 1,
    )
    # Reading the property would train copies now, so use it only if a log line has computed it
    # already.
    found = vars(known).get("shown_by_two_copies")
    one_by_one = None if known.untried else known.shown_by_first_steps or found
    if row.engine == SEQUENTIAL:
        return plan, one_by_one
    workers = known.wanted if known.device == "cpu" else 0
    if row.processes:
        return replace(plan, workers=workers, processes=True), one_by_one
    captured = not known.not_captured
    plan = replace(plan, workers=workers, captured=captured, not_captured=known.not_captured)
    return plan, one_by_one
