"""The engine that is built for a run's setting and plan, and what is said of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_lightning import run
from fl_lightning.engines import choice, registry
from fl_lightning.engines.choice import Decision
from fl_lightning.engines.engine_context import EngineContext
from fl_lightning.engines.engine_plan import AS_BEFORE, EnginePlan
from fl_lightning.engines.sequential import Sequential
from fl_lightning.engines.threads import Threads
from fl_lightning.engines.trials.trial_steps import FirstSteps, Reason
from fl_lightning.errors import UserError
from tests.helpers.learners import Lit, blobs, federated, trainer

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Frozen(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.nn.Parameter(torch.zeros(3), requires_grad=False)


def engine_context_of(engine: str, callbacks: Any = ()) -> EngineContext:
    """Of a real run, in which every client takes part."""
    seen: list[EngineContext] = []
    chosen = run.choose

    def choose(context: EngineContext, *others: Any) -> Any:
        seen.append(context)
        return chosen(context, *others)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "choose", choose)
        trainer(1, callbacks).fit(
            federated(Frozen(), engine="sequential", participation=1.0), blobs()
        )
    return replace(seen[0], engine=engine)


@pytest.fixture
def chosen() -> Iterator[Callable[..., tuple[Any, EnginePlan, list[str]]]]:
    """``chosen(engine, held, …)``: the engine, its plan and what was noted."""
    engines: list[Any] = []

    def chosen(
        engine: str, held: EnginePlan | None = None, callbacks: Any = (), **given: Any
    ) -> tuple[Any, EnginePlan, list[str]]:
        notes: list[str] = []
        made, plan = choice.choose(
            replace(engine_context_of(engine, callbacks), **given), held, notes.append, pytest.fail
        )
        engines.append(made)
        return made, plan, notes

    yield chosen
    for engine in engines:
        engine.close()
    torch.set_num_threads(1)


def images_of(worker: Any) -> bool:
    """Whether a worker gives its learner images in channels-last memory."""
    image = torch.rand(1, 3, 4, 4)
    given = image if worker.copy.convert is None else worker.copy.convert(None, image)
    return bool(given.is_contiguous(memory_format=torch.channels_last))


def test_a_resumed_run_goes_on_as_its_plan_says(chosen: Any) -> None:
    held = EnginePlan(
        "sequential", threads=1, server_threads=2, channels_last=True, as_buffers=("centre",)
    )
    engine, plan, notes = chosen("auto", held)
    assert isinstance(engine, Sequential) and notes == []
    assert torch.get_num_threads() == 2 and images_of(engine.worker)
    assert plan == held
    assert "centre" in engine.worker.copy.buffers
    engine, plan, _ = chosen(
        "sequential", replace(held, server_threads=0, channels_last=False, as_buffers=())
    )
    assert (
        torch.get_num_threads() == 2 and plan.server_threads == 2 and not images_of(engine.worker)
    )
    assert "centre" not in engine.worker.copy.buffers


def test_side_by_side_by_name_is_not_proven_and_a_resumed_run_knows_it(chosen: Any) -> None:
    engine, plan, notes = chosen("concurrent")
    assert isinstance(engine, Threads) and len(notes) == 1 and "that does not prove" in notes[0]
    assert plan.workers == len(engine.workers) == min(CORES, 10) and isinstance(
        engine.learner, Frozen
    )
    for asked in ("concurrent", "auto"):
        # A second fit of one module finds its plan as it was made.
        engine, plan, notes = chosen(asked, EnginePlan("concurrent", "asked for", workers=3))
        assert (
            isinstance(engine, Threads) and plan.workers == 3 and plan.threads == 1 and notes == []
        )


def test_what_cannot_be_stacked_trains_one_after_the_other_and_says_so(
    chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "why_not_stacked", lambda _: "it branches")
    engine, plan, notes = chosen("stacked")
    assert isinstance(engine, Sequential) and plan.engine == "sequential"
    assert plan.why == "it cannot be stacked: it branches"
    assert notes == ["engine='stacked' cannot train Frozen (it branches); engine='sequential' does"]


KEEPS = Reason("it counts", keeps=True)


def copies(engine: str = "auto", **given: Any) -> Any:
    """Four clients at once on four cores, as far as decisions look at it."""
    context = {
        "engine": engine,
        "workers": "auto",
        "clients_at_once": "auto",
        "capture": "auto",
        "rank": 0,
        "w": torch.zeros(4),
        "most_at_once": 4,
        "looking": (),
        "prefers_channels_last": False,
        "fuses": False,
        "learner": torch.nn.Linear(2, 2),
        "broadcast": lambda value: value,
    }
    return SimpleNamespace(
        context=SimpleNamespace(**{**context, **given}),
        as_buffers=("frozen",),
        treat_as_buffers=lambda names: None,
        prepare=lambda plan: None,
        on_learner=lambda: None,
        optimizer=None,
    )


@pytest.mark.parametrize(
    ("w", "reason", "words"),
    [
        (torch.zeros(4, device="meta"), None, ["engine='concurrent' on meta"]),
        (torch.zeros(4), KEEPS, ["cannot train Linear", "keep such state in a buffer"]),
        (torch.zeros(4), Reason("it draws"), ["cannot train Linear: it draws"]),
    ],
)
def test_what_stands_against_side_by_side_is_refused_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, w: Any, reason: Any, words: list[str]
) -> None:
    given = copies(
        "concurrent", w=w, work=SimpleNamespace(methods=SimpleNamespace(look="", reduced_by=""))
    )
    found = Decision(EnginePlan("concurrent"), reason)
    monkeypatch.setattr(choice, "LearnerCopies", lambda _: given)
    monkeypatch.setattr(choice, "decided", lambda *_: found)
    monkeypatch.setattr(choice, "tell_of_buffers", lambda *_: None)
    with pytest.raises(UserError) as refused:
        choice.choose(given.context, None, pytest.fail, pytest.fail)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(("text", "first"), [("bad weights\nand more", "bad weights"), ("", "")])
def test_a_start_that_fails_is_told_to_the_other_processes(
    monkeypatch: pytest.MonkeyPatch, text: str, first: str
) -> None:
    def fails(_: Any) -> Any:
        raise ValueError(text)

    told: list[Decision] = []

    def tell(decision: Decision) -> Decision:
        told.append(decision)
        return decision

    monkeypatch.setattr(choice, "take_first_steps", fails)
    with pytest.raises(ValueError, match=text or None):
        choice.decided(copies(broadcast=tell), ())
    assert [d.failure for d in told] == [f"the first process could not start: {first}"]
    with pytest.raises(UserError, match="the first process could not start"):
        choice.decided(copies(rank=1, broadcast=lambda _: told[0]), ())


def test_what_the_first_process_found_holds_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    of_others = Decision(EnginePlan("sequential", "as the first says"))
    known: list[tuple[str, ...]] = []
    monkeypatch.setattr(choice, "take_first_steps", lambda _: FirstSteps())
    monkeypatch.setattr(choice, "check_batch_sizes", lambda *_: None)  # has tests of its own
    assert choice.decided(copies(rank=1, broadcast=lambda _: of_others), ()) == of_others
    first = copies("sequential")
    first.treat_as_buffers = known.append
    assert choice.decided(first, ("a",)).plan.engine == "sequential"
    assert known == [("a",)]


def test_a_plan_comes_back_from_a_checkpoint() -> None:
    plan = EnginePlan(
        "concurrent", "measured", workers=3, server_threads=2, channels_last=True, fused=True
    )
    assert EnginePlan.from_dict(plan.as_dict()) == replace(plan, why=AS_BEFORE)
    stacked = EnginePlan("stacked", at_once=8)
    assert EnginePlan.from_dict(stacked.as_dict()) == replace(stacked, why=AS_BEFORE)
    assert EnginePlan.from_dict({}) is None


def test_a_card_tells_what_belongs_to_the_engine() -> None:
    beside = EnginePlan("concurrent", "measured", workers=2, captured=True, at_once=5)
    threads = {"threads": "1", "server_threads": "1"}
    more = {"workers": "2", "capture": "yes", "why": "measured"}
    assert beside.card() == {"engine": "concurrent", **threads, **more}
    assert EnginePlan("concurrent", not_captured="few steps").card()["capture"] == "no: few steps"
    stacked = EnginePlan("stacked", at_once=5, workers=2, channels_last=True).card()
    held = {"clients": "5", "memory": "channels_last", "why": ""}
    assert stacked == {"engine": "stacked", **threads, **held}
    plain = EnginePlan("sequential", as_buffers=("teacher.w", "queue"))
    assert plain.card()["as buffers"] == "teacher.w, queue"
    assert (str(beside), str(plain)) == ("concurrent × 2", "sequential")
