"""State that a learner keeps where nobody looks. Auto gives sequential's bits each time, and trials
leave no trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import FederatedCallback, UserError
from fl_lightning.engines import auto
from tests.helpers.learners import Lit, blobs, federated, trainer


class Factor:
    """Anneals a loss; a plain object."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1 / (1 + 0.01 * self.calls)


class Weighted(Lit):
    """Its loss is weighted by ``self.factor()``, each time by another number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: Any = Factor()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.factor()


def drawing_data() -> Any:
    """Its transform has a generator of its own."""
    data, draws = blobs(), torch.Generator().manual_seed(0)
    data._transform = lambda x: x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=draws)
    return data


@pytest.fixture(autouse=True)
def always_measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(auto, "TINY_SECONDS", 0.0)
    yield


def ran(
    make: Callable[[], Any],
    engine: str,
    data: Callable[[], Any] = blobs,
    methods: Sequence[FederatedCallback] = (),
) -> Any:
    torch.manual_seed(3)
    module = federated(make(), engine=engine, workers=2, participation=0.6, local_epochs=2)
    trainer(2, methods).fit(module, data())
    return module


@pytest.mark.filterwarnings("ignore:.*keeps state outside its buffers")
def test_auto_leaves_the_bits_of_sequential_each_time() -> None:
    expected = ran(Weighted, "sequential").global_vector
    for _ in range(2):
        module = ran(Weighted, "auto")
        assert module.engine_facts["engine"] == "sequential", module.engine_facts["why"]
        assert torch.equal(module.global_vector, expected)
        assert any("keeps state outside its buffers" in note for note in module.notes)


def test_data_that_draws_from_a_generator_of_its_own_is_read_in_order() -> None:
    expected = ran(Lit, "sequential", drawing_data).global_vector
    for _ in range(2):
        module = ran(Lit, "auto", drawing_data)
        assert module.engine_facts["engine"] == "sequential" and torch.equal(
            module.global_vector, expected
        )


class Reading(FederatedCallback):
    """Keeps a client's batch in a place that all clients share, without a hook of clients."""

    def local_batch(self, client: int, batch: Any) -> Any:
        self.batch = batch
        return self.batch


class OnItself(FederatedCallback):
    """Keeps where a client began in a place that all clients share."""

    def on_local_start(self, clients: Any) -> None:
        keep(self, clients.x.clone())

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        return gradient + 0.1 * (clients.x - self.begun)


def keep(method: Any, begun: Tensor) -> None:
    """Sets the attribute where the method's own source does not show it."""
    method.begun = begun


@pytest.mark.filterwarnings("ignore:you asked for engine='concurrent'")
@pytest.mark.parametrize(
    ("method", "name"),
    [(OnItself, "OnItself sets self.begun"), (Reading, "Reading sets self.batch")],
)
def test_a_method_that_sets_an_attribute_for_all_clients_trains_them_in_order_or_not_at_all(
    method: Any, name: str
) -> None:
    for engine in ("auto", "concurrent", "stacked"):
        with pytest.raises(UserError, match=rf"{name} while clients train.*engine='sequential'"):
            ran(Lit, engine, methods=[method()])
    assert ran(Lit, "sequential", methods=[method()]).engine_facts["engine"] == "sequential"


KEEPS = "): under engine='sequential' it runs on"


class Spectral(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.utils.spectral_norm(self.net[0])


class Weight(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.utils.weight_norm(self.net[0])


class Previous(Lit):
    """Reads in a later step what an earlier one of the same client wrote."""

    previous = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx:
            loss = loss + 0.1 * self.previous
        self.previous = float(loss.detach())
        return loss


@pytest.mark.parametrize("learner", [Spectral, Weight])
@pytest.mark.filterwarnings("ignore:engine=")
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_is_written_before_it_is_read_trains_side_by_side(learner: type[Lit]) -> None:
    torch.manual_seed(2)
    made = learner()
    runs = [
        federated(learner(), engine="sequential"),
        federated(learner(), engine="concurrent", workers=2),
    ]
    for module in runs:
        module.learner.load_state_dict(made.double().state_dict())
        run = trainer(2)
        run.fit(module, blobs())
        assert not any(KEEPS in note for note in module.notes)
    assert torch.equal(runs[0].global_vector, runs[1].global_vector)


class Summary(Lit):
    """Speaks between rounds, by a function, of what only one engine's learner has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.latest = float(batch[0].sum())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        say(self)


def say(learner: Any) -> None:
    learner.log("latest", learner.latest)


class Growing(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(0.0)
        return super().training_step(batch, batch_idx) * len(self.seen)


@pytest.mark.parametrize("learner", [Summary, Growing, Previous])
def test_what_is_read_later_stays_refused_and_said(learner: type[Lit]) -> None:
    with pytest.raises(UserError, match=f"engine='concurrent' cannot train {learner.__name__}"):
        trainer(1).fit(federated(learner(), engine="concurrent"), blobs())
    with pytest.warns(UserWarning, match=re.escape(KEEPS)):
        trainer(1).fit(federated(learner(), engine="sequential"), blobs())
