"""Frozen weights of fewer bits, activations computed again, and what a language model is asked."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning import FederatedModule, UserError
from fl_lightning.datamodules import InstructionTuning
from fl_lightning.models import CausalLanguageModel, pretrained
from fl_lightning.models.text import OfTable
from tests.helpers.learners import trainer
from tests.helpers.texts import opt

pytest.importorskip("transformers", reason="texts need transformers")
pytest.importorskip("peft", reason="low-rank matrices need peft")

SHORT = "{instruction}="
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
RECORDS = [{"instruction": f"{a}+{b}", "output": str(a + b)} for a in range(4) for b in range(1, 5)]


def batch() -> tuple[Any, Any]:
    tokens = torch.randint(3, 259, (3, 12), generator=torch.Generator().manual_seed(0))
    tokens[1, 7:] = -1
    return tokens, torch.full((3,), -1)


def learner(**given: Any) -> CausalLanguageModel:
    torch.manual_seed(0)
    made = CausalLanguageModel(config=opt(), lora=LORA, **given)
    made.log = lambda *_, **__: None  # type: ignore[method-assign]
    return made


def test_what_is_frozen_has_the_type_that_was_asked_for() -> None:
    model = learner(base_dtype="bfloat16")
    types = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}
    plain = learner()
    given = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.shape == given[name].shape
    loss, count = model.training_step(batch(), 0).values()
    assert loss.dtype == torch.float32
    assert int(count) == 11 + 6 + 11
    assert float(loss) == pytest.approx(float(plain.training_step(batch(), 0)["loss"]), rel=0.05)


def test_activations_that_are_computed_again() -> None:
    gradients = []
    for again in (False, True):
        model = learner(gradient_checkpointing=again).train()
        model.training_step(batch(), 0)["loss"].backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"base_dtype": "bfloat16"}, r"base_dtype='bfloat16' is for frozen weights.*lora"),
        ({"quantize": 4}, r"quantize=4 is for frozen weights.*lora"),
        ({"quantize": 3, "lora": LORA}, r"quantize=3"),
        ({"base_dtype": "float16", "lora": LORA}, r"base_dtype='float16'.*Did you mean"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_read(
    given: dict[str, Any], says: str
) -> None:
    if torch.cuda.is_available() and "quantize" in given:
        pytest.skip("the refusal is of machines without a GPU")
    with pytest.raises(UserError, match=says):
        CausalLanguageModel(config=opt(), **given)


def test_a_federation_over_a_base_of_fewer_bits(tmp_path: Path) -> None:
    """w and what is sent are float32; a step changes w; a resumed run has the same bits."""
    vectors = []
    for rounds in ((3,), (2, 3)):
        for part in rounds:
            data = InstructionTuning(
                None, RECORDS, template=SHORT, length=64, num_clients=4, batch_size=2, seed=1
            )
            module = FederatedModule(
                learner(base_dtype="bfloat16"), participation=2, local_steps=2, seed=1, accumulate=2
            )
            run = trainer(part)
            path = tmp_path / "x.ckpt"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.fit(module, data, ckpt_path=path if part != rounds[0] else None)
            run.save_checkpoint(path)
        assert module.global_vector.dtype == torch.float32
        vectors.append(module.global_vector.detach().clone())
    assert torch.equal(*vectors)
    assert bool(vectors[0].ne(0).any())


def test_log_likelihood_is_that_of_single_tokens() -> None:
    model = learner().eval()
    tokens, _ = batch()
    start = torch.tensor([4, 0, 11])
    expected = []
    for row, first in zip(tokens, start, strict=True):
        row = row[row >= 0]
        with torch.no_grad():
            logits = model.network(input_ids=row[None]).logits[0].double()
        each = logits.log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0]
        expected.append(float(each[max(0, int(first) - 1) :].sum()))
    found = model.log_likelihood(tokens, start)
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_perplexity_is_of_all_tokens_together() -> None:
    """Not the mean of batches' perplexities: batches have unequal numbers of tokens."""
    records = [{"instruction": "a", "output": "b" * k} for k in (1, 9, 2, 3)]
    data = InstructionTuning(
        None, records, records, SHORT, length=64, num_clients=2, eval_batch_size=1
    )
    made = CausalLanguageModel(config=opt(), lora=LORA)
    module = FederatedModule(made, participation="all", local_steps=1, seed=1)
    run = trainer(1)
    run.fit(module, data)
    metrics = run.callback_metrics
    found = float(metrics["val/perplexity"])
    assert found == pytest.approx(float(metrics["val/loss"].double().exp()), rel=1e-5)
    total = number = 0.0
    final = module.export().eval()
    with torch.no_grad():
        for x, y in zip(data.test_set.x, data.test_set.y, strict=True):
            logits, wanted = final.scores((x[None], y[None]))
            total += float(
                torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-1, reduction="sum")
            )
            number += int((wanted != -1).sum())
    expected = float(torch.tensor(total / number).exp())
    assert float(metrics["val/perplexity"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_a_float32_product_is_that_of_weights(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of rows, where the processor has no instructions for bfloat16."""
    monkeypatch.setattr(pretrained, "WIDENED", 24)
    monkeypatch.setattr(pretrained, "computes_in_bfloat16", lambda: False)
    layer = torch.nn.Linear(8, 10, bias=bias).requires_grad_(False).to(torch.bfloat16)
    pretrained.freeze_linears(layer)
    x = torch.randn(3, 5, 8, requires_grad=True)
    y = layer(x)
    wide = torch.nn.functional.linear(x, layer.weight.float(), layer.bias.float() if bias else None)
    torch.testing.assert_close(y, wide.to(torch.bfloat16))
    g = torch.randn(3, 5, 10).to(torch.bfloat16)
    (gradient,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(gradient, g.float() @ layer.weight.float())
    # A gradient of a gradient, as curvature needs it.
    (first,) = torch.autograd.grad((layer(x).float() ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    w = layer.weight.float()
    torch.testing.assert_close(second, (2 * w.sum(1) @ w).expand_as(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_metrics_of_a_table_are_scikit_learns(classes: int) -> None:
    """Also if all guesses are one class, or a class does not occur."""
    from sklearn.metrics import f1_score, matthews_corrcoef

    draw = torch.Generator().manual_seed(classes)
    for most in (1, 2, classes):
        right, guessed = (torch.randint(high, (20,), generator=draw) for high in (classes, most))
        f1, mcc = OfTable("f1", classes), OfTable("mcc", classes)
        for metric in (f1, mcc):
            for part in (slice(0, 7), slice(7, 20)):
                metric.update(guessed[part], right[part])
        average: Any = "binary" if classes == 2 else "macro"
        expected = f1_score(right, guessed, average=average, zero_division=0.0)
        assert float(f1.compute()) == pytest.approx(expected)
        assert float(mcc.compute()) == pytest.approx(matthews_corrcoef(right, guessed))
