"""What decides between the engines: each fact that it rests on, with what was measured given."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_lightning.engines.choice import build, trial
from fl_lightning.engines.choice.build import Decision
from fl_lightning.engines.choice.plan import EnginePlan
from fl_lightning.engines.choice.rehearsal import Obstacle, Rehearsal
from fl_lightning.errors import UserError

KEEPS = Obstacle("it counts", keeps=True)
GPU = SimpleNamespace(device=torch.device("cuda"), nbytes=8)


def workshop(engine: str = "auto", **given: Any) -> Any:
    """A workshop's setting, of four clients at once on four cores, as far as decisions look at
    it."""
    asked = {
        "engine": engine,
        "workers": "auto",
        "clients_at_once": "auto",
        "capture": "auto",
        "rank": 0,
    }
    of_run = {
        "w": torch.zeros(4),
        "usable_cores": 4,
        "most_at_once": 4,
        "most_beside": 4,
        "lengths": lambda: [2, 3],
        "looking": (),
        "prefers_channels_last": False,
    }
    parts = {"learner": torch.nn.Linear(2, 2), "work": SimpleNamespace(data=SimpleNamespace())}
    setting = SimpleNamespace(
        **{**asked, **of_run, **parts, "broadcast": lambda value: value, **given}
    )
    return SimpleNamespace(
        setting=setting, written=("frozen",), treat_as_buffers=lambda names: None
    )


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What was measured: by default nothing that speaks against side by side."""
    found = SimpleNamespace(once=0.05, quiet=0.05, uncaptured="", unproven=None, unstacked="")

    monkeypatch.setattr(trial, "one_step", lambda _: found.once)
    monkeypatch.setattr(trial, "step_when_quiet", lambda _: found.quiet)
    monkeypatch.setattr(trial, "why_not_captured", lambda _: found.uncaptured)
    monkeypatch.setattr(trial, "why_not_stacked", lambda _: found.unstacked)
    monkeypatch.setattr(trial, "replayed_seconds", lambda _: 1.0)
    monkeypatch.setattr(build, "unproven", lambda _: found.unproven)
    return found


def test_side_by_side_where_nothing_speaks_against_it(found: Any) -> None:
    plan, obstacle = build.measured(workshop(), Rehearsal())
    assert (plan.engine, plan.workers, plan.captured, plan.not_captured) == (
        "concurrent",
        4,
        True,
        "",
    )
    assert obstacle is None and "a local step takes 50 ms" in plan.why
    found.uncaptured = "it branches"
    plan, _ = build.measured(workshop(), Rehearsal())
    assert (plan.engine, plan.captured, plan.not_captured) == ("concurrent", False, "it branches")


@pytest.mark.parametrize(
    ("given", "workers"),
    [
        ({"most_at_once": 2}, 2),
        ({"workers": 3}, 3),
        ({"workers": 1}, 1),
        ({"usable_cores": 1}, 1),
        ({"usable_cores": 1, "most_at_once": 1}, 1),
    ],
)
def test_as_many_workers_as_asked_for_or_cores_or_clients(
    found: Any, given: dict[str, Any], workers: int
) -> None:
    plan, _ = build.measured(workshop(**given), Rehearsal())
    assert (plan.engine, plan.workers) == ("concurrent", workers)


@pytest.mark.parametrize("asked", ["auto", 2])
def test_one_client_on_several_cores_needs_none(found: Any, asked: Any) -> None:
    plan, obstacle = build.measured(workshop(workers=asked, most_at_once=1), Rehearsal(KEEPS))
    assert (plan.engine, plan.why, obstacle) == ("sequential", "one client for each process", KEEPS)


def test_other_devices_train_one_client_after_the_other(found: Any) -> None:
    plan, obstacle = build.measured(workshop(w=torch.zeros(4, device="meta")), Rehearsal(KEEPS))
    assert plan.engine == "sequential" and "CPUs and CUDA GPUs" in plan.why and obstacle == KEEPS


def test_a_gpu_takes_streams_also_for_one_client_and_short_steps(found: Any) -> None:
    found.quiet = 0.0
    plan, _ = build.measured(workshop(w=GPU, most_at_once=1), Rehearsal())
    assert (
        plan.engine == "concurrent"
        and "on a GPU clients train on streams" in plan.why
        and plan.captured
    )


def test_what_could_not_be_tried_or_is_not_proven_trains_one_by_one(found: Any) -> None:
    plan, obstacle = build.measured(workshop(), Rehearsal(KEEPS, untried="it cannot be copied"))
    assert (plan.engine, plan.why, obstacle) == ("sequential", "it cannot be copied", None)
    plan, obstacle = build.measured(workshop(), Rehearsal(KEEPS))
    assert (
        plan.engine == "sequential"
        and plan.why.startswith("it counts, so clients train")
        and obstacle == KEEPS
    )
    found.quiet = 0.0  # a short round is no reason where there is a better one
    assert build.measured(workshop(), Rehearsal(KEEPS))[1] == KEEPS
    found.quiet, found.unproven = 0.05, Obstacle("a client's end depends on its copy")
    plan, obstacle = build.measured(workshop(), Rehearsal())
    assert plan.engine == "sequential" and obstacle == found.unproven


def test_a_round_that_is_over_soon_is_not_worth_measuring(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "TINY_SECONDS", 10.0)
    found.quiet = 2.0  # of five steps, so just not too short
    assert build.measured(workshop(), Rehearsal())[0].engine == "concurrent"
    found.quiet = 1.9
    plan, _ = build.measured(workshop(), Rehearsal())
    assert plan.engine == "sequential" and "less than 10000 ms" in plan.why


def test_what_fails_while_it_is_measured_is_left_to_the_first_round(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "one_step", lambda _: 1 / 0)
    plan, _ = build.measured(workshop(), Rehearsal())
    assert plan.engine == "sequential" and "not measured (ZeroDivisionError" in plan.why


@pytest.mark.parametrize(
    ("workers", "reason", "quiet", "engine", "why"),
    [
        (1, "", 0.05, "concurrent", "one at a time"),
        (1, "it branches", 0.0, "concurrent", "one at a time"),
        (2, "", 0.0, "concurrent", "it is captured"),
        (2, "it branches", build.PYTHON_SECONDS, "concurrent", "a smaller part"),
        (
            2,
            "it branches",
            0.9 * build.PYTHON_SECONDS,
            "sequential",
            "would wait for Python's lock",
        ),
    ],
)
def test_a_cpu_trains_side_by_side_but_for_short_steps_of_python(
    found: Any, workers: int, reason: str, quiet: float, engine: str, why: str
) -> None:
    found.quiet = quiet
    plan = build.measured_on_cpu(workshop(), workers, reason)
    assert plan.engine == engine and why in plan.why
    assert engine == "sequential" or plan.workers == workers


def test_a_gpu_trains_on_streams(found: Any) -> None:
    plan = build.measured_on_gpu(workshop(w=GPU))
    assert plan.engine == "concurrent" and "1e+03 ms" in plan.why


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_an_engine_asked_for_is_the_plan(found: Any, engine: str) -> None:
    def planned(seen: Rehearsal) -> Decision:
        return build.planned(workshop(engine), seen)

    threads = torch.get_num_threads()
    assert planned(Rehearsal()) == Decision(
        EnginePlan(engine, "asked for", threads=threads, written=("frozen",))
    )
    assert planned(Rehearsal(KEEPS)).obstacle == KEEPS
    assert planned(Rehearsal(untried="a step before round 0 fails")).obstacle is None
    assert planned(Rehearsal(untried="it cannot be copied")).obstacle == Obstacle(
        "it cannot be copied"
    )
    assert planned(Rehearsal(KEEPS, untried="it cannot be copied")).obstacle == KEEPS


def test_auto_is_planned_by_what_was_measured(found: Any) -> None:
    decision = build.planned(workshop(), Rehearsal(untried="it cannot be copied"))
    assert (
        decision.plan.engine == "sequential"
        and decision.plan.written == ("frozen",)
        and decision.obstacle is None
    )


def test_stacks_hold_a_gigabyte_or_the_rounds_clients(found: Any) -> None:
    def size(nbytes: int, **given: Any) -> int:
        w = SimpleNamespace(device=torch.device("cpu"), nbytes=nbytes)
        plan = build.stackable(workshop(w=w, **given), EnginePlan("stacked"), None, pytest.fail)
        assert (plan.engine, plan.threads) == ("stacked", torch.get_num_threads())
        return plan.at_once

    assert [size(2**30 // 24), size(2**30), size(8), size(8, clients_at_once=2)] == [3, 1, 4, 2]


@pytest.mark.parametrize(
    ("w", "obstacle", "instead"),
    [
        (torch.zeros(4), None, "concurrent"),
        (GPU, None, "concurrent"),
        (torch.zeros(4), KEEPS, "sequential"),
        (torch.zeros(4, device="meta"), None, "sequential"),
    ],
)
def test_what_cannot_be_stacked_takes_the_next_best(
    found: Any, w: Any, obstacle: Any, instead: str
) -> None:
    said: list[str] = []
    found.unstacked = "it branches"
    plan = build.stackable(workshop(w=w), EnginePlan("stacked"), obstacle, said.append)
    assert plan.engine == instead and plan.why == "it cannot be stacked: it branches"
    assert said == [f"engine='stacked' cannot train Linear (it branches); engine='{instead}' does"]


def test_side_by_side_is_refused_on_other_devices() -> None:
    other = workshop(w=torch.zeros(4, device="meta"))
    with pytest.raises(UserError, match="engine='concurrent' on meta"):
        build.concurrent(other, EnginePlan("concurrent"), pytest.fail, pytest.fail)


@pytest.mark.parametrize(("obstacle", "way_out"), [(KEEPS, True), (Obstacle("it draws"), False)])
def test_what_stands_against_side_by_side_is_refused_with_a_way_out(
    obstacle: Obstacle, way_out: bool
) -> None:
    with pytest.raises(UserError, match=r"engine='concurrent' cannot train Linear") as caught:
        build.check_beside(workshop().setting, obstacle, pytest.fail)
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

    monkeypatch.setattr(build, "rehearse", fails)
    with pytest.raises(ValueError, match=text or None):
        build.decided(workshop(broadcast=tell), ())
    assert [d.failure for d in told] == [f"the first process could not start: {first}"]
    with pytest.raises(UserError, match="the first process could not start"):
        build.decided(workshop(rank=1, broadcast=lambda _: told[0]), ())


def test_what_the_first_process_found_holds_for_all(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_others, known = (
        Decision(EnginePlan("sequential", "as the first says")),
        list[tuple[str, ...]](),
    )
    monkeypatch.setattr(build, "rehearse", lambda _: Rehearsal(written=("b", "a")))
    monkeypatch.setattr(build, "check_batch_sizes", lambda *_: "")  # has tests of its own
    assert build.decided(workshop(rank=1, broadcast=lambda _: of_others), ()) == of_others
    first = workshop("sequential")
    first.treat_as_buffers = known.append
    assert build.decided(first, ("a",)).plan.engine == "sequential"
    assert known == [("a", "b")]


def test_trying_leaves_nothing_behind() -> None:
    class Counting(torch.nn.Linear):
        calls = 0

    learner, data = Counting(2, 2), SimpleNamespace(read=[0])
    setting = workshop(learner=learner, work=SimpleNamespace(data=data)).setting
    drawn: list[tuple[float, float]] = []

    def draws() -> tuple[float, float]:
        return float(torch.rand(())), random.random()

    for seen in (build.nothing_left(setting), build.nothing_left(setting)):
        with seen:
            drawn.append(draws())
            learner.calls = 7
            data.read.append(1)
        assert learner.calls == 0 and data.read == [0]
    assert drawn[0] == drawn[1] == draws()
