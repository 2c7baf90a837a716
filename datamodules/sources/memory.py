"""Your own tensors as a federated data module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.datamodules.partitions.client_tests import GroupTests
from fl_lightning.datamodules.partitions.partition import ByGroup
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import PositiveInt
from fl_lightning.sampling import generator


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


class GeneratedDomains(FederatedDataModule):
    """Pictures of classes under a gain and an offset per domain and channel; a client is a domain.

    x = a_d (p_y + noise · z) + b_d by channel, with prototypes p ``(classes, 3, size, size)``, log
    a_d ~ shift · N(0, 1), b_d ~ shift · N(0, 1) and z standard normal. So BatchNorm's statistics
    differ between clients, which is the case that FedBN treats (Li et al., 2021).

    Args:
        domains: number of domains; client d is ``domain d``.
        samples, test: training and test samples of each domain.
        size: side of a picture in pixels.
        data_seed: seed of the data; the run's seed does not change them.
    """

    default_partition = ByGroup()
    has_test_set = True

    def __init__(
        self,
        domains: PositiveInt = 5,
        classes: PositiveInt = 5,
        samples: PositiveInt = 200,
        test: PositiveInt = 100,
        size: PositiveInt = 8,
        noise: float = 0.5,
        shift: float = 1.0,
        data_seed: int = 0,
        **arguments: Any,
    ) -> None:
        # A config such as `base` may give a number of clients.
        if arguments.get("partition") is None:
            arguments = {**arguments, "num_clients": None}
        super().__init__(**arguments)
        self.domains = domains
        self.classes = classes
        self.samples = samples
        self.test = test
        self.size = size
        self.noise = noise
        self.shift = shift
        self.data_seed = data_seed
        self.client_domains: list[str] = []

    @classmethod
    def own_clients(cls, **arguments: Any) -> bool:
        """Return whether each domain is a client."""
        return arguments.get("partition") is None

    @classmethod
    def shape_of_samples(cls, **arguments: Any) -> tuple[int, ...] | None:
        """``(3, size, size)``."""
        size = int(arguments.get("size", 8))
        return (3, size, size)

    @classmethod
    def classes_of_samples(cls, **arguments: Any) -> int | None:
        return int(arguments.get("classes", 5))

    @property
    def num_classes(self) -> int:
        return self.classes

    def load(self) -> None:
        shape = (3, self.size, self.size)
        g = generator(self.data_seed, "prototypes")
        prototypes = g.standard_normal((self.classes, *shape))
        sides = [self._side(prototypes, side) for side in (0, 1)]
        (train, test) = sides
        self.train_set = TensorSamples(train[0], train[1])
        self.test_set = TensorSamples(test[0], test[1])
        self.groups = train[2]
        if isinstance(self.partition, ByGroup):
            self.client_names = [f"domain {d}" for d in range(self.domains)]
            self.client_domains = list(self.client_names)
            self.own_tests = GroupTests.of(self.test_set, train[2], test[2])

    def _side(
        self, prototypes: NDArray[np.float64], side: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
        """Return x, y and the domain of each sample of the training (0) or the test side (1)."""
        n = self.test if side else self.samples
        x = []
        y = []
        for d in range(self.domains):
            gain = np.exp(self.shift * generator(self.data_seed, "gain", d).standard_normal(3))
            offset = self.shift * generator(self.data_seed, "offset", d).standard_normal(3)
            r = generator(self.data_seed, "domain samples", d, side)
            of = r.integers(0, self.classes, n)
            z = r.standard_normal((n, *prototypes.shape[1:]))
            pixels = prototypes[of] + self.noise * z
            x.append(gain[:, None, None] * pixels + offset[:, None, None])
            y.append(of)
        groups = np.repeat(np.arange(self.domains), n)
        return np.concatenate(x).astype(np.float32), np.concatenate(y), groups
