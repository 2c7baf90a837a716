"""Byzantine clients: participants that attack, to test how much a run withstands.

L. Lamport, R. Shostak, M. Pease: The Byzantine Generals Problem (TOPLAS 1982), for the name. P.
Blanchard et al.: Machine Learning with Adversaries (NeurIPS 2017), arXiv:1703.02757 (flipped signs,
noise). V. Tolpegin et al.: Data Poisoning Attacks Against Federated Learning Systems (ESORICS
2020), arXiv:2007.08432 (flipped labels). M. Baruch, G. Baruch, Y. Goldberg: A Little Is Enough
(NeurIPS 2019), Algorithm 3, arXiv:1902.06156 (alie).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.callback import (
    BelowOne,
    FederatedCallback,
    Paper,
    PositiveFloat,
    Server,
    UserError,
    generator,
)


class ByzantineClients(FederatedCallback):
    """⌊fraction · m⌋ clients, chosen by the run's seed, change the update that they transmit.

    The clients that do so count as participants.

    ``"sign_flip"``: u ← -scale · u. ``"noise"``: u ← N(0, scale² I). ``"alie"``: u ← μ - z σ. μ and
    σ are the mean and deviation of each coordinate over the round's honest participants, which this
    attack knows; z = scale. ``"label_flip"``: attackers train on y ← C - 1 - y with C classes, and
    send the resulting update. Attacks change updates after every honest method and before the
    server's rule. Other uploads of attackers stay honest.
    Sent and kept: nothing more.

    Args:
        attack: one of the attacks above.
        fraction: share of all registered clients, from 0 to below 1, computed exactly from its
            decimal form; 0: no client.
        scale: above 0; None: 1, and with alie the z that hides among n participants, a of them
            attackers: Φ⁻¹((n - ⌊n/2 + 1⌋)/(n - a)), from 0 to 3. Label flips do not use it.

    Attributes:
        attackers: the clients that attack, ascending; from the start of a fit on.

    Raises:
        UserError: labels are to be flipped, but the data have no classes, or batches are not pairs
            of samples and labels.

    Example:
        The seed decides which clients attack.

        >>> from fl_lightning.callbacks import ByzantineClients
        >>> from fl_lightning.testing import tiny_run
        >>> attack = ByzantineClients("sign_flip", fraction=0.4)
        >>> run = tiny_run(attack, participation="all")
        >>> attack.attackers, float(run.trainer.callback_metrics["byzantine/participants"])
        ((0, 4), 2.0)
    """

    title = "Byzantine clients"
    paper = Paper(
        by=lambda given: [
            {
                "sign_flip": "blanchard2017krum",
                "noise": "blanchard2017krum",
                "label_flip": "tolpegin2020poisoning",
                "alie": "baruch2019alie",
            }.get(given.get("attack") or "sign_flip")
        ]
    )
    order = -1

    def __init__(
        self,
        attack: Literal["sign_flip", "noise", "label_flip", "alie"] = "sign_flip",
        fraction: BelowOne = 0.2,
        scale: PositiveFloat | None = None,
    ) -> None:
        super().__init__()
        self.attack = attack
        self.fraction = fraction
        self.scale = scale
        # Whether one client's update changes several updates of a round's sum.
        self.mixes_clients = attack == "alie"
        self.attackers: tuple[int, ...] = ()
        if attack == "label_flip":
            self.use("local_batch", self.flipped)
        else:
            self.use("on_updates", self.attacked)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        m = int(trainer.datamodule.num_clients)
        self.classes = trainer.datamodule.num_classes
        draw = generator(pl_module.run_seed, "byzantine clients")
        number = math.floor(Fraction(str(self.fraction)) * m)
        self.attackers = tuple(sorted(draw.choice(m, number, replace=False).tolist()))
        if self.attack == "label_flip" and self.classes is None:
            raise UserError(
                "ByzantineClients: attack='label_flip' needs class labels, and the data have none."
            )

    def facts(self) -> dict[str, str]:
        return {"attackers": ", ".join(map(str, self.attackers)) or "nobody"}

    def on_round_end(self, server: Server) -> None:
        server.log("byzantine/participants", len(set(self.attackers) & set(server.ids.tolist())))

    def attacked(self, server: Server) -> None:
        """The hook ``on_updates`` of all attacks except the one on labels."""
        ids = server.ids.tolist()
        u = server.updates
        bad = torch.tensor([client in self.attackers for client in ids], device=u.device)
        scale = 1.0 if self.scale is None else self.scale
        if self.attack == "sign_flip":
            u[bad] *= -scale
        elif self.attack == "noise":
            for row in bad.nonzero().flatten().tolist():
                noise = server.generator("byzantine noise", ids[row]).standard_normal(u.shape[1])
                u[row] = scale * torch.from_numpy(noise).to(u)
        elif bool((~bad).any()):
            # Use the mean and deviation of only the honest clients: with the attackers' own updates
            # included, the attack would be milder.
            honest = u[~bad].double()
            n = len(ids)
            a = int(bad.sum())
            z = hiding(n, a) if self.scale is None else self.scale
            u[bad] = (honest.mean(0) - z * honest.std(0, correction=0)).to(u.dtype)

    def flipped(self, client: int, batch: Any) -> Any:
        """The hook ``local_batch`` of the attack on labels."""
        if client not in self.attackers:
            return batch
        labels = batch[-1] if isinstance(batch, (tuple, list)) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            raise UserError(
                "ByzantineClients: attack='label_flip' takes batches (x, y) with integer labels "
                f"y, and those of client {client} are of type {type(batch).__name__}. Use another "
                "attack, or such batches."
            )
        *x, y = batch
        return (*x, self.classes - 1 - y)


def hiding(n: int, attackers: int) -> float:
    """Return the z of alie, in deviations from the mean: so many honest values are expected beyond
    it that they and the attackers are a majority of n.
    """
    share = min(1.0, (n - (n // 2 + 1)) / (n - attackers))
    return float(torch.special.ndtri(torch.tensor(share, dtype=torch.float64)).clamp(0, 3))
