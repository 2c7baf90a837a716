"""Robust rules against NumPy's, and what they stand; who attacks, and where the attack comes. What
attackers send is in the oracle's matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning import FederatedCallback, UserError
from fl_lightning.callbacks import ByzantineClients, RobustAggregation, RunCard
from fl_lightning.callbacks.robust.byzantine_clients import hiding
from fl_lightning.callbacks.robust.robust_aggregation import PIECE, mixed
from fl_lightning.datamodules import InMemoryDataModule
from fl_lightning.testing import tiny_run
from tests.helpers.learners import Lit, blobs, federated, trainer
from tests.oracles.robust import aggregate


class Given:
    averaged = None

    def __init__(self, updates: Any) -> None:
        self.updates, self.said = torch.from_numpy(updates), list[str]()

    def note(self, text: str) -> None:
        self.said.append(text)


RULES: dict[str, dict[str, Any]] = {
    "median": {"rule": "median"},
    "trimmed": {"rule": "trimmed_mean", "trim": 0.3},
    "trimmed, exactly": {"rule": "trimmed_mean", "trim": 0.29},
    "Krum": {"rule": "krum", "byzantine": 2},
    "multi-Krum": {"rule": "multi_krum", "byzantine": 2},
    "multi-Krum, 3": {"rule": "multi_krum", "byzantine": 1, "keep": 3},
    "geometric": {"rule": "geometric_median"},
    "Bulyan": {"rule": "bulyan", "byzantine": 1},
    "Bulyan, 2": {"rule": "bulyan", "byzantine": 2},
    "mixed, median": {"rule": "median", "byzantine": 2, "mixing": True},
    "mixed, trimmed": {"rule": "trimmed_mean", "trim": 0.2, "mixing": True},
    "mixed, Krum": {"rule": "krum", "byzantine": 3, "mixing": True},
    "mixed, geometric": {"rule": "geometric_median", "byzantine": 2, "mixing": True},
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("n", "length"), [*((n, 1.0) for n in (1, 2, 4, 7, 10)), (7, 0.01), (30, 1.0)]
)
def test_rules_agree_with_numpy(name: str, n: int, length: float) -> None:
    rng = np.random.default_rng(n)
    u = length * rng.normal(size=(n, 17)) * np.where(np.arange(n) % 4 == 3, 30.0, 1.0)[:, None]
    u[n // 2] = u[0]  # two alike, so that ties are met
    server: Any = Given(u)
    ours = RobustAggregation(**RULES[name]).aggregate(server, server.updates).numpy()
    assert np.abs(ours - aggregate(u, **RULES[name])).max() < 1e-9
    counts = "byzantine" in RULES[name] or "mixing" in RULES[name]
    times = 4 if RULES[name]["rule"] == "bulyan" else 2
    lowered = counts and n < times * RULES[name].get("byzantine", 1) + 3
    assert len(server.said) == lowered


@pytest.mark.parametrize("sent", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("name", RULES)
def test_what_is_not_finite_carries_no_rule_away(name: str, sent: float) -> None:
    u = np.random.default_rng(0).normal(size=(9, 17))
    u[4] = sent
    server: Any = Given(u)
    d = RobustAggregation(**RULES[name]).aggregate(server, server.updates)
    assert d.isfinite().all() and d.abs().max() < 4


def test_distances_and_means_of_long_rows_are_those_of_numpy() -> None:
    u = np.random.default_rng(0).normal(size=(5, 2 * PIECE + 3))
    server: Any = Given(u)
    ours = (
        RobustAggregation("krum", byzantine=1, mixing=True)
        .aggregate(server, server.updates)
        .numpy()
    )
    assert np.abs(ours - aggregate(u, "krum", byzantine=1, mixing=True)).max() < 1e-9


@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
def test_what_is_not_averaged_brings_no_update_nearer(rule: str) -> None:
    u, averaged = np.random.default_rng(0).normal(size=(9, 17)), np.arange(17) % 3 > 0
    u[:, ~averaged] *= 100
    server: Any = Given(u)
    server.averaged = torch.from_numpy(averaged)
    ours = RobustAggregation(rule, byzantine=2).aggregate(server, server.updates).numpy()
    assert np.abs(ours - aggregate(u * averaged, rule, byzantine=2)).max() < 1e-9


def test_bulyan_takes_what_mixing_leaves() -> None:
    """Neighbours may be mixed to one row, so both see the same rounding here."""
    u = np.random.default_rng(0).normal(size=(11, 5))
    server: Any = Given(u)
    ours = (
        RobustAggregation("bulyan", byzantine=2, mixing=True)
        .aggregate(server, server.updates)
        .numpy()
    )
    rows = mixed(torch.from_numpy(u), 2).numpy()
    assert np.abs(ours - aggregate(rows, "bulyan", byzantine=2)).max() < 1e-9


def test_weights_play_no_part_which_is_said() -> None:
    runs = [
        tiny_run(RobustAggregation("median"), weighting=weighting)
        for weighting in ("uniform", "samples")
    ]
    assert torch.equal(runs[0].global_vector, runs[1].global_vector)
    assert any("weighting='samples' are not used" in note for note in runs[1].notes)


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
