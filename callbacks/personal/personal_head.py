"""FedRoD: a generic head that is trained on a balanced loss, and a personal head per client.

H.-Y. Chen, W.-L. Chao: On Bridging Generic and Personalized Federated Learning for Image
Classification (ICLR 2022), arXiv:2107.00778.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, softmax

from fl_lightning.callback import (
    CLASS_LABELS,
    ROUND_RATE,
    Clients,
    ClientState,
    Coefficient,
    FederatedCallback,
    Layout,
    Paper,
    Schedule,
    Scratch,
    UserError,
)


class PersonalHead(FederatedCallback):
    """x trains on CE(z + γ log N_i, y), and a personal head P trains on the error of z + F P_Wᵀ +
    P_b.

    N_{i,c} is the number of the client's samples of class c; classes without samples are left out
    of the sum. In each step, before x moves, P ← P - η (gradient + λ_wd P), with the features F and
    the raw logits z of the step. No gradient of P reaches x. P is 0 at first; the client uses w
    with P added to its head. If a step has several passes, the last one before P moves counts.
    Sent: nothing more than by FedAvg. Kept by each client: P, a head in a row of D numbers. One
    gradient per step.

    Args:
        gamma: γ, from 0; 0 is FedAvg (classes without samples stay in the sum).

    Raises:
        UserError: the last layer is not linear with a bias; or labels are not class indices.

    Example:
        with γ = 0 the global model is FedAvg's, to the last bit.

        >>> from fl_lightning.callbacks import PersonalHead
        >>> from fl_lightning.testing import tiny_run
        >>> tiny_run(PersonalHead(gamma=0.0)).global_vector.equal(tiny_run().global_vector)
        True
    """

    title = "FedRoD"
    paper = Paper("chen2022fedrod")
    moves_start = False
    neutral = {"gamma": 0.0}
    taps = {"logits": "last", "features": "last:in"}
    notes = (CLASS_LABELS, ROUND_RATE)
    gamma = Coefficient(least=0)
    P = ClientState(synchronised=False)
    # The gradient of P, and 0 at the other coordinates; and the samples of which it is the mean.
    slope = Scratch()
    samples = Scratch(shape=())

    def __init__(self, gamma: float | Schedule = 1.0) -> None:
        super().__init__()
        self.gamma = gamma

    def on_layout(self, layout: Layout) -> None:
        names = list(layout.layers.values())[-1]
        if [len(layout[name][1]) for name in names] != [2, 1]:
            raise UserError(
                f"PersonalHead: the last layer has the parameters {', '.join(names) or 'none'}, "
                "and the method needs a trainable linear layer with a bias there. Let the learner "
                "end in torch.nn.Linear(features, classes)."
            )
        weight, bias = names
        self.weight, self.shape = layout[weight]
        self.bias = layout[bias][0]

    def local_output(self, clients: Clients, name: str, value: Any, batch: Any) -> Any:
        if name != "logits":
            return value
        n = clients.label_counts.to(value.dtype)
        n = pad(n, (0, value.shape[1] - n.shape[1]))
        absent = -torch.inf if self.gamma > 0 else 0.0
        return value + torch.where(n > 0, self.gamma * n.clamp(min=1).log(), absent)

    def local_loss(
        self, clients: Clients, loss: Tensor, seen: dict[str, Any], batch: Any
    ) -> Tensor:
        f = seen["features"].detach()
        own = self.P[clients][0]
        head = own[self.weight].view(self.shape)
        logits = seen["logits"].detach() + f @ head.mT + own[self.bias]
        # torch's one_hot reads the values of the labels, which a captured step must not do.
        classes = torch.arange(logits.shape[1], device=logits.device)
        labels = (batch[1][:, None] == classes).to(logits)
        error = (softmax(logits, 1) - labels) / len(labels)
        slope = torch.zeros_like(own)
        slope[self.weight] = (error.mT @ f).flatten()
        slope[self.bias] = error.sum(0)
        mean = slope[None]
        count = torch.full((1,), float(len(labels)), device=mean.device)
        # The gradient of a step over several batches is the mean over all of their samples.
        if clients.place_in_step:
            before = self.slope[clients]
            total = self.samples[clients] + count
            mean = before + (mean - before) * (count / total)[:, None]
            count = total
        self.slope[clients] = mean
        self.samples[clients] = count
        return loss

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        own = self.P[clients]
        own -= clients.lr * (self.slope[clients] + clients.weight_decay * own)

    def personal(self, clients: Clients) -> Tensor:
        return clients.x + self.P[clients]
