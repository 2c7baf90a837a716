"""The learner around a network for classification."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.accepted import AtLeast, FiniteFloat, check_arguments
from fl_lightning.errors import UserError
from fl_lightning.machine.lightning import pl


class ImageClassifier(pl.LightningModule):
    """Cross-entropy on batches (x, y), with an accuracy; y are classes ``(n,)``, or their shares
    ``(n, num_classes)``, as mixup and cutmix make them.

    The learner logs ``loss`` and ``acc`` under ``train/``, ``val/`` and ``test/``.

    Args:
        network: inputs ``(n, …)`` to logits ``(n, num_classes)``.
        lr, weight_decay, momentum: of SGD, if no client optimizer is set.

    ``predict_step`` gives probabilities ``(n, num_classes)``.
    """

    # A checkpoint may hold this argument as a config does: class_path, init_args.
    builds_arguments = ("network",)

    def __init__(
        self,
        network: nn.Module,
        num_classes: Annotated[int, AtLeast(2)],
        lr: FiniteFloat = 0.1,
        weight_decay: FiniteFloat = 0.0,
        momentum: FiniteFloat = 0.0,
    ) -> None:
        check_arguments(ImageClassifier.__init__, locals())
        super().__init__()
        self.save_hyperparameters(ignore=["network"])
        self.network = built_network(network, "ImageClassifier")
        self.lr = lr
        self.weight_decay = weight_decay
        self.momentum = momentum
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as Lightning does, but import no class that the checkpoint names."""
        trusted = {} if cls is not ImageClassifier else {"_instantiator": None}
        return super().load_from_checkpoint(*args, **{**trusted, **kwargs})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.network(x)
        return y

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = _loss(logits, y)
        self.log("train/loss", loss.detach())
        # For samples mixed by mixup or cutmix, the class with the largest share counts as right.
        right = y.argmax(1) if y.is_floating_point() else y
        self.log("train/acc", (logits.detach().argmax(1) == right).float().mean())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", self.val_acc, *batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", self.test_acc, *batch)

    def _evaluate(self, name: str, accuracy: MulticlassAccuracy, x: Tensor, y: Tensor) -> None:
        logits = self(x)
        accuracy.update(logits, y)
        self.log(f"{name}/loss", _loss(logits, y), batch_size=len(y), sync_dist=True)
        self.log(f"{name}/acc", accuracy, batch_size=len(y))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        probabilities: Tensor = self(batch[0]).softmax(1)
        return probabilities

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.parameters(), lr=self.lr, weight_decay=self.weight_decay, momentum=self.momentum
        )


def _loss(logits: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point() and y.shape != logits.shape:
        raise UserError(
            f"ImageClassifier: the targets are {y.dtype} of shape {tuple(y.shape)}, but this "
            "learner needs classes, which are whole numbers from 0. For regression use a learner "
            "with a loss for numbers."
        )
    return cross_entropy(logits, y)


def built_network(network: Any, learner: str) -> Any:
    """Return a network that a checkpoint names by class and arguments.

    The network's class has to be imported already, because a checkpoint by others may name any
    class.
    """
    if not isinstance(network, dict) or "class_path" not in network:
        return network
    module, _, name = str(network["class_path"]).rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise UserError(
            f"{learner}: its network is a {network['class_path']}, a class that has not been "
            f"imported. If you trust {module or 'its module'}, import it first; or "
            "give load_from_checkpoint(…, network=…)."
        )
    arguments = dict(network.get("init_args") or {})
    return cls(**{key: built_network(value, learner) for key, value in arguments.items()})
