"""The table of ``auto``: each row, with what is found out given; and what a reader sees of it."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.engines import auto, choice
from fl_lightning.engines.auto import TABLE
from fl_lightning.engines.trials.trial_steps import FirstSteps, Reason
from tests.helpers.learners import Lit, Normed, blobs, federated, trainer

KEEPS = Reason("it counts", keeps=True)
DRAWS = Reason("it draws", draws=True)
GPU = {"w": SimpleNamespace(device=torch.device("cuda"), nbytes=8)}
OTHER = {"w": torch.zeros(4, device="meta")}
DOCS = Path(__file__).parents[2] / "docs" / "engines.md"


def decided(
    monkeypatch: pytest.MonkeyPatch, first: FirstSteps | None = None, **given: Any
) -> tuple[int, Any, Any]:
    """The number of the row that applied, from 1, the plan, and why clients train in order. Four
    clients at once on four cores take five steps of 10 ms, and nothing stands against side by side,
    unless ``given``."""
    known = {"seconds": 0.01, "uncaptured": "", "one_by_one": None, "not_forked": "", **given}
    for name, value in (
        ("step_seconds", known.pop("seconds")),
        ("what_clients_share", known.pop("one_by_one")),
        ("why_not_captured", known.pop("uncaptured")),
        ("why_not_forked", known.pop("not_forked")),
    ):
        monkeypatch.setattr(auto, name, lambda *_, value=value, **__: value)
    steps = known.pop("steps", 5)
    context = {
        "workers": "auto",
        "w": torch.zeros(4),
        "usable_cores": 4,
        "most_at_once": 4,
        "lengths": lambda: [steps],
        "work": SimpleNamespace(methods=SimpleNamespace(look="")),
        **known,
    }
    copies: Any = SimpleNamespace(context=SimpleNamespace(**context))
    plan, alone = auto.decide(copies, first or FirstSteps())
    (row,) = [row for row in TABLE if plan.why.startswith(f"{row.when}: ")]
    assert plan.engine == row.engine
    assert plan.threads == (torch.get_num_threads() if row.threads == "all" else 1)
    return TABLE.index(row) + 1, plan, alone


@pytest.mark.parametrize(
    ("row", "first", "given"),
    [
        (1, None, OTHER),
        (2, None, {"most_at_once": 1}),
        (2, None, {"most_at_once": 1, "workers": 2}),
        (3, FirstSteps(KEEPS, untried="it cannot be copied"), {}),
        (4, FirstSteps(KEEPS), {}),
        # A short round is no reason where there is a better one.
        (5, None, {"one_by_one": KEEPS, "seconds": 0.0}),
        (5, FirstSteps(DRAWS), {"one_by_one": KEEPS}),
        (6, FirstSteps(DRAWS), {"one_by_one": DRAWS, "not_forked": "a file is open"}),
        (7, FirstSteps(DRAWS), {"one_by_one": DRAWS, "seconds": 0.0399}),
        (7, FirstSteps(DRAWS), {"one_by_one": DRAWS, "seconds": 1.0, "workers": 1}),
        (8, FirstSteps(DRAWS), {"one_by_one": DRAWS, "seconds": 0.0401}),
        # Streams also for one client and short steps.
        (9, None, {**GPU, "most_at_once": 1, "seconds": 0.0}),
        (10, None, {"seconds": 0.0039}),
        (11, None, {"usable_cores": 1}),
        (11, None, {"usable_cores": 1, "most_at_once": 1}),
        (11, None, {"workers": 1}),
        (12, None, {"uncaptured": "it branches", "seconds": 0.0019, "steps": 106}),
        (13, None, {"uncaptured": "it branches", "seconds": 0.0019, "steps": 100}),
        (
            13,
            None,
            {"uncaptured": "x", "seconds": 0.0019, "steps": 106, "not_forked": "a file is open"},
        ),
        (14, None, {"seconds": 0.0041}),
        (15, None, {"uncaptured": "it branches", "seconds": 0.0021, "steps": 100}),
    ],
)
def test_the_row_that_holds(
    monkeypatch: pytest.MonkeyPatch, row: int, first: Any, given: dict[str, Any]
) -> None:
    found, plan, alone = decided(monkeypatch, first, **given)
    assert found == row
    reason = None if first is None or first.untried else first.one_by_one
    assert alone == (reason or given.get("one_by_one"))
    if plan.engine == "concurrent":
        wanted = given.get("workers", given.get("usable_cores", 4))
        assert plan.workers == (0 if given.get("w") is GPU["w"] else wanted)
        assert plan.processes == (row in (8, 12))
        assert plan.captured == (not plan.processes and not given.get("uncaptured"))


def test_as_many_workers_as_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan, _ = decided(monkeypatch, most_at_once=2)
    assert plan.workers == 2 and "10 ms" in plan.why


def test_what_fails_in_a_trial_is_left_to_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: Any = SimpleNamespace(
        context=SimpleNamespace(
            workers="auto",
            w=torch.zeros(4),
            usable_cores=4,
            most_at_once=4,
            work=SimpleNamespace(methods=SimpleNamespace(look="")),
        )
    )
    monkeypatch.setattr(auto, "what_clients_share", lambda *_, **__: 1 / 0)
    plan, _ = auto.decide(copies, FirstSteps())
    assert plan.engine == "sequential" and "failed (ZeroDivisionError" in plan.why


def test_the_table_in_the_docs_is_the_table() -> None:
    text = DOCS.read_text("utf-8")
    for number, row in enumerate(TABLE, start=1):
        assert f"| {number} | {row.when} | `{row.engine}` | {row.threads} |" in text
    assert f"| {len(TABLE) + 1} |" not in text


class Waiting(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        end = time.thread_time() + 0.004
        while time.thread_time() < end:
            pass
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("short_steps")
def test_auto_takes_what_is_faster_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, tiny = federated(Waiting(), workers=2), federated(Lit(), workers=2)
    trainer(1).fit(slow, blobs())
    monkeypatch.setattr(auto, "TINY_SECONDS", math.inf)
    trainer(1).fit(tiny, blobs(clients=4))
    assert slow.engine_facts["engine"] == "concurrent" and slow.engine_facts["workers"] == "2"
    assert "a step is captured: it takes" in slow.engine_facts["why"]
    assert "concurrent × 2" in slow.describe()
    assert tiny.engine_facts["engine"] == "sequential"


def test_choosing_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "TINY_SECONDS", 0.0)
    torch.manual_seed(3)
    one = federated(Normed(), engine="sequential")
    torch.manual_seed(3)
    two = federated(Normed(), workers=2)
    for module in (one, two):
        trainer(2).fit(module, blobs())
    assert two.engine_facts["engine"] == "concurrent"
    assert torch.equal(one.global_vector, two.global_vector)
    assert torch.equal(one.learner.net[1].running_var, two.learner.net[1].running_var)


def test_a_resumed_run_goes_on_with_the_engine_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = federated(Waiting(), workers=2)
    run = trainer(1, default_root_dir=tmp_path, enable_checkpointing=True)
    run.fit(first, blobs())
    assert first.engine_facts["engine"] == "concurrent"
    monkeypatch.setattr(choice, "decided", lambda *_: pytest.fail("decided again"))
    callers: list[threading.Thread] = []
    monkeypatch.setattr(
        torch, "set_num_threads", lambda _: callers.append(threading.current_thread())
    )
    second = federated(Waiting())
    trainer(2, default_root_dir=tmp_path, enable_checkpointing=True).fit(
        second, blobs(), ckpt_path=run.checkpoint_callback.best_model_path
    )
    assert second.engine_facts["engine"] == "concurrent" and second.engine_facts["workers"] == "2"
    assert second.engine_facts["why"] == "as when the run began"
    # which would be left on the one thread of a worker
    assert threading.main_thread() not in callers


@pytest.mark.parametrize("first", [{"fast_dev_run": True}, {}])
def test_another_trainer_begins_another_run_and_decides_anew(first: dict[str, Any]) -> None:
    module = federated(Lit(), workers=2)
    trainer(1, **first).fit(module, blobs())
    drawing = blobs()
    drawing._transform = lambda x: x + 0.1 * torch.randn_like(x)
    trainer(1).fit(module, drawing)
    assert "draw random numbers" in module.engine_facts["why"]


def test_a_learner_that_cannot_be_copied_trains_one_client_after_the_other() -> None:
    class Locked(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.generator = (i for i in range(3))

    module = federated(Locked(), workers=2)
    trainer(1).fit(module, blobs())
    assert (
        module.engine_facts["engine"] == "sequential"
        and "cannot be copied" in module.engine_facts["why"]
    )


class Images(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Asked(Images):
    """Its images have to lie in channels-last memory in each local step, or must not."""

    wanted = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch[0].is_contiguous(memory_format=torch.channels_last) == self.wanted
        return super().training_step(batch, batch_idx)


class AskedAndPreferring(Asked):
    wanted = prefers_channels_last = True


@pytest.mark.parametrize("kind", [Asked, AskedAndPreferring])
def test_a_networks_preference_is_followed_by_every_engine_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: type[Asked]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 3, 8, 8, generator=generator)
    y = torch.randint(0, 4, (80,), generator=generator)
    clients = [range(8 * i, 8 * i + 8) for i in range(10)]
    monkeypatch.setattr(auto, "TINY_SECONDS", 0.0)
    models = []
    for engine in ("auto", "concurrent", "sequential"):
        torch.manual_seed(1)
        module = FederatedModule(kind(), participation=0.4, seed=1, workers=2, engine=engine)
        trainer(2).fit(module, InMemoryDataModule((x, y), clients=clients, batch_size=4))
        assert (module.engine_facts.get("memory") == "channels_last") == kind.wanted
        models.append(module.global_vector.detach().clone())
    assert torch.equal(models[0], models[1]) and torch.equal(models[0], models[2])
