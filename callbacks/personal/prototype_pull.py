"""FedProto: clients share the mean features of each class, and no weights.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang: FedProto: Federated Prototype Learning
across Heterogeneous Clients (AAAI 2022), arXiv:2105.00243.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning.callback import (
    CLASS_LABELS,
    Clients,
    Coefficient,
    FederatedCallback,
    Layout,
    Paper,
    Part,
    PositiveInt,
    Schedule,
    Scratch,
    Server,
    ServerState,
    Upload,
    UserError,
)


class PrototypePull(FederatedCallback):
    """The loss gets strength · (1/B) Σ a_y (1/F) ‖z - P_y‖²; P_c is the mean of z over clients.

    z are the inputs of the last layer in the local steps, without graph; a_c is 1 once class c has
    occurred. A client sums z and counts samples by class over all its steps. The server divides the
    sums by the counts; a class that no participant had keeps its prototype. No parameter is
    averaged. If a step has several passes, the last one before the step ends counts.
    Sent: P and a down, sums and counts up; the model once to each client. Kept: the model by each
    client; P and a by the server.

    Args:
        classes: C.
        features: F, the number of inputs of the last layer.
        strength: strength of the pull, from 0; with 0 each client trains alone.

    Raises:
        UserError: classes or features differ from the data's or the learner's; or labels are not
            class indices.

    Example:
        with strength 0 each client trains alone.

        >>> from fl_lightning.callbacks import PartialAveraging, PrototypePull
        >>> from fl_lightning.testing import tiny_run
        >>> alone = tiny_run(PartialAveraging({"all": "never"})).evaluated_vector
        >>> def pulled(strength):
        ...     method = PrototypePull(classes=3, features=4, strength=strength)
        ...     return tiny_run(method).evaluated_vector
        >>> pulled(0.0).equal(alone), pulled(1.0).equal(alone)
        (True, False)
    """

    title = "FedProto"
    paper = Paper("tan2022fedproto", vectors=None)
    moves_start = False
    taps = {"features": "last:in"}
    notes = (CLASS_LABELS,)
    strength = Coefficient(least=0)
    P = ServerState(shape=("C", "F"), sent=True, synchronised=False)
    a = ServerState(shape=("C",), sent=True, synchronised=False)
    # The sums and counts of the last pass, and those over all steps.
    seen_sums = Scratch(shape=("C", "F"))
    seen_counts = Scratch(shape=("C",))
    sums = Scratch(shape=("C", "F"))
    counts = Scratch(shape=("C",))
    sent_sums = Upload(shape=("C", "F"))
    sent_counts = Upload(shape=("C",), least=0)

    def __init__(
        self, classes: PositiveInt, features: PositiveInt, strength: float | Schedule = 1.0
    ) -> None:
        super().__init__()
        self.classes = self.C = classes
        self.features = self.F = features
        self.strength = strength

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        classes = getattr(trainer.datamodule, "num_classes", None)
        if classes is not None and classes > self.C:
            raise UserError(
                f"PrototypePull: classes={self.C}, but the data have {classes} classes. Give "
                f"classes={classes}."
            )

    def parts(self, layout: Layout) -> list[Part]:
        return [(torch.ones(layout.size, dtype=torch.bool), None)]

    def local_loss(
        self, clients: Clients, loss: Tensor, seen: dict[str, Any], batch: Any
    ) -> Tensor:
        z = seen["features"]
        if z.shape[1:] != (self.F,):
            remedy = f"Give features={z.shape[-1]}."
            if z.ndim != 2:
                remedy = "Let the last layer take one vector a sample."
            raise UserError(
                f"PrototypePull: features={self.F}, but the input of the last layer has the shape "
                f"{tuple(z.shape)}, with one row per sample. {remedy}"
            )
        # torch's one_hot reads the values of the labels, which a captured step must not do.
        mine = (batch[1][:, None] == torch.arange(self.C, device=z.device)).to(z)  # (B, C)
        sums = (mine.mT @ z.detach())[None]
        counts = mine.sum(0)[None]
        if clients.place_in_step:
            sums = sums + self.seen_sums[clients]
            counts = counts + self.seen_counts[clients]
        self.seen_sums[clients] = sums
        self.seen_counts[clients] = counts
        far = (z - self.P[batch[1]]).square().mean(1)
        pulled: Tensor = loss + self.strength * (far * self.a[batch[1]]).mean()
        return pulled

    def on_local_step_end(self, clients: Clients) -> None:
        self.sums[clients] += self.seen_sums[clients]
        self.counts[clients] += self.seen_counts[clients]

    def on_local_end(self, clients: Clients) -> None:
        self.sent_sums[clients] = self.sums[clients]
        self.sent_counts[clients] = self.counts[clients]

    def on_server_update(self, server: Server) -> None:
        counts = self.sent_counts.sum()
        means = self.sent_sums.sum() / counts.clamp(min=1)[:, None]
        self.P = torch.where(counts[:, None] > 0, means, self.P)
        self.a = torch.maximum(self.a, (counts > 0).to(self.a))
