"""Every packaged callback on a make-believe GPU, and what else a run may have there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import callbacks as c
from fl_lightning.callback import FederatedCallback
from fl_lightning.errors import UserError
from fl_lightning.lab.contracts.federation import (
    Learner,
    Outcome,
    fit,
    outcome,
    quiet,
    require_same,
)
from tests.contracts.test_contracts import OURS
from tests.engines.test_gpu import ENGINES, ON_GPU, SIDE_BY_SIDE, Measured, in_two, on_cpu, on_gpu
from tests.helpers.fake_gpu import fake_gpu

pytestmark = pytest.mark.slow
SGD, Adam = torch.optim.SGD, torch.optim.Adam
KEPT = {"client_optimizer": lambda p: SGD(p, lr=0.05, momentum=0.9), "keep_optimizer_state": True}
# Its noise is not drawn from the run's seed, unless it has one of its own.
NOISY = {
    "DifferentialPrivacy": lambda: c.DifferentialPrivacy(0.5, noise_multiplier=4.0, noise_seed=0),
    "DP, adaptive": lambda: c.DifferentialPrivacy(
        0.5, noise_multiplier=4.0, target_quantile=0.5, count_stddev=5.0, noise_seed=0
    ),
}
CALLBACKS: dict[str, Callable[[], FederatedCallback]] = {**OURS, **NOISY}
# Variants of a callback differ in little that concerns a device.
PACKAGED = [name for name in CALLBACKS if name in c.__all__]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": KEPT,
    "Adam": {"client_optimizer": lambda p: Adam(p, lr=0.01)},
    "accumulation, clip, weights": {"accumulate": 2, "clip_norm": 0.5, "weighting": "samples"},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", PACKAGED)
def test_a_callback_has_the_bits_of_the_cpu(name: str, settings: str) -> None:
    """In the sequential engine, and beside each other, where no client reads what is not there."""
    given = {"local_steps": 2, **SETTINGS[settings]}
    try:
        there = on_cpu([CALLBACKS[name]()], **given)
    except (UserError, ValueError) as refused:
        with pytest.raises(type(refused)):
            on_gpu([CALLBACKS[name]()], **given)
        return
    for engine in ENGINES:
        more = {"engine": engine} if engine == "sequential" else {**SIDE_BY_SIDE, "capture": False}
        here, gpu, _ = on_gpu([CALLBACKS[name]()], **given, **more)
        require_same(here, there, 0.0, engine, "")
        assert not gpu.races


@pytest.mark.parametrize("name", CALLBACKS)
def test_recorded_steps_of_a_callback_wait_for_what_they_read(name: str) -> None:
    there = on_cpu([CALLBACKS[name]()])
    here, gpu, module = on_gpu([CALLBACKS[name]()], **SIDE_BY_SIDE)
    require_same(here, there, 0.0, name, "")
    assert not gpu.races
    assert (module.engine_facts["capture"] == "yes") == (gpu.graphs > 2), module.engine_facts


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adadelta, torch.optim.Rprop])
def test_recorded_steps_of_other_optimizers(kind: Any) -> None:
    given = {"client_optimizer": lambda p: kind(p, lr=0.01), "keep_optimizer_state": True}
    here, gpu, module = on_gpu([], **given, **SIDE_BY_SIDE)
    require_same(here, on_cpu([], **given), 0.0, "", "")
    assert module.engine_facts["capture"] == "yes" and gpu.graphs == 7


@pytest.mark.parametrize("kind", ["Adagrad", "NAdam", "RAdam", "ASGD", "Adamax"])
def test_a_step_count_on_the_cpu_is_not_recorded(kind: str) -> None:
    """A replay would not count."""
    made = getattr(torch.optim, kind)
    given = {"client_optimizer": lambda p: made(p, lr=0.01), "keep_optimizer_state": True}
    here, _, module = on_gpu([], **given, **SIDE_BY_SIDE)
    require_same(here, on_cpu([], **given), 0.0, "", "")
    assert module.engine_facts["capture"].startswith("no: ")


LOGGERS = [name for name in OURS if name.endswith("Logger")]
TOGETHER: dict[str, Callable[[], list[FederatedCallback]]] = {
    "FedSMOO": lambda: [c.GlobalSharpnessAwareMinimization()],
    "FedInit": lambda: [c.RelaxedInitialization(average="updates")],
    "Ditto": lambda: [c.ProximalPersonalModel(), c.PerClientEvaluation()],
    "loggers": lambda: [CALLBACKS[name]() for name in LOGGERS],
    "DP": lambda: [NOISY["DifferentialPrivacy"]()],
}


@pytest.mark.parametrize("name", TOGETHER)
def test_two_processes_have_the_sums_of_one(name: str) -> None:
    with quiet():
        one = outcome(fit(TOGETHER[name](), rounds=2))
        require_same(in_two(TOGETHER[name]), one, 0.0, name, "")


class Normed(Learner):
    """With batch normalisation, whose statistics its steps change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        norm = self.norm if len(x) > 1 else nn.Identity()
        return super().training_step((norm(x), y), batch_idx)


class Drawing(Learner):
    """Draws random numbers in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((nn.functional.dropout(x, 0.5), y), batch_idx)


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "auto"])
@pytest.mark.parametrize("learner", [Measured, Normed, Drawing])
def test_learners_that_log_draw_or_have_statistics(learner: type[Learner], engine: str) -> None:
    if learner is Drawing and engine == "concurrent":
        return  # refused: streams would share the GPU's generator
    how = ENGINES.get(engine, {"engine": engine})
    given = {"client_optimizer": lambda p: SGD(p, lr=0.05), "participation": 4}
    there = on_cpu([], learner=learner(), **given)
    here, gpu, module = on_gpu([], learner=learner(), **given, **how)
    require_same(here, there, 0.0, engine, "")
    assert not gpu.races
    if learner is Drawing and engine == "auto":
        assert module.engine_facts["engine"] == "sequential"


VALIDATED = {"limit_val_batches": 1.0, "num_sanity_val_steps": 0}


@pytest.mark.parametrize("world", [1, 2])
def test_validation_and_clients_own_models(world: int) -> None:
    """Means of validation agree up to rounding, as the docs promise."""

    def made() -> list[FederatedCallback]:
        return [c.ProximalPersonalModel(), c.PerClientEvaluation()]

    there = on_cpu(made(), trainer=VALIDATED, local_steps=3)
    assert {"log val/loss", "log val/acc"} <= there.keys()
    if world == 1:
        here = on_gpu(made(), trainer=VALIDATED, local_steps=3)[0]
    else:
        with quiet():
            here = in_two(made, trainer=VALIDATED, local_steps=3)
    means = {name for name in there if name.startswith("log val/")}
    require_same({n: here[n] for n in means}, {n: there[n] for n in means}, 1e-12, "means", "")
    rest = there.keys() - means
    require_same({n: here[n] for n in rest}, {n: there[n] for n in rest}, 0.0, "bits", "")


def half(folder: Path, gpu: bool, resume: bool, **settings: Any) -> Outcome:
    """The first round of a run with kept Adam and SCAFFOLD, or its other rounds."""
    given: dict[str, Any] = {"folder": str(folder), "resume": resume, "rounds": 3 if resume else 1}
    given |= {"client_optimizer": lambda p: Adam(p, lr=0.01), "keep_optimizer_state": True}
    with quiet():
        if not gpu:
            return outcome(fit([c.GlobalSharpnessAwareMinimization()], **given, **settings))
        with fake_gpu():
            trainer = {"trainer": ON_GPU}
            return outcome(fit([c.GlobalSharpnessAwareMinimization()], **given, **trainer))


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_run_resumes_on_another_device(tmp_path: Path, before: bool, after: bool) -> None:
    half(tmp_path / "whole", False, False)
    whole = half(tmp_path / "whole", False, True)
    half(tmp_path / "moved", before, False)
    require_same(half(tmp_path / "moved", after, True), whole, 0.0, "resumed", "")


class Single(Learner):
    """In single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0].float(), batch[1]), batch_idx)


@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "FedProto"])
def test_half_precision(name: str) -> None:
    """The make-believe GPU computes as a CPU does; that no part mixes devices is what shows."""
    made = {"FedAvg": list, "SCAFFOLD": lambda: [c.ControlVariates()]}.get(
        name, lambda: [OURS["PrototypePull"]()]
    )
    mixed = {"precision": "bf16-mixed"}
    results = []
    for engine in ENGINES:
        here, gpu, _ = on_gpu(made(), trainer=mixed, learner=Single(), **ENGINES[engine])
        assert not gpu.races
        results.append(here)
    require_same(*results, 0.0, "engines", "")
