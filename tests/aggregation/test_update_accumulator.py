"""What a client brings home: an update that is finite, buffers, and nothing of a client that
diverged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.aggregation.update_accumulator import FINISHED, UpdateAccumulator
from fl_lightning.callback import Clients, FederatedCallback
from fl_lightning.callback_list import CallbackList
from fl_lightning.errors import Diverged, UserError
from fl_lightning.learner.buffers import BufferPolicy
from fl_lightning.round.client_sums import Total
from fl_lightning.round.transaction import RoundTransaction
from tests.helpers.learners import InPlace, Lit, Normed, blobs, federated, fitted, trainer
from tests.helpers.rounds import a_group, a_round


def test_buffers_are_averaged_or_kept() -> None:
    averaged, kept = federated(Normed()), federated(Normed(), buffers="keep")
    trainer(1).fit(averaged, blobs())
    trainer(1).fit(kept, blobs())
    assert averaged.learner.net[1].num_batches_tracked == 3  # the maximum over clients
    assert averaged.learner.net[1].running_mean.abs().sum() > 0
    assert (
        kept.learner.net[1].num_batches_tracked == 0 and not kept.learner.net[1].running_mean.any()
    )


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_clients_that_diverge_stop_the_run_or_are_left_out(policy: str) -> None:
    class Diverges(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            # the last batch of some clients, and of that alone
            short = batch_idx == 2 and len(batch[1]) == 2
            return loss * float("nan") if short else loss

    module = federated(Diverges(), on_nonfinite=policy, participation="all")
    if policy == "stop":
        with pytest.raises(RuntimeError, match=r"client \d+ .*in round 0"):
            trainer(2).fit(module, blobs())
    else:
        trainer(2).fit(module, blobs())
        assert torch.isfinite(module.global_vector).all() and any(
            "left out" in note for note in module.notes
        )


def test_a_buffer_of_another_shape_has_no_average() -> None:
    class Growing(InPlace):
        def move(self, x: Tensor) -> None:
            self.running_mean = x.expand(2, -1).mean(0, keepdim=True)

    with pytest.raises(
        UserError, match=r"buffer running_mean has shape \(20,\).*\(1, 20\).*buffers='keep'"
    ):
        fitted(Growing, engine="sequential")
    fitted(Growing, engine="sequential", buffers="keep")


@pytest.mark.parametrize("policy", ["average", "keep"])
def test_a_client_whose_buffer_is_not_finite_has_diverged(policy: str) -> None:
    class Overflowing(InPlace):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.nan]))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            # the last batch of one client in five
            self.running_mean.add_(torch.inf if len(batch[0]) == 6 else 1.0)
            return Lit.training_step(self, batch, batch_idx)

    if policy == "average":
        with pytest.raises(Diverged, match="client 1 "):
            fitted(Overflowing, engine="sequential")
        with pytest.warns(UserWarning, match=r"clients \[1, 6\] were left out"):
            module, _ = fitted(Overflowing, 1, engine="sequential", on_nonfinite="skip")
        assert bool(module.learner.running_mean.isfinite().all()) and bool(
            (module.learner.running_mean >= 2).all()
        )
    else:
        module, _ = fitted(Overflowing, engine="sequential", buffers=policy)
        assert not bool(module.learner.running_mean.any())
    torch.testing.assert_close(
        module.learner.mask, torch.tensor([0.0, -torch.inf, torch.nan]).double(), equal_nan=True
    )


def brought_home(*methods: FederatedCallback, **marks: Any) -> tuple[UpdateAccumulator, Total]:
    """What two clients that took a step of 1 contribute; ``marks``: set on the second."""
    transaction = RoundTransaction(
        a_round(weights={3: 1.0, 5: 1.0}, buffers={"running_mean": torch.zeros(3)})
    )
    contributions = UpdateAccumulator(
        transaction, CallbackList(list(methods)), 2, BufferPolicy(nn.Identity(), "average")
    )
    for leaf, client in enumerate((3, 5)):
        group = a_group(transaction.round, [client])
        group.x += 1
        Clients(group).log("seen", torch.tensor([float(client)]))
        group.buffers = {"running_mean": torch.full((3,), float(client))}
        for name, value in marks.items() if client == 5 else ():
            setattr(group, name, value)
        contributions(leaf, group)
    return contributions, contributions.total()[0]


def test_the_latest_round_of_a_client_is_kept_where_a_method_has_personal_models() -> None:
    class Own(FederatedCallback):
        def personal(self, clients: Clients) -> Tensor:
            return clients.x

    assert brought_home()[0].transaction.rows == {}
    rows = brought_home(Own())[0].transaction.rows
    assert rows.keys() == {FINISHED} and {i: int(t) for i, t in rows[FINISHED].items()} == {
        3: 0,
        5: 0,
    }
