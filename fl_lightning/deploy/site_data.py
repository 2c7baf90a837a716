"""Data of a run whose clients are at sites: the numbers of samples and batches that sites
report."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules import Partition
from fl_lightning.datamodules.partitions.partition import Indices


class Everything(Partition):
    """Each client has all samples, which are those of a site with its own data.

    Args:
        m: number of clients of the run.
    """

    needs_labels = False

    def __init__(self, m: int) -> None:
        self.m = m

    @property
    def clients(self) -> int:
        return self.m

    def split(self, labels: Indices, num_clients: int, seed: int) -> list[Indices]:
        return [np.arange(len(labels))] * num_clients


def as_one_client(data: Any, m: int) -> None:
    """Give all of these data to one client, whichever of m it is; its test samples likewise.

    Args:
        data: data that are not set up yet; one list in ``test_clients`` belongs to that client.
    """
    data.partition = Everything(m)
    tests = getattr(data, "_test_clients", None)
    if tests is not None and len(tests) == 1:
        data._test_clients = list(tests) * m


class Told:
    """The server's data, except that sites report the clients' numbers of samples and batches."""

    client_names = ()  # names in the server's own data do not belong to sites

    def __init__(self, data: Any) -> None:
        self._data = data
        self._sizes: NDArray[np.int64] = np.array(data.client_sizes(), np.int64)
        self._batches: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def tell(self, client: int, size: int, batches: int) -> None:
        """Note the numbers that a site reports for a client."""
        self._sizes[client] = size
        self._batches[client] = batches

    def told(self) -> dict[int, tuple[int, int]]:
        """Return samples and batches of the clients whose sites have reported their numbers."""
        return {i: (int(self._sizes[i]), batches) for i, batches in self._batches.items()}

    def client_sizes(self) -> NDArray[np.int64]:
        """Return N_i ``(m,)``; the server's own number for a client whose site has not sent it."""
        return self._sizes

    def batches_per_epoch(self, client: int) -> int:
        """Return the batches of an epoch of a client."""
        if client in self._batches:
            return self._batches[client]
        return int(self._data.batches_per_epoch(client))

    def card(self) -> dict[str, str]:
        """Return facts for the run's card, without the partition of the server's own data."""
        told = sorted(self._batches)
        sizes = [int(self._sizes[client]) for client in told]
        if not sizes:
            return {"clients": f"{self._data.num_clients} at sites"}
        spread = f"{min(sizes)} to {max(sizes)}"
        return {
            "clients": f"{self._data.num_clients} at sites, of {spread} samples",
            "training samples": f"{sum(sizes)}, at sites",
        }
