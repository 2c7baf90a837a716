"""RAVAN's layer: what a text learner has of it, trains and saves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning.callbacks import ScaledHeads
from fl_lightning.learner import saved_network
from fl_lightning.learner.layout import Layout
from fl_lightning.models import CausalLanguageModel, MultiHead, TextClassifier
from fl_lightning.models.multi_head import with_heads
from tests.helpers.federation import fit
from tests.helpers.texts import opt

transformers = pytest.importorskip(
    "transformers", reason="texts need transformers: pip install 'fl-lightning[text]'"
)
HEADS = {"rank": 2, "heads": 3, "target_modules": ["q_proj", "v_proj"]}
TOKENS = torch.randint(3, 259, (2, 9), generator=torch.Generator().manual_seed(1))


def learner(**given: Any) -> CausalLanguageModel:
    torch.manual_seed(0)
    return CausalLanguageModel(config=opt(), **{"heads": HEADS, "lr": 0.05, **given})


def logits(network: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = network.eval()(input_ids=TOKENS).logits
    return found


def test_heads_are_found_by_name() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    changed = with_heads(network, 2, 2, ["1.0"])
    trained = [name for name, p in changed.named_parameters() if p.requires_grad]
    assert trained == ["1.0.heads_H", "1.0.heads_s"]
    with pytest.raises(UserError, match="no linear layer has such a name"):
        with_heads(network, 2, 2, "query")


def test_a_text_learner_trains_cores_and_scales() -> None:
    layout = Layout(learner())
    assert layout.size == 2 * 2 * 3 * (2 * 2 + 1), "two layers, two projections, three heads"
    assert {name.rpartition(".")[2] for name in layout} == {"heads_H", "heads_s"}
    torch.manual_seed(0)
    torch.testing.assert_close(
        logits(learner().network), logits(learner(heads=None).network), atol=1e-6, rtol=1e-6
    )
    # A new last layer is trained too, unless it has heads itself.
    of_classifier = Layout(TextClassifier(3, config=opt(), heads=HEADS))
    assert of_classifier.size == layout.size + 3 * 16
    whole = {**HEADS, "target_modules": ["q_proj", "v_proj", "score"]}
    assert "network.score.linear.weight" not in Layout(TextClassifier(3, config=opt(), heads=whole))


def test_a_saved_network_has_the_heads_in_its_weights(tmp_path: Path) -> None:
    data = InMemoryDataModule((TOKENS.repeat(3, 1), torch.zeros(6)), num_clients=3, batch_size=2)
    run = fit(learner(), data, [ScaledHeads()], 2, participation="all", local_steps=2)
    module = run.module
    cores = module.global_vector[module.layout.mask(module.layout.named("*heads_H", ""))]
    assert cores.abs().min() > 0, "every core is trained"
    made = module.export()
    for layer in made.modules():
        if isinstance(layer, MultiHead):
            layer.heads_s.data = torch.tensor([2.0, 1.0, 0.5])
    expected = logits(made.network)
    assert not torch.allclose(expected, logits(learner().network), atol=1e-4)
    saved_network.save(made, tmp_path / "merged", False, False)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(whole), expected, atol=1e-5, rtol=1e-5)


def test_heads_over_a_base_of_fewer_bits() -> None:
    model = learner(base_dtype="bfloat16")
    types = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}
    losses = []
    for each in (model, learner()):
        each.log = lambda *_, **__: None  # type: ignore[method-assign]
        loss = each.training_step((TOKENS, torch.full((2,), -1)), 0)["loss"]
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lora": {"r": 2}}, "lora and heads both choose the parameters to train"),
        ({"heads": {"rank": 2, "target_modules": ["q_proj"]}}, "heads={'rank': 2, 'target_module"),
        ({"heads": {**HEADS, "rank": 0}}, "MultiHead: rank=0 is not accepted"),
        ({"heads": {**HEADS, "target_modules": "query"}}, "no linear layer has such a name"),
    ],
)
def test_heads_that_are_not_accepted(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        learner(**given)
