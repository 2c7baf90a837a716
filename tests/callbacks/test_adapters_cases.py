"""FedSA-LoRA agrees with NumPy's calculation; edge cases of all methods for adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from fl_lightning import FederatedCallback, UserError
from fl_lightning import callbacks as c
from fl_lightning.sampling import generator
from tests.callbacks.test_adapters import (
    NET,
    RANKS,
    TRAININGS,
    agree,
    base_of,
    federation,
    ours,
)
from tests.helpers.federation import fit
from tests.helpers.low_rank import Adapted, LowRank
from tests.oracles import adapters as oracle

A_NUMBERS = sum(layer.rank * layer.d_in for layer in NET.layers)


def drawn(t: int) -> Any:
    return generator(1, "flora", t).random(A_NUMBERS)


@pytest.mark.parametrize("training", TRAININGS)
def test_fedsa_lora(training: str) -> None:
    how = TRAININGS[training]
    run = ours([c.PartialAveraging({"*lora_B*": "never"})], how)
    rule = oracle.OwnFactor(NET)
    start = base_of(Adapted())
    expected = oracle.run(rule, run.start, start, run.schedule, len(run.record.w), how)
    shared = ~rule.kept
    down = up = 0
    for t, theirs in enumerate(expected):
        down, up = down + theirs.down, up + theirs.up
        assert np.abs(run.record.w[t] - theirs.w)[shared].max() < 1e-9, f"A in round {t}"
        sent = run.record.metrics[t]
        assert sent["communication/down_parameters"] == down, f"down in round {t}"
        assert sent["communication/up_parameters"] == up, f"up in round {t}"
    assert len(rule.own) > 3, "more clients than a round has"
    for i, own in rule.own.items():
        model = dict(run.module.export(client=i).named_parameters())
        factors = [model[adapter.b].detach().flatten() for adapter in run.module.layout.adapters]
        assert np.abs(torch.cat(factors).numpy() - own).max() < 1e-9, f"B of client {i}"


METHODS: dict[str, Callable[[], Any]] = {
    "ffa": lambda: c.FactorSchedule(["B"]),
    "rolora": lambda: c.FactorSchedule(["B", "A"]),
    "fedsa": lambda: c.PartialAveraging({"*lora_B*": "never"}),
    "flexlora": lambda: c.TruncatedProduct(RANKS),
    "hetlora": lambda: c.PaddedRanks(gamma=0.5),
    "flora": lambda: c.StackedAdapters(RANKS),
    "fedex": lambda: c.ResidualMerge(),
    "fair": lambda: c.CorrectedFactor(),
}
RULES: dict[str, Callable[[], oracle.Rule]] = {
    "ffa": lambda: oracle.Turns(NET, ["B"]),
    "rolora": lambda: oracle.Turns(NET, ["B", "A"]),
    "flexlora": lambda: oracle.Flex(NET, dict(enumerate(RANKS))),
    "flora": lambda: oracle.Stacked(NET, dict(enumerate(RANKS)), drawn),
    "fedex": lambda: oracle.Residual(NET, None),
    "fair": lambda: oracle.Fair(NET, 0.01),
}


@pytest.mark.parametrize("participants", [1, 7])
@pytest.mark.parametrize("name", RULES)
def test_one_participant_and_everybody(name: str, participants: int) -> None:
    how = TRAININGS["sgd"]
    run = ours([METHODS[name]()], how, participation=participants, rounds=3)
    agree(run, RULES[name](), how)


@pytest.mark.parametrize("name", METHODS)
def test_at_rate_0_no_product_moves(name: str) -> None:
    """Neither in W nor in the adapters: all begin with B = 0."""
    still = oracle.Training(lr=0.0, weight_decay=0.0)
    run = ours([METHODS[name]()], still, rounds=2)
    layout = run.module.layout
    for adapter in layout.adapters:
        assert not adapter.matrices(torch.from_numpy(run.record.w[-1]))[1].any()
    for one, other in zip(base_of(run.module.learner), base_of(Adapted()), strict=True):
        assert np.array_equal(one, other)
    others = layout.mask([f"{layer}.bias" for layer in ("first", "head")]).numpy()
    assert np.array_equal(run.record.w[-1][others], run.start[others])


class Nobody(FederatedCallback):
    """All diverge in round 1."""

    def on_local_end(self, clients: Any) -> None:
        if clients.round == 1:
            clients.x = torch.full_like(clients.x, torch.nan)


@pytest.mark.parametrize("name", METHODS)
def test_where_nobody_finishes_model_and_base_stay(name: str) -> None:
    how = TRAININGS["sgd"]
    run = ours([METHODS[name](), Nobody()], how, rounds=2, on_nonfinite="skip")
    once = ours([METHODS[name]()], how, rounds=1)
    assert np.array_equal(run.record.w[1], once.record.w[0])
    for one, other in zip(base_of(run.module.learner), base_of(once.module.learner), strict=True):
        assert np.array_equal(one, other)


# --------------------------------------------------------------------------- kinds of adapters


class Twice(nn.Module):
    """Two named adapters, of ranks 2 and 1, on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3), requires_grad=False)
        sizes = {"one": 2, "two": 1}
        self.lora_A = nn.ParameterDict(
            {k: nn.Parameter(torch.randn(r, 3)) for k, r in sizes.items()}
        )
        self.lora_B = nn.ParameterDict(
            {k: nn.Parameter(torch.zeros(6, r)) for k, r in sizes.items()}
        )
        self.scaling = {"one": 0.5, "two": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        for name, scale in self.scaling.items():
            out = out + scale * (x @ self.lora_A[name].T) @ self.lora_B[name].T
        return out


def of_peft(network: nn.Module, **config: Any) -> nn.Module:
    peft = pytest.importorskip("peft", reason="pip install 'fl-lightning[lora]'")
    made: nn.Module = peft.get_peft_model(network, peft.LoraConfig(r=2, lora_alpha=3, **config))
    return made


def conv1d() -> nn.Module:
    utils = pytest.importorskip(
        "transformers.pytorch_utils", reason="pip install 'fl-lightning[text]'"
    )
    network = nn.Sequential(utils.Conv1D(6, 3), nn.Tanh(), nn.Linear(6, 4))
    return of_peft(network, target_modules=["0", "2"], fan_in_fan_out=True)


def linear() -> nn.Module:
    return of_peft(
        nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)), target_modules=["0", "2"]
    )


def tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6))
    network[3].weight = network[2].weight
    return of_peft(network, target_modules=["2"])


class Own(pl.LightningModule):
    """A user's own module around such a network."""

    def __init__(self, network: Callable[[], nn.Module]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.inner = network()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)


def trained(network: Callable[[], nn.Module], method: list[Any], **options: Any) -> Any:
    settings = {"participation": 1, "local_epochs": 2, **options}
    rate = torch.optim.SGD
    return fit(
        Own(network), federation(), method, 1, client_optimizer=lambda p: rate(p, 0.3), **settings
    ).module


@pytest.mark.parametrize(
    "network", [lambda: Twice(), conv1d, linear], ids=["two", "conv1d", "peft"]
)
@pytest.mark.parametrize("method", ["flora", "fedex", "flexlora"])
def test_with_one_client_the_model_is_that_clients(method: str, network: Any) -> None:
    """Whatever moved between W and the adapters, its logits are FedAvg's."""
    made = {"flora": c.StackedAdapters(), "fedex": c.ResidualMerge()}
    run = trained(network, [made.get(method, c.TruncatedProduct())])
    plain = trained(network, [])
    x = torch.randn(9, 3, dtype=torch.float64)
    logits = [each.export()(x) for each in (run, plain)]
    assert (logits[0] - logits[1]).abs().max() < 1e-12
    assert (logits[0] - Own(network)(x)).abs().max() > 1e-3


def test_products_of_two_adapters_on_one_weight_are_both_added() -> None:
    """Everything is linear: the mean of the clients' outputs is the new model's."""
    options = {"participation": "all"}
    x = torch.randn(9, 3, dtype=torch.float64)
    seen: dict[int, Tensor] = {}

    class Outputs(FederatedCallback):
        def on_local_end(self, clients: Any) -> None:
            learner = Own(lambda: Twice())
            parameters = dict(learner.named_parameters())
            for name, view in zip(clients.layout, clients.layout.views(clients.x[0]), strict=True):
                parameters[name].data.copy_(view)
            seen[clients.client_ids[0]] = learner(x).detach()

    for method in (c.StackedAdapters(), c.ResidualMerge()):
        run = trained(lambda: Twice(), [method, Outputs()], **options)
        mean = torch.stack(list(seen.values())).mean(0)
        assert (run.export()(x) - mean).abs().max() < 1e-12


@pytest.mark.parametrize("method", [c.StackedAdapters, c.ResidualMerge])
def test_tied_weights_of_peft_are_refused_before_round_0(method: Any) -> None:
    with pytest.raises(UserError, match=rf"{method.__name__} changes.*inner.*tied weights"):
        trained(tied, [method()])


class OfTokens(pl.LightningModule):
    """peft's adapters on an embedding and a linear layer; the samples' signs are their tokens."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            network = nn.Sequential(nn.Embedding(2, 5), nn.Flatten(), nn.Linear(15, 4))
            self.inner = of_peft(network, target_modules=["0", "2"])
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.inner((x > 0).long()), y)


class Renamed(Adapted):
    """`lora_A` is also a part of the names of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_Adapter, self.lora_A = self.first, self.head
        del self.first, self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.lora_A(torch.tanh(self.lora_Adapter(x)))


OF_TOKENS = "inner.base_model.model."
FACTORS = {
    OfTokens: (
        [f"{OF_TOKENS}0.lora_embedding_A.default", f"{OF_TOKENS}2.lora_A.default.weight"],
        [f"{OF_TOKENS}0.lora_embedding_B.default", f"{OF_TOKENS}2.lora_B.default.weight"],
    ),
    Renamed: (
        ["lora_Adapter.lora_A", "lora_A.lora_A"],
        ["lora_Adapter.lora_B", "lora_A.lora_B"],
    ),
}


@pytest.mark.parametrize("learner", FACTORS)
def test_ffa_lets_each_a_rest_and_fedsa_each_b(learner: Any) -> None:
    """FFA-LoRA's A keeps its bits, FedSA-LoRA's server never moves B; all else moves."""
    begun = {name: p for name, p in learner().named_parameters() if p.requires_grad}
    methods = (c.FactorSchedule(["B"]), c.PartialAveraging({"lora_B": "never"}))
    for method, resting in zip(methods, FACTORS[learner], strict=True):
        run = ours([method], TRAININGS["sgd"], 3, learner())
        layout, w = run.module.layout, torch.from_numpy(run.record.w[-1])
        for name, view in zip(layout, layout.views(w), strict=True):
            assert view.equal(begun[name]) == (name in resting), name


class OtherName(LowRank):
    """Its number is called ``scale``."""

    def __init__(self) -> None:
        super().__init__(5, 4, 2, 1.5)
        self.scale = 3.0
        del self.scaling

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.linear(x, self.weight, self.bias)
        return out + self.scale * (x @ self.lora_A.T) @ self.lora_B.T


@pytest.mark.parametrize("method", [c.StackedAdapters, c.ResidualMerge, c.PaddedRanks])
def test_an_adapter_that_does_not_say_its_scale_is_refused_with_the_number(method: Any) -> None:
    learner = Adapted()
    learner.head = OtherName().double()
    says = (
        rf"{method.__name__}.*the layer head \(OtherName\) adds .*attribute scaling be that number"
    )
    with pytest.raises(UserError, match=says):
        ours([method()], TRAININGS["sgd"], 1, learner)
    learner.head.scaling = learner.head.scale
    assert len(ours([method()], TRAININGS["sgd"], 1, learner).record.w) == 1


@pytest.mark.parametrize("method", [c.StackedAdapters, c.TruncatedProduct])
def test_distances_between_rounds_are_told_to_say_nothing_where_adapters_restart(
    method: Any,
) -> None:
    says = "DivergenceLogger: it compares models of different rounds"
    run = ours([method(), c.DivergenceLogger()], TRAININGS["sgd"], 1)
    assert sum(says in text for text in run.module.run.notes) == 1
    for others in ([method()], [c.FactorSchedule(["B"]), c.DivergenceLogger()]):
        run = ours(others, TRAININGS["sgd"], 1)
        assert not any(says in text for text in run.module.run.notes)
