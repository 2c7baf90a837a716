"""Each workload of ``benchmarks.speed``, made small, leaves one client's bits after the other's
in every way that a CPU has to train clients side by side."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.workloads import WORKLOADS, Learner, Workload, quiet_trainer
from fl_lightning import FederatedModule, callbacks
from tests.helpers.learners import client_rows
from tests.helpers.processes import launched

pytestmark = pytest.mark.slow

ROUNDS = 2
ENGINES: list[dict[str, Any]] = [
    {"engine": "auto", "workers": 2},
    {"engine": "concurrent", "workers": 2},
    {"engine": "concurrent", "workers": 3},
]


def small(name: str) -> Workload:
    """A few steps of a few clients, each with a short last batch where sizes differ."""
    work = WORKLOADS[name]
    size = min(work.batch_size, 8)
    clients = 4 if work.registered > work.clients or work.registered > 10 else 2
    return dataclasses.replace(
        work, samples=2 * size, batch_size=size, epochs=1, clients=clients, registered=2 * clients
    )


def trained(name: str, rounds: int = ROUNDS, resume: Path | None = None, **given: Any) -> Any:
    """The module and its Trainer after so many rounds; clients' threads are one."""
    engine = {key: given.pop(key) for key in ("engine", "workers", "capture") if key in given}
    work = small(name)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    learner = Learner(work.network(), work.optimizer)
    module = FederatedModule(
        learner, participation=work.clients, local_epochs=work.epochs, seed=1, **engine
    )
    methods = [getattr(callbacks, method)() for method in work.methods]
    run = quiet_trainer(rounds, methods, **given)
    run.fit(module, work.data(), ckpt_path=resume)
    return module, run


def left(module: FederatedModule) -> dict[str, Tensor]:
    rows = {f"row {key}": row for key, row in client_rows(module).items()}
    return {"w": module.global_vector.clone(), **rows, **dict(module.learner.named_buffers())}


def require_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# Between them: layers without and with state, dropout, a method's state, pictures that are drawn
# anew, frozen weights. The others have the same layers.
@pytest.mark.parametrize("name", ["W4-fedsmoo", "W6", "X6", "X8", "X9", "X12"])
def test_every_way_to_train_it_leaves_the_bits_of_one_client_after_the_other(
    name: str, tmp_path: Path
) -> None:
    expected = left(trained(name, engine="sequential")[0])
    used = set()
    for engine in ENGINES:
        module, _ = trained(name, **engine)
        assert module.engine_facts is not None
        used.add(str(module.engine_facts.get("workers")))  # none in one process on one thread
        require_same(left(module), expected)
    # What draws random numbers trains in processes, all else in threads.
    assert {"2 processes" if WORKLOADS[name].draws else "2"} <= used

    _, first = trained(name, 1, default_root_dir=tmp_path, enable_checkpointing=True, workers=2)
    first.save_checkpoint(tmp_path / "one.ckpt")
    resumed, _ = trained(name, resume=tmp_path / "one.ckpt", workers=3, default_root_dir=tmp_path)
    require_same(left(resumed), expected)

    require_same(left(trained(name, engine="concurrent", workers=2, capture=False)[0]), expected)

    assert launched(on_ranks, 2, name, tmp_path) == [0, 0]
    found = torch.load(tmp_path / "left.pt")
    # The other process has the rows of its own clients.
    require_same(found, {name: expected[name] for name in found})


def on_ranks(name: str, folder: Path, rank: int, world: int) -> None:
    given = {"strategy": "federated", "devices": world, "default_root_dir": folder}
    module, _ = trained(name, engine="concurrent", workers=2, **given)
    if rank == 0:
        torch.save(left(module), folder / "left.pt")
