"""Recurrent networks of characters and words, and the learner of the next token."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedModule, UserError
from fl_lightning.datamodules import InMemoryDataModule
from fl_lightning.models import LSTM, NextToken


def test_sizes_are_those_of_the_papers() -> None:
    stackoverflow = LSTM(10_004, None, 96, 670, 1, 96, "each")
    # Reddi et al. (2020) have 4,050,748; torch's LSTM has two biases a gate, Keras's one.
    assert sum(p.numel() for p in stackoverflow.parameters()) == 4_050_748 + 4 * 670


def test_what_comes_after_a_text_does_not_count() -> None:
    torch.manual_seed(0)
    network = LSTM(9, 3, 4, 5)
    short = torch.tensor([[4, 1]])
    padded = torch.tensor([[4, 1, -1, -1]])
    assert torch.equal(network(short), network(padded))
    learner = NextToken(LSTM(9, None, 4, 5, outputs="each"))
    loss = learner.predict_step((padded, None), 0)
    assert torch.equal(loss, learner.predict_step((short, None), 0)) and loss.shape == (1,)


def test_an_empty_text_has_logits() -> None:
    assert LSTM(9, 3, 4, 5)(torch.full((2, 4), -1)).shape == (2, 3)


def test_next_tokens_are_learned() -> None:
    text = torch.arange(9).repeat(8, 2)
    data = InMemoryDataModule(
        (text, torch.full((8,), -1)), test=(text, torch.full((8,), -1)), num_clients=2
    )
    torch.manual_seed(0)
    learner = NextToken(LSTM(9, None, 8, 16, 1, outputs="each"), lr=2.0, momentum=0.5)
    module = FederatedModule(learner, participation=1.0, local_epochs=20, seed=1)
    trainer = pl.Trainer(max_epochs=4, logger=False, enable_checkpointing=False)
    trainer.fit(module, data)
    assert float(trainer.callback_metrics["val/acc"]) > 0.9


def test_a_token_beyond_the_network_is_refused() -> None:
    with pytest.raises(UserError, match=r"tokens is 9, and the data have the token 12: give at"):
        LSTM(9)(torch.tensor([[12]]))
    with pytest.raises(UserError, match=r"NextToken: x is torch\.float32"):
        NextToken(LSTM(9)).scores((torch.zeros(2, 3), None))
    for wrong in ({"tokens": 0}, {"tokens": 3, "outputs": "all"}, {"tokens": 3, "projection": 0}):
        with pytest.raises(UserError, match=r"LSTM: (tokens|outputs|projection)="):
            LSTM(**wrong)
