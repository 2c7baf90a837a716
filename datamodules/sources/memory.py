"""Your own tensors as a federated data module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.errors import UserError


class InMemoryDataModule(FederatedDataModule):
    """Federated data from tensors, NumPy arrays, or frames of pandas or polars, in memory.

    Args:
        train: ``(x, y)``, N samples each. uint8 x become float32 in [0, 1] when they are used,
            other dtypes do not change, and a frame's float64 becomes float32; whole numbers y
            become int64. A frame without a value somewhere is refused.
        test, val: ``(x, y)``; without ``val`` the run validates on the test set.
        clients: one array of positions in the training data per client; any sequence, also a lazy
            one.
        partition, num_clients: how to split, and over how many clients, instead of ``clients``.
        transform: function that is called on x of each batch, in training and in evaluation; the
            same input has to give the same output.

    >>> import torch
    >>> train = (torch.eye(6), torch.arange(6) % 2)
    >>> data = InMemoryDataModule(train, clients=[[0, 1], [2, 3, 4, 5]])
    >>> data.client_sizes().tolist(), data.num_classes
    ([2, 4], 2)
    """

    def __init__(
        self,
        train: tuple[Any, Any],
        test: tuple[Any, Any] | None = None,
        val: tuple[Any, Any] | None = None,
        clients: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        transform: Callable[[Tensor], Tensor] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(clients=clients, **arguments)
        self._given_sets = {"train": train, "val": val, "test": test}
        self._transform = transform

    def load(self) -> None:
        samples: dict[str, TensorSamples | None] = {}
        for name, pair in self._given_sets.items():
            if pair is not None and not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise UserError(
                    f"The {name} data are of type {type(pair).__name__}: give a pair of tensors "
                    "(x, y)."
                )
            samples[name] = None
            if pair is not None:
                samples[name] = TensorSamples(*pair, transform=self._transform)
        self.train_set = samples["train"]
        self.val_set = samples["val"]
        self.test_set = samples["test"]
