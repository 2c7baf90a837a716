"""Texts against plain loops of PyTorch and transformers, over two rounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning import FederatedModule
from fl_lightning.datamodules import InstructionTuning, TextClassification
from fl_lightning.models import CausalLanguageModel, TextClassifier
from tests.helpers.learners import trainer
from tests.helpers.texts import (
    CLASSES,
    WORDS,
    bert,
    bert_folder,
    llama,
    multinli_files,
    sentence_rows,
    tokenizer_folder,
)

transformers = pytest.importorskip(
    "transformers", reason="texts need transformers: pip install 'fl-lightning[text]'"
)

ROUNDS = 2
CLIENTS = 2


Losses = Callable[[Any, int, int], Iterator[Tensor]]


def federated_by_hand(network: Any, loss_of_steps: Losses) -> Any:
    """FedAvg with AdamW, a fresh one in each round; the clients have equal weights."""
    for round in range(ROUNDS):
        trained = []
        for client in range(CLIENTS):
            own = deepcopy(network)
            optimizer = torch.optim.AdamW(own.parameters(), lr=0.01, weight_decay=0.01)
            for loss in loss_of_steps(own, client, round):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            trained.append(own)
        means = zip(network.parameters(), *(own.parameters() for own in trained), strict=True)
        for to, *values in means:
            to.data = torch.stack([value.data for value in values]).mean(0)
    return network


def fitted(learner: Any, data: Any, **given: Any) -> tuple[Any, Any]:
    """The network after the run, and the run."""
    module = FederatedModule(learner, participation="all", local_epochs=1, seed=0, **given)
    run = trainer(ROUNDS)
    run.fit(module, data)
    return module.export().network, run


def assert_equal(network: Any, other: Any) -> None:
    expected = dict(other.named_parameters())
    torch.testing.assert_close(dict(network.named_parameters()), expected, rtol=1e-5, atol=1e-5)


def test_bert_on_pairs(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "words")
    data = TextClassification(
        multinli_files(tmp_path, 44), group=None, num_clients=CLIENTS, length=16, batch_size=8,
        tokenizer=folder, seed=0,
    )  # fmt: skip
    torch.manual_seed(0)
    learner = TextClassifier(3, config=bert(), lr=0.01)
    start = deepcopy(learner.network)
    network, run = fitted(learner, data)

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def loss(own: Any, rows: list[dict[str, str]]) -> Tensor:
        pairs = [[row[f"sentence{k}"] for row in rows] for k in (1, 2)]
        inputs = tokenizer(*pairs, padding=True, return_tensors="pt")
        assert inputs["token_type_ids"].any()
        labels = torch.tensor([CLASSES.index(row["gold_label"]) for row in rows])
        found: Tensor = own(**inputs, labels=labels).loss
        return found

    train, test = (
        [row for row in rows if row["gold_label"] != "-"]
        for rows in (sentence_rows(44), sentence_rows(30, 1))
    )

    def steps(own: Any, client: int, round: int) -> Iterator[Tensor]:
        places = data.client_indices(client)[data.order(client, round, 0)]
        for first in range(0, len(places), 8):
            yield loss(own, [train[place] for place in places[first : first + 8]])

    by_hand = federated_by_hand(start, steps)
    assert_equal(network, by_hand)
    with torch.no_grad():
        expected = float(loss(by_hand.eval(), test))
    assert float(run.callback_metrics["val/loss"]) == pytest.approx(expected, abs=1e-5)


def instructions(count: int, seed: int) -> list[dict[str, str]]:
    draw = np.random.default_rng(seed)
    return [
        {
            name: " ".join(draw.choice(WORDS, size))
            for name, size in (("instruction", 3), ("output", n))
        }
        for n in draw.integers(1, 9, count).tolist()
    ]


def test_a_packed_llama_with_accumulation(tmp_path: Path) -> None:
    """Batches of a step have different numbers of answers' tokens, by which they are weighted."""
    folder = tokenizer_folder(tmp_path / "words", bos=True)
    records = instructions(40, 0)
    others = instructions(10, 1)
    (tmp_path / "test.json").write_text(json.dumps(others))
    data = InstructionTuning(
        None, records, str(tmp_path / "test.json"), template="{instruction}", length=12, pack=True,
        tokenizer=folder, num_clients=CLIENTS, batch_size=2, seed=0,
    )  # fmt: skip
    torch.manual_seed(0)
    learner = CausalLanguageModel(config=llama(), lr=0.01)
    start = deepcopy(learner.network)
    network, run = fitted(learner, data, accumulate=3)

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    bos, end = 0, 2

    def encoded(record: dict[str, str]) -> tuple[list[int], list[int]]:
        """As transformers has it: a prompt with its BOS, the answer, and -100 for the prompt."""
        asked = tokenizer(record["instruction"])["input_ids"]
        assert asked[0] == bos
        answer = [*tokenizer(record["output"], add_special_tokens=False)["input_ids"], end]
        return asked + answer, [-100] * len(asked) + answer

    def total(own: Any, rows: list[Any]) -> tuple[Tensor, int]:
        """The sum of the losses over the answers' tokens of some rows, and their number."""
        longest = max(len(tokens) for tokens, _ in rows)
        tokens, labels = (
            torch.tensor([row[k] + [fill] * (longest - len(row[k])) for row in rows])
            for k, fill in ((0, 1), (1, -100))
        )
        labels[:, 0] = -100
        count = int((labels != -100).sum())
        return own(input_ids=tokens, labels=labels).loss * count, count

    plain = InstructionTuning(
        None, records, template="{instruction}", num_clients=CLIENTS, tokenizer=folder, seed=0
    )
    plain.setup()
    packed = []
    for client in range(CLIENTS):
        texts = [encoded(records[place]) for place in sorted(plain.client_indices(client))]
        tokens, labels = ([number for text in texts for number in text[k]] for k in (0, 1))
        starts = range(0, len(tokens), 12)
        packed.append([(tokens[i : i + 12], labels[i : i + 12]) for i in starts])

    def steps(own: Any, client: int, round: int) -> Iterator[Tensor]:
        order = data.order(client, round, 0)
        rows = [packed[client][place] for place in order]
        for first in range(0, len(rows), 6):
            parts = [rows[i : i + 2] for i in range(first, min(first + 6, len(rows)), 2)]
            sums, counts = zip(*(total(own, part) for part in parts), strict=True)
            yield sum(sums) / sum(counts)

    by_hand = federated_by_hand(start, steps)
    assert_equal(network, by_hand)
    tests = [tuple(part[:12] for part in encoded(record)) for record in others]
    with torch.no_grad():
        loss, count = total(by_hand.eval(), tests)
    assert float(run.callback_metrics["val/loss"]) == pytest.approx(float(loss) / count, abs=1e-5)
