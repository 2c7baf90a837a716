"""Who attacks, that it is told, and that the attack comes where it should.

What it sends is in the oracle's tests.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import FederatedCallback, UserError
from fl_lightning.callbacks import ByzantineClients, ControlVariates, RunCard
from fl_lightning.callbacks.robust.byzantine_clients import hiding
from fl_lightning.datamodules import InMemoryDataModule
from fl_lightning.lab.contracts.federation import (
    Outcome,
    fit,
    in_processes,
    outcome,
    quiet,
    require_same,
)
from fl_lightning.testing import check_method, tiny_run
from tests.helpers.learners import Lit, blobs, federated, trainer


@pytest.mark.parametrize("attack", ["sign_flip", "noise", "label_flip", "alie"])
def test_every_contract_holds(attack: str) -> None:
    report = check_method(partial(ByzantineClients, attack, fraction=0.5))
    assert report.ok and report["order of clients"].verdict == "n/a", f"{report}"


def test_attackers_follow_from_the_seed_are_counted_among_participants_and_stand_in_the_card(
    tmp_path: Path,
) -> None:
    who = set()
    for seed in (1, 1, 2):
        attack = ByzantineClients(fraction=0.29)  # of ten: exactly 2
        run = trainer(1, [attack, RunCard()], default_root_dir=tmp_path)
        run.fit(federated(seed=seed, participation="all"), blobs())
        assert len(attack.attackers) == 2 == run.callback_metrics["byzantine/participants"]
        who.add(attack.attackers)
    assert len(who) == 2
    shown = ", ".join(map(str, attack.attackers))
    assert f"| ByzantineClients: attackers | {shown} |" in (tmp_path / "card.md").read_text()


@pytest.mark.parametrize("attack", ["noise", "label_flip", "alie"])
def test_four_processes_leave_the_same_bits(attack: Any) -> None:
    def job() -> Outcome:
        methods = [ByzantineClients(attack, 0.5), ControlVariates()]
        return outcome(
            fit(methods, participation=5, trainer={"strategy": "federated", "devices": 4})
        )

    with quiet():
        alone = outcome(fit([ByzantineClients(attack, 0.5), ControlVariates()], participation=5))
        require_same(alone, in_processes(4, job), 0.0, "4 processes", "")


def test_flipped_labels_are_flipped_in_full_gradients_too_and_honest_clients_keep_theirs() -> None:
    class Whole(FederatedCallback):
        def on_local_end(self, clients: Any) -> None:
            found[int(clients.ids)] = clients.full_gradient(clients.w)[0].clone()

    found: dict[int, Tensor] = {}
    attack = ByzantineClients("label_flip", 0.4)
    tiny_run(Whole(), attack, rounds=1, participation="all")
    attacked, found = found, {}
    tiny_run(Whole(), rounds=1, participation="all")
    assert (
        {i for i in found if not torch.equal(found[i], attacked[i])}
        == set(attack.attackers)
        != set()
    )


def test_labels_are_the_last_of_a_batch_and_the_data_have_to_have_them() -> None:
    attack = ByzantineClients("label_flip", 0.4)
    attack.attackers, attack.classes = (2,), 4
    x, groups, y = torch.rand(3, 2), torch.tensor([7, 8, 9]), torch.tensor([0, 1, 3])
    for batch in ((x, groups, y), [x, y]):
        *others, flipped = attack.flipped(2, batch)
        assert flipped.tolist() == [3, 2, 0] and all(
            a is b for a, b in zip(others, batch, strict=False)
        )
        assert attack.flipped(1, batch) is batch
    for wrong in ((x, y, x), (y, None), x):
        with pytest.raises(UserError, match=r"batches \(x, y\) with integer labels y.*client 2"):
            attack.flipped(2, wrong)


def test_data_without_labels_have_none_to_flip() -> None:
    class Squared(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.net(batch[0]).mean(1) - batch[1]).square().mean()

    x = torch.randn(20, 20, dtype=torch.float64)
    data = InMemoryDataModule((x, x.sum(1)), num_clients=5)
    with pytest.raises(UserError, match="needs class labels, and the data have none"):
        trainer(1, [ByzantineClients("label_flip")]).fit(federated(Squared()), data)
    trainer(1, [ByzantineClients("sign_flip")]).fit(federated(Squared()), data)


def test_how_far_an_attack_hides() -> None:
    """Baruch et al., 2019: 50 workers, 24 of them corrupted: Φ⁻¹(24/26) is 1.43."""
    assert hiding(50, 24) == pytest.approx(1.4260768722)
    assert hiding(2, 1) == 0.0 and hiding(10, 6) == pytest.approx(3.0) and hiding(10, 1) == 0.0


def test_label_flips_with_a_scale_are_refused() -> None:
    with pytest.raises(UserError, match="label flips have no scale"):
        ByzantineClients("label_flip", scale=1.0)
