"""Every variant of LoRA and every tuner of the installed peft, beside the methods for adapters. A
cell of the table is right, by a check in float64 on three clients, or it is refused by the method's
name before round 0. What an adapter adds is measured here from the layers' outputs, and not
computed from its factors. The page docs/methods/adapters.md has the table, by groups."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from fl_lightning import FederatedCallback, UserError
from fl_lightning import callbacks as c
from tests.callbacks.test_adapters import federation
from tests.helpers.federation import fit

peft = pytest.importorskip("peft", reason="pip install 'fl-lightning[lora]'")
PAGE = Path(__file__).parents[2] / "docs" / "methods" / "adapters.md"
RANK, LIMIT = 2, 1e-9


# --------------------------------------------------------------------------- networks


class Experts(nn.Module):
    """Weights of two experts in one parameter, and a fixed mixture of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("eoi,ni->no", self.weight, x) / 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        found: Tensor = self.attention(x, x, x)[0][:, 0]
        return found


class Signs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).long()


def transposed() -> nn.Module:
    utils = pytest.importorskip("transformers.pytorch_utils")
    made: nn.Module = utils.Conv1D(5, 3)
    return made


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)),
    "even": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)),
    "Conv1D": lambda: nn.Sequential(transposed(), nn.Tanh(), nn.Linear(5, 4)),
    "embedding": lambda: nn.Sequential(Signs(), nn.Embedding(2, 5), nn.Flatten(), nn.Linear(15, 4)),
    "conv2d": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3, 1)), nn.Conv2d(1, 4, (2, 1)), nn.Flatten(), nn.Linear(8, 4)
    ),
    "conv1d": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), nn.Flatten(), nn.Linear(8, 4)
    ),
    "experts": lambda: nn.Sequential(Experts(), nn.Tanh(), nn.Linear(5, 4)),
    "attention": lambda: nn.Sequential(nn.Linear(3, 4), Attention(), nn.Linear(4, 4)),
    "norm": lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 4)),
}


class Learner(pl.LightningModule):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(3)
            network = NETWORKS[variant.network]()
            self.inner = peft.get_peft_model(network, variant.config())
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.inner(x), y)


# --------------------------------------------------------------------------- variants


class Variant:
    """A configuration of peft on a small network.

    Args:
        kind: name of the config's class in peft.
    """

    def __init__(self, network: str = "linear", kind: str = "LoraConfig", **options: Any) -> None:
        self.network = network
        self.kind = kind
        self.options = options

    def config(self) -> Any:
        given = {"target_modules": ["0", "2"], **self.options}
        if self.kind == "LoraConfig":
            given = {"r": RANK, "lora_alpha": 3, **given}
        given = {name: value() if callable(value) else value for name, value in given.items()}
        return getattr(peft, self.kind)(**{k: v for k, v in given.items() if v is not None})


def of_lora(name: str, **options: Any) -> Callable[[], Any]:
    """A configuration within LoraConfig, such as KasaConfig."""
    return lambda: getattr(__import__("peft.tuners.lora.config", fromlist=[name]), name)(**options)


BLOCKS = of_lora("BdLoraConfig", target_modules_bd_a=["2"], target_modules_bd_b=[], nblocks=2)
LORA: dict[str, Variant] = {
    "LoRA": Variant(),
    "`init_lora_weights=False`": Variant(init_lora_weights=False),
    '`init_lora_weights="gaussian"`': Variant(init_lora_weights="gaussian"),
    '`init_lora_weights="orthogonal"`': Variant(init_lora_weights="orthogonal"),
    '`init_lora_weights="pissa"`': Variant(init_lora_weights="pissa"),
    '`init_lora_weights="pissa_niter_2"`': Variant(init_lora_weights="pissa_niter_2"),
    '`init_lora_weights="olora"`': Variant(init_lora_weights="olora"),
    '`init_lora_weights="mica"`': Variant(init_lora_weights="mica"),
    "`use_rslora`": Variant(use_rslora=True),
    "`use_dora`": Variant(use_dora=True),
    "`rank_pattern`": Variant(rank_pattern={"2": 3}),
    "`alpha_pattern`": Variant(alpha_pattern={"2": 5}),
    "`lora_dropout`": Variant(lora_dropout=0.3),
    "`modules_to_save`": Variant(target_modules=["0"], modules_to_save=["2"]),
    '`bias="all"`': Variant(bias="all"),
    '`bias="lora_only"`': Variant(bias="lora_only"),
    "`lora_bias`": Variant(lora_bias=True),
    "`fan_in_fan_out` (`Conv1D`)": Variant("Conv1D", fan_in_fan_out=True),
    "`target_parameters`, of a linear layer": Variant(
        target_modules=[], target_parameters=["0.weight"]
    ),
    "`target_parameters`, of experts": Variant(
        "experts", target_modules=[], target_parameters=["0.weight"]
    ),
    "embedding": Variant("embedding", target_modules=["1", "3"]),
    "`trainable_token_indices`": Variant(
        "embedding", target_modules=["3"], trainable_token_indices={"1": [0]}
    ),
    "`Conv1d`": Variant("conv1d", target_modules=["1", "3"]),
    "`Conv2d`": Variant("conv2d", target_modules=["1", "3"]),
    "`MultiheadAttention`": Variant("attention", target_modules=["attention", "2"]),
    "aLoRA (`alora_invocation_tokens`)": Variant(alora_invocation_tokens=lambda: [1]),
    "BD-LoRA (`use_bdlora`)": Variant("even", target_modules=["2"], use_bdlora=BLOCKS),
    "KaSA (`kasa_config`)": Variant(kasa_config=of_lora("KasaConfig")),
    "VeLoRA (`velora_config`)": Variant(velora_config=of_lora("VeloraConfig", num_groups=1)),
    "MonteCLoRA (`monteclora_config`)": Variant(monteclora_config=of_lora("MontecloraConfig")),
    "AdaLoRA": Variant(
        kind="AdaLoraConfig", init_r=RANK, target_r=1, total_step=100, tinit=1, tfinal=10
    ),
}
# Tuners without LoRA's two factors, with what they need for so small a layer.
OTHER_TUNERS: dict[str, dict[str, Any]] = {
    "FourierFTConfig": {"n_frequency": 6},
    "GraloraConfig": {"r": 1, "gralora_k": 1},
    "IA3Config": {"feedforward_modules": []},
    "LNTuningConfig": {"target_modules": ["1"]},
    "LoHaConfig": {},
    "OFTConfig": {"r": 1, "oft_block_size": 0},
    "RoadConfig": {"group_size": 2},
    "VeraConfig": {"r": 2},
}


# --------------------------------------------------------------------------- runs


class Seen(FederatedCallback):
    """Keeps the clients' models after their last step, and their weights."""

    role = "measurement"

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[int, Any] = {}
        self.weights: dict[int, float] = {}

    def on_local_end(self, clients: Any) -> None:
        for client, row in zip(clients.client_ids, clients.x, strict=True):
            self.models[client] = row.numpy().copy()

    def on_server_update(self, server: Any) -> None:
        self.weights = dict(zip(server.ids.tolist(), server.weights.tolist(), strict=True))


class Ran:
    """A round of a method over a variant: ``start`` → the clients' ``x`` → ``w``."""

    def __init__(self, variant: Variant, method: Any, seen: Seen) -> None:
        self.seen = seen
        learner = Learner(variant)
        self.before = copy.deepcopy(learner)
        self.run = fit(
            learner,
            federation(),
            [*method, self.seen],
            1,
            participation=3,
            local_epochs=1.5,
            weighting="samples",
            client_optimizer=lambda p: torch.optim.SGD(p, 0.3),
        )
        self.layout = self.run.module.layout
        self.start, self.w = self.run.start, self.run.record.w[0]
        self.x = list(seen.models.values())
        self.p = [seen.weights[i] for i in seen.models]
        self.mean = sum(p * x for p, x in zip(self.p, self.x, strict=True))

    def of(self, factor: str) -> Any:
        """Which coordinates are A's, or B's, without biases of `lora_bias`."""
        named = re.compile(rf"\.lora_(embedding_)?{factor}\..*(?<!bias)$")
        return self.layout.mask([name for name in self.layout if named.search(name)]).numpy()

    def after(self) -> nn.Module:
        return self.network(self.run.module.export(), self.w)

    def network(self, of: nn.Module, x: Any) -> nn.Module:
        """A copy that has the trained parameters x."""
        made = copy.deepcopy(of)
        parameters = dict(made.named_parameters())
        views = self.layout.views(torch.from_numpy(x))
        for name, view in zip(self.layout, views, strict=True):
            parameters[name].data.copy_(view)
        return made


def outputs(network: nn.Module, without: bool = False) -> list[Any]:
    """The matrix (in, out) of each layer with an adapter, measured; with its bias."""
    found = []
    for layer in network.modules():
        if not isinstance(layer, peft.tuners.lora.LoraLayer):
            continue
        made = copy.deepcopy(layer).eval()
        if without:
            for name, parameter in made.named_parameters():
                parameter.data = parameter.data * (not name.startswith("lora_B."))
        with torch.no_grad():
            found.append(made(torch.eye(made.in_features, dtype=torch.float64)).numpy())
    return found


def added(network: nn.Module) -> list[Any]:
    """What the adapter of each layer adds to that matrix."""
    pairs = zip(outputs(network), outputs(network, without=True), strict=True)
    return [one - other for one, other in pairs]


def mean_of(ran: Ran, measure: Callable[[nn.Module], list[Any]]) -> list[Any]:
    """The weighted mean over the clients of what is measured of their networks, by layer."""
    rows = []
    for p, x in zip(ran.p, ran.x, strict=True):
        rows.append([p * each for each in measure(ran.network(ran.before, x))])
    return [sum(layer) for layer in zip(*rows, strict=True)]


def near(one: Any, other: Any) -> None:
    largest = np.abs(other).max(initial=1.0)
    assert np.abs(one - other).max(initial=0.0) < LIMIT * largest


# --------------------------------------------------------------------------- rules


def fedit(ran: Ran) -> None:
    near(ran.w, ran.mean)


def one_factor(rests: str) -> Callable[[Ran], None]:
    def check(ran: Ran) -> None:
        resting = ran.of(rests)
        assert resting.any()
        for vector in (ran.w, *ran.x):
            assert np.array_equal(vector[resting], ran.start[resting])
        near(ran.w, ran.mean)

    return check


def fedsa(ran: Ran) -> None:
    names = [name for name in ran.layout if re.search(r"lora_(embedding_)?B\.", name)]
    own = ran.layout.mask(names).numpy()
    assert own.any() and np.array_equal(ran.w[own], ran.start[own])
    near(ran.w[~own], ran.mean[~own])
    for i, x in ran.seen.models.items():
        model = dict(ran.run.module.export(client=i).named_parameters())
        flat = torch.cat([model[name].detach().flatten() for name in ran.layout]).numpy()
        assert np.array_equal(flat[own], x[own])


def flexlora(ran: Ran) -> None:
    others = ~(ran.of("A") | ran.of("B"))
    near(ran.w[others], ran.mean[others])
    ranks = [adapter.rank for adapter in ran.layout.adapters]
    for rank, mean, own in zip(ranks, mean_of(ran, added), added(ran.after()), strict=True):
        u, sigma, vt = np.linalg.svd(mean)
        near(own, u[:, :rank] * sigma[:rank] @ vt[:rank])


def fedsvd(ran: Ran) -> None:
    resting = ran.of("A")
    for vector in ran.x:
        assert np.array_equal(vector[resting], ran.start[resting])
    near(ran.w[~(resting | ran.of("B"))], ran.mean[~(resting | ran.of("B"))])
    before = added(ran.network(ran.before, ran.mean))
    for adapter, own, mean in zip(ran.layout.adapters, added(ran.after()), before, strict=True):
        near(own, mean)
        a, _ = adapter.matrices(torch.from_numpy(ran.w))
        near((a @ a.T).numpy(), np.eye(adapter.rank))


def flora(ran: Ran) -> None:
    others = ~(ran.of("A") | ran.of("B"))
    near(ran.w[others], ran.mean[others])
    assert not ran.w[ran.of("B")].any()
    for own, mean in zip(outputs(ran.after()), mean_of(ran, outputs), strict=True):
        near(own, mean)


def fedex(ran: Ran) -> None:
    near(ran.w, ran.mean)
    for own, mean in zip(outputs(ran.after()), mean_of(ran, outputs), strict=True):
        near(own, mean)


def finite(ran: Ran) -> None:
    assert np.isfinite(ran.w).all() and not np.array_equal(ran.w, ran.start)


METHODS: dict[str, tuple[Callable[[], list[Any]], Callable[[Ran], None]]] = {
    "FedIT": (lambda: [], fedit),
    "FFA-LoRA": (lambda: [c.FactorSchedule(["B"])], one_factor("A")),
    "RoLoRA": (lambda: [c.FactorSchedule(["B", "A"])], one_factor("A")),
    "FedSA-LoRA": (lambda: [c.PartialAveraging({"lora_B": "never"})], fedsa),
    "FlexLoRA": (lambda: [c.TruncatedProduct()], flexlora),
    # Their own rules are held by test_adapters; the scale and the products are FLoRA's.
    "HetLoRA": (lambda: [c.PaddedRanks(gamma=1.0)], finite),
    "FLoRA": (lambda: [c.StackedAdapters()], flora),
    "FedEx-LoRA": (lambda: [c.ResidualMerge()], fedex),
    "LoRA-FAIR": (lambda: [c.CorrectedFactor(0.1)], finite),
    "FedSVD": (lambda: [c.OrthogonalFactor()], fedsvd),
}


def cell(variant: Variant, name: str) -> str:
    """ "yes": it ran, and the round is right; "no": it was refused before round 0, by name."""
    make, check = METHODS[name]
    method, seen = make(), Seen()
    try:
        ran = Ran(variant, method, seen)
    except UserError as refusal:
        # The learner is named if no method can train it.
        named = (
            "learner Learner" if str(refusal).startswith("learner") else type(method[0]).__name__
        )
        assert named in str(refusal) and not seen.models, str(refusal)
        return "no"
    check(ran)
    return "yes"


def rows_of_page() -> dict[str, list[str]]:
    """What the page's table says of each variant, beside each method: "yes" or "no"."""
    text = PAGE.read_text(encoding="utf-8").partition("## Which adapters a method takes")[2]
    said: dict[str, list[str]] = {}
    for line in text.partition("\n## ")[0].splitlines():
        if line.startswith("|"):
            variants, takes = (part.strip() for part in line.strip("|").split("|"))
            if takes.startswith("all"):
                taken = [name for name in METHODS if takes != f"all but {name}"]
            else:
                taken = takes.split(", ")
            row = ["yes" if name in taken else "no" for name in METHODS]
            said |= dict.fromkeys(variants.split("; "), row)
    return said


def made(variant: Variant) -> Variant:
    """The variant, if the installed peft has it."""
    try:
        Learner(variant)
    except (AttributeError, ImportError, TypeError) as error:
        pytest.skip(f"peft {peft.__version__}: {error}")
    return variant


@pytest.mark.slow
@pytest.mark.parametrize("name", LORA)
def test_a_variant_of_lora_is_right_or_refused(name: str) -> None:
    variant = made(LORA[name])
    found = [cell(variant, method) for method in METHODS]
    assert found == rows_of_page()[name], f"| {name} | {' | '.join(found)} |"


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_TUNERS)
def test_another_tuner_has_only_fedit(kind: str) -> None:
    network = {"LNTuningConfig": "norm", "RoadConfig": "even"}.get(kind, "linear")
    variant = made(Variant(network, kind, **OTHER_TUNERS[kind]))
    found = [cell(variant, method) for method in METHODS]
    assert found == rows_of_page()["peft's other tuners"]


def test_the_page_has_a_row_for_each_variant() -> None:
    said = {*rows_of_page()} - {"adapters", "---"}
    assert said == {*LORA, "peft's other tuners"}


# --------------------------------------------------------------------------- DoRA
