"""Every measurement is of the model that is validated and exported, whichever that is."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.nn.functional import cross_entropy

from fl_lightning import callbacks as c
from tests.evaluation.test_as_validated import Swapping, data, loader_of
from tests.helpers.learners import Lit, Normed, federated, trainer


class Watching(pl.Callback):
    """Keeps what is validated, and what is exported after each round."""

    def __init__(self) -> None:
        self.exported: list[Any] = []
        self.validated: list[torch.Tensor] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        flat = torch.cat([p.detach().reshape(-1) for p in module.learner.parameters()])
        self.validated[trainer.current_epoch :] = [flat]

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.exported.append(module.export())


MODELS: dict[str, Any] = {
    "w": lambda: [],
    "ema": lambda: [EMAWeightAveraging(decay=0.5)],
    "both": lambda: [c.ExtrapolatedStep(), EMAWeightAveraging(decay=0.5)],
    "parts": lambda: [c.PartialAveraging({"net.0.*": 2}), EMAWeightAveraging(decay=0.5)],
}


@pytest.mark.parametrize("kind", MODELS)
def test_clients_and_global_values_are_of_the_model_that_is_validated(kind: str) -> None:
    federation = data()
    x, y = federation._given_sets["train"]
    federation._given_sets["val"] = (x[:50], y[:50])
    torch.manual_seed(0)
    module = federated(Lit() if kind == "both" else Normed(), engine="sequential")
    seen, watching = c.PerClientEvaluation(1), Watching()
    measured = [seen, c.GlobalLossLogger(1), c.HessianLogger(None, samples=20, probes=2)]
    averaged = [m for m in MODELS[kind]() if isinstance(m, WeightAveraging)]
    methods = [m for m in MODELS[kind]() if not isinstance(m, WeightAveraging)]
    trainer(4, [*methods, *averaged, watching, *measured]).fit(module, federation)
    flat = torch.cat([p.detach().reshape(-1) for p in watching.exported[-1].parameters()])
    torch.testing.assert_close(flat, watching.validated[-1])
    torch.testing.assert_close(
        flat, torch.cat([p.detach().reshape(-1) for p in module.export().parameters()])
    )
    for client in range(5):
        own_model = {"client": client} if kind == "parts" else {}
        loader = loader_of(federation, federation.client_test_indices(client))
        (given,) = trainer(1).validate(module.export(**own_model), loader, verbose=False)
        expected = {name.removeprefix("val/"): value for name, value in given.items()}
        for name, value in expected.items():
            assert seen.table[name][client] == pytest.approx(value, rel=1e-6), (client, name)
    logged = module.trainer.callback_metrics
    learner = module.export().eval()
    own = [i for client in range(5) for i in federation.client_indices(client)]
    loss = float(cross_entropy(learner.net(x[own]), y[own]).detach())
    assert float(logged["global/train_loss"]) == pytest.approx(loss, rel=1e-6)
    assert float(logged["hessian/norm"]) == pytest.approx(float(flat.norm()), rel=1e-6)
    found = float(logged["global/gap"])
    assert found == pytest.approx(float(logged["val/loss"]) - loss, rel=1e-5, abs=1e-7)


def test_the_gap_is_of_one_model_where_the_learner_exchanges_weights() -> None:
    federation = data()
    x, y = federation._given_sets["train"]
    federation._given_sets["val"] = (x, y)
    module = federated(Swapping(), engine="sequential")
    trainer(2, [c.GlobalLossLogger(1)]).fit(module, federation)
    logged = module.trainer.callback_metrics
    learner = module.export()
    learner.swap()
    own = [i for client in range(5) for i in federation.client_indices(client)]
    loss = float(cross_entropy(learner.net(x[own]), y[own]).detach())
    assert float(logged["global/train_loss"]) == pytest.approx(loss, rel=1e-6)
    (whole,) = trainer(1).validate(module.export(), loader_of(federation, own), verbose=False)
    assert whole["val/loss"] == pytest.approx(loss, rel=1e-6)


def test_stochastic_weight_averaging_is_said_to_be_measured_nowhere() -> None:
    averaging = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    module = federated(engine="sequential")
    with pytest.warns(UserWarning, match=r"StochasticWeightAveraging.*trainer\.validate"):
        trainer(3, [averaging]).fit(module, data())
