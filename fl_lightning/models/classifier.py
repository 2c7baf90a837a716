"""The learner around a network for classification."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import AtLeast, BelowOne, FiniteFloat, check_arguments
from fl_lightning.learner.modules import modes
from fl_lightning.machine.lightning import pl
from fl_lightning.models import class_metrics


class AroundNetwork(pl.LightningModule):
    """A learner around a network, with SGD if no client optimizer is set."""

    # A checkpoint may hold this argument as a config does: class_path, init_args.
    builds_arguments = ("network",)

    def __init__(self, network: nn.Module, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__()
        self.network = built_network(network, type(self).__name__)
        # No step writes the frozen parameters of an adapted network, so copies share them.
        self.frozen_stay = getattr(self.network, "frozen_stay", False)
        self.lr = lr
        self.weight_decay = weight_decay
        self.momentum = momentum

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as Lightning does, but import no class that the checkpoint names."""
        trusted = {"_instantiator": None} if cls.__module__.startswith("fl_lightning.") else {}
        return super().load_from_checkpoint(*args, **{**trusted, **kwargs})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.network(x)
        return y

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.parameters(), lr=self.lr, weight_decay=self.weight_decay, momentum=self.momentum
        )


class Classifier(AroundNetwork):
    """Cross-entropy on batches (x, y), with an accuracy; y are classes ``(n,)``, or their shares
    ``(n, num_classes)``, as mixup and cutmix make them.

    The learner logs ``loss`` and ``acc`` under ``train/``, ``val/`` and ``test/``.

    Args:
        network: inputs ``(n, …)`` to logits ``(n, num_classes)``.
        lr, weight_decay, momentum: of SGD, if no client optimizer is set.
        label_smoothing: ε: in training, each label is 1 - ε of its class and ε of all classes.
        metrics: names of further metrics under ``val/`` and ``test/``, and so of each client:
            auroc, average_precision, balanced_acc, calibration_error, f1, kappa, mcc, precision,
            top3, top5. Those per class are means over the classes that have samples.

    ``predict_step`` gives probabilities ``(n, num_classes)``.

    Raises:
        UserError: the network has not ``num_classes`` outputs, or the data more classes.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: Annotated[int, AtLeast(2)],
        lr: FiniteFloat = 0.1,
        weight_decay: FiniteFloat = 0.0,
        momentum: FiniteFloat = 0.0,
        label_smoothing: BelowOne = 0.0,
        metrics: Sequence[str] = (),
    ) -> None:
        check_arguments(Classifier.__init__, locals())
        super().__init__(network, lr, weight_decay, momentum)
        self.save_hyperparameters(ignore=["network"])
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")
        self.val_metrics = class_metrics.metrics_named(metrics, num_classes)
        self.test_metrics = class_metrics.metrics_named(metrics, num_classes)

    def setup(self, stage: str) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        if stage != "fit" or not hasattr(data, "one_sample"):
            return
        class_metrics.check_classes(type(self).__name__, self.num_classes, data)
        outputs = self._outputs_of(data.one_sample()[0])
        if outputs not in (None, self.num_classes):
            raise UserError(
                f"{type(self).__name__}: the network has {outputs} outputs, and num_classes is "
                f"{self.num_classes}. Give the network's last layer {self.num_classes} outputs, "
                f"as in torchvision.models.resnet18(num_classes={self.num_classes}); a config's "
                "torchvision:resnet18 or timm:resnet18 has as many as the data have classes."
            )

    def _outputs_of(self, x: Any) -> int | None:
        """Return the number of the network's outputs for a sample; None: it computes none here."""
        before = modes(self)
        self.eval()
        try:
            weight = next(self.parameters())
            with torch.no_grad():
                y = self(x.to(weight) if x.is_floating_point() else x.to(weight.device))
            return int(y.shape[-1])
        except Exception:  # the network is the user's code, and training meets the error again
            return None
        finally:
            for part, training in before:
                part.training = training

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = cross_entropy(logits, y, label_smoothing=self.label_smoothing)
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
        self.log(f"{name}/loss", cross_entropy(logits, y), batch_size=len(y), sync_dist=True)
        self.log(f"{name}/acc", accuracy, batch_size=len(y))
        further = self.val_metrics if name == "val" else self.test_metrics
        class_metrics.update(further, logits, y)
        metric: Any
        for title, metric in further.items():
            self.log(f"{name}/{title}", metric, batch_size=len(y))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        probabilities: Tensor = self(batch[0]).softmax(1)
        return probabilities


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
