"""The training plan and data splitter of scvi-tools, on counts that scvi-tools makes itself.

Validation draws, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scvi
from scvi.dataloaders import DataSplitter
from scvi.module import VAE
from scvi.train import TrainingPlan

from fl_lightning.datamodules import FromDataModule
from tests.public.agreement import Draws, Recipe, check, quiet_trainer

GENES, BATCHES = 30, 2


def plain() -> DataSplitter:
    """90 cells to train on, 30 to validate on, in two batches of the laboratory's."""
    scvi.settings.seed = 0
    adata = scvi.data.synthetic_iid(batch_size=60, n_genes=GENES, n_batches=BATCHES)
    scvi.model.SCVI.setup_anndata(adata, batch_key="batch")
    return DataSplitter(scvi.model.SCVI(adata).adata_manager, train_size=0.75, batch_size=12)


def module() -> VAE:
    return VAE(n_input=GENES, n_batch=BATCHES, n_hidden=16, n_latent=4)


@pytest.mark.public
def test_training_plan(tmp_path: Path) -> None:
    draws = Draws()

    def federated() -> Any:
        return FromDataModule(plain(), num_clients=3)

    def outside(exported: Path) -> float:
        plan = TrainingPlan.load_from_checkpoint(exported, module=module())
        data = plain()
        return float(
            quiet_trainer(callbacks=[Draws(draws)]).validate(plan, data, verbose=False)[0][
                "elbo_validation"
            ]
        )

    def learner() -> TrainingPlan:
        return TrainingPlan(module(), n_epochs_kl_warmup=3)

    options = {"participation": 2, "local_epochs": 1}
    check(
        Recipe(
            "scvi-tools",
            learner,
            federated,
            "elbo_validation",
            outside,
            options,
            callbacks=(draws,),
        ),
        tmp_path,
    )
