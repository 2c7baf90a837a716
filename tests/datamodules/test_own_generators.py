"""Datasets that draw from generators of their own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import Dataset, default_collate

from fl_lightning import FederatedModule, UserError
from fl_lightning.datamodules import FromDatasets
from tests.helpers.learners import Lit, trainer


class Randomizable:
    """As MONAI has it: a generator of the class, until it is given one of its own."""

    R = np.random.RandomState(5)

    def set_random_state(self, seed: int | None = None, state: Any = None) -> Any:
        self.R = np.random.RandomState(seed) if state is None else state
        return self


class RandShift(Randomizable):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.shift = float(self.R.normal())  # kept between drawing and use
        return x + self.shift


class Compose(Randomizable):
    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def set_random_state(self, seed: int | None = None, state: Any = None) -> Any:
        super().set_random_state(seed, state)
        for transform in self.transforms:
            transform.set_random_state(seed=self.R.randint(2**31))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms:
            x = transform(x)
        return x


class Augmented(Dataset[Any]):
    def __init__(self, transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.x, self.y = (
            torch.randn(60, 20, generator=torch.Generator().manual_seed(1)),
            torch.arange(60) % 4,
        )
        self.transform = transform

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> Any:
        return self.transform(self.x[i]), self.y[i]


class Drawing:
    """Draws by a method of a generator that it keeps."""

    def __init__(self, source: Any, draw: Callable[[Any], float]) -> None:
        self.source, self.draw = source, draw

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.draw(self.source)


class Late:
    """Makes its generator when it is first called."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "rng"):
            self.rng = np.random.default_rng()
        return x + float(self.rng.normal())


class LateAndSlow(Late):
    """Two readers come before it has its generator."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "rng"):
            time.sleep(0.05)
        return super().__call__(x)


class Unseen:
    """Goes on by itself, as a generator that nobody knows."""

    state = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        Unseen.state = Unseen.state * 48271 % (2**31 - 1)
        return x + Unseen.state / 2**31


def closed_over() -> Callable[[torch.Tensor], torch.Tensor]:
    rng = np.random.default_rng(7)
    return lambda x: x + float(rng.normal())


KINDS: dict[str, Callable[[], Any]] = {
    "MONAI's Compose": lambda: Compose([RandShift(), RandShift()]),
    "numpy, PCG64DXSM": lambda: Drawing(
        np.random.Generator(np.random.PCG64DXSM(3)), lambda g: float(g.normal())
    ),
    "RandomState": lambda: Drawing(np.random.RandomState(3), lambda g: float(g.normal())),
    "Python": lambda: Drawing(random.Random(3), lambda g: g.gauss(0, 1)),
    "torch": lambda: Drawing(
        torch.Generator().manual_seed(3), lambda g: float(torch.randn((), generator=g))
    ),
    "a closure": closed_over,
    "made late": Late,
    "made late and slowly": LateAndSlow,
}


def fitted(
    transform: Any, folder: Any = None, resumed: Any = None, **arguments: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    test = Augmented(lambda x: x)
    data = FromDatasets(Augmented(transform), test=test, num_clients=6, batch_size=4)
    module = FederatedModule(Lit(), participation=0.5, local_epochs=1, seed=1, **arguments)
    keeping = [] if folder is None else [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)]
    run = trainer(3, keeping, enable_checkpointing=bool(keeping))
    run.fit(module, data, ckpt_path=resumed)
    return module, run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:engine=", "ignore:local steps are not captured")
def test_a_resumed_run_and_clients_side_by_side_have_the_same_bits(
    kind: str, tmp_path: Any
) -> None:
    whole, _ = fitted(KINDS[kind](), tmp_path, engine="sequential")
    again, _ = fitted(KINDS[kind](), None, tmp_path / "epoch=0.ckpt", engine="sequential")
    assert torch.equal(whole.global_vector, again.global_vector)
    beside, _ = fitted(KINDS[kind](), engine="concurrent", workers=2)
    assert torch.equal(whole.global_vector, beside.global_vector)
    plain, _ = fitted(lambda x: x, engine="sequential")
    assert not torch.equal(whole.global_vector, plain.global_vector), "nothing was drawn"


def test_what_cannot_be_seeded_trains_one_after_the_other_and_is_told() -> None:
    words = "another batch when the same one is read again.*resumed run does not have"
    with pytest.warns(UserWarning, match=words):
        module, _ = fitted(Unseen(), engine="auto")
    assert module.run.plan.engine == "sequential" and "read again" in module.run.plan.why
    with pytest.warns(UserWarning, match="resumed run does not have"):
        fitted(Unseen(), engine="sequential")
    told = r"engine='concurrent' cannot train Lit: its data set gives another batch"
    with pytest.raises(UserError, match=told):
        fitted(Unseen(), engine="concurrent")


class Masking:
    """A collate function with a generator, made when it is first called, as transformers has."""

    def __init__(self, late: bool = True) -> None:
        self.generator = None if late else torch.Generator().manual_seed(3)

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(3)
        return x.masked_fill(torch.rand(x.shape, generator=self.generator) < 0.3, 0.0), y


def collated(collate: Any, folder: Any = None, resumed: Any = None, workers: int = 0) -> Any:
    torch.manual_seed(0)
    samples = Augmented(lambda x: x)
    data = FromDatasets(
        samples, test=samples, num_clients=6, batch_size=4, collate=collate, num_workers=workers
    )
    module = FederatedModule(Lit(), participation=0.5, local_epochs=1, seed=1, engine="sequential")
    keeping = [] if folder is None else [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)]
    run = trainer(3, keeping, enable_checkpointing=bool(keeping), limit_val_batches=0)
    run.fit(module, data, ckpt_path=resumed)
    return module.global_vector.detach()


@pytest.mark.parametrize("late", [True, False])
def test_generators_of_a_collate_function_are_seeded_too(late: bool, tmp_path: Any) -> None:
    whole = collated(Masking(late), tmp_path)
    assert torch.equal(whole, collated(Masking(late), None, tmp_path / "epoch=0.ckpt"))
    assert torch.equal(whole, collated(Masking(late), workers=2))
    assert not torch.equal(whole, collated(default_collate)), "nothing was drawn"
