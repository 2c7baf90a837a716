"""The engine that is built for a run's setting and plan, and what is said of it."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_lightning import run
from fl_lightning.callback import FederatedCallback
from fl_lightning.engines import choice, fast, registry
from fl_lightning.engines.choice import Decision
from fl_lightning.engines.engine_context import EngineContext
from fl_lightning.engines.engine_plan import AS_BEFORE, EnginePlan
from fl_lightning.engines.fast.stacked import Stacked
from fl_lightning.engines.sequential import Sequential
from fl_lightning.engines.threads import Threads
from fl_lightning.engines.trials.dry_run import tried_apart
from fl_lightning.engines.trials.trial_steps import FirstSteps, Reason
from fl_lightning.errors import UserError
from tests.helpers.learners import Lit, blobs, federated, trainer

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Frozen(Lit):
    """Has a parameter that nobody trains."""

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
    assert plan == replace(held, kernels=plan.kernels) and "processor" in plan.kernels
    assert "centre" in engine.worker.copy.buffers
    engine, plan, _ = chosen(
        "sequential", replace(held, server_threads=0, channels_last=False, as_buffers=())
    )
    assert (
        torch.get_num_threads() == 2 and plan.server_threads == 2 and not images_of(engine.worker)
    )
    assert "centre" not in engine.worker.copy.buffers


def test_a_run_that_began_on_another_processor_says_so(chosen: Any) -> None:
    held = EnginePlan("sequential", kernels="a processor with AVX1024")
    _, plan, notes = chosen("auto", held)
    both = plan.kernels
    assert both.startswith(f"{held.kernels}, then a processor with ")
    assert len(notes) == 1 and all(part in notes[0] for part in both.split(", then "))
    _, again, notes = chosen("auto", plan)
    assert again.kernels == both and both in notes[0], "a later resume says so, too"
    fresh = replace(plan, kernels=both.partition(", then ")[2])
    assert chosen("auto", fresh)[2] == []


def test_a_run_that_asks_for_another_engine_than_its_checkpoint_gets_it(chosen: Any) -> None:
    held = EnginePlan("concurrent", workers=1, as_buffers=("centre",))
    engine, plan, _ = chosen("sequential", held)
    assert isinstance(engine, Sequential) and plan.why == "asked for"
    assert plan.as_buffers == ("centre",)  # what is known of the learner stays known


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


@pytest.mark.fast
@pytest.mark.parametrize("capture", ["auto", True])
def test_who_asks_for_capturing_is_told_where_there_is_none(
    chosen: Any, monkeypatch: pytest.MonkeyPatch, capture: Any
) -> None:
    _, _, notes = chosen("sequential", capture=capture)
    assert [note.endswith("only engine='concurrent' captures") for note in notes] == [True] * (
        capture is True
    )
    monkeypatch.setattr(fast, "why_not_captured", lambda _: "it branches")
    engine, plan, notes = chosen("concurrent", EnginePlan("concurrent", workers=1), capture=capture)
    assert notes == [registry.NOT_CAPTURED + "it branches"] * (capture is True)
    assert (
        not plan.captured
        and plan.not_captured == "it branches"
        and engine.workers[0].step_runner is None
    )


@pytest.mark.fast
@pytest.mark.usefixtures("short_steps")
def test_steps_are_captured_as_they_were_tried(
    chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = EnginePlan("concurrent", workers=2)
    engine, plan, _ = chosen("auto", held)
    assert plan.captured and all(worker.step_runner.shared for worker in engine.workers)
    monkeypatch.setattr(fast, "why_not_captured", lambda _: pytest.fail("tried again"))
    for known in (replace(held, captured=True), replace(held, not_captured="it branches")):
        engine, plan, _ = chosen("auto", known)
        assert [worker.step_runner is not None for worker in engine.workers] == [known.captured] * 2
        assert (plan.captured, plan.not_captured) == (known.captured, known.not_captured)


@pytest.mark.fast
def test_a_recording_with_steps_of_others_belongs_to_one_client(chosen: Any) -> None:
    class Foreign(FederatedCallback):
        def on_local_gradient(self, clients: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    engine, plan, _ = chosen("auto", EnginePlan("concurrent", workers=1), [Foreign()], capture=True)
    assert plan.captured and not engine.workers[0].step_runner.shared


def test_no_more_workers_than_clients_in_a_round(chosen: Any) -> None:
    engine, plan, _ = chosen("concurrent", workers=30)
    assert plan.workers == len(engine.workers) == 10


@pytest.mark.fast
def test_a_stack_of_clients(chosen: Any) -> None:
    engine, plan, notes = chosen("stacked", clients_at_once=4)
    assert isinstance(engine, Stacked) and engine.at_once == plan.at_once == 4 and notes == []


@pytest.mark.fast
def test_what_cannot_be_stacked_trains_side_by_side_and_says_so(
    chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "why_not_stacked", lambda _: "it branches")
    engine, plan, notes = chosen("stacked")
    assert isinstance(engine, Threads) and plan.engine == "concurrent"
    assert notes == ["engine='stacked' cannot train Frozen (it branches); engine='concurrent' does"]


KEEPS = Reason("it counts", keeps=True)
GPU = SimpleNamespace(device=torch.device("cuda"), nbytes=8)


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


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_an_engine_asked_for_is_the_plan(engine: str) -> None:
    def planned(seen: FirstSteps) -> Decision:
        return choice.planned(copies(engine), seen)

    threads = torch.get_num_threads()
    assert planned(FirstSteps()) == Decision(
        EnginePlan(engine, "asked for", threads=threads, as_buffers=("frozen",))
    )
    assert planned(FirstSteps(KEEPS)).one_by_one == KEEPS
    assert planned(FirstSteps(untried="a step before round 0 fails")).one_by_one is None
    assert planned(FirstSteps(untried="it cannot be copied")).one_by_one == Reason(
        "it cannot be copied"
    )
    assert planned(FirstSteps(KEEPS, untried="it cannot be copied")).one_by_one == KEEPS


def built(
    name: str, copies: Any, alone: Reason | None = None, note: Any = pytest.fail
) -> tuple[Any, EnginePlan]:
    """What an engine that was asked for makes of its plan."""
    plan = EnginePlan(name, "asked for")
    return registry.ENGINES[name].build(
        registry.BuildRequest(copies, plan, alone, True, note, pytest.fail)
    )


def test_every_engine_may_be_asked_for_and_a_checkpoint_may_name_its_plan() -> None:
    for name, kind in registry.ENGINES.items():
        assert kind.name == federated(engine=name).settings.engine == name
        plan = EnginePlan(kind.planned_as)
        assert EnginePlan.from_dict(plan.as_dict()) == replace(plan, why=AS_BEFORE)


@pytest.mark.fast
def test_stacks_hold_a_gigabyte_or_the_rounds_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "why_not_stacked", lambda _: "")
    monkeypatch.setattr(fast, "Stacked", lambda *_: None)
    monkeypatch.setattr(registry, "tried_apart", lambda _: nullcontext())

    def size(nbytes: int, **given: Any) -> int:
        w = SimpleNamespace(device=torch.device("cpu"), nbytes=nbytes)
        _, plan = built("stacked", copies(w=w, **given))
        assert (plan.engine, plan.threads) == ("stacked", torch.get_num_threads())
        return plan.at_once

    assert [size(2**30 // 24), size(2**30), size(8), size(8, clients_at_once=2)] == [3, 1, 4, 2]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("w", "alone", "compared", "instead"),
    [
        (torch.zeros(4), None, None, "concurrent"),
        (GPU, None, None, "concurrent"),
        (torch.zeros(4), KEEPS, None, "sequential"),
        (torch.zeros(4), None, KEEPS, "sequential"),
        (torch.zeros(4, device="meta"), None, None, "sequential"),
    ],
)
def test_what_cannot_be_stacked_takes_the_next_best(
    monkeypatch: pytest.MonkeyPatch, w: Any, alone: Any, compared: Any, instead: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr(registry, "tried_apart", lambda _: nullcontext())
    monkeypatch.setattr(registry, "compare_two_copies", lambda _: compared)
    monkeypatch.setattr(fast, "why_not_stacked", lambda _: "it branches")
    for kind in (registry.SequentialBuilder, registry.ConcurrentBuilder):
        monkeypatch.setattr(kind, "build", lambda _, request: (None, request.plan))
    _, plan = built("stacked", copies(w=w), alone, said.append)
    assert plan.engine == instead and plan.why == "it cannot be stacked: it branches"
    assert said == [f"engine='stacked' cannot train Linear (it branches); engine='{instead}' does"]


def test_side_by_side_is_refused_on_other_devices() -> None:
    other = copies("concurrent", w=torch.zeros(4, device="meta")).context
    with pytest.raises(UserError, match="engine='concurrent' on meta"):
        choice.choose(other, None, pytest.fail, pytest.fail)


@pytest.mark.parametrize(("alone", "way_out"), [(KEEPS, True), (Reason("it draws"), False)])
def test_what_stands_against_side_by_side_is_refused_with_a_way_out(
    alone: Reason, way_out: bool
) -> None:
    with pytest.raises(UserError, match=r"engine='concurrent' cannot train Linear") as caught:
        built("concurrent", copies(), alone)
    assert ("keep such state in a buffer" in str(caught.value)) == way_out


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
    monkeypatch.setattr(choice, "check_batch_sizes", lambda *_: "")  # has tests of its own
    assert choice.decided(copies(rank=1, broadcast=lambda _: of_others), ()) == of_others
    first = copies("sequential")
    first.treat_as_buffers = known.append
    assert choice.decided(first, ("a",)).plan.engine == "sequential"
    assert known == [("a",)]


class Looking:
    """A callback that is called with each batch."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen = [0]
        self.lock = threading.Lock()  # cannot be copied


def test_trying_leaves_nothing_behind_on_generators_and_callbacks() -> None:
    callback = Looking()
    before = dict(vars(callback))
    drawn: list[tuple[float, float]] = []

    def draws() -> tuple[float, float]:
        return float(torch.rand(())), random.random()

    context = copies(looking=(callback,)).context
    for _ in range(2):
        with tried_apart(context):
            drawn.append(draws())
            callback.calls += 1
            callback.seen.append(1)
            callback.new = 1  # type: ignore[attr-defined]
        assert vars(callback) == before and callback.seen == [0]
    assert drawn[0] == drawn[1] == draws()
