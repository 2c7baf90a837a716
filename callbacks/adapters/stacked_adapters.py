"""FLoRA: the server stacks the clients' adapters and adds them to the frozen weights; new adapters
begin.

Z. Wang, Z. Shen, Y. He, G. Sun, H. Wang, L. Lyu, A. Li: FLoRA: Federated Fine-Tuning Large Language
Models with Heterogeneous Low-Rank Adaptations (NeurIPS 2024), arXiv:2409.05976.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callback import (
    Base,
    Clients,
    FederatedCallback,
    Layout,
    Paper,
    Server,
    UserError,
    low_rank,
)


class StackedAdapters(FederatedCallback):
    """W ← W + s Σ p_i B_i A_i; then B is set to 0, and A is drawn anew.

    Client i trains the first r_i rows of A and columns of B. Other trainable parameters are
    averaged.
    Sent: up, these rows and columns and the other trainable parameters. Down, in round 0 the same;
    later the other trainable parameters and the stacked adapters that the client has not had yet.
    Kept: nothing by clients; the server keeps the changed weights.

    Args:
        ranks: None: every client trains the adapter's whole rank; a list with one rank per client;
            or ``{rank: share}`` of the clients, drawn from the seed.
        draw: ``"round"``: all clients of a round begin at the same A; ``"client"``: each at its
            own.

    Raises:
        UserError: the learner's adapters have a B that does not begin at 0.

    Example:
        After a round the server's B is 0, and the frozen weights contain what the clients learned.

        >>> from fl_lightning.callbacks import StackedAdapters
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(StackedAdapters(), rounds=1)
        >>> a, b = run.layout.adapters[0].matrices(run.global_vector)
        >>> bool(b.any()), sorted(run.base)
        (False, ['first.weight', 'head.weight'])
    """

    title = "FLoRA"
    paper = Paper("wang2024flora", vectors=None)
    needs_adapters = True
    needs_products = True
    cannot_run_with = {"broadcast": low_rank.OF_OTHER_MODELS}
    restarts = True
    untrained = "zero"
    draws_by_client = True
    base = Base()

    def __init__(
        self,
        ranks: list[int] | dict[int, float] | None = None,
        draw: Literal["round", "client"] = "round",
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.draw = draw
        self._of_client = low_rank.Ranks(ranks, "StackedAdapters")
        if not self._of_client.equal:
            self.use("trained", self._mask)
        if draw == "client":
            self.use("on_local_start", self._begin)

    def check_layout(self, layout: Layout, num_clients: int, w: Tensor) -> None:
        super().check_layout(layout, num_clients, w)
        self._of_client.check(layout, num_clients)
        for adapter in layout.adapters:
            if adapter.matrices(w)[1].any():
                raise UserError(
                    f"method: StackedAdapters: {adapter.b} does not start at 0 (as in PiSSA), so "
                    "its product would be added to the frozen weight a second time. Use "
                    "LoraConfig(init_lora_weights=True), or FedEx-LoRA (-c method/fedex_lora)."
                )

    def numbers_down(self, layout: Layout, t: int, last: int | None) -> int | None:
        # After round 0 the adapters are computed from the seed.
        return int((low_rank.numbers(layout) < 0).sum()) if t else None

    def foreseen(self, given: Tensor, layout: Layout, t: int) -> Tensor:
        return self._begun(given, layout, t) if t else given

    def _mask(self, clients: Clients) -> Tensor:
        return low_rank.mask(clients.layout, self._of_client.of(clients))

    def _begin(self, clients: Clients) -> None:
        for row, client in zip(clients.x, clients.client_ids, strict=True):
            self._draw(row, clients.layout, self._keyed("flora client", clients.round, client))

    def aggregate(self, server: Server, updates: Tensor) -> Tensor:
        # The mean of the clients' updates, which is right for all parameters except adapters.
        update = server.update.clone()
        if not len(updates):
            return update
        received = low_rank.Received(server, self._of_client.at(server))
        new = self._begun(server.w, server.layout, server.round + 1)
        for adapter in server.layout.adapters:
            left, right = received.stacked(adapter)
            self.base.add(adapter.weight, *adapter.addition(left, right))
            received.put(update, adapter, *adapter.matrices(new))
        return update

    def _begun(self, w: Tensor, layout: Layout, t: int) -> Tensor:
        """Return w with the A with which round t begins; its B is 0 in every round."""
        new = w.clone()
        self._draw(new, layout, self._keyed("flora", t))
        return new

    @staticmethod
    def _draw(vector: Tensor, layout: Layout, generator: np.random.Generator) -> None:
        """Draw A of each adapter uniformly between ±1/√in, peft's default."""
        for adapter in layout.adapters:
            a, _ = adapter.matrices(vector)
            drawn = torch.from_numpy(generator.random(a.numel())).view(a.shape)
            a.copy_((2 * drawn - 1) / a.shape[1] ** 0.5)
