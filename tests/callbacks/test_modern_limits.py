"""Methods of 2023 to 2026: options that name nothing, and clients whose numbers are not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import UserError
from fl_lightning import callbacks as c
from fl_lightning.errors import Diverged
from fl_lightning.lab.contracts.federation import Learner, fit, quiet


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: c.MuonDirection(exclude=0.5), "exclude=0.5 has to be patterns"),
        (lambda: c.MuonDirection(exclude="haed.*"), "exclude: no parameter is called 'haed"),
        (lambda: c.GlobalDirection(1.5, "mix"), "alpha=1.5 is not accepted"),
        (lambda: c.FixedHead([]), r"FixedHead: \[\] names no parameter"),
        (lambda: c.AdaptiveLocalAggregation(None), "None names no parameter"),
        (lambda: c.AlternatingHead(head=["last", 1]), r"'last', 1\] names no parameter"),
        (lambda: c.PrototypePull(2, 4), "the data have 3 classes. Give classes=3"),
        (lambda: c.PrototypePull(3, 5), "Give features=4"),
    ],
)
def test_options_that_fit_no_model_are_refused(make: Any, words: str) -> None:
    with pytest.raises(UserError, match=words), quiet():
        fit([make()], rounds=1)


def test_the_last_layer_is_excluded_by_its_group_too() -> None:
    with quiet():
        by_group, by_name = (
            fit([c.MuonDirection(exclude=exclude)]).global_vector for exclude in ("last", "head.*")
        )
    assert torch.equal(by_group, by_name)


class Unlucky(Learner):
    """On batches whose inputs sum to more than 3 its loss is multiplied, in one of two modes."""

    def __init__(self, factor: float, training: bool = True) -> None:
        super().__init__()
        self.factor = torch.tensor(factor, dtype=torch.float64)
        self.when = training

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        unlucky = (batch[0].sum() > 3) & (self.training == self.when)
        return loss * torch.where(unlucky, self.factor, 1.0)


LMO: dict[str, Any] = {"nesterov": False, "start": "own", "variates": True}
UNLUCKY: dict[str, tuple[Any, Any]] = {
    "svd of NaN": (lambda: c.MuonDirection(orthogonaliser="svd", **LMO), (torch.nan, True)),
    # Its square is infinite, and the step along m/√v is 0.
    "squares of AdamW": (lambda: c.AdamDirection(second="averaged"), (1e170, True)),
    "loss that weighs": (lambda: c.FairAggregation(), (torch.nan, False)),
}


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("name", UNLUCKY)
def test_a_client_that_is_not_finite_is_left_out_or_stops_the_run(name: str, engine: str) -> None:
    make, given = UNLUCKY[name]
    settings: dict[str, Any] = {"participation": "all", "engine": engine}
    with quiet():
        module = fit([make()], 2, Unlucky(*given), on_nonfinite="skip", **settings)
        assert any("were left out" in note for note in module.notes)
        for value in (module.global_vector, *module.server_states.values()):
            assert bool(value.isfinite().all())
        with pytest.raises(Diverged, match=r"client \d or a model that it keeps or sends"):
            fit([make()], 2, Unlucky(*given), **settings)


@pytest.mark.parametrize("other", [c.LookaheadMomentum, c.DynamicRegularization])
def test_the_mean_over_all_clients_is_scaled_before_others_add_to_it(other: Any) -> None:
    def run(*methods: Any) -> Tensor:
        with quiet():
            return fit(methods).global_vector

    def muon() -> Any:
        return c.MuonDirection(average="all", **LMO)

    assert torch.equal(run(other(), muon()), run(muon(), other()))
