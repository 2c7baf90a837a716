"""`MultipleChoice` and `ExactMatch`, by a network that is asked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging

from fl_lightning import FederatedModule, UserError
from fl_lightning.callbacks import ExactMatch, MultipleChoice
from fl_lightning.datamodules import InstructionTuning
from fl_lightning.datamodules.formats.tokens import tokenizer_of
from fl_lightning.evaluation.instruction_records import prompt_of, question_of
from fl_lightning.models import CausalLanguageModel
from tests.helpers.learners import trainer
from tests.helpers.texts import opt, tokenizer_folder
from tests.test_weight_averaging import Saving

pytest.importorskip("transformers", reason="texts need transformers")

RECORDS = [{"instruction": f"say {word}", "output": word} for word in ("a", "bb", "ccc", "d")]
ROWS = [
    {"prompt": "say a:", "choices": ["a", "some longer text", "b"], "answer": 0},
    {"prompt": "say bb:", "choices": ["q", "bb"], "answer": 1},
    {"prompt": "", "choices": ["xyz", "x"], "answer": 1},
]


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def fitted(*callbacks: Any, rounds: int = 2) -> Any:
    torch.manual_seed(0)
    model = CausalLanguageModel(config=opt(), lr=0.01)
    data = InstructionTuning(
        None, RECORDS, template="{instruction}", length=64, num_clients=2, batch_size=2, seed=0
    )
    module = FederatedModule(model, participation="all", local_steps=8, seed=0)
    run = trainer(rounds, callbacks)
    run.fit(module, data)
    return module, run


def score(network: Any, prompt: str, choice: str) -> float:
    """By one forward pass of the one text."""
    asked = [byte + 3 for byte in prompt.encode()]
    text = torch.tensor([*asked, *(byte + 3 for byte in choice.encode())])
    with torch.no_grad():
        logits = network.network(input_ids=text[None]).logits[0].double()
    each = logits.log_softmax(-1)[:-1].gather(1, text[1:, None])[:, 0]
    return float(each[max(0, len(asked) - 1) :].sum())


def test_choices_by_likelihood(tmp_path: Path) -> None:
    module, run = fitted(MultipleChoice(written(tmp_path / "x.jsonl", ROWS)))
    final = module.export().eval()
    plain = normed = 0
    for row in ROWS:
        scores = [score(final, row["prompt"], choice) for choice in row["choices"]]
        each = [s / len(c) for s, c in zip(scores, row["choices"], strict=True)]
        plain += scores.index(max(scores)) == row["answer"]
        normed += each.index(max(each)) == row["answer"]
    assert float(run.callback_metrics["choice/acc"]) == pytest.approx(plain / 3)
    assert float(run.callback_metrics["choice/acc_norm"]) == pytest.approx(normed / 3)


def test_answers_word_for_word(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", RECORDS)
    module, run = fitted(ExactMatch(path, max_new_tokens=4, template="{instruction}"), rounds=12)
    final = module.export().eval()
    matches = 0
    for record in RECORDS:
        prompt, answer = prompt_of(record, "{instruction}", "")
        text = [byte + 3 for byte in prompt.encode()]
        for _ in range(4):
            with torch.no_grad():
                logits = final.network(input_ids=torch.tensor([text])).logits[0, -1]
            text.append(int(logits.argmax()))
            if text[-1] == 1:
                break
        told = bytes(t - 3 for t in text[len(prompt.encode()) :] if t >= 3)
        matches += told.decode(errors="replace").strip() == answer
    assert float(run.callback_metrics["generation/exact_match"]) == matches / len(RECORDS)
    assert matches, "the network has learned some of them"


def test_an_answer_in_a_conversation(tmp_path: Path) -> None:
    """Learned by heart, and asked for as it was learned."""
    talks = [
        {"messages": [{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": w}]}
        for w in ("a", "bb")
    ]
    wrong = [{"messages": [talks[0]["messages"][0], {"role": "assistant", "content": "zz"}]}]
    torch.manual_seed(0)
    data = InstructionTuning(None, talks, length=64, num_clients=1, batch_size=2, seed=0)
    path = written(tmp_path / "x.jsonl", [*talks, *wrong])
    module = FederatedModule(
        CausalLanguageModel(config=opt(), lr=0.01), participation="all", local_steps=60, seed=0
    )
    run = trainer(1, [ExactMatch(path, max_new_tokens=4)])
    run.fit(module, data)
    assert float(run.callback_metrics["generation/exact_match"]) == pytest.approx(2 / 3)


def test_a_conversation_without_an_answer_is_refused(tmp_path: Path) -> None:
    for messages, says in (("x", "not a list"), ([{"role": "user", "content": "a"}], "no answer")):
        with pytest.raises(UserError, match=f"record 1, has .*{says}"):
            ExactMatch(written(tmp_path / "x.jsonl", [{"messages": messages}]))


def test_questions_begin_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    """So that a question is what the network learned to answer."""
    folder = tokenizer_folder(tmp_path / "words", bos=True)
    record = {"instruction": "the king", "output": "good"}
    encoder = tokenizer_of(folder)
    assert question_of(record, "{instruction}", encoder)[0][0] == 0
    rows = [{"prompt": "the king", "choices": ["good", "no"], "answer": 0}]
    choice = MultipleChoice(written(tmp_path / "x.jsonl", rows))
    assert choice.lengths(encoder) == [4]


def test_the_networks_settings_of_generation_change_no_answer() -> None:
    pytest.importorskip("peft", reason="low-rank matrices need peft")
    lora = {"r": 2, "target_modules": ["q_proj"]}
    torch.manual_seed(0)
    model = CausalLanguageModel(config=opt(), lora=lora).eval()
    model.network.generation_config.repetition_penalty = 5.0
    model.network.generation_config.suppress_tokens = [7]
    asked = torch.tensor([7, 9, 11, 7])
    text = asked.tolist()
    while len(text) < len(asked) + 8 and text[-1] != 1:
        with torch.no_grad():
            text.append(int(model.network(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    assert model.generate(asked, 8, 1).tolist() == text[len(asked) :]
    end = text[len(asked)]
    assert model.generate(asked, 8, end).tolist() == [end]
    assert model.network.generation_config.repetition_penalty == 5.0


def test_they_measure_the_averages_that_are_validated(tmp_path: Path) -> None:
    measured: list[torch.Tensor] = []

    class Recording(CausalLanguageModel):
        def log_likelihood(self, tokens: Any, start: Any) -> Any:
            measured.append(torch.cat([p.detach().reshape(-1) for p in self.parameters()]))
            return super().log_likelihood(tokens, start)

    torch.manual_seed(0)
    data = InstructionTuning(
        None, RECORDS, RECORDS, "{instruction}", length=64, num_clients=2, batch_size=2, seed=0
    )
    module = FederatedModule(Recording(config=opt(), lr=0.01), participation="all", seed=0)
    saving = Saving(tmp_path)
    asking = MultipleChoice(written(tmp_path / "x.jsonl", ROWS), every_n_rounds=1)
    trainer(3, [EMAWeightAveraging(decay=0.5), saving, asking]).fit(module, data)
    assert len(measured) == len(saving.validated) == 3
    for t, (one, other) in enumerate(zip(measured, saving.validated, strict=True)):
        assert torch.equal(one, other), t
    assert not torch.equal(saving.w[2], saving.validated[2][: len(saving.w[2])])


def test_they_change_no_bit_of_training(tmp_path: Path) -> None:
    asked = (
        MultipleChoice(written(tmp_path / "x.jsonl", ROWS), every_n_rounds=1),
        ExactMatch(written(tmp_path / "y.jsonl", RECORDS), 2, 1, "{instruction}"),
    )
    assert torch.equal(fitted(*asked)[0].global_vector, fitted()[0].global_vector)
