"""Recurrent networks of characters and words, and a learner that predicts the next token."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.introspection.accepted import FiniteFloat, PositiveInt, check_arguments
from fl_lightning.introspection.init_args import Given
from fl_lightning.models.classifier import AroundNetwork
from fl_lightning.models.text import NO_TOKEN, Predictions


class LSTM(Given, nn.Module):
    """An embedding, ``layers`` of LSTM and a linear layer, as in LEAF (Caldas et al., 2018).

    Tokens ``(n, length)``, −1 after the end of a text, to logits. With ``outputs="last"`` one per
    text, read at its last token, ``(n, num_classes)``; with ``outputs="each"`` one per token, ``(n,
    length, num_classes)``.

    Args:
        tokens: number of different tokens; a token is a whole number from 0 to below it.
        num_classes: number of outputs; None: ``tokens``, to predict the next one.
        embedding, hidden: numbers per token, and units of a layer.
        projection: size of a linear layer between the LSTM and the last one, as in Reddi et al.
            (2020) for StackOverflow; None: there is none.
        outputs: ``"last"`` for :class:`Classifier`, ``"each"`` for :class:`NextToken`.
    """

    # The command line's checks for images do not apply.
    takes_tokens = True

    def __init__(
        self,
        tokens: PositiveInt,
        num_classes: PositiveInt | None = None,
        embedding: PositiveInt = 8,
        hidden: PositiveInt = 256,
        layers: PositiveInt = 2,
        projection: PositiveInt | None = None,
        outputs: Literal["last", "each"] = "last",
    ) -> None:
        super().__init__()
        self.outputs = outputs
        self.embedding = nn.Embedding(tokens, embedding)
        self.recurrent = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.projection = nn.Linear(hidden, projection) if projection else nn.Identity()
        self.head = nn.Linear(projection or hidden, num_classes or tokens)

    def forward(self, x: Tensor) -> Tensor:
        filled = x.long().clamp(min=0)
        states: Tensor = self.recurrent(self.embedding(filled))[0]
        if self.outputs == "last":
            # Padding follows a text, so the text's last token has read only the text.
            last = (x != NO_TOKEN).sum(1).clamp(min=1) - 1
            states = states[torch.arange(len(x), device=x.device), last]
        y: Tensor = self.head(self.projection(states))
        return y


class NextToken(Predictions, AroundNetwork):
    """Predicts each token from those before it: cross-entropy and accuracy per token.

    A batch is tokens ``(n, length + 1)``, −1 after the end of a text, and a second entry that is
    not used, as in ``FromHDF5`` with TFF's and pfl's texts, and in ``LanguageModelling``.
    ``predict_step`` returns the mean loss of each text ``(n,)``, in nats.

    Args:
        network: tokens ``(n, length)`` to logits ``(n, length, tokens)``, such as :class:`LSTM`
            with ``outputs="each"``.
        lr, weight_decay, momentum: of SGD, if no client optimizer is set.
    """

    def __init__(
        self,
        network: nn.Module,
        lr: FiniteFloat = 1.0,
        weight_decay: FiniteFloat = 0.0,
        momentum: FiniteFloat = 0.0,
    ) -> None:
        check_arguments(NextToken.__init__, locals())
        super().__init__(network, lr, weight_decay, momentum)
        self.save_hyperparameters(ignore=["network"])

    def scores(self, batch: tuple[Tensor, Any]) -> tuple[Tensor, Tensor]:
        logits, wanted = self._next(batch[0])
        return logits.flatten(0, 1), wanted.flatten()

    def _next(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self(tokens[:, :-1]), tokens[:, 1:].long()

    def predict_step(self, batch: tuple[Tensor, Any], batch_idx: int) -> Tensor:
        return self.each_text(*self._next(batch[0]))
