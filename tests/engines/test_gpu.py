"""Whole runs on a make-believe GPU: the CPU's bits, streams that wait, and no wait in a step."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from benchmarks.gpu_compositions import COMMON, COMPOSITIONS, CallbackList
from fl_lightning import FederatedCallback, FederatedStrategy
from fl_lightning import callbacks as c
from fl_lightning.callback import ClientState, Server
from fl_lightning.evaluation.evaluator import samples_of
from fl_lightning.lab.contracts.federation import (
    Learner,
    Outcome,
    fit,
    in_processes,
    outcome,
    quiet,
    require_same,
)
from tests.contracts.test_contracts import OURS
from tests.helpers.fake_gpu import fake_gpu
from tests.helpers.processes import nccl_over_gloo
from tests.tiers import CONTRACTS_OF

SGD, Adam = torch.optim.SGD, torch.optim.Adam
ON_GPU = {"accelerator": "gpu", "devices": 1}
SIDE_BY_SIDE: dict[str, Any] = {"engine": "concurrent", "capture": True, "workers": 2}
ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {"engine": "sequential"},
    "concurrent": SIDE_BY_SIDE,
}


def on_gpu(methods: list[Any], trainer: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Two rounds of nine steps per client on the make-believe GPU, and what happened on it."""
    settings = {**COMMON, **settings}
    with quiet(), fake_gpu() as gpu:
        module = fit(methods, trainer={**ON_GPU, **(trainer or {})}, **settings)
        return outcome(module), gpu, module


def on_cpu(methods: list[Any], **settings: Any) -> Outcome:
    with quiet():
        return outcome(fit(methods, **{**COMMON, **settings}))


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_run_has_the_bits_of_the_cpu(name: str) -> None:
    made, settings = COMPOSITIONS[name]
    there = on_cpu(made(), **settings)
    for engine, how in ENGINES.items():
        here, gpu, module = on_gpu(made(), **settings, **how)
        require_same(here, there, 0.0, engine, "")
        assert not gpu.races
        if engine == "concurrent":
            # every client in both rounds is recorded, as is one in the trial
            assert module.engine_facts["capture"] == "yes" and gpu.graphs == 7
            # a worker's recordings share their memory
            assert len(gpu.pools) == 3


def in_two(
    methods: CallbackList, trainer: dict[str, Any] | None = None, **settings: Any
) -> Outcome:
    """What is left of a run in two processes, each with a GPU."""
    both = {"accelerator": "gpu", "devices": 2, "strategy": "federated", **(trainer or {})}

    def job() -> Outcome:
        with fake_gpu(2), nccl_over_gloo():
            left = outcome(fit(methods(), trainer=both, rounds=2, **settings))
        # At a timeout NCCL would abort the process, before it names the one that was lost.
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
        return left

    return in_processes(2, job)


TOGETHER: dict[str, CallbackList] = {
    "FedAvg": lambda: [],
    "SCAFFOLD": lambda: [c.ControlVariates()],
    "FedALS": lambda: [c.PartialAveraging(periods={"first.*": 2, "head.bias": "never"})],
    "Krum": lambda: [c.RobustAggregation("krum", byzantine=0)],
}


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "nccl") for name in TOGETHER), ("FedALS", "gloo")]
)
def test_two_processes_have_the_sums_of_one(name: str, backend: str) -> None:
    by = {"strategy": FederatedStrategy(process_group_backend=backend)}
    with quiet():
        one = outcome(fit(TOGETHER[name](), rounds=2))
        require_same(in_two(TOGETHER[name], by), one, 0.0, name, "")


class Outside(Metric):
    """Counts its updates in an attribute that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = 0
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.updates += 1
        self.total += value

    def reset(self) -> None:
        super().reset()
        self.updates = 0

    def compute(self) -> Tensor:
        return self.total / max(1, self.updates)


class Measured(Learner):
    """Logs a number, a tensor, and a metric whose clients' values cannot be merged."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = Outside()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric(loss.detach())
        self.log("train/metric", self.metric)
        self.log("train/loss", loss)
        self.log("train/number", float(len(batch[0])))
        return loss


def test_metrics_of_two_processes_are_sent_from_the_cpu() -> None:
    with quiet():
        one = outcome(fit([], learner=Measured(), rounds=2))
        two = in_two(lambda: [], learner=Measured())
    assert "log train/metric" in one
    require_same(two, one, 1e-12, "two processes", "")


class Wide(Learner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        wide = batch[0].new_ones(1000, 1000) * self.head.bias.sum()
        return loss + 0 * wide.square().mean()


@pytest.mark.parametrize("engine", ["concurrent", "auto"])
@pytest.mark.parametrize("capture", [True, False])
def test_as_many_clients_train_beside_each_other_as_fit(engine: str, capture: bool) -> None:
    """A step takes 40 MB: `wide` has 8 MB, as have its factor, its square and two gradients."""
    if engine == "auto" and capture:
        return
    settings = {"engine": engine, "capture": "auto" if engine == "auto" else capture}
    with quiet(), fake_gpu(free=120 * 10**6):
        module = fit([], learner=Wide(), trainer=ON_GPU, rounds=1, participation=6, **settings)
        assert module.engine_facts["engine"] == "concurrent"
        assert module.engine_facts["workers"] == "2"  # 0.8 × 120 MB / 40 MB
    with quiet(), fake_gpu():
        module = fit([], trainer=ON_GPU, rounds=1, participation=6, **settings)
        assert module.engine_facts["workers"] == "6"


class Long(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(100_000, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.more.sum()


def test_rows_of_methods_and_states_of_optimizers_count() -> None:
    """A vector has 0.8 MB, and 48 MB are free."""
    found = []
    for methods, optimizer in (([], SGD), ([], Adam), ([c.ControlVariates()], SGD)):
        given = {"client_optimizer": lambda p, made=optimizer: made(p, lr=0.1)}
        with quiet(), fake_gpu(free=48 * 10**6):
            module = fit(
                methods,
                learner=Long(),
                trainer=ON_GPU,
                rounds=1,
                participation=6,
                engine="auto",
                **given,
            )
            found.append(int(module.engine_facts["workers"]))
    assert found[1] < found[0] < 6 and found[2] < found[0], found


class Logs(Learner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        self.log("train/number", 0.5)
        return loss


class Counts(Learner):
    """Says over how many samples its loss is a mean, as a Python number."""

    factor = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "count": self.factor * len(batch[0])}


IN_STEPS: dict[str, tuple[CallbackList, dict[str, Any]]] = {
    "logs": (lambda: [], {"learner": Logs}),
    "accumulated": (lambda: [], {"accumulate": 2, "learner": Logs}),
    "accumulated, with a count": (lambda: [], {"accumulate": 2, "learner": Counts}),
    "SCAFFOLD": (lambda: [c.ControlVariates()], {}),
    "HetLoRA": (lambda: [c.PaddedRanks()], {}),
    "kept Adam, not fused": (
        lambda: [],
        {
            "client_optimizer": lambda p: Adam(p, lr=0.01, foreach=False),
            "keep_optimizer_state": True,
            "rounds": 3,
        },
    ),
}


@pytest.mark.parametrize("name", IN_STEPS)
def test_no_step_waits_for_the_gpu(name: str) -> None:
    """Three times as many steps wait as often."""
    methods, settings = IN_STEPS[name]
    waits = []
    for steps in (4, 12):
        made = {**settings, "learner": settings["learner"]()} if "learner" in settings else {}
        given = {"rounds": 1, **settings, **made, "engine": "concurrent", "capture": False}
        waits.append(on_gpu(methods(), local_steps=steps, workers=2, **given)[1].syncs)
    assert waits[0] == waits[1]


def test_no_batch_of_an_evaluation_waits_for_the_gpu() -> None:
    """Eight batches wait as often as two: when their sums are read."""
    counts = []

    def measure(module: Any) -> None:
        evaluator = module.evaluator()
        batches = evaluator.shares(samples_of(module.trainer.datamodule), 4, keep=True)
        for some in (batches[:2], batches[:8]):
            before = gpu.syncs.total()
            evaluator.mean_of(module.evaluated_vector, some, gradient=True, step="validation_step")
            counts.append(gpu.syncs.total() - before)

    with quiet(), fake_gpu() as gpu:
        fit([], learner=Logs(), trainer=ON_GPU, rounds=1, ended=measure)
    assert counts[0] == counts[1] > 0


class Reads(Learner):
    """Reads a value in each step, or copies a number to the GPU, from a round on."""

    def __init__(self, read: Callable[[Tensor], Any], first: int) -> None:
        super().__init__()
        self.read = read
        self.first_round = first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.current_epoch >= self.first_round:
            self.read(loss.detach())
        return loss


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "if": lambda loss: bool(loss > 0),
    "to the GPU": lambda loss: torch.tensor(1.0, device=loss.device),
    "mask": lambda loss: loss.reshape(1)[loss.reshape(1) > 0],
}


@pytest.mark.parametrize(("read", "first"), [*((read, 0) for read in READS), ("item", 1)])
def test_a_step_that_reads_a_value_is_not_recorded(read: str, first: int) -> None:
    """It is refused before CUDA meets it: a failed capture would leave torch's allocator in it."""
    with quiet(), fake_gpu() as gpu:
        module = fit(
            [], learner=Reads(READS[read], first), trainer=ON_GPU, local_steps=9, **SIDE_BY_SIDE
        )
    assert not gpu.underway and not gpu.races
    facts = module.engine_facts["capture"]
    if first == 0:
        assert facts.startswith("no: a step "), facts
        assert gpu.graphs == 0


class Indexed(Learner):
    """Uses the number of its batch from round 1 on, which no recording can hold."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + batch_idx) if self.trainer.current_epoch else loss


def test_a_recording_that_fails_changes_nothing_that_others_read() -> None:
    here, gpu, _ = on_gpu([], learner=Indexed(), **SIDE_BY_SIDE)
    require_same(here, on_cpu([], learner=Indexed()), 0.0, "", "")
    assert not gpu.races


def test_no_pinned_memory_is_kept() -> None:
    with quiet(), fake_gpu() as gpu:
        module = fit([c.ControlVariates()], trainer=ON_GPU, rounds=2)
        store = module.client_rows.store
        for name in store.names():
            for client in store.clients(name):
                row = store.read(name, int(client))
                assert row is not None and row.untyped_storage()._cdata not in gpu.pinned
    assert store.names()


class ByClient(FederatedCallback):
    """Indexes what a round staged by the clients' numbers."""

    last = ClientState(synchronised=False)

    def on_local_end(self, clients: Any) -> None:
        self.last[clients] = clients.x

    def on_round_end(self, server: Server) -> None:
        table = server.w.new_zeros(server.num_clients, len(server.w))
        for ids, rows in self.last.staged(server):
            table[ids] = rows
        server.log("last", table.sum())


@pytest.mark.parametrize("engine", ENGINES)
def test_staged_rows_lie_with_the_clients_numbers(engine: str) -> None:
    here, _, _ = on_gpu([ByClient()], **ENGINES[engine])
    require_same(here, on_cpu([ByClient()]), 0.0, engine, "")


@pytest.mark.parametrize(("precision", "allowed"), [("highest", False), ("high", True)])
def test_convolutions_round_their_inputs_only_if_products_do(precision: str, allowed: bool) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with quiet(), fake_gpu():
            torch.backends.cudnn.allow_tf32 = True
            fit([], trainer=ON_GPU, rounds=1)
            assert torch.backends.cudnn.allow_tf32 is allowed
            # A process that only validates computes as the fit did.
            torch.backends.cudnn.allow_tf32 = True
            module = fit([], rounds=1)
            alone = pl.Trainer(**ON_GPU, logger=False, enable_progress_bar=False)
            alone.validate(module, module.trainer.datamodule, verbose=False)
            assert torch.backends.cudnn.allow_tf32 is allowed
    finally:
        torch.set_float32_matmul_precision(before)


# Its noise is not drawn from the run's seed, unless it has one of its own.
NOISY = {
    "DifferentialPrivacy": lambda: c.DifferentialPrivacy(0.5, noise_multiplier=4.0, noise_seed=0),
    "RecordPrivacy": lambda: c.RecordPrivacy(0.5, noise_multiplier=4.0, noise_seed=0),
    "DP, adaptive": lambda: c.DifferentialPrivacy(
        0.5, noise_multiplier=4.0, target_quantile=0.5, count_stddev=5.0, noise_seed=0
    ),
}
# Between them these have every hook of a local step and every kind of state that steps read.
CALLBACKS: dict[str, Callable[[], FederatedCallback]] = {
    **{name: OURS[name] for name in (*CONTRACTS_OF, "DecorrelatedFeatures", "SoapDirection")},
    **NOISY,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLBACKS)
def test_recorded_steps_of_a_callback_wait_for_what_they_read(name: str) -> None:
    there = on_cpu([CALLBACKS[name]()])
    here, gpu, module = on_gpu([CALLBACKS[name]()], **SIDE_BY_SIDE)
    require_same(here, there, 0.0, name, "")
    assert not gpu.races
    captured = module.engine_facts["capture"] == "yes"
    if CALLBACKS[name]().reads_values:
        assert not captured
    else:
        assert captured == (gpu.graphs > 2), module.engine_facts


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Rprop])
def test_recorded_steps_of_other_optimizers(kind: Any) -> None:
    given = {"client_optimizer": lambda p: kind(p, lr=0.01), "keep_optimizer_state": True}
    here, gpu, module = on_gpu([], **given, **SIDE_BY_SIDE)
    require_same(here, on_cpu([], **given), 0.0, "", "")
    assert module.engine_facts["capture"] == "yes" and gpu.graphs == 7


@pytest.mark.parametrize("kind", ["Adagrad", "NAdam"])
def test_a_step_count_on_the_cpu_is_not_recorded(kind: str) -> None:
    """A replay would not count."""
    made = getattr(torch.optim, kind)
    given = {"client_optimizer": lambda p: made(p, lr=0.01), "keep_optimizer_state": True}
    here, _, module = on_gpu([], **given, **SIDE_BY_SIDE)
    require_same(here, on_cpu([], **given), 0.0, "", "")
    assert module.engine_facts["capture"].startswith("no: ")
