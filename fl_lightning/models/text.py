"""Learners around a transformer: language models, and classifiers of texts.

A batch is ``(tokens (n, length), labels (n,))``, with tokens -1 after the end of a text, as in our
data modules. If the tokenizer marks the second text of a pair, they are ``(n, 2, length)``: tokens
and their types (``token_type_ids``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import Metric

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import AtLeast, FiniteFloat, check_arguments
from fl_lightning.machine.lightning import pl
from fl_lightning.models import pretrained
from fl_lightning.models.class_metrics import check_classes

# The same value as in datamodules/formats/tokens.py, which this module must not import.
NO_TOKEN = -1
Dtype = Literal["float32", "bfloat16"]
Bits = Literal[4, 8, "nf4"] | None


class Predictions(pl.LightningModule, ABC):
    """A learner for texts, which logs a loss and an accuracy.

    The learner logs ``loss`` and ``acc`` under ``train/``, ``val/`` and ``test/``.

    ``scores(batch)`` of a subclass returns logits ``(k, classes)`` and the right classes ``(k,)``;
    -1 does not count. Evaluation weighs batches by the number of predictions.
    """

    @abstractmethod
    def scores(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return logits ``(k, classes)`` of k predictions, and the right classes ``(k,)``.

        A class of -1 does not count in the loss and the metrics. A subclass predicts the text's
        class, or each next token.
        """

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss, right, count = _measured(*self.scores(batch))
        # Logged values outlive the step, so detach them from the graph.
        self.log("train/loss", loss.detach())
        self.log("train/acc", right)
        return {"loss": loss, "count": count}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, name: str, batch: Any) -> None:
        logits, wanted = self.scores(batch)
        loss, right, count = _measured(logits, wanted)
        weight = max(1, int(count))
        self.log(f"{name}/loss", loss, batch_size=weight, sync_dist=True)
        self.log(f"{name}/acc", right, batch_size=weight, sync_dist=True)
        self._also(name, logits, wanted)

    def _also(self, name: str, logits: Tensor, wanted: Tensor) -> None:
        """Log a subclass's metrics other than loss and accuracy."""

    def each_text(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean loss of each text ``(n,)``, from logits ``(n, length, tokens)``."""
        each = cross_entropy(
            logits.transpose(1, 2), wanted, ignore_index=NO_TOKEN, reduction="none"
        )
        means: Tensor = each.sum(1) / (wanted != NO_TOKEN).sum(1).clamp(min=1)
        return means


class TextLearner(Predictions):
    """A learner around a transformer, with AdamW."""

    task: str
    frozen_stay = True  # no step writes the base, so copies of the learner share it

    def __init__(
        self,
        path: str | None,
        config: dict[str, Any] | None,
        trainable: Sequence[str] | None,
        lora: dict[str, Any] | None,
        lr: FiniteFloat,
        weight_decay: FiniteFloat,
        base_dtype: Dtype = "float32",
        quantize: Bits = None,
        gradient_checkpointing: bool = False,
        heads: dict[str, Any] | None = None,
        **fixed: Any,
    ) -> None:
        check_arguments(TextLearner.__init__, locals())
        name = type(self).__name__
        super().__init__()
        base = (base_dtype, quantize, gradient_checkpointing, heads)
        self.network: Any = pretrained.network(
            self.task, name, path, config, trainable, lora, *base, **fixed
        )
        # Frozen weights have fewer bits and trained ones are float32: autocast makes them work
        # together.
        self._mixes = base_dtype != "float32" or quantize is not None
        self.lr = lr
        self.weight_decay = weight_decay

    def setup(self, stage: str) -> None:
        """Refuse data with tokens or lengths that the network does not have.

        Raises:
            UserError: it names both sides.
        """
        if self._mixes and self.trainer.precision == "64-true":
            raise UserError(
                f"{type(self).__name__}: trainer.precision='64-true' makes all weights float64, "
                "and base_dtype asks for fewer bits of the frozen ones. Leave one of them out."
            )
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
        longest = self.longest
        if isinstance(length, int) and longest is not None and length > longest:
            raise UserError(
                f"{type(self).__name__}: data.length is {length}, but the network takes at most "
                f"{longest} tokens (config.max_position_embeddings). Give a shorter length."
            )

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if self._mixes else nullcontext()

    def computed(self, **inputs: Any) -> Tensor:
        with self._precision(inputs["input_ids"].device):
            logits: Tensor = self.network(**inputs, use_cache=False).logits
        return logits.float() if self._mixes else logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The optimizer gets no frozen parameters, so it keeps no moments of them.
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, weight_decay=self.weight_decay)

    @property
    def longest(self) -> int | None:
        """Return the largest number of tokens that the network takes; None: it is not known."""
        longest = getattr(pretrained.sizes_of(self.network), "max_position_embeddings", None)
        return longest if isinstance(longest, int) else None

    @property
    def padding(self) -> int:
        return int(pretrained.sizes_of(self.network).pad_token_id)


def split_types(tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return tokens ``(n, length)``, and their types if the tokenizer has given them."""
    if tokens.ndim == 2:
        return tokens, None
    return tokens[:, 0], tokens[:, 1]


def _measured(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross-entropy, the share of right predictions, and how many count; 0 if none does."""
    count = (wanted != NO_TOKEN).sum()
    over = count.clamp(min=1)
    loss = cross_entropy(logits, wanted, ignore_index=NO_TOKEN, reduction="sum") / over
    return loss, (logits.detach().argmax(-1) == wanted).sum() / over, count


class Perplexity(Metric):
    """exp(total loss / total number of predictions), in nats."""

    higher_is_better = False
    full_state_update = False
    total: Tensor
    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "number"):
            start = torch.zeros((), dtype=torch.float64)
            self.add_state(name, start, dist_reduce_fx="sum")

    def update(self, loss: Tensor, count: Tensor) -> None:
        self.total += loss.detach().double() * count
        self.number += count

    def compute(self) -> Tensor:
        return (self.total / self.number.clamp(min=1)).exp()


def f1(table: Tensor) -> Tensor:
    """Return F1 of class 1 if there are two classes, else the mean over those that occur."""
    counts = table.sum(0) + table.sum(1)
    each = 2 * table.diagonal() / counts.clamp(min=1)
    return each[1] if len(table) == 2 else each.sum() / (counts > 0).sum().clamp(min=1)


def mcc(table: Tensor) -> Tensor:
    """Return Matthews' correlation coefficient; 0 if all guesses, or all classes, are one."""
    total = table.sum()
    guessed, right = table.sum(0), table.sum(1)
    spread = (total**2 - guessed @ guessed) * (total**2 - right @ right)
    covariance = table.trace() * total - guessed @ right
    return torch.where(spread > 0, covariance / spread.clamp(min=1).sqrt(), 0.0)


# torchmetrics' own coefficient of Matthews is not 0 if all guesses are one class.
RULES = {"f1": f1, "mcc": mcc}


class OfTable(Metric):
    """A number from the table of right and guessed classes, as scikit-learn defines it.

    Args:
        name: ends in a name of ``RULES``.
    """

    higher_is_better = True
    full_state_update = False
    table: Tensor

    def __init__(self, name: str, num_classes: int) -> None:
        super().__init__()
        self.rule = RULES[name.rpartition("/")[2]]
        start = torch.zeros(num_classes, num_classes, dtype=torch.float64)
        self.add_state("table", start, dist_reduce_fx="sum")

    def update(self, guessed: Tensor, right: Tensor) -> None:
        of = torch.bincount(right * len(self.table) + guessed, minlength=self.table.numel())
        self.table += of.view_as(self.table)

    def compute(self) -> Tensor:
        return self.rule(self.table)


class CausalLanguageModel(TextLearner):
    """Predicts each token from those before it: cross-entropy in nats and accuracy, per token.

    ``val/perplexity`` and ``test/perplexity`` are exp(total loss / number of predicted tokens).

    Args:
        path: a local folder with config.json and weights, such as OPT-125M's; None: random weights,
            built from ``config``.
        config: entries of the architecture with transformers' names, including ``model_type`` if
            there is no ``path``; with a path they replace the folder's entries (``{dropout:
            0.0}``).
        trainable: patterns (``fnmatch``) of the names of parameters that are trained; the others
            are frozen; None: all are trained.
        lora: arguments of peft's ``LoraConfig``: low-rank matrices are trained instead of the
            network.
        base_dtype: dtype of frozen weights, with ``lora``, ``trainable`` or ``heads``:
            ``"float32"`` or ``"bfloat16"``, which takes half the memory. Trained weights are
            float32.
        quantize: keep frozen weights in 8 or 4 bits, by bitsandbytes on a CUDA GPU; ``"nf4"``: in 4
            bits as QLoRA does, with NF4 and double quantization; None: do not.
        gradient_checkpointing: compute activations again in the backward pass, instead of keeping
            them: less memory, about a third more time.
        heads: ``{rank: 4, heads: 4, target_modules: [q_proj, v_proj]}``:
            :class:`~fl_lightning.models.MultiHead` takes the place of these linear layers, and only
            its cores and scales are trained, for RAVAN (``ScaledHeads``).
        lr, weight_decay: of AdamW, if no client optimizer is set.

    D and the communication count only trained weights; tied embeddings are one parameter and count
    once. ``predict_step`` returns the mean loss of each text ``(n,)``. A batch is tokens ``(n,
    L)``, -1 after the end of a text, and a second entry. The second entry is either not used, or
    targets ``(n, L)`` as in ``InstructionTuning``: the token if it is to be learned, else -1.

    Raises:
        UserError: transformers or peft are missing; or a folder, architecture or pattern is not
            possible.
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
        base_dtype: Dtype = "float32",
        quantize: Bits = None,
        gradient_checkpointing: bool = False,
        heads: dict[str, Any] | None = None,
    ) -> None:
        base = (base_dtype, quantize, gradient_checkpointing, heads)
        super().__init__(path, config, trainable, lora, lr, weight_decay, *base)
        self.save_hyperparameters(ignore=["base"])
        self.val_perplexity = Perplexity()
        self.test_perplexity = Perplexity()

    def scores(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits, wanted = self._next(batch[0])
        # A batch may have targets besides the tokens: these mark the tokens that are learned.
        if batch[1].shape == batch[0].shape:
            wanted = batch[1][:, 1:].long()
        return logits.flatten(0, 1), wanted.flatten()

    def _next(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        tokens = split_types(tokens)[0].long()
        # Padding comes last, and no token of the text attends to it, so no mask is needed.
        seen = tokens[:, :-1]
        filled = seen.masked_fill(seen == NO_TOKEN, self.padding)
        return self.computed(input_ids=filled), tokens[:, 1:]

    def _also(self, name: str, logits: Tensor, wanted: Tensor) -> None:
        loss, _, count = _measured(logits, wanted)
        perplexity = self.val_perplexity if name == "val" else self.test_perplexity
        perplexity.update(loss, count)
        self.log(f"{name}/perplexity", perplexity)

    def log_likelihood(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Return Σ log p(token_j | tokens before) over j ≥ ``start``, in nats ``(n,)``.

        Args:
            tokens: ``(n, L)``, -1 after the end of a text, which does not count.
            start: ``(n,)``; the first token of a text has no probability.
        """
        logits, wanted = self._next(tokens)
        # 0 at a token that does not count (-1).
        each = -cross_entropy(
            logits.transpose(1, 2), wanted, ignore_index=NO_TOKEN, reduction="none"
        )
        places = torch.arange(1, tokens.shape[1], device=tokens.device)
        total: Tensor = torch.where(places >= start[:, None], each, 0.0).double().sum(1)
        return total

    def generate(self, tokens: Tensor, max_new_tokens: int, end: int) -> Tensor:
        """Likeliest tokens ``(k,)`` after tokens ``(L,)``, one after the other, up to ``end``."""
        asked = tokens[None].long()
        options = {"do_sample": False, "num_beams": 1, "pad_token_id": self.padding}
        adapted = hasattr(self.network, "get_base_model")
        inner: Any = self.network.get_base_model() if adapted else self.network
        # The network's generation_config.json may ask for penalties, and so for other tokens than
        # the likeliest; generate would merge it with the options.
        own = inner.generation_config
        inner.generation_config = type(own)()
        try:
            with torch.no_grad(), self._precision(tokens.device):
                made: Tensor = self.network.generate(
                    input_ids=asked,
                    attention_mask=torch.ones_like(asked),
                    max_new_tokens=max_new_tokens,
                    eos_token_id=end,
                    **options,
                )
        finally:
            inner.generation_config = own
        return made[0, len(tokens) :]

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.each_text(*self._next(batch[0]))


class TextClassifier(TextLearner):
    """Predicts a text's class; cross-entropy and accuracy per text.

    The arguments are those of :class:`CausalLanguageModel`. The head is new if the network has
    none; with a decoder such as OPT it reads the last token. ``predict_step`` returns probabilities
    ``(n, num_classes)``. If the data module has ``metrics``, these are logged, too: ``"f1"`` (of
    class 1 if there are two, else the mean over classes) and ``"mcc"``.
    """

    task = "SequenceClassification"

    def __init__(
        self,
        num_classes: Annotated[int, AtLeast(2)],
        path: str | None = None,
        config: dict[str, Any] | None = None,
        trainable: Sequence[str] | None = None,
        lora: dict[str, Any] | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        base_dtype: Dtype = "float32",
        quantize: Bits = None,
        gradient_checkpointing: bool = False,
        heads: dict[str, Any] | None = None,
    ) -> None:
        check_arguments(TextClassifier.__init__, locals())
        base = (base_dtype, quantize, gradient_checkpointing, heads)
        given = (path, config, trainable, lora, lr, weight_decay, *base)
        super().__init__(*given, num_labels=num_classes)
        self.save_hyperparameters(ignore=["base", "given"])
        self.num_classes = num_classes
        names = [*map("val/{}".format, RULES), *map("test/{}".format, RULES)]
        self._metrics = torch.nn.ModuleDict({name: OfTable(name, num_classes) for name in names})
        self._logged: Sequence[str] = ()
        inner = self.network.get_base_model() if lora is not None else self.network
        self.takes_types = "token_type_ids" in signature(inner.forward).parameters

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = getattr(self.trainer, "datamodule", None)
        self._logged = getattr(data, "metrics", ())
        check_classes(type(self).__name__, self.num_classes, data)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens, types = split_types(tokens)
        there = tokens != NO_TOKEN
        inputs = {
            "input_ids": tokens.long().masked_fill(~there, self.padding),
            "attention_mask": there.long(),
        }
        if types is not None and self.takes_types:
            inputs["token_type_ids"] = types.long().masked_fill(~there, 0)
        return self.computed(**inputs)

    def scores(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self(batch[0]), batch[1]

    def _also(self, name: str, logits: Tensor, wanted: Tensor) -> None:
        for metric in self._logged:
            found: Any = self._metrics[f"{name}/{metric}"]
            found.update(logits.argmax(1), wanted)
            self.log(f"{name}/{metric}", found, batch_size=len(wanted))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        probabilities: Tensor = self(batch[0]).softmax(1)
        return probabilities
