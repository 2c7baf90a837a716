"""chemprop's documented recipe for regression.

Scaled targets, BatchNorm, metrics, rates by rounds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from chemprop import data, featurizers, models, nn

from fl_lightning.datamodules import FromDatasets
from tests.public.agreement import Recipe, check, quiet_trainer

CHAINS = [
    "C" * n + head for n in range(1, 13) for head in ("", "O", "N", "Cl", "c1ccccc1", "C(=O)O")
]


def molecules() -> tuple[data.MoleculeDataset, data.MoleculeDataset, nn.UnscaleTransform]:
    """Training and validation molecules with scaled targets, and what scales predictions back."""
    rng = np.random.default_rng(0)
    points = [
        data.MoleculeDatapoint.from_smi(s, np.array([0.5 * len(s) + s.count("O")])) for s in CHAINS
    ]
    order = rng.permutation(len(points))
    featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
    train, val = (
        data.MoleculeDataset([points[i] for i in part], featurizer)
        for part in (order[:56], order[56:])
    )
    scaler = train.normalize_targets()
    val.normalize_targets(scaler)
    return train, val, nn.UnscaleTransform.from_standard_scaler(scaler)


def learner() -> models.MPNN:
    ffn = nn.RegressionFFN(input_dim=32, dropout=0.1, output_transform=molecules()[2])
    metrics = [nn.metrics.RMSE(), nn.metrics.MAE()]
    return models.MPNN(
        nn.BondMessagePassing(d_h=32), nn.MeanAggregation(), ffn, batch_norm=True, metrics=metrics
    )


def federated() -> FromDatasets:
    train, val, _ = molecules()
    return FromDatasets(train, val, num_clients=4, batch_size=7, collate=data.collate_batch)


def error_in_real_units(exported: Path) -> float:
    """RMSE of predictions in the targets' own unit, by the loader and the Trainer of the recipe."""
    _, val, unscale = molecules()
    model = models.MPNN.load_from_file(exported)
    loader = data.build_dataloader(val, shuffle=False)
    predicted = np.concatenate(quiet_trainer().predict(model, loader))
    raw = np.stack([point.y for point in val.data])
    return float(np.sqrt(np.mean((predicted - raw) ** 2)) / unscale.scale.item())


@pytest.mark.public
def test_recipe(tmp_path: Path) -> None:
    options = {"participation": 2, "local_epochs": 2, "client_scheduler": "rounds"}
    check(
        Recipe("chemprop", learner, federated, "val/rmse", error_in_real_units, options), tmp_path
    )
