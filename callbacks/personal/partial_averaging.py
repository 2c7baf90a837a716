"""FedALS, FedPer, FedBN: parts of the model that are averaged only every few rounds, or never.

P. Gholami, H. Seferoglu: Improved Generalization Bounds for Communication Efficient Federated
Learning (2024), Algorithm 1, arXiv:2404.11754: the head every round, the extractor every α rounds.
M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary: Federated Learning with Personalization
Layers (2019), arXiv:1912.00818: the head never. X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou: FedBN:
Federated Learning on Non-IID Features via Local Batch Normalization (ICLR 2021), arXiv:2102.07623:
normalisation layers never, and buffers="own". P. Guo, S. Zeng, Y. Wang, H. Fan, F. Wang, L. Qu:
Selective Aggregation for Low-Rank Adaptation in Federated Learning (ICLR 2025), arXiv:2410.01463:
B of each low-rank adapter never (FedSA-LoRA). The framework keeps the clients' copies; this class
decides which part is averaged when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from fl_lightning.callback import (
    FederatedCallback,
    Layout,
    Note,
    Paper,
    PositiveInt,
    RunFacts,
    UserError,
)

Period = PositiveInt | Literal["never"]
# Groups of parameters that are never averaged → the method's name in the literature.
KNOWN = {
    "last": "FedPer",
    "norms": "FedBN",
    "all": "local training",
    "lora_B": "FedSA-LoRA",
    "*lora_B*": "FedSA-LoRA",
}


def lost_work(method: PartialAveraging, run: RunFacts) -> float:
    """Return the share of work on the rarest part that never reaches the server."""
    return (1 - run.n / run.m) * (method.longest - 1) / method.longest


class PartialAveraging(FederatedCallback):
    """A part with period P is averaged at the end of round t when (t + 1) mod P = 0.

    In other rounds clients keep their own copies of the part. Parameters that no pattern names are
    averaged every round. Without ``periods``, ``extractor`` and ``extractor_layers`` the extractor
    is all layers but the last.
    Sent: down, the parts of which a client has no valid copy; up, those averaged this round. Kept
    by each client: its copy of the parts not averaged, and the start of that copy.

    Args:
        periods: patterns of parameter names (``fnmatch``: ``"head.*"``) or names of groups,
            ``"last"`` (layer), ``"norms"``, ``"all"``, ``"lora_A"`` and ``"lora_B"`` (the factors
            of adapters), each with its period in rounds or ``"never"``. If several match, the first
            counts. FedPer: ``{"last": "never"}``; FedBN: ``{"norms": "never"}``; FedSA-LoRA:
            ``{"lora_B": "never"}``; local training of every client: ``{"all": "never"}``.
        period: α, the extractor's period if no ``periods`` are given; 1 is FedAvg.
        extractor: patterns of the extractor's parameter names.
        extractor_layers: alternatively the number of its layers, from the first (convolutions,
            linear, embedding and attention blocks, as registered; a norm belongs to the layer
            before it).

    Raises:
        UserError: a pattern matches nothing; a period is below 1; there are fewer layers; or more
            than one of ``periods``, ``extractor`` and ``extractor_layers`` is given.

    Example:
        FedALS. Until round 10 the server's extractor does not change, but its head does.

        >>> from fl_lightning.callbacks import PartialAveraging
        >>> from fl_lightning.testing import tiny_run
        >>> one, two = (tiny_run(PartialAveraging(period=10), rounds=t) for t in (1, 2))
        >>> moved = one.global_vector != two.global_vector
        >>> {name: bool(moved[where].any()) for name, (where, _) in one.layout.items()}
        {'first.weight': False, 'first.bias': False, 'head.weight': True, 'head.bias': True}
    """

    title = "FedALS"
    paper = Paper(
        by=lambda given: (
            [
                {
                    ("norms",): "li2021fedbn",
                    ("last",): "arivazhagan2019fedper",
                    ("lora_B",): "guo2025fedsalora",
                    ("*lora_B*",): "guo2025fedsalora",
                    ("last", "*"): "liang2020lgfedavg",
                }.get(tuple(given.get("periods") or ()))
            ]
            if "never" in (given.get("periods") or {"": given.get("period")}).values()
            else ["gholami2024fedals"]
        ),
        vectors=None,
    )
    neutral = {"period": 1}
    notes = (
        Note(
            "with {n} of {m} clients per round and a period of {longest}, about {lost:.0%} of the "
            "local work on that part never reaches the server: only the participants of the "
            "round in which it is averaged send it.",
            when=lambda method, run: lost_work(method, run) > 0,
            longest=lambda method, run: method.longest,
            lost=lost_work,
        ),
        Note(
            "nothing is averaged: each client trains by itself, w does not change, and the "
            "validated model is the mean of the participants' models, which is not a useful model. "
            "Use clients/… of PerClientEvaluation.",
            when=lambda method, run: method.periods in ({"all": "never"}, {"*": "never"}),
        ),
    )

    def __init__(
        self,
        periods: dict[str, Period] | None = None,
        period: Period = 10,
        extractor: str | Sequence[str] | None = None,
        extractor_layers: int | None = None,
    ) -> None:
        super().__init__()
        options = {"periods": periods, "extractor": extractor, "extractor_layers": extractor_layers}
        named = [name for name, value in options.items() if value is not None]
        if len(named) > 1:
            raise UserError(
                f"PartialAveraging: {' and '.join(named)} each choose the part that clients keep; "
                "give one of them."
            )
        self.periods = periods
        self.period = period
        self.extractor = extractor
        self.extractor_layers = extractor_layers
        # A title belongs to the class, but this one depends on the arguments.
        if periods is not None or period == "never":
            self.title = self._named(periods)  # type: ignore[misc]

    @staticmethod
    def _named(periods: dict[str, Period] | None) -> str:
        """Return the name of the method with these periods, if it has one in the literature; else
        the class's name.
        """
        for group, title in KNOWN.items():
            if periods == {group: "never"}:
                return title
        shares_head = periods == {"last": 1, "*": "never"}
        return "LG-FedAvg" if shares_head else "PartialAveraging"

    @property
    def longest(self) -> int:
        """Return the longest period in rounds, not counting "never"."""
        periods = (self.periods or {"": self.period}).values()
        return max([period for period in periods if period != "never"], default=1)

    def parts(self, layout: Layout) -> list[tuple[Tensor, int | None]]:
        period_of: dict[str, Period] = {}
        for pattern, period in self._patterns(layout).items():
            matched = layout.named(pattern, "PartialAveraging")
            # If several patterns match a parameter, the first counts. Keep the order of the parts,
            # because the rows of a checkpoint have it.
            period_of = {name: period for name in matched} | period_of
        parts = []
        for period in dict.fromkeys(p for p in period_of.values() if p != 1):
            mask = layout.mask([name for name, own in period_of.items() if own == period])
            parts.append((mask, None if period == "never" else int(period)))
        return parts

    def _patterns(self, layout: Layout) -> dict[str, Period]:
        if self.periods is not None:
            return self.periods
        if self.extractor is not None:
            if isinstance(self.extractor, str):
                return {self.extractor: self.period}
            return dict.fromkeys(self.extractor, self.period)
        layers = list(layout.layers.values())
        number = len(layers) - 1
        if self.extractor_layers is not None:
            number = self.extractor_layers
        if not 0 <= number <= len(layers):
            raise UserError(
                f"PartialAveraging: extractor_layers={number}, but the learner has {len(layers)} "
                "layers."
            )
        names: list[str] = []
        for layer in layers[:number]:
            names += [name for name in layer if name in layout]
        return dict.fromkeys(names, self.period)
