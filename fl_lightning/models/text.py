"""Learners around a transformer: language models, and classifiers of texts.

A batch is ``(tokens (n, length), labels (n,))``, tokens -1 where a text has ended, as our data
modules give it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_lightning.errors import UserError
from fl_lightning.lightning import pl
from fl_lightning.models import pretrained

# As in datamodules/tokens.py, which stands beside the networks and not below them.
NO_TOKEN = -1


class Predictions(pl.LightningModule):
    """A learner of texts, which logs a loss and an accuracy.

    They are ``loss`` and ``acc`` under ``train/``, ``val/`` and ``test/``.

    ``scores(batch)`` of a subclass gives logits ``(k, classes)`` and what they are to predict
    ``(k,)``, where -1 does not count. Evaluation weighs batches by the number of predictions.
    """

    def scores(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits ``(k, classes)`` of a batch's k predictions, and what was right ``(k,)``.

        That is -1 where nothing counts. A subclass predicts a class of the text, or each next
        token.
        """
        raise NotImplementedError  # abstract: what is predicted is what a subclass is

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, right, _ = _measured(*self.scores(batch))
        # What is logged outlives the step, and would keep its graph.
        self.log("train/loss", loss.detach())
        self.log("train/acc", right)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, name: str, batch: Any) -> None:
        loss, right, count = _measured(*self.scores(batch))
        self.log(f"{name}/loss", loss, batch_size=int(count), sync_dist=True)
        self.log(f"{name}/acc", right, batch_size=int(count), sync_dist=True)

    def each_text(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """Mean loss of each text ``(n,)``, of logits ``(n, length, tokens)``."""
        each = cross_entropy(
            logits.transpose(1, 2), wanted, ignore_index=NO_TOKEN, reduction="none"
        )
        means: Tensor = each.sum(1) / (wanted != NO_TOKEN).sum(1).clamp(min=1)
        return means


class TextLearner(Predictions):
    """A learner around a transformer, with AdamW."""

    task: str

    def __init__(
        self,
        path: str | None,
        config: dict[str, Any] | None,
        trainable: Sequence[str] | None,
        lora: dict[str, Any] | None,
        lr: float,
        weight_decay: float,
        **fixed: Any,
    ) -> None:
        name = type(self).__name__
        for option, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not math.isfinite(value):
                raise UserError(
                    f"{name}: {option}={value!r} is not accepted; it has to be a finite number."
                )
        super().__init__()
        self.network: Any = pretrained.network(
            self.task, name, path, config, trainable, lora, **fixed
        )
        self.lr = lr
        self.weight_decay = weight_decay

    def setup(self, stage: str) -> None:
        """Refuse data with tokens that the network does not have, or texts longer than it takes.

        Raises:
            UserError: names both sides.
        """
        data = getattr(self.trainer, "datamodule", None)
        sizes = pretrained.sizes_of(self.network)
        tokens = getattr(data, "vocabulary", None)
        length = getattr(data, "length", None)
        if isinstance(tokens, int) and tokens > sizes.vocab_size:
            raise UserError(
                f"{type(self).__name__}: the network has {sizes.vocab_size} tokens, but "
                f"{type(data).__name__} has {tokens}. Give config.vocab_size {tokens}, or "
                "data.tokenizer: the folder of the network's own."
            )
        longest = getattr(sizes, "max_position_embeddings", None)
        if isinstance(length, int) and isinstance(longest, int) and length > longest:
            raise UserError(
                f"{type(self).__name__}: data.length is {length}, but the network takes at most "
                f"{longest} tokens (config.max_position_embeddings). Give a shorter length."
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The optimizer is given nothing that is frozen, so it keeps no moments of it.
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, weight_decay=self.weight_decay)

    @property
    def padding(self) -> int:
        """The network's token for padding."""
        return int(pretrained.sizes_of(self.network).pad_token_id)


def _measured(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross-entropy, the share of right predictions, and how many count; 0 of none."""
    count = (wanted != NO_TOKEN).sum().clamp(min=1)
    loss = cross_entropy(logits, wanted, ignore_index=NO_TOKEN, reduction="sum") / count
    return loss, (logits.detach().argmax(-1) == wanted).sum() / count, count


class CausalLanguageModel(TextLearner):
    """Each token from those before it: cross-entropy in nats and accuracy, per token.

    Args:
        path: a local folder with config.json and weights, such as OPT-125M's; None: random weights
            by ``config``.
        config: entries of the architecture as transformers names them, ``model_type`` among them
            where there is no ``path``; beside one, in place of the folder's (``{dropout: 0.0}``).
        trainable: patterns (``fnmatch``) of the names of parameters that are trained, the others
            frozen; None: all.
        lora: arguments of peft's ``LoraConfig``: low-rank matrices are trained in place of the
            network.
        lr, weight_decay: of AdamW, where no client optimizer is set.

    D, and what is communicated, counts what is trained; tied embeddings are one parameter and
    count once.
    ``predict_step`` gives the mean loss of each text ``(n,)``. A batch is tokens ``(n, L)``, -1
    where a text has ended, and anything, or targets ``(n, L)``: the token where it is learned, else
    -1, as ``InstructionTuning`` has them.

    Raises:
        UserError: transformers or peft are missing; a folder, architecture or pattern that cannot
            be.
    """

    task = "CausalLM"

    def __init__(
        self,
        path: str | None = None,
        config: dict[str, Any] | None = None,
        trainable: Sequence[str] | None = None,
        lora: dict[str, Any] | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(path, config, trainable, lora, lr, weight_decay)
        self.save_hyperparameters()

    def scores(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits, wanted = self._next(batch[0])
        # Targets beside the tokens say which of these are learned.
        if batch[1].shape == batch[0].shape:
            wanted = batch[1][:, 1:].long()
        return logits.flatten(0, 1), wanted.flatten()

    def _next(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``(n, length - 1, vocabulary)`` and the tokens that come ``(n, length - 1)``."""
        tokens = tokens.long()
        # Padding is last, where no token of the text looks: no mask is needed.
        seen = tokens[:, :-1]
        filled = seen.masked_fill(seen == NO_TOKEN, self.padding)
        return self.network(input_ids=filled, use_cache=False).logits, tokens[:, 1:]

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.each_text(*self._next(batch[0]))


class TextClassifier(TextLearner):
    """A text's class; cross-entropy and accuracy per text.

    Arguments are as :class:`CausalLanguageModel` has them. The head is new in a network that has
    none; of a decoder such as OPT it reads the last token. ``predict_step`` gives probabilities
    ``(n, num_classes)``.
    """

    task = "SequenceClassification"

    def __init__(
        self,
        num_classes: int,
        path: str | None = None,
        config: dict[str, Any] | None = None,
        trainable: Sequence[str] | None = None,
        lora: dict[str, Any] | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(path, config, trainable, lora, lr, weight_decay, num_labels=num_classes)
        self.save_hyperparameters()
        self.num_classes = num_classes

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = getattr(self.trainer, "datamodule", None)
        classes = getattr(data, "num_classes", self.num_classes)
        if classes is None:
            raise UserError(
                f"TextClassifier: {type(data).__name__} has no classes. "
                "CausalLanguageModel needs none."
            )
        if classes > self.num_classes:
            raise UserError(
                f"TextClassifier: num_classes is {self.num_classes}, but {type(data).__name__} has "
                f"{classes} classes."
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``(n, length)`` to logits ``(n, num_classes)``."""
        there = tokens != NO_TOKEN
        filled = tokens.long().masked_fill(~there, self.padding)
        options = {"attention_mask": there.long(), "use_cache": False}
        logits: Tensor = self.network(input_ids=filled, **options).logits
        return logits

    def scores(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self(batch[0]), batch[1]

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        probabilities: Tensor = self(batch[0]).softmax(1)
        return probabilities
