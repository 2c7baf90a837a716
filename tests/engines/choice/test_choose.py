"""The engine that is built for a run's setting and plan, and what is said of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_lightning import run
from fl_lightning.callback import FederatedCallback
from fl_lightning.engines.choice import build, trial
from fl_lightning.engines.choice.plan import EnginePlan
from fl_lightning.engines.choice.workshop import Setting
from fl_lightning.engines.sequential import Sequential
from fl_lightning.engines.stacked import Stacked
from fl_lightning.engines.threads import Threads
from tests.helpers.learners import Lit, blobs, federated, trainer

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Frozen(Lit):
    """Has a parameter that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.nn.Parameter(torch.zeros(3), requires_grad=False)


def setting_of(engine: str, callbacks: Any = ()) -> Setting:
    """Of a real run, in which every client takes part."""
    seen: list[Setting] = []
    chosen = run.choose

    def choose(setting: Setting, *others: Any) -> Any:
        seen.append(setting)
        return chosen(setting, *others)

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
        made, plan = build.choose(
            replace(setting_of(engine, callbacks), **given), held, notes.append, pytest.fail
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
        "sequential", threads=1, server_threads=2, channels_last=True, written=("centre",)
    )
    engine, plan, notes = chosen("auto", held)
    assert isinstance(engine, Sequential) and notes == []
    assert torch.get_num_threads() == 2 and plan == held and images_of(engine.worker)
    assert "centre" in engine.worker.copy.buffers
    engine, plan, _ = chosen(
        "sequential", replace(held, server_threads=0, channels_last=False, written=())
    )
    assert (
        torch.get_num_threads() == 2 and plan.server_threads == 2 and not images_of(engine.worker)
    )
    assert "centre" not in engine.worker.copy.buffers


def test_a_run_that_asks_for_another_engine_than_its_checkpoint_gets_it(chosen: Any) -> None:
    held = EnginePlan("concurrent", workers=1, written=("centre",))
    engine, plan, _ = chosen("sequential", held)
    assert isinstance(engine, Sequential) and plan.why == "asked for"
    assert plan.written == ("centre",)  # what is known of the learner stays known


def test_side_by_side_by_name_is_not_proven_and_a_resumed_run_knows_it(chosen: Any) -> None:
    engine, plan, notes = chosen("concurrent")
    assert isinstance(engine, Threads) and len(notes) == 1 and "it is not proven" in notes[0]
    assert plan.workers == len(engine.workers) == min(CORES, 10) and isinstance(
        engine.learner, Frozen
    )
    for asked in ("concurrent", "auto"):
        engine, plan, notes = chosen(asked, EnginePlan("concurrent", workers=3))
        assert (
            isinstance(engine, Threads) and plan.workers == 3 and plan.threads == 1 and notes == []
        )


@pytest.mark.parametrize("capture", ["auto", True])
def test_who_asks_for_capturing_is_told_where_there_is_none(
    chosen: Any, monkeypatch: pytest.MonkeyPatch, capture: Any
) -> None:
    _, _, notes = chosen("sequential", capture=capture)
    assert [note.endswith("engine='concurrent' alone captures") for note in notes] == [True] * (
        capture is True
    )
    monkeypatch.setattr(trial, "why_not_captured", lambda _: "it branches")
    engine, plan, notes = chosen("concurrent", EnginePlan("concurrent", workers=1), capture=capture)
    assert notes == [build.NOT_CAPTURED + "it branches"] * (capture is True)
    assert (
        not plan.captured
        and plan.not_captured == "it branches"
        and engine.workers[0].recorder is None
    )


def test_steps_are_captured_as_they_were_tried(
    chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = EnginePlan("concurrent", workers=2)
    engine, plan, _ = chosen("auto", held)
    assert plan.captured and all(worker.recorder.shared for worker in engine.workers)
    monkeypatch.setattr(trial, "why_not_captured", lambda _: pytest.fail("tried again"))
    for known in (replace(held, captured=True), replace(held, not_captured="it branches")):
        engine, plan, _ = chosen("auto", known)
        assert [worker.recorder is not None for worker in engine.workers] == [known.captured] * 2
        assert (plan.captured, plan.not_captured) == (known.captured, known.not_captured)


def test_a_recording_with_steps_of_others_belongs_to_one_client(chosen: Any) -> None:
    class Foreign(FederatedCallback):
        def on_local_gradient(self, clients: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    engine, plan, _ = chosen("auto", EnginePlan("concurrent", workers=1), [Foreign()], capture=True)
    assert plan.captured and not engine.workers[0].recorder.shared


def test_no_more_workers_than_clients_in_a_round(chosen: Any) -> None:
    engine, plan, _ = chosen("concurrent", workers=30)
    assert plan.workers == len(engine.workers) == 10


def test_a_stack_of_clients(chosen: Any) -> None:
    engine, plan, notes = chosen("stacked", clients_at_once=4)
    assert isinstance(engine, Stacked) and engine.at_once == plan.at_once == 4 and notes == []


def test_what_cannot_be_stacked_trains_side_by_side_and_says_so(
    chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "why_not_stacked", lambda _: "it branches")
    engine, plan, notes = chosen("stacked")
    assert isinstance(engine, Threads) and plan.engine == "concurrent"
    assert notes == ["engine='stacked' cannot train Frozen (it branches); engine='concurrent' does"]
