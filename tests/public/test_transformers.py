"""A BERT of transformers, tiny and random, in the LightningModule of Lightning's tutorial, with
linear warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from fl_lightning.datamodules import ByGroup, FromDatasets
from tests.public.agreement import Recipe, check

WORDS, LENGTH, CLASSES, STEPS = 40, 12, 3, 8
TINY = BertConfig(
    vocab_size=WORDS,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=LENGTH,
    num_labels=CLASSES,
)


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentences of unequal length whose class is that of their most frequent kind of word."""

    def __init__(self, number: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(number) % CLASSES
        words = torch.randint(1, WORDS, (number, LENGTH), generator=draw)
        own = torch.rand(number, LENGTH, generator=draw) < 0.4
        self.words = torch.where(own, words - words % CLASSES + self.labels[:, None], words).clamp(
            1, WORDS - 1
        )
        self.mask = (
            torch.arange(LENGTH) < torch.randint(6, LENGTH + 1, (number, 1), generator=draw)
        ).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.words[i],
            "attention_mask": self.mask[i],
            "labels": self.labels[i],
        }


class Classifier(LightningModule):
    def __init__(
        self, learning_rate: float = 2e-3, warmup_steps: int = 3, weight_decay: float = 0.01
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = BertForSequenceClassification(TINY)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.model(**batch)
        self.accuracy(outputs.logits, batch["labels"])
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", outputs.loss, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> Any:
        plain, decayed = [], []
        for name, parameter in self.model.named_parameters():
            (plain if name.endswith("bias") or "LayerNorm" in name else decayed).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": self.hparams.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, eps=1e-8)
        scheduler = get_linear_schedule_with_warmup(optimizer, self.hparams.warmup_steps, STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


def federated() -> FromDatasets:
    groups = [i // 9 % 4 for i in range(108)]
    return FromDatasets(
        Sentences(108, 1), Sentences(60, 2), partition=ByGroup(groups), batch_size=6
    )


def loss_of_the_model_itself(exported: Path, folder: Path) -> float:
    """Of all validation sentences at once, after transformers' own way to the disk and back."""
    Classifier.load_from_checkpoint(exported).model.save_pretrained(folder)
    model = BertForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()
    val = Sentences(60, 2)
    with torch.no_grad():
        return float(model(input_ids=val.words, attention_mask=val.mask, labels=val.labels).loss)


@pytest.mark.public
@pytest.mark.parametrize("unit", ["local_steps", "rounds", "ignore"])
def test_warm_up(tmp_path: Path, unit: str) -> None:
    def outside(exported: Path) -> float:
        return loss_of_the_model_itself(exported, tmp_path / "bert")

    options = {"participation": 2, "local_steps": STEPS, "client_scheduler": unit}
    check(
        Recipe("transformers", Classifier, federated, "val_loss", outside, options, unit), tmp_path
    )
