"""Learners of texts: what they compute, what of them is trained, what they refuse."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from fl_lightning import FederatedModule
from fl_lightning.callbacks import PartialAveraging
from fl_lightning.datamodules import LanguageModelling, TextClassification
from fl_lightning.errors import UserError
from fl_lightning.learner.layout import Layout
from fl_lightning.models import CausalLanguageModel, TextClassifier
from tests.helpers.learners import trainer
from tests.helpers.texts import multinli_files, opt, opt_layer, opt_rest, text_file

transformers = pytest.importorskip(
    "transformers", reason="texts need transformers: pip install 'fl-lightning[text]'"
)


def tokens(*lengths: int) -> Tensor:
    """Texts of these lengths, -1 where they have ended."""
    made = torch.randint(
        3, 259, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0)
    )
    for row, length in zip(made, lengths, strict=True):
        row[length:] = -1
    return made.int()


def logged(learner: Any, step: str, batch: Any) -> dict[str, tuple[float, int | None]]:
    found: dict[str, tuple[float, int | None]] = {}
    learner.log = lambda name, value, batch_size=None, **_: found.update(
        {name: (float(getattr(value, "compute", lambda: value)()), batch_size)}
    )
    getattr(learner, step)(batch, 0)
    return found


def test_the_loss_is_that_of_the_library_and_padding_does_not_count() -> None:
    learner = CausalLanguageModel(config=opt())
    x = tokens(12, 5, 9)
    losses = [learner.network(input_ids=row[None], labels=row[None]).loss for row in rows(x)]
    theirs, counts = torch.tensor([float(loss) for loss in losses]), torch.tensor([11, 4, 8])
    expected = pytest.approx(float((theirs * counts).sum() / counts.sum()), rel=1e-6)
    batch = (x, torch.full((3,), -1))
    assert float(logged(learner, "training_step", batch)["train/loss"][0]) == expected
    assert logged(learner, "validation_step", batch)["val/loss"] == (expected, 23)
    assert learner.predict_step(batch, 0).tolist() == pytest.approx(theirs.tolist(), rel=1e-6)
    guesses = [learner.network(input_ids=row[None]).logits[0, :-1].argmax(-1) for row in rows(x)]
    right = sum(int((guess == row[1:]).sum()) for guess, row in zip(guesses, rows(x), strict=True))
    assert logged(learner, "test_step", batch)["test/acc"][0] == pytest.approx(right / 23)


def rows(x: Tensor) -> list[Tensor]:
    return [row[row >= 0].long() for row in x]


def test_a_class_does_not_depend_on_padding() -> None:
    learner = TextClassifier(3, config=opt())
    x, y = tokens(12, 5, 9), torch.tensor([2, 0, 1])
    alone = torch.cat([learner(row[None]) for row in rows(x)])
    torch.testing.assert_close(learner(x), alone)
    torch.testing.assert_close(learner.predict_step((x, y), 0), alone.softmax(1))
    found = logged(learner, "validation_step", (x, y))
    loss = float(torch.nn.functional.cross_entropy(alone, y))
    assert found["val/loss"] == (pytest.approx(loss), 3)
    assert found["val/acc"][0] == pytest.approx(float((alone.argmax(1) == y).float().mean()))


def test_tied_embeddings_are_one_parameter() -> None:
    learner = CausalLanguageModel(config=opt(layers=3))
    layout = Layout(learner)
    assert layout.size == 3 * opt_layer() + opt_rest()
    head = learner.network.get_output_embeddings()
    embedding = learner.network.get_input_embeddings()
    assert head.weight is embedding.weight
    assert sum("embed_tokens" in n or "lm_head" in n for n in layout) == 1
    untied = Layout(CausalLanguageModel(config=opt(layers=3, tie_word_embeddings=False)))
    assert untied.size == layout.size + 259 * 16


def test_a_frozen_backbone_makes_d_small() -> None:
    layout = Layout(TextClassifier(3, config=opt(), trainable=["score.*", "*.layers.1.*"]))
    assert layout.size == opt_layer() + 3 * 16
    learner = TextClassifier(3, config=opt(), trainable=["score.*"])
    assert list(Layout(learner)) == ["network.score.weight"]
    (group,) = learner.configure_optimizers().param_groups
    assert len(group["params"]) == 1 and group["weight_decay"] == 0.01


def test_low_rank_matrices_make_d_small(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="lora needs peft: pip install 'fl-lightning[lora]'")
    lora = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
    learner = CausalLanguageModel(config=opt(layers=3), lora=lora, lr=0.05)
    assert Layout(learner).size == 3 * 2 * 2 * (2 * 16), (
        "of 3 layers two matrices, each r x 16 and 16 x r"
    )
    text_file(tmp_path)
    data = LanguageModelling(tmp_path, length=12, num_clients=3, batch_size=4)
    start = learner.state_dict()
    start = {name: value.clone() for name, value in start.items()}
    module = fitted(learner, data, PartialAveraging(extractor="*.layers.[01].*", period=2))
    moved = {
        name
        for name, value in module.export().state_dict().items()
        if not torch.equal(value, start[name])
    }
    assert moved and all("lora_" in name for name in moved)


def fitted(
    learner: Any, data: Any, *callbacks: pl.Callback, rounds: int = 2, **options: Any
) -> FederatedModule:
    given = {"participation": "all", "local_steps": 2, "seed": 0, "engine": "sequential"}
    module = FederatedModule(learner, **given, **options)
    trainer(rounds, callbacks).fit(module, data)
    return module


def test_a_folder_in_half_precision_is_trained_in_single_and_its_entries_can_be_replaced(
    tmp_path: Path,
) -> None:
    whole = CausalLanguageModel(config=opt(dropout=0.1)).network
    whole.half().save_pretrained(tmp_path)
    learner = CausalLanguageModel(str(tmp_path), config={"dropout": 0.0})
    assert {p.dtype for p in learner.parameters()} == {torch.float32}
    assert learner.network.config.dropout == 0.0
    assert all(module.training for module in learner.modules()), "where there is dropout, it is on"
    for (name, here), (_, there) in zip(
        learner.network.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert torch.equal(here, there.float()), name
    classifier = TextClassifier(3, str(tmp_path))
    assert torch.equal(
        classifier.network.get_input_embeddings().weight,
        whole.get_input_embeddings().weight.float(),
    )


def test_another_architecture_is_told_before_weights_are_read(tmp_path: Path) -> None:
    CausalLanguageModel(config=opt()).network.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"'opt', and config\.model_type is 'llama'.*null"):
        CausalLanguageModel(path=str(tmp_path), config={"model_type": "llama"})


def test_a_checkpoint_loads_as_lightning_does(tmp_path: Path) -> None:
    data = TextClassification(multinli_files(tmp_path / "data"), length=24, batch_size=8)
    learner = TextClassifier(3, config=opt())
    module = fitted(learner, data)
    module.trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = TextClassifier.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    exported = module.export().state_dict()
    assert all(torch.equal(value, exported[name]) for name, value in loaded.state_dict().items())


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({}, "neither path nor config.model_type is given"),
    "pattern": ({"config": opt(), "trainable": ["scores.*"]}, "trainable has 'scores.*', but no p"),
    "both": (
        {"config": opt(), "trainable": ["*"], "lora": {"r": 2}},
        "lora and trainable both choose the parameters to train",
    ),
    "rate": ({"config": opt(), "lr": float("nan")}, "lr=nan is not accepted"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_made_is_one_paragraph(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, says = BROKEN[case]
    with pytest.raises(UserError, match=re.escape(says)) as error:
        CausalLanguageModel(**arguments)
    assert str(error.value).startswith("CausalLanguageModel: ") and "\n" not in str(error.value)


def test_missing_libraries_name_their_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"lora needs peft.* pip install 'fl-lightning\[lora\]'"):
        CausalLanguageModel(config=opt(), lora={"r": 2})
    monkeypatch.setitem(sys.modules, "transformers", None)
    install = r"pip install 'fl-lightning\[text\]'"
    with pytest.raises(UserError, match=rf"TextClassifier needs transformers.* {install}"):
        TextClassifier(3, config=opt())
    file = "multinli_1.0_train.jsonl"
    with pytest.raises(UserError, match=rf"data\.tokenizer is .* {install}"):
        LanguageModelling(multinli_files(tmp_path), file, tokenizer=tmp_path).setup()


def test_data_that_do_not_fit_the_network_are_refused_before_training(tmp_path: Path) -> None:
    text_file(tmp_path)
    multinli_files(tmp_path)
    few, own = (CausalLanguageModel(config=opt(**given)) for given in ({"vocab_size": 200}, {}))
    pairs, two = TextClassification(tmp_path, length=24), TextClassifier(2, config=opt())
    cases = [
        (few, LanguageModelling(tmp_path), "has 200 tokens, but LanguageM"),
        (own, LanguageModelling(tmp_path, length=65), "length is 65, .* at most 64 token"),
        (two, pairs, "num_classes is 2, but .* 3 classes"),
    ]
    for learner, data, says in cases:
        with pytest.raises(UserError, match=says):
            fitted(learner, data)
