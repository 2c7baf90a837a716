"""The training plan and data splitter of scvi-tools, on counts that scvi-tools makes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scvi
from scvi.dataloaders import DataSplitter
from scvi.module import VAE
from scvi.train import TrainingPlan

from fl_lightning.datamodules import FromDataModule
from tests.public.agreement import Recipe, check, quiet_trainer

scvi.settings.seed = 0
GENES, BATCHES = 30, 2


def cells() -> Any:
    """The manager of 2 × 60 cells of negative binomial counts."""
    scvi.settings.seed = 0
    adata = scvi.data.synthetic_iid(batch_size=60, n_genes=GENES, n_batches=BATCHES)
    scvi.model.SCVI.setup_anndata(adata, batch_key="batch")
    return scvi.model.SCVI(adata).adata_manager


def plain() -> DataSplitter:
    return DataSplitter(cells(), train_size=0.75, batch_size=12)


def learner() -> TrainingPlan:
    module = VAE(n_input=GENES, n_batch=BATCHES, n_hidden=16, n_latent=4)
    return TrainingPlan(module, n_epochs_kl_warmup=3)


def outside(exported: Path) -> float:
    plan = TrainingPlan.load_from_checkpoint(exported, module=VAE(GENES, n_batch=BATCHES, n_hidden=16, n_latent=4))
    return float(quiet_trainer().validate(plan, plain(), verbose=False)[0]["elbo_validation"])


@pytest.mark.public
def test_training_plan(tmp_path: Path) -> None:
    options = {"participation": 2, "local_epochs": 1}
    data = lambda: FromDataModule(plain(), num_clients=3)  # noqa: E731
    check(Recipe("scvi-tools", learner, data, "elbo_validation", outside, options), tmp_path)
