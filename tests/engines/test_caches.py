"""What does not depend on the client that came before is no state.

Clients may train side by side, without a warning.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import FederatedModule, UserError
from tests.helpers.learners import Lit, blobs, federated, trainer

KEEPS = "): under engine='sequential' it runs on"


class Spectral(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.utils.spectral_norm(self.net[0])


class Weight(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.utils.weight_norm(self.net[0])


class PairLoss(nn.Module):
    """As pytorch-metric-learning's losses, which record what they saw."""

    def __init__(self) -> None:
        super().__init__()
        self.num_pos_pairs = 0

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        self.num_pos_pairs = 0
        self.num_pos_pairs += int((y[:, None] == y).sum())
        return nn.functional.cross_entropy(out, y) * (1 + 1e-3 * self.num_pos_pairs)


class Pairs(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.loss = PairLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.latest = self.net(batch[0])
        loss: Tensor = self.loss(self.latest, batch[1])
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("spread", self.latest.detach().std() + self.loss.num_pos_pairs)


class Previous(Lit):
    """Reads in a later step what an earlier one of the same client wrote."""

    previous = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx:
            loss = loss + 0.1 * self.previous
        self.previous = float(loss.detach())
        return loss


CACHES: list[type[Lit]] = [Spectral, Weight, Pairs, Previous]


@pytest.mark.parametrize("learner", CACHES)
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


@pytest.mark.filterwarnings("ignore:engine=", "ignore:.*weight_norm:FutureWarning")
def test_what_the_first_step_leaves_as_it_was_is_a_cache_too() -> None:
    """In float32, as the layer was made, the weight that its hook computes first is the one that is
    there."""

    class Both(Spectral):
        def __init__(self) -> None:
            super().__init__()
            self.net[2] = nn.utils.weight_norm(self.net[2])

    torch.manual_seed(2)
    module = FederatedModule(Both(), participation=0.3, local_epochs=1, seed=1, engine="concurrent")
    trainer(1).fit(module, blobs(dtype=torch.float32))
    assert module.run.plan.engine == "concurrent" and not any(
        KEEPS in note for note in module.notes
    )


class Summary(Lit):
    """Speaks between rounds of what the last client left, which only one engine's learner has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.latest = float(batch[0].sum())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("latest", self.latest)


class Growing(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(0.0)
        return super().training_step(batch, batch_idx) * len(self.seen)


@pytest.mark.parametrize("learner", [Summary, Growing])
def test_what_is_read_later_stays_refused_and_said(learner: type[Lit]) -> None:
    with pytest.raises(UserError, match=f"engine='concurrent' cannot train {learner.__name__}"):
        trainer(1).fit(federated(learner(), engine="concurrent"), blobs())
    with pytest.warns(UserWarning, match=re.escape(KEEPS)):
        trainer(1).fit(federated(learner(), engine="sequential"), blobs())


class Named(type):
    """Knows all classes that were made."""

    made: ClassVar[list[str]] = []

    def __new__(cls, name: str, *rest: Any) -> Any:
        cls.made.append(name)
        return super().__new__(cls, name, *rest)


class Listed(nn.Module, metaclass=Named):
    """Keeps a register of its subclasses, in which each name stands once."""

    register: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if cls.__name__ in cls.register:
            raise ValueError(f"{cls.__name__} is registered already")
        cls.register[cls.__name__] = cls


class Remembering(Listed):
    def forward(self, x: Tensor) -> Tensor:
        self.latest = x
        return x


class Exact(nn.Module):
    """Takes itself for no subclass."""

    def forward(self, x: Tensor) -> Tensor:
        assert type(self) is Exact
        self.latest = x
        return x


@pytest.mark.filterwarnings(
    "ignore:engine=", "ignore:Exact.* keeps state", "ignore:Inserted keeps state"
)
@pytest.mark.parametrize("layer", [Remembering, Exact])
def test_a_class_that_keeps_a_register_of_its_subclasses_does_not_hear_of_trials(
    layer: type[nn.Module],
) -> None:
    class Inserted(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(1, layer())

    made, register = list(Named.made), dict(Listed.register)
    module = federated(Inserted())
    trainer(1).fit(module, blobs())
    assert (
        Named.made == made and Listed.register == register and type(module.learner.net[1]) is layer
    )
