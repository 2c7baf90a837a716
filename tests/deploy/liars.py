"""Three sites in threads, one of which lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.callbacks import SystemHeterogeneity
from fl_lightning.deploy.transport import Message, Post, packed
from tests.deploy.test_in_memory import over_sites

SHARES = {"north": [0], "south": [1], "west": [2]}
LIAR, CLIENT = "south", 1
SKIP = {"on_nonfinite": "skip"}
Lie = Callable[[Message], Message | bytes | None]


def data() -> InMemoryDataModule:
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(24, 3))).float()
    y = torch.from_numpy(rng.integers(0, 3, 24))
    clients = [np.arange(10), np.arange(10, 16), np.arange(16, 24)]
    return InMemoryDataModule((x, y), val=(x, y), clients=clients, batch_size=4)


def data_with_tests() -> InMemoryDataModule:
    made = data()
    made.client_test_fraction = 0.25
    return made


OPTIONS: dict[str, Any] = {"participation": "all", "local_epochs": 1, "data": data}


class Liar:
    """A site's post whose answers are changed: in place, or for another message or bytes."""

    def __init__(self, post: Any, lie: Lie) -> None:
        self.post = post
        self.lie = lie

    def take(self) -> Message | None:
        found: Message | None = self.post.take()
        return found

    def give(self, answer: Message) -> None:
        told = self.lie(answer)
        self.post.outbox.put(told if isinstance(told, bytes) else packed(told or answer))


def with_liar(
    lie: Lie,
    folder: Path,
    methods: Callable[[], list[Any]] = list,
    liar: str = LIAR,
    **options: Any,
) -> tuple[FederatedModule, list[dict[str, float]]]:
    """A run over the three sites, and the metrics of its rounds."""

    def wrap(name: str, post: Post) -> Post:
        return Liar(post, lie) if name == liar else post

    given = {**OPTIONS, "shares": SHARES, "timeout": 20, "rounds": 2, "wrap": wrap, **options}
    module, metrics, _ = over_sites(methods, folder, **given)
    return module, metrics


class Without(SystemHeterogeneity):
    """In the simulation, these clients drop out of these rounds."""

    def __init__(self, rounds: Sequence[int], clients: Sequence[int] = (CLIENT,)) -> None:
        super().__init__(dropout=0.5)
        self.rounds, self.clients = list(rounds), list(clients)

    def conditions(self, seed: int, m: int) -> Any:
        found = super().conditions(seed, m)
        mine = self.rounds, self.clients
        vars(found)["drops"] = lambda version, i: version in mine[0] and i in mine[1]
        return found
