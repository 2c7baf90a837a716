"""Every packaged method, every callback and every composition that the oracle knows, with all three
engines.

Clients of unequal size, so of unequal numbers of steps and with short last batches; weight decay,
decaying rate.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import callbacks as c
from fl_lightning.callback import FederatedCallback
from fl_lightning.errors import UserError
from fl_lightning.lab.cli.classes import full_paths
from fl_lightning.lab.cli.compose import merge, packaged, read
from fl_lightning.optim import FedAdam
from tests.helpers.agreement import (
    CLIPPED,
    SINGLE,
    Case,
    EveryHook,
    Logged,
    Run,
    near,
    same_bits,
    trained,
)
from tests.helpers.compositions import METHODS, methods, server, settings
from tests.helpers.low_rank import Adapted


def built(tree: Any) -> Any:
    """What a config's ``class_path`` stands for; of an optimizer: what makes it."""
    if not isinstance(tree, dict) or "class_path" not in tree:
        return tree
    module, _, name = tree["class_path"].rpartition(".")
    made = getattr(importlib.import_module(module), name)
    arguments = {key: built(value) for key, value in tree.get("init_args", {}).items()}
    if issubclass(made, torch.optim.Optimizer):
        return lambda parameters: made(parameters, **arguments)
    return made(**arguments)


def config(name: str) -> Case:
    """A packaged config; what adds to another method, beside SCAFFOLD."""
    given = read(name)
    given = full_paths(merge(read("method/scaffold"), given) if "method+" in given else given)
    # As few as it takes.
    more: dict[str, Any] = {"participation": 5} if "krum" in name else {}
    if name in ("method/diloco", "method/muloco"):
        more = {"local_steps": 3}
    for method in given["method"]:
        arguments = method.get("init_args", {})
        if "noise_seed" in arguments:
            arguments["noise_seed"] = 0  # else each run has noise of its own
        # What fits this federation of six clients, and its network.
        fitting = {"count_stddev": 1.0, "features": 4}
        arguments |= {key: value for key, value in fitting.items() if key in arguments}
        if arguments.get("rule") == "bulyan":
            arguments["byzantine"] = 0
    return [built(method) for method in given["method"]], {
        **{k: built(v) for k, v in given.get("model", {}).items() if v is not None},
        **more,
    }


def composition(name: str) -> Case:
    of = settings("uniform", **METHODS[name])
    return methods(of), {
        "server_optimizer": server(of),
        "momentum": of.momentum,
        "keep_optimizer_state": of.keep_momentum,
    }


def every_hook() -> list[Any]:
    return [
        c.RelaxedInitialization(0.1),
        c.ControlVariates(),
        c.PartialAveraging({"net.0.*": 3}),
        EveryHook(),
    ]


# need norms, held-out samples, nothing clipped, devices, language models: in tests of their own
ELSEWHERE = (
    "method/fedbuff",
    "method/fedasync",
    "method/fedbn",
    "PerClientEvaluation",
    "ExactMatch",
    "MultipleChoice",
    "method/scaffnew",
    "RandomSkips",
)
PACKAGED = [name for name in packaged() if name.startswith("method/") and name not in ELSEWHERE]
IN_CONFIGS = {type(method).__name__ for name in PACKAGED for method in config(name)[0]}
OTHERS = [
    method
    for method in map(vars(c).get, c.__all__)
    if issubclass(method, FederatedCallback) and method.__name__ not in {*IN_CONFIGS, *ELSEWHERE}
]
CASES: dict[str, Callable[[], Case]] = {
    **{name: (lambda name=name: config(name)) for name in PACKAGED},
    **{method.__name__: (lambda method=method: ([method()], {})) for method in OTHERS},
    "HessianLogger": lambda: ([c.HessianLogger(probes=3)], {}),
}


# Methods of other learners than those for adapters, with which they run here.
FOR_ADAPTERS = ("method/fedit", "method/fedsa_lora")


def learners(name: str, plain: type[Logged]) -> dict[str, Any]:
    """The learner of a case: one with adapters where the method is for these."""
    adapted = name in FOR_ADAPTERS or any(each.needs_adapters for each in CASES[name]()[0])
    if not adapted:
        return {} if plain is Logged else {"learner": plain}
    return {"learner": DrawingAdapted if plain is Drawing else LoggedAdapted}


class LoggedAdapted(Adapted):
    """Logs its loss at each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        return loss


class DrawingAdapted(LoggedAdapted):
    """Draws a random number in each step, so that it trains in processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.rand(()).double())


def stacks(run: Run, case: Case) -> bool:
    """Whether the clients were stacked; state of the clients' own optimizers cannot be."""
    if run.module.engine_facts["engine"] == "stacked":
        return True
    assert (
        case[1].get("keep_optimizer_state")
        and "keep_optimizer_state" in run.module.engine_facts["why"]
    )
    return False


def refused(case: Case) -> bool:
    """Whether stacking is refused: of methods that look at one client's modules."""
    if not any(getattr(method, "taps", None) for method in case[0]):
        return False
    with pytest.raises(UserError, match="stacked"):
        trained(case, "stacked")
    return True


@pytest.mark.fast
@pytest.mark.parametrize("name", CASES)
def test_packaged_methods_with_clipping(name: str) -> None:
    """Four clients by three workers; stacked, three and then one, and all at once.

    Without clipping the contracts have it.
    """
    make = CASES[name]
    given = {**CLIPPED, **learners(name, Logged)}
    reference = trained(make(), "sequential", **given)
    run = trained(make(), "concurrent", workers=3, **given)
    assert run.module.engine_facts["workers"] == "3"
    same_bits(run, reference)
    if refused(make()):
        return
    for at_once in (3, "auto"):
        run = trained(make(), "stacked", clients_at_once=at_once, **given)
        assert stacks(run, make()) or "adamw" in name or name == "method/diloco"
        near(run, reference)
    single = {"dtype": torch.float32, **given}
    # Orthogonal matrices of gradients that are almost of lower rank magnify their rounding.
    tolerance = 1000 * SINGLE if "muon" in name or "muloco" in name else SINGLE
    near(trained(make(), "stacked", **single), trained(make(), "sequential", **single), tolerance)


class Drawing(Logged):
    """Draws a random number in each step, so that it trains in processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.rand(()).double())


# What a worker hands over is known by its kind, and these have every kind: rows, uploads, parts,
# what is coded, measured, broadcast and chosen, states of optimizers, a loss that looks, a base.
IN_PROCESSES = [
    f"method/{name}"
    for name in (
        *("fedavg", "scaffold", "fedinit", "fedsmoo", "fedals", "fedrep", "ditto", "ifca", "moon"),
        *("topk", "powersgd", "qsgd", "ef21", "median", "byzantine", "dp", "qfedavg", "fedspeed"),
        *("fedadamw", "fedmuon", "fedswa", "fedacg", "kept_adamw", "power_of_choice", "flora"),
    )
]


@pytest.mark.parametrize("name", IN_PROCESSES)
def test_packaged_methods_in_worker_processes(name: str) -> None:
    given = learners(name, Drawing)
    reference = trained(CASES[name](), "sequential", **given)
    run = trained(CASES[name](), "concurrent", workers=2, **given)
    assert run.module.engine_facts["workers"] == "2 processes"
    assert not any("in the run's own process" in note for note in run.module.notes)
    same_bits(run, reference)


@pytest.mark.fast
@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["every hook", "FedSMOO + RI", "all that mix"])
def test_any_number_of_workers_or_of_clients_at_once(name: str, number: int) -> None:
    def make() -> Case:
        return (every_hook(), {}) if name == "every hook" else composition(name)

    reference = trained(make(), "sequential", **CLIPPED)
    run = trained(make(), "concurrent", workers=number, **CLIPPED)
    assert run.module.engine_facts["workers"] == str(number)
    same_bits(run, reference)
    run = trained(make(), "stacked", clients_at_once=number, **CLIPPED)
    assert stacks(run, make())
    near(run, reference)


@pytest.mark.fast
@pytest.mark.parametrize("name", [name for name, parts in METHODS.items() if len(parts) > 1])
def test_compositions(name: str) -> None:
    """Four rounds, so that parts with a period of three are kept, averaged, and kept again.

    Of methods by themselves the packaged ones and the contracts have it.
    """
    reference = trained(composition(name), "sequential", rounds=4, **CLIPPED)
    same_bits(trained(composition(name), "concurrent", rounds=4, workers=2, **CLIPPED), reference)
    if refused(composition(name)):
        return
    run = trained(composition(name), "stacked", rounds=4, clients_at_once=3, **CLIPPED)
    near(run, reference) if stacks(run, composition(name)) else same_bits(run, reference)


@pytest.mark.parametrize(
    ("first", "then"),
    [("sequential", "concurrent"), ("concurrent", "stacked"), ("stacked", "sequential")],
)
def test_a_run_goes_on_with_another_engine(
    first: str, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where rows of clients are kept

    def part(engine: str, rounds: int, start: Path | None = None) -> Run:
        return trained(
            (every_hook(), {"server_optimizer": adam}),
            engine,
            rounds=rounds,
            start=start,
            participation="all",
            **CLIPPED,
        )

    def adam(parameters: Any) -> FedAdam:
        return FedAdam(parameters, 0.1)

    whole = part(first, 4)
    part(first, 2).trainer.save_checkpoint("middle.ckpt")
    run = part(then, 4, Path("middle.ckpt"))
    assert run.module.engine_facts["engine"] == then
    (near if "stacked" in (first, then) else same_bits)(run, whole, last=2)
