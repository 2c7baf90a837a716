"""Local AdamW, and AdamW whose moments the server averages (FedAdamW, FedLADA).

I. Loshchilov, F. Hutter: Decoupled Weight Decay Regularization (ICLR 2019), arXiv:1711.05101.
J. Liu, F. Shang, H. Liu, Y. Tian, Y. Liu, J. Liu, K. Zhu, Z. Lin: FedAdamW: A
Communication-Efficient Optimizer with Convergence and Generalization Guarantees for Federated Large
Models (AAAI 2026), arXiv:2510.27486.
Y. Sun, L. Shen, H. Sun, L. Ding, D. Tao: Efficient Federated Learning via Local Adaptive Amended
Optimizer with Linear Speedup (IEEE TPAMI 2023), arXiv:2308.00522. The client optimizer is plain
SGD, so weight decay is decoupled, as in AdamW.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.callback import (
    BelowOne,
    Clients,
    FederatedCallback,
    Layout,
    Paper,
    PositiveFloat,
    Scratch,
    Server,
    ServerState,
    Upload,
)

Moment = Literal["fresh", "averaged"]
Share = Literal["rows", "tensor", "full"]


class AdamDirection(FederatedCallback):
    """Each local step k follows m̂/(√v̂ + ε), computed from the gradient g after clipping.

    m ← β1 m + (1 - β1) g, v ← β2 v + (1 - β2) g², m̂ = m/(1 - q β1^k), v̂ = v/(1 - r β2^k).
    A ``"fresh"`` moment starts each round at 0, and its q or r is 1, as in torch.optim.AdamW with
    ``keep_optimizer_state=False``. An ``"averaged"`` moment starts at the server's mean. Clients
    send m, and the means of v over blocks; every coordinate of a block starts at the block's mean.
    The server keeps q^{t+1} = q^t mean β1^{K_i}, and r likewise. They are the weights that the
    first zeros still have in the averages, and are exact for unequal K_i. The weights p_i play no
    part in the moments. A round in which no client finishes changes no moment.
    Sent: averaged moments and one number per moment down; the moments up. Kept: the averaged
    moments, by the server.

    Args:
        betas: β1, β2, from 0 to below 1.
        epsilon: ε, above 0.
        first, second: how m and v start.
        share: blocks of v. ``"rows"``: a block is each vector, and each slice along the first
            dimension of a tensor of two or more dimensions; ``"tensor"``: each parameter tensor;
            ``"full"``: each number.

    Example:
        Local AdamW, whose fresh moments equal those of torch's optimizer.

        >>> import torch
        >>> from fl_lightning.callbacks import AdamDirection
        >>> from fl_lightning.testing import tiny_run
        >>> options = {"lr": 0.01, "weight_decay": 0.1}
        >>> def run(kind, *methods):
        ...     return tiny_run(*methods, client_optimizer=lambda p: kind(p, **options))
        >>> ours = run(torch.optim.SGD, AdamDirection()).global_vector
        >>> ours.allclose(run(torch.optim.AdamW).global_vector)
        True
    """

    title = "Local AdamW"
    paper = Paper(
        "loshchilov2019adamw",
        by=lambda given: [
            {("averaged", "full"): "sun2023fedlada", ("averaged", "rows"): "liu2026fedadamw"}.get(
                (str(given.get("second")), given.get("share") or "rows")
            )
        ],
    )
    moves_start = False
    of_coordinates = ("B",)
    m = Scratch()
    v = Scratch()

    def __init__(
        self,
        betas: tuple[BelowOne, BelowOne] = (0.9, 0.999),
        epsilon: PositiveFloat = 1e-8,
        first: Moment = "fresh",
        second: Moment = "fresh",
        share: Share = "rows",
    ) -> None:
        super().__init__()
        self.betas = (float(betas[0]), float(betas[1]))
        self.epsilon = epsilon
        self.first = first
        self.second = second
        self.share = share
        # With "fresh" for both, clients read nothing that the server sends.
        vars(self)["tolerates_staleness"] = first == second == "fresh"
        if not self.tolerates_staleness:
            vars(self)["title"] = "AdamW, averaged moments"
            self.cannot_run_with = {"parts": "the mean of a moment of kept parts is undefined"}
        if first == "averaged":
            self._average("first", None)
        if second == "averaged":
            self._average("second", ("B",))

    def _average(self, moment: str, shape: tuple[int | str, ...] | None) -> None:
        """Declare the states and uploads that averaging a moment needs."""
        self.declare(f"{moment}_mean", ServerState(shape=shape, sent=True, synchronised=False))
        least = 0.0 if moment == "second" else None  # a mean of squares
        self.declare(f"{moment}_sent", Upload(shape=shape, least=least))
        share = ServerState(
            initial=lambda w: 1.0, shape=(), dtype=torch.float64, sent=True, synchronised=False
        )
        self.declare(f"{moment}_share", share)
        # The server knows K_i.
        faded = Upload(sent=False, shape=(), dtype=torch.float64, least=0, most=1)
        self.declare(f"{moment}_faded", faded)

    def on_layout(self, layout: Layout) -> None:
        self.sizes = [self._blocks(shape) for _, shape in layout.values()]
        self.B = sum(number for number, _ in self.sizes)
        counts = torch.tensor([size for _, size in self.sizes])
        numbers = torch.tensor([number for number, _ in self.sizes])
        of_blocks = counts.repeat_interleave(numbers)
        # The index of each coordinate's block.
        self.block = torch.arange(self.B).repeat_interleave(of_blocks)

    def _blocks(self, shape: torch.Size) -> tuple[int, int]:
        """Return the number of blocks of a parameter, and how many numbers each block has."""
        if self.share == "full":
            return shape.numel(), 1
        number = shape[0] if self.share == "rows" and len(shape) >= 2 else 1
        return number, shape.numel() // number

    def on_local_start(self, clients: Clients) -> None:
        if self.first == "averaged":
            self.m[clients] = self.first_mean
        if self.second == "averaged":
            block = self.block.to(clients.x.device)
            self.v[clients] = self.second_mean[block]

    def precondition(self, clients: Clients, gradient: Tensor) -> None:
        beta1, beta2 = self.betas
        m = self.m[clients]
        v = self.v[clients]
        m.mul_(beta1).add_(gradient, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # Write into the gradient's memory: another vector costs as much as a step of a small
        # network.
        gradient.copy_(v)
        gradient.div_(1 - self._share("second") * self._power(beta2, clients))
        gradient.sqrt_().add_(self.epsilon).reciprocal_().mul_(m)
        gradient.div_(1 - self._share("first") * self._power(beta1, clients))

    def _share(self, moment: str) -> Tensor | float:
        """q or r."""
        averaged = getattr(self, moment) == "averaged"
        share: Tensor | float = getattr(self, f"{moment}_share") if averaged else 1.0
        return share

    @staticmethod
    def _power(beta: float, clients: Clients) -> Tensor:
        """Return β^k of the present step k = 1, 2, …, a scalar tensor in float64."""
        power: Tensor = beta ** (clients.step + 1).double()
        return power

    def on_local_end(self, clients: Clients) -> None:
        steps = clients.steps[:, 0].double()
        if self.first == "averaged":
            self.first_sent[clients] = self.m[clients]
        if self.second == "averaged":
            self.second_sent[clients] = self._means(self.v[clients])
        for moment, beta in zip(("first", "second"), self.betas, strict=True):
            if getattr(self, moment) == "averaged":
                getattr(self, f"{moment}_faded")[clients] = beta**steps

    def _means(self, v: Tensor) -> Tensor:
        """Return the means over blocks ``(n, B)``."""
        means = []
        start = 0
        for blocks, size in self.sizes:
            end = start + blocks * size
            means.append(v[:, start:end].reshape(len(v), blocks, size).mean(2))
            start = end
        return torch.cat(means, dim=1)

    def on_server_update(self, server: Server) -> None:
        for moment in ("first", "second"):
            if getattr(self, moment) == "fresh" or not server.n:
                continue
            setattr(self, f"{moment}_mean", getattr(self, f"{moment}_sent").mean())
            share = getattr(self, f"{moment}_share")
            setattr(self, f"{moment}_share", share * getattr(self, f"{moment}_faded").mean())
