"""Methods × engines × resume: the bits of sequential, or its values to rounding where clients are
stacked. Every packaged method and every composition that the oracle knows. Clients of unequal size,
so of unequal numbers of steps and with short last batches; weight decay, decaying rate, clipping.
(Other callbacks, threads, processes and resume of each method are in the contracts.)"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import callbacks as c
from fl_lightning import topologies
from fl_lightning.callback import FederatedCallback
from fl_lightning.callbacks.decentralised.without_server import WithoutServer
from fl_lightning.errors import UserError
from fl_lightning.lab.cli.classes import full_paths
from fl_lightning.lab.cli.compose import merge, packaged, read
from fl_lightning.models.multi_head import with_heads
from fl_lightning.optim import FedAdam
from tests.helpers.agreement import (
    CLIPPED,
    DOUBLE,
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
    if isinstance(tree, str) and isinstance(getattr(topologies, tree, None), type):
        return getattr(topologies, tree)()
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
    "method/scaffnew",
)
PACKAGED = [name for name in packaged() if name.startswith("method/") and name not in ELSEWHERE]
COMPOSED = [name for name, parts in METHODS.items() if len(parts) > 1]
CASES: dict[str, Callable[[], Case]] = {
    **{name: (lambda name=name: config(name)) for name in PACKAGED},
    **{name: (lambda name=name: composition(name)) for name in COMPOSED},
    "every hook": lambda: (every_hook(), {}),
}


# Methods of other learners than those for adapters, with which they run here.
FOR_ADAPTERS = ("method/fedit", "method/fedsa_lora")


class LoggedAdapted(Adapted):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        return loss


class WithHeads(Logged):
    """The network with RAVAN's heads."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.net = with_heads(self.net, rank=1, heads=2, target_modules="*")


class Drawing:
    """Draws a random number in each step, so that it trains in processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)  # type: ignore[misc]
        return loss * (1 + 0.1 * torch.rand(()).double())


def learner(name: str, draws: bool) -> Any:
    """The learner of a case: one with adapters where the method is for these."""
    kind: type = Logged
    if name == "method/ravan":
        kind = WithHeads
    elif name in FOR_ADAPTERS or any(getattr(m, "needs_adapters", False) for m in CASES[name]()[0]):
        kind = LoggedAdapted
    return type(f"Drawing{kind.__name__}", (Drawing, kind), {}) if draws else kind


def ran(name: str, engine: str, draws: bool = False, **options: Any) -> Run:
    # Four rounds, so that parts with a period of three are kept, averaged, and kept again.
    given = {"rounds": 4 if name in COMPOSED else 3, "learner": learner(name, draws), **CLIPPED}
    case = CASES[name]()
    if any(isinstance(method, WithoutServer) for method in case[0]):
        given["weighting"] = "uniform"
    return trained(case, engine, **{**given, **options})


@cache
def reference(name: str, draws: bool = False) -> Run:
    return ran(name, "sequential", draws)


# What a worker hands over is known by its kind, and these have every kind: rows, uploads, parts,
# what is coded, measured, broadcast and chosen, states of optimizers, a loss that looks, a base.
IN_PROCESSES = [
    f"method/{name}"
    for name in (
        *("fedavg", "scaffold", "fedinit", "fedsmoo", "fedals", "fedrep", "ditto", "ifca", "moon"),
        *("topk", "powersgd", "qsgd", "ef21", "median", "byzantine", "dp", "dp_sgd", "qfedavg"),
        "fedspeed",
        *("fedadamw", "fedmuon", "fedswa", "fedacg", "kept_adamw", "power_of_choice", "flora"),
    )
]


@pytest.mark.parametrize("name", [*IN_PROCESSES, "every hook", *COMPOSED[::4]])
def test_threads_leave_the_bits_of_sequential(name: str) -> None:
    """Four clients by three workers."""
    run = ran(name, "concurrent", workers=3)
    assert run.module.engine_facts["workers"] == "3"
    same_bits(run, reference(name))


@pytest.mark.parametrize("name", IN_PROCESSES)
def test_forked_processes_leave_the_bits_of_sequential(name: str) -> None:
    run = ran(name, "concurrent", draws=True, workers=2)
    assert run.module.engine_facts["workers"] == "2 processes"
    assert not any("in the run's own process" in note for note in run.module.notes)
    same_bits(run, reference(name, draws=True))


@pytest.mark.parametrize("name", CASES)
def test_stacked_clients_agree_with_sequential(name: str) -> None:
    """Three and then one. Methods that look at one client's modules, or take the gradients of
    single samples, are refused; states of the clients' own optimizers that are kept cannot be
    stacked."""
    callbacks, settings = CASES[name]()
    federated = [method for method in callbacks if isinstance(method, FederatedCallback)]
    if any(method.taps or method.has("scale_samples") for method in federated):
        with pytest.raises(UserError, match="stacked"):
            ran(name, "stacked")
        return
    # The eigenvectors of SOAP's moments amplify rounding, and differently on each processor.
    tolerance = 1e-7 if "soap" in name else DOUBLE
    run = ran(name, "stacked", clients_at_once=3)
    near(run, reference(name), tolerance)
    facts = run.module.engine_facts
    others = settings.get("keep_optimizer_state") or "adamw" in name or name == "method/diloco"
    assert facts["engine"] == "stacked" or (others and "cannot be stacked" in facts["why"])


@pytest.mark.parametrize("name", ["method/fedavg", "method/scaffold", "method/fedsmoo"])
def test_stacked_clients_agree_in_single_precision(name: str) -> None:
    single = {"dtype": torch.float32}
    near(ran(name, "stacked", **single), ran(name, "sequential", **single), SINGLE)


@pytest.mark.parametrize("number", [1, 2, "auto"])
@pytest.mark.parametrize("name", ["every hook", "all that mix"])
def test_any_number_of_workers_or_of_clients_at_once(name: str, number: Any) -> None:
    same_bits(ran(name, "concurrent", workers=number), reference(name))
    near(ran(name, "stacked", clients_at_once=number), reference(name))


@pytest.mark.parametrize(
    ("first", "then", "draws"),
    [
        ("sequential", "concurrent", False),
        ("concurrent", "concurrent", False),
        ("concurrent", "concurrent", True),
        ("concurrent", "stacked", False),
        ("stacked", "sequential", False),
    ],
)
def test_a_run_goes_on_with_the_same_or_another_engine(
    first: str, then: str, draws: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where rows of clients are kept

    def part(engine: str, rounds: int, start: Path | None = None) -> Run:
        options = {"participation": "all", "server_optimizer": adam, "workers": 2}
        return ran("every hook", engine, draws, rounds=rounds, start=start, **options)

    def adam(parameters: Any) -> FedAdam:
        return FedAdam(parameters, 0.1)

    whole = part(first, 4)
    part(first, 2).trainer.save_checkpoint("middle.ckpt")
    run = part(then, 4, Path("middle.ckpt"))
    assert run.module.engine_facts["engine"] == then
    (near if "stacked" in (first, then) else same_bits)(run, whole, last=2)
