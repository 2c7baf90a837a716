"""State that a learner keeps where nobody looks.

Auto gives sequential's bits each time, and trials leave no trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning import FederatedCallback, Scratch, UserError
from fl_lightning.engines import auto
from tests.helpers.learners import Lit, blobs, federated, trainer

NUMBERS = [0.01 * (i % 17) for i in range(1000)]


class Factor:
    """Anneals a loss; a plain object."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1 / (1 + 0.01 * self.calls)


def closure() -> Callable[[], float]:
    calls = 0

    def factor() -> float:
        nonlocal calls
        calls += 1
        return 1 / (1 + 0.01 * calls)

    return factor


def of_itertools() -> Callable[[], float]:
    numbers = itertools.count()
    return lambda: 1 / (1 + 0.01 * next(numbers))


CALLS = 0


def of_module() -> float:
    global CALLS
    CALLS += 1
    return 1 / (1 + 0.01 * CALLS)


class Weighted(Lit):
    """Its loss is weighted by ``self.factor()``, each time by another number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: Any = Factor()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.factor()


def weighted(make: Callable[[], Any]) -> type[Lit]:
    class Made(Weighted):
        def __init__(self) -> None:
            super().__init__()
            self.factor = make()

    return Made


class Rare(Weighted):
    """Changes in a client's last step alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = Lit.training_step(self, batch, batch_idx)
        return loss * self.factor() if batch_idx == 4 else loss


class Later(Factor):
    """Changes the loss after more steps than anybody tries."""

    def __call__(self) -> float:
        self.calls += 1
        return 1.0 if self.calls < 1000 else 0.5


def class_list() -> type[Lit]:
    class Listing(Lit):
        seen: ClassVar[list[float]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.seen.append(float(loss.detach()))
            return loss

    return Listing


def drawing_data() -> Any:
    """Its transform has a generator of its own."""
    data, draws = blobs(), torch.Generator().manual_seed(0)
    data._transform = lambda x: x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=draws)
    return data


LEARNERS: dict[str, Callable[[], Any]] = {
    "itertools": weighted(of_itertools),
    "object": weighted(Factor),
    "class list": lambda: class_list()(),
    "after a thousand steps": weighted(Later),
    "closure": weighted(closure),
    "global": weighted(lambda: of_module),
    "last step": Rare,
}


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
    global CALLS
    CALLS = 0
    torch.manual_seed(3)
    module = federated(make(), engine=engine, workers=2, participation=0.6, local_epochs=2)
    trainer(2, methods).fit(module, data())
    return module


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.filterwarnings("ignore:.*keeps state outside its buffers")
def test_auto_leaves_the_bits_of_sequential_each_time(name: str) -> None:
    expected = ran(LEARNERS[name], "sequential").global_vector
    for _ in range(3):
        module = ran(LEARNERS[name], "auto")
        assert module.engine_facts["engine"] == "sequential", module.engine_facts["why"]
        assert torch.equal(module.global_vector, expected)
        assert any("keeps state outside its buffers" in note for note in module.notes)


def test_data_that_draws_from_a_generator_of_its_own_is_read_in_order() -> None:
    expected = ran(Lit, "sequential", drawing_data).global_vector
    for _ in range(3):
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


class Computed(OnItself):
    """Declares it."""

    begun = Scratch()

    def on_local_start(self, clients: Any) -> None:
        self.begun[clients] = clients.x

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        return gradient + 0.1 * (clients.x - self.begun[clients])


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


def test_a_declared_value_leaves_the_bits_of_an_attribute_in_clients_that_train_in_order() -> None:
    expected = ran(Lit, "sequential", methods=[OnItself()]).global_vector
    assert torch.equal(ran(Lit, "auto", methods=[Computed()]).global_vector, expected)


@pytest.mark.fast
def test_what_keeps_nothing_trains_side_by_side() -> None:
    class Configured(Lit):
        """Attributes of every kind that nothing changes."""

        table = {"a": [1, 2, 3]}

        def __init__(self) -> None:
            super().__init__()
            self.factor, self.numbers, self.anchor = Factor(), iter(NUMBERS), torch.ones(3)
            self.draws, self.call = np.random.default_rng(0), closure()

    module = ran(Configured, "auto")
    assert module.engine_facts["engine"] == "concurrent", module.engine_facts["why"]
    assert "keeps state" not in " ".join(module.notes)


def test_concurrent_by_name_says_what_it_cannot_know() -> None:
    with pytest.warns(UserWarning, match="that does not prove"):
        module = ran(Lit, "concurrent")
    assert any("that does not prove" in note for note in module.notes)


class MadeLate(Lit):
    """A hook at the start of training makes what steps count in, so none can be tried before."""

    def on_train_start(self) -> None:
        self.seen = torch.zeros(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.seen += 1
        loss = nn.functional.cross_entropy(self.net(x), y)
        # A stack cannot take this branch.
        return loss * (1 + self.seen.item() / 100) if bool(loss > 0) else loss


@pytest.mark.filterwarnings("ignore:engine=")
def test_what_was_not_proven_is_not_handed_from_stacked_to_concurrent() -> None:
    """Weights would depend on how many workers there are, and counts would be lost."""
    ends = []
    for engine in ("auto", "sequential", "stacked"):
        torch.manual_seed(0)
        module = federated(MadeLate(), participation="all", engine=engine)
        trainer(2).fit(module, blobs())
        assert module.run.plan is not None and module.run.plan.engine == "sequential"
        ends.append(module.global_vector.detach())
    assert torch.equal(ends[0], ends[2]) and torch.equal(ends[1], ends[2])
