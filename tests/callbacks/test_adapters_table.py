"""Every variant of LoRA and every tuner of the installed peft, beside nine methods for adapters.

A cell of the table is right, by a check in float64 on one client and on three, or it is refused by
the method's name before round 0. What an adapter adds is measured here from the layers' outputs,
and not computed from its factors. The page docs/methods/adapters.md has the table.
"""

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
RANK, LIMIT, PENALTY = 2, 1e-9, 0.1


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
# Tuners without LoRA's two factors, with what they need for so small a layer. AdaMSS computes in
# float32, and Poly needs the numbers of tasks.
OTHER_TUNERS: dict[str, dict[str, Any]] = {
    "BOFTConfig": {"boft_block_size": 1},
    "BeftConfig": {},
    "C3AConfig": {"block_size": 1},
    "DeftConfig": {},
    "DeloraConfig": {},
    "FourierFTConfig": {"n_frequency": 6},
    "FrodConfig": {},
    "GloraConfig": {},
    "GraloraConfig": {"r": 1, "gralora_k": 1},
    "HRAConfig": {},
    "HiraConfig": {},
    "IA3Config": {"feedforward_modules": []},
    "LNTuningConfig": {"target_modules": ["1"]},
    "LilyConfig": {},
    "LoHaConfig": {},
    "LoKrConfig": {},
    "MissConfig": {"r": 1},
    "OFTConfig": {"r": 1, "oft_block_size": 0},
    "OSFConfig": {},
    "PeanutConfig": {},
    "PsoftConfig": {"r": 1},
    "PveraConfig": {},
    "RandLoraConfig": {},
    "RoadConfig": {"group_size": 2},
    "ShiraConfig": {"r": 1},
    "SupertuningConfig": {"sparsity": 0.5},
    "TinyLoraConfig": {},
    "UniLoraConfig": {},
    "VBLoRAConfig": {"num_vectors": 4, "vector_length": 1, "r": 2, "topk": 2},
    "VeraConfig": {"r": 2},
    "WaveFTConfig": {"n_frequency": 6},
}


# --------------------------------------------------------------------------- runs


class Seen(FederatedCallback):
    """Keeps the clients' models after their last step, and the weights of each round."""

    role = "measurement"

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[tuple[int, int], Any] = {}
        self.rounds: list[tuple[list[int], Any]] = []

    def on_local_end(self, clients: Any) -> None:
        for client, row in zip(clients.client_ids, clients.x, strict=True):
            self.models[clients.round, client] = row.numpy().copy()

    def on_server_update(self, server: Any) -> None:
        self.rounds.append((server.ids.tolist(), server.weights.numpy().copy()))


class Networks(pl.Callback):
    """Keeps the learner after each round."""

    def __init__(self, learner: nn.Module) -> None:
        self.after = [copy.deepcopy(learner)]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        made = pl_module.export()
        layout, w = pl_module.layout, pl_module.global_vector.detach()
        parameters = dict(made.named_parameters())
        for name, view in zip(layout, layout.views(w), strict=True):
            parameters[name].data.copy_(view)
        self.after.append(made)


class Ran:
    """Two rounds of a method over a variant, with all that the rules of §§ 5 speak of."""

    def __init__(self, variant: Variant, method: Any, participants: int, seen: Seen) -> None:
        self.seen = seen
        learner = Learner(variant)
        self.networks = Networks(learner)
        self.run = fit(
            learner,
            federation(),
            [*method, self.seen, self.networks],
            2,
            participation=participants,
            local_epochs=1.5,
            weighting="samples",
            client_optimizer=lambda p: torch.optim.SGD(p, 0.3),
        )
        self.layout = self.run.module.layout
        self.w = [self.run.start, *self.run.record.w]

    def clients(self, t: int) -> list[tuple[float, Any]]:
        """p_i and x_i of each client of round t."""
        ids, p = self.seen.rounds[t]
        return [(weight, self.seen.models[t, i]) for i, weight in zip(ids, p, strict=True)]

    def mean(self, t: int) -> Any:
        return sum(p * x for p, x in self.clients(t))

    def of(self, factor: str) -> Any:
        """Which coordinates are A's, or B's, without biases of `lora_bias`."""
        named = re.compile(rf"\.lora_(embedding_)?{factor}\..*(?<!bias)$")
        return self.layout.mask([name for name in self.layout if named.search(name)]).numpy()

    def network(self, t: int, x: Any) -> nn.Module:
        """A client's network in round t."""
        made = copy.deepcopy(self.networks.after[t])
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


def mean_of(ran: Ran, t: int, measure: Callable[[nn.Module], list[Any]]) -> list[Any]:
    """The weighted mean over the clients of what is measured of their networks, by layer."""
    rows = [[p * each for each in measure(ran.network(t, x))] for p, x in ran.clients(t)]
    return [sum(layer) for layer in zip(*rows, strict=True)]


def near(one: Any, other: Any) -> None:
    largest = np.abs(other).max(initial=1.0)
    assert np.abs(one - other).max(initial=0.0) < LIMIT * largest


# --------------------------------------------------------------------------- rules


def fedit(ran: Ran, t: int) -> None:
    near(ran.w[t + 1], ran.mean(t))


def one_factor(rests: Callable[[int], str]) -> Callable[[Ran, int], None]:
    def check(ran: Ran, t: int) -> None:
        resting = ran.of(rests(t))
        assert resting.any()
        for vector in (ran.w[t + 1], *(x for _, x in ran.clients(t))):
            assert np.array_equal(vector[resting], ran.w[t][resting])
        near(ran.w[t + 1], ran.mean(t))

    return check


def fedsa(ran: Ran, t: int) -> None:
    own = ran.layout.mask(
        [name for name in ran.layout if re.search(r"lora_(embedding_)?B\.", name)]
    )
    own = own.numpy()
    assert own.any() and np.array_equal(ran.w[t + 1][own], ran.run.start[own])
    near(ran.w[t + 1][~own], ran.mean(t)[~own])
    if t == 1:
        ids, _ = ran.seen.rounds[t]
        for i in ids:
            model = dict(ran.run.module.export(client=i).named_parameters())
            flat = torch.cat([model[name].detach().flatten() for name in ran.layout]).numpy()
            assert np.array_equal(flat[own], ran.seen.models[t, i][own])


def flexlora(ran: Ran, t: int) -> None:
    others = ~(ran.of("A") | ran.of("B"))
    near(ran.w[t + 1][others], ran.mean(t)[others])
    found = added(ran.networks.after[t + 1])
    ranks = [adapter.rank for adapter in ran.layout.adapters]
    for rank, mean, own in zip(ranks, mean_of(ran, t, added), found, strict=True):
        u, sigma, vt = np.linalg.svd(mean)
        near(own, u[:, :rank] * sigma[:rank] @ vt[:rank])


def hetlora(ran: Ran, t: int) -> None:
    factors = ran.of("A") | ran.of("B")
    near(ran.w[t + 1][~factors], ran.mean(t)[~factors])
    squares = [
        sum(np.square(each).sum() for each in added(ran.network(t, x))) for _, x in ran.clients(t)
    ]
    shares = np.sqrt(squares) / np.sqrt(squares).sum()
    rows = np.stack([x for _, x in ran.clients(t)])
    near(ran.w[t + 1][factors], (shares @ rows)[factors])


def flora(ran: Ran, t: int) -> None:
    others = ~(ran.of("A") | ran.of("B"))
    near(ran.w[t + 1][others], ran.mean(t)[others])
    assert not ran.w[t + 1][ran.of("B")].any()
    after = outputs(ran.networks.after[t + 1])
    for own, mean in zip(after, mean_of(ran, t, outputs), strict=True):
        near(own, mean)


def fedex(ran: Ran, t: int) -> None:
    near(ran.w[t + 1], ran.mean(t))
    after = outputs(ran.networks.after[t + 1])
    for own, mean in zip(after, mean_of(ran, t, outputs), strict=True):
        near(own, mean)


def lora_fair(ran: Ran, t: int) -> None:
    """The correction is fitted to B A, which is what is added over the layer's factor; this factor
    is measured, too."""
    others = ~ran.of("B")
    mean = ran.mean(t)
    near(ran.w[t + 1][others], mean[others])
    layers = zip(
        ran.layout.adapters,
        mean_of(ran, t, added),
        added(ran.network(t, mean)),
        added(ran.networks.after[t + 1]),
        strict=True,
    )
    for adapter, whole, plain, own in layers:
        a, b = (each.numpy() for each in adapter.matrices(torch.from_numpy(mean)))
        product = (b @ a).T
        factor = (plain * product).sum() / np.square(product).sum()
        ridge = np.linalg.inv(a @ a.T + PENALTY * np.eye(len(a)))
        change = ((whole - plain) / factor).T @ a.T @ ridge
        near(own - plain, factor * (change @ a).T)


METHODS: dict[str, tuple[Callable[[], list[Any]], Callable[[Ran, int], None]]] = {
    "FedIT": (lambda: [], fedit),
    "FFA-LoRA": (lambda: [c.FactorSchedule(["B"])], one_factor(lambda t: "A")),
    "RoLoRA": (lambda: [c.FactorSchedule(["B", "A"])], one_factor(lambda t: "AB"[t % 2])),
    "FedSA-LoRA": (lambda: [c.PartialAveraging({"lora_B": "never"})], fedsa),
    "FlexLoRA": (lambda: [c.TruncatedProduct()], flexlora),
    "HetLoRA": (lambda: [c.PaddedRanks(gamma=1.0)], hetlora),
    "FLoRA": (lambda: [c.StackedAdapters()], flora),
    "FedEx-LoRA": (lambda: [c.ResidualMerge()], fedex),
    "LoRA-FAIR": (lambda: [c.CorrectedFactor(PENALTY)], lora_fair),
}


def cell(variant: Variant, name: str, participants: int) -> str:
    """ "yes": it ran, and each round is right; "no": it was refused before round 0, by name."""
    make, check = METHODS[name]
    method, seen = make(), Seen()
    try:
        ran = Ran(variant, method, participants, seen)
    except UserError as refusal:
        # The learner is named if no method can train it.
        named = (
            "learner Learner" if str(refusal).startswith("learner") else type(method[0]).__name__
        )
        assert named in str(refusal) and not seen.rounds, str(refusal)
        return "no"
    for t in range(2):
        check(ran, t)
    return "yes"


def rows_of_page() -> dict[str, list[str]]:
    """The page's table: the cells of each row, by the variant."""
    lines = PAGE.read_text(encoding="utf-8").partition("## Which adapters a method takes")[2]
    table = [line.strip("|").split("|") for line in lines.splitlines() if line.startswith("|")]
    rows = [[part.strip() for part in line] for line in table]
    header = rows[0]
    assert header[1:] == list(METHODS), header
    return {row[0]: row[1:] for row in rows[2 : 2 + len(LORA) + 1]}


def made(variant: Variant) -> Variant:
    """The variant, if the installed peft has it."""
    try:
        Learner(variant)
    except (AttributeError, ImportError, TypeError) as error:
        pytest.skip(f"peft {peft.__version__}: {error}")
    return variant


@pytest.mark.slow
@pytest.mark.parametrize("participants", [1, 3])
@pytest.mark.parametrize("name", LORA)
def test_a_variant_of_lora_is_right_or_refused(name: str, participants: int) -> None:
    variant = made(LORA[name])
    found = [cell(variant, method, participants) for method in METHODS]
    assert found == rows_of_page()[name], f"| {name} | {' | '.join(found)} |"


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_TUNERS)
def test_another_tuner_has_only_fedit(kind: str) -> None:
    network = {"LNTuningConfig": "norm", "RoadConfig": "even"}.get(kind, "linear")
    variant = made(Variant(network, kind, **OTHER_TUNERS[kind]))
    found = [cell(variant, method, 3) for method in METHODS]
    assert found == rows_of_page()["peft's other tuners"]


def test_the_page_has_a_row_for_each_variant() -> None:
    assert list(rows_of_page()) == [*LORA, "peft's other tuners"]
