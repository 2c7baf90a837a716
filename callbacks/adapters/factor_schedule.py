"""FFA-LoRA, RoLoRA: each round trains only one factor of the adapters.

Y. Sun, Z. Li, Y. Li, B. Ding: Improving LoRA in Privacy-preserving Federated Learning (ICLR 2024),
arXiv:2403.12313: B is trained, A keeps its initial draw. S. Chen, Y. Guo, Y. Ju, H. Dalal, Z. Zhu,
A. Khisti: Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA (NeurIPS 2025),
arXiv:2502.01755: A and B in turn. In both the mean of the clients' products B A is the product of
the means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.callback import Clients, FederatedCallback, Layout, Paper, UserError

# The name in the literature, by the factors that are trained.
NAMES = {"B": "FFA-LoRA", "AB": "FedIT", "A": "FactorSchedule"}


class FactorSchedule(FederatedCallback):
    """Round t trains the factors in entry t mod length; other trainable parameters are always
    trained.

    The factor that is not trained keeps its bits, whatever the optimizer is.
    Sent: up, the coordinates that the round trains; down, the coordinates that have changed since
    the client was last sent the model. A factor that no entry names is never sent: it follows from
    the seed. Kept: nothing.

    Args:
        factors: ``"A"``, ``"B"`` or ``"AB"``, one entry per round of a cycle. ``["B"]`` is
            FFA-LoRA, ``["B", "A"]`` RoLoRA, ``["AB"]`` FedAvg.

    Raises:
        UserError: the list is empty or has another entry.

    Example:
        After a round that trains B, A has not changed.

        >>> from fl_lightning.callbacks import FactorSchedule
        >>> from fl_lightning.testing import tiny_run
        >>> one, two = (tiny_run(FactorSchedule(["B", "A"]), rounds=t) for t in (1, 2))
        >>> moved = one.global_vector != two.global_vector
        >>> [name for name, (where, _) in one.layout.items() if not moved[where].any()]
        ['first.lora_B', 'head.lora_B']
    """

    title = "RoLoRA"
    paper = Paper(
        by=lambda given: [
            {("B",): "sun2024ffalora", ("AB",): None}.get(
                tuple(given.get("factors") or ("B",)), "chen2025rolora"
            )
        ],
        vectors=None,
    )
    needs_adapters = True
    alike = True
    moves_start = False
    neutral = {"factors": ["AB"]}

    def __init__(self, factors: Sequence[Literal["A", "B", "AB"]] = ("B",)) -> None:
        super().__init__()
        entries = list(factors)
        if not entries:
            raise UserError(
                "FactorSchedule: factors=[]: give one of 'A', 'B' and 'AB' for each round of a "
                "cycle: factors=['B'] is FFA-LoRA, ['B', 'A'] RoLoRA."
            )
        self.factors = entries
        same = len(set(entries)) == 1
        if same:
            # A title belongs to the class, but this one depends on the arguments.
            self.title = NAMES[entries[0]]  # type: ignore[misc]
        vars(self)["tolerates_staleness"] = same

    def trained(self, clients: Clients) -> Tensor:
        mask = self.in_round(clients.layout, clients.round).to(clients.x.device)
        return mask.expand_as(clients.x)

    def numbers_down(self, layout: Layout, t: int, last: int | None) -> int:
        if last is None:
            return int(self._of(layout, "".join(self.factors)).sum())
        changed = torch.zeros(layout.size, dtype=torch.bool)
        # One whole cycle trains every factor that is ever trained.
        for v in range(max(last, t - len(self.factors)), t):
            changed |= self.in_round(layout, v)
        return int(changed.sum())

    def remembers_sent(self) -> bool:
        return True

    def in_round(self, layout: Layout, t: int) -> Tensor:
        """Return ``(D,)`` bool: the coordinates that round t trains."""
        return self._of(layout, self.factors[t % len(self.factors)])

    def not_beside(self, other: FederatedCallback) -> str:
        if other.restarts and set(self.factors) != {"AB"}:
            return (
                f"{type(other).__name__} gives both factors new values in each round, and a round "
                f"of {type(self).__name__} changes only those that it trains"
            )
        key = self.kept_vector(other)
        # The part of a factor that compression has not sent rests with that factor.
        if len(set(self.factors)) == 1 or not key or other.of_trained:
            return ""
        return f"{key} is kept from round to round, and rounds train factors in turn"

    @staticmethod
    def _of(layout: Layout, letters: str) -> Tensor:
        resting = []
        for adapter in layout.adapters:
            resting += [] if "A" in letters else [adapter.a]
            resting += [] if "B" in letters else [adapter.b]
        return ~layout.mask(resting)
