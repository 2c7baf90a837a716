"""Which parameters PartialAveraging keeps, what it refuses, what it warns of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from fl_lightning import UserError
from fl_lightning import callbacks as c
from fl_lightning.callback import FederatedCallback, RunFacts
from fl_lightning.callback_list import CallbackList
from fl_lightning.learner.layout import Layout, layers_of
from fl_lightning.models import ResNet20
from fl_lightning.storage.rows_on_disk import KEY
from tests.helpers.learners import blobs, federated, trainer


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.first_norm = nn.LayerNorm(3)
        self.embedding = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm(4)
        self.body = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)


def test_a_norm_belongs_to_the_layer_before_it_and_an_attention_block_is_one_layer() -> None:
    layers = layers_of(Mixed())
    assert list(layers) == ["embedding", "attention", "body.0", "head"], (
        "by the paths of their modules"
    )
    embedding, attention, convolution, head = layers.values()
    assert embedding == ["scale", "first_norm.weight", "first_norm.bias", "embedding.weight"]
    assert attention == [
        f"attention.{n}"
        for n in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    ] + ["norm.weight", "norm.bias"]
    assert convolution == ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"]
    assert head == ["head.weight", "head.bias"]


@pytest.mark.parametrize(
    "layers, size", [(None, 269_072), (19, 269_072), (16, None), (0, 0), (20, 269_722)]
)
def test_extractor_of_resnet20(layers: int | None, size: int | None) -> None:
    network, method = ResNet20(10), c.PartialAveraging(extractor_layers=layers)
    method._learner = network
    parts = method.parts(Layout(network))
    kept = sum(int(mask.sum()) for mask, _ in parts)
    if size is None:
        names = [n for layer in list(layers_of(network).values())[:16] for n in layer]
        size = sum(p.numel() for n, p in network.named_parameters() if n in names)
        assert 0 < size < 269_072
    assert kept == size and all(period == 10 for _, period in parts)


def kept(**arguments: Any) -> list[tuple[list[str], int | None]]:
    learner = Mixed()
    method, layout = c.PartialAveraging(**arguments), Layout(learner)
    method._learner = learner
    parts = method.parts(layout)
    return [
        ([n for n, (where, _) in layout.items() if mask[where].all()], period)
        for mask, period in parts
    ]


def test_patterns_name_parts_and_the_first_that_matches_counts() -> None:
    assert kept(periods={"head.bias": 3, "head.*": "never", "embedding.*": 3, "norm.*": 1}) == [
        (["embedding.weight", "head.bias"], 3),
        (["head.weight"], None),
    ]
    assert kept(period=4, extractor=["embedding.*", "head.weight"]) == [
        (["embedding.weight", "head.weight"], 4)
    ]
    assert kept(period=4, extractor="head.*") == [(["head.weight", "head.bias"], 4)]
    assert kept(period=1) == []


def test_names_of_groups() -> None:
    assert kept(periods={"last": "never"}) == [(["head.weight", "head.bias"], None)]
    norms = [
        f"{name}.{what}" for name in ("first_norm", "norm", "body.1") for what in ("weight", "bias")
    ]
    assert kept(periods={"norms": "never"}) == [(norms, None)]
    assert kept(periods={"norm.bias": 1, "norms": 2}) == [
        ([n for n in norms if n != "norm.bias"], 2)
    ]
    assert kept(periods={"all": "never"}) == [(list(Layout(Mixed())), None)]
    titles = [
        c.PartialAveraging({group: "never"}).title for group in ("last", "norms", "all", "head.*")
    ]
    assert titles == ["FedPer", "FedBN", "local training", "PartialAveraging"]
    assert c.PartialAveraging(period=5).title == "FedALS"
    assert c.PartialAveraging({"net.0.*": 5}).title == "PartialAveraging"
    assert c.PartialAveraging(period="never").title == "PartialAveraging"
    with pytest.raises(UserError, match="no normalisation layer"):
        c.PartialAveraging({"norms": "never"}).parts(Layout(nn.Linear(2, 2)))
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(UserError, match="the last layer, 1, is frozen") as refused:
        c.PartialAveraging({"last": "never"}).parts(Layout(frozen))
    assert "Did you mean" not in str(refused.value)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"periods": {"haed.*": 2}}, ["'haed.*'", "scale", "'norms'"]),
        ({"period": 0}, ["0", "never"]),
        ({"periods": {"head.*": 1.5}}, ["1.5"]),
        ({"periods": {"head.*": "sometimes"}}, ["sometimes", "never"]),
        ({"extractor_layers": 9}, ["extractor_layers=9", "4 layers"]),
        (
            {"extractor_layers": 2, "extractor": "head.*"},
            ["extractor", "extractor_layers", "one of them"],
        ),
    ],
)
def test_bad_parts_are_refused_by_name(arguments: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        kept(**arguments)
    assert all(word in str(refused.value) for word in named)


def test_work_that_never_reaches_the_server_is_said() -> None:
    """With p = 0.1 and α = 10 about four fifths, nothing when all participate. That clients train
    alone."""
    said = []
    for n, arguments in (
        (10, {"period": 10}),
        (100, {"period": 10}),
        (10, {"periods": {"*": "never"}}),
    ):
        methods = CallbackList([c.PartialAveraging(**arguments)])
        said.append(methods.notes(RunFacts(n, 100, "uniform")))
    assert len(said[0]) == 1 and "81%" in said[0][0] and said[1] == []
    assert len(said[2]) == 1 and "each client trains by itself" in said[2][0]


def fitted(rounds: int, start: Path | None = None) -> tuple[Any, Any]:
    """A run of which some rounds are empty, also rounds in which a part is due."""
    run = trainer(rounds, [c.PartialAveraging({"*0*": 3})])
    module = federated(participation=0.12, sampling="poisson", seed=4)
    run.fit(module, blobs(6), ckpt_path=start)
    return run, module


def test_a_run_resumes_to_the_same_bits_after_an_average_was_missed(tmp_path: Path) -> None:
    run, module = fitted(17)
    assert "parts.averaged" in module.server_states
    run.save_checkpoint(tmp_path / "at-17.ckpt")
    _, whole = fitted(40)
    _, resumed = fitted(40, tmp_path / "at-17.ckpt")
    assert torch.equal(whole.global_vector, resumed.global_vector)
    assert torch.equal(whole.evaluated_vector, resumed.evaluated_vector)
    assert torch.equal(
        whole.server_states["parts.averaged"], resumed.server_states["parts.averaged"]
    )


def test_a_module_that_trained_resumes_as_a_fresh_one(tmp_path: Path) -> None:
    def run(module: Any, rounds: int, start: Path | None = None) -> Any:
        keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        callbacks = [c.PartialAveraging(period=2), keep]
        trainer(rounds, callbacks, enable_checkpointing=True).fit(module, blobs(), ckpt_path=start)
        return module.global_vector.detach().clone()

    module = federated()
    run(module, 3)
    start = tmp_path / "epoch=1.ckpt"
    assert torch.load(start, weights_only=False)[KEY]["w"] is None
    fresh = run(federated(), 4, start)
    assert torch.equal(run(module, 4, start), fresh)


@pytest.mark.parametrize("second", ["the same", "of another shape"])
def test_parts_of_a_method_are_disjoint_masks(second: str) -> None:
    class Wrong(FederatedCallback):
        def parts(self, layout: Any) -> Any:
            whole = torch.ones(layout.size, dtype=torch.bool)
            return [(whole, 2), (whole if second == "the same" else whole[:2], 3)]

    with pytest.raises(UserError, match="no coordinate lies in two of them"):
        trainer(1, [Wrong()]).fit(federated(), blobs())
