"""``RecordPrivacy`` at sites with data of their own: ε is that of their data, whoever asks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning.callbacks import RecordPrivacy
from fl_lightning.deploy.site_data import Everything
from fl_lightning.deploy.transport import InMemoryTransport, Message
from fl_lightning.round.privacy import epsilon
from fl_lightning.sampling import generator
from tests.deploy.test_in_memory import Learner, WithoutNorm, over_sites

pytestmark = pytest.mark.slow
N = 20  # samples of the site
OPTIONS: dict[str, Any] = {"participation": "all", "local_epochs": None, "local_steps": 1}


class Logs(WithoutNorm):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        return loss

    validation_step = Learner.validation_step


def table(size: int, batch: int | None, **given: Any) -> InMemoryDataModule:
    rng = np.random.default_rng(4)
    x = torch.from_numpy(rng.normal(size=(size, 3))).float()
    y = torch.from_numpy(rng.integers(0, 3, size))
    return InMemoryDataModule((x, y), val=(x[:4], y[:4]), batch_size=batch, **given)


def run(
    folder: Path,
    method: Any,
    carrier: type[InMemoryTransport] = InMemoryTransport,
    batch: tuple[int | None, int | None] = (None, None),
    **options: Any,
) -> Any:
    """A run over one site; ``batch``: batch sizes at the server, whose data have 60 samples, and at
    the site.
    """
    own = partial(table, N, batch[1], partition=Everything(1))
    given = {"learner": Logs, "buffers": "keep", "rounds": 1, **OPTIONS, **options}
    given["data"] = partial(table, 60, batch[0], num_clients=1)
    site = {"own": True, "data": own}
    module, _, _ = over_sites(
        lambda: [method()], folder, {"a": [0]}, carrier=carrier, at_site=lambda name: site, **given
    )
    return module


def test_a_site_of_another_batch_size_is_refused(tmp_path: Path) -> None:
    """The server would count q = 4/20, and the site trains with q = 1."""
    with pytest.raises(UserError, match=r"data\.batch_size: None there, 4 here"):
        run(tmp_path, partial(RecordPrivacy, 0.5, 4.0), batch=(4, None))


class Sends(InMemoryTransport):
    """The server gives the site this σ, and asks it again with another model."""

    sigma: float | None = None
    trained: list[Message]
    again = True

    def send(self, messages: list[Message]) -> None:
        for message in messages:
            if self.sigma is not None and message.what == "round":
                message.arrays["state/RecordPrivacy.sigma"] = np.array(self.sigma)
            self.latest = message
        super().send(messages)

    def receive(self, timeout: float) -> list[Message]:
        came = super().receive(timeout)
        new = [message for message in came if message.what == "trained"]
        self.trained += new
        if not new or not self.again:
            return came
        self.again = False
        self.latest.arrays["w"] = self.latest.arrays["w"] + np.float32(1e-3)
        super().send([self.latest])
        return []


@pytest.mark.parametrize("sigma", [0.0, -1.0, 1.0, None])
def test_a_site_goes_above_its_target_for_no_server(sigma: float | None, tmp_path: Path) -> None:
    """Not with less noise, and not if it is asked for a round twice."""
    carrier = type("Given", (Sends,), {"sigma": sigma, "trained": []})
    assert epsilon(1.0, 1.0, 1, 1e-5) > 3.0
    with pytest.raises(UserError, match=r"site a: client 0: UserError in privacy\.py"):
        run(tmp_path, partial(RecordPrivacy, 0.5, target_epsilon=3.0), carrier)
    assert len(carrier.trained) == (sigma is None)


class Keeps(Sends):
    again = False


def test_metrics_of_few_samples_stay_where_coins_choose_them(tmp_path: Path) -> None:
    carrier = type("Kept", (Keeps,), {"trained": []})
    method = partial(RecordPrivacy, 0.5, 4.0, noise_seed=1)
    run(tmp_path, method, carrier, (5, 5), rounds=8, fewest_samples=5)
    coins = [generator(1, "record samples", t, 0, 0).random(N) < 5 / N for t in range(8)]
    few = [int(each.sum()) < 5 for each in coins]
    assert len({*few}) == 2
    assert ["0/withheld" in answer.numbers for answer in carrier.trained] == few
    assert ["0/log/train/loss" not in answer.numbers for answer in carrier.trained] == few


def test_a_run_stops_by_the_sizes_that_sites_told(tmp_path: Path) -> None:
    """By the server's own, 60 samples, more rounds would fit."""
    method = partial(RecordPrivacy, 0.5, 2.0, target_epsilon=4.0)
    module = run(tmp_path, method, type("Kept", (Keeps,), {"trained": []}), (20, 20), rounds=9)
    fit = [t for t in range(1, 9) if epsilon(2.0, 1.0, t, 1e-5) <= 4.0]
    assert module.trainer.current_epoch == max(fit) < 8
