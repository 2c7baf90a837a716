"""Ranking metrics on a client that lacks some classes: the mean is over those that it has."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torchmetrics import classification

from fl_lightning import InMemoryDataModule
from fl_lightning.callbacks import PerClientEvaluation
from tests.helpers.learners import Lit, federated, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BINS = 101
OPTIONS = {
    "auroc": ("AUROC", {}),
    "weighted": ("AUROC", {"average": "weighted"}),
    "each": ("AUROC", {"average": None}),
    "bins": ("AUROC", {"thresholds": BINS}),
    "logauc": ("LogAUC", {"fpr_range": (0.01, 0.5), "average": "macro"}),
    "precision": ("AveragePrecision", {}),
    "precision_bins": ("AveragePrecision", {"thresholds": BINS}),
    "eer": ("EER", {}),
}
METRICS = {
    f"{kind}_{name}".lower(): (kind, what, options)
    for kind in ("Multiclass", "Multilabel")
    for name, (what, options) in OPTIONS.items()
    if hasattr(classification, kind + what)
}
PER_CLASS = [name for name, (_, _, o) in METRICS.items() if o.get("average", "") is None]
PER_CLASS += [name for name in METRICS if name.endswith("eer")]


class Ranked(Lit):
    """Logs each metric, and those with a value per class class by class."""

    def __init__(self) -> None:
        super().__init__()
        made = {n: vars(classification)[k + w](4, **o) for n, (k, w, o) in METRICS.items()}
        self.ranked = nn.ModuleDict(made)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self.net(x).softmax(1)
        for name, metric in self.ranked.items():
            metric.update(scores, y if METRICS[name][0] == "Multiclass" else one_hot(y, 4))
            if name not in PER_CLASS:
                self.log(f"val/{name}", metric)

    def on_validation_epoch_end(self) -> None:
        for name in PER_CLASS:
            values = self.ranked[name].compute()
            self.log_dict({f"val/{name}_{k}": value for k, value in enumerate(values)})
            self.ranked[name].reset()


def expected(scores: Tensor, y: Tensor, name: str) -> Tensor:
    """The value of each class (4,), alone; NaN where the samples do not define it."""
    _, what, options = METRICS[name]
    values = torch.full((4,), math.nan, dtype=torch.float64)
    rest = {key: value for key, value in options.items() if key != "average"}
    ranked = "Precision" in what or len(y.unique()) > 1
    for k in y.unique().tolist() if ranked else ():
        metric = vars(classification)[f"Binary{what}"](**rest)
        values[k] = metric(scores[:, k], (y == k).long())
    return values


def test_the_mean_is_over_the_classes_that_a_client_has() -> None:
    """Clients 0 and 1 have two classes of four each, client 2 has all of them, client 3 one."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(240, 20, generator=draw, dtype=torch.float64)
    y = x[:, :4].argmax(1)
    own = [torch.where(y < 2)[0][:60], torch.where(y >= 2)[0][:60], torch.arange(40)]
    own.append(torch.where(y == 1)[0][:9])
    tests = [each.tolist() for each in own]
    names = [*METRICS, *(f"{name}_{k}" for name in PER_CLASS for k in range(4))]
    measure = PerClientEvaluation(1, modes=dict.fromkeys(names, "max"))
    data = InMemoryDataModule((x, y), test=(x, y), clients=tests, test_clients=tests, batch_size=16)
    module = federated(Ranked(), participation="all")
    trainer(1, [measure]).fit(module, data)
    net = module.export().net
    for name in METRICS:
        for client in range(4):
            target = y[own[client]]
            each = expected(net(x[own[client]]).softmax(1).detach(), target, name)
            defined = ~each.isnan()
            if name in PER_CLASS:
                found = [measure.table[f"{name}_{k}"].get(client, math.nan) for k in range(4)]
                wanted = each.tolist()
            else:
                weights = torch.bincount(target, minlength=4).double()
                weights = weights if name.endswith("weighted") else torch.ones(4).double()
                mean = (each * weights)[defined].sum() / weights[defined].sum()
                found = [measure.table[name].get(client, math.nan)]
                wanted = [float(mean)]
            assert found == pytest.approx(wanted, rel=1e-5, nan_ok=True), (name, client)
