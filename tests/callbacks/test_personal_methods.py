"""What personal methods promise beside their rules.

Recorded steps, what is refused and noted, FedAvg's own bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from fl_lightning import UserError
from fl_lightning import callbacks as c
from fl_lightning.callback_list import CallbackList
from fl_lightning.errors import Diverged
from fl_lightning.lab.contracts.federation import fit, quiet
from fl_lightning.testing import tiny_run
from tests.helpers.federation import network
from tests.helpers.learners import Lit, Normed, blobs, client_rows, federated, trainer
from tests.helpers.replays import assert_same, ran, replayed

PERSONAL: dict[str, Callable[[], Any]] = {
    "FedRep": lambda: c.AlternatingHead(0.5),
    "Ditto": c.ProximalPersonalModel,
    "pFedMe": lambda: c.MoreauEnvelope(inner_steps=2),
}


@pytest.mark.fast
@pytest.mark.parametrize("learner", [Lit, Normed])
@pytest.mark.parametrize("name", PERSONAL)
def test_steps_are_recorded_with_the_same_bits(name: str, learner: type[Lit]) -> None:
    plain = ran(learner, lambda: [PERSONAL[name]()], {}, capture=False)
    captured = ran(learner, lambda: [PERSONAL[name]()], {}, capture=True)
    assert replayed(captured[2]) > 0, captured[0].engine_facts["capture"]
    assert_same(captured[1], plain[1])


def test_in_fedrep_nothing_that_rests_moves_whatever_the_order_of_callbacks() -> None:
    """Momentum and weight decay, and a correction listed after it.

    Where the head takes all steps, the body rests.
    """
    head = slice(16, 31)
    first, last = (
        [c.AlternatingHead(9), c.ProximalTerm(0.5)],
        [c.ProximalTerm(0.5), c.AlternatingHead(9)],
    )
    runs = [network(methods, 2, momentum=0.9, clip_norm=0.9) for methods in (first, last)]
    assert np.array_equal(runs[0].record.w[-1], runs[0].start), (
        "the head takes all steps, and is never averaged"
    )
    assert np.array_equal(runs[0].record.evaluated[-1], runs[1].record.evaluated[-1])
    assert not np.array_equal(runs[0].record.evaluated[-1][head], runs[0].start[head])


def test_what_cannot_run_together_or_at_all_is_refused_by_name() -> None:
    for methods, words in (
        ([c.AlternatingHead(), c.PartialAveraging()], "AlternatingHead and PartialAveraging"),
        (
            [c.MoreauEnvelope(), c.SharpnessAwareMinimization()],
            "MoreauEnvelope and SharpnessAwareMinimization",
        ),
        ([c.MoreauEnvelope(), c.ClientMomentum()], "MoreauEnvelope and ClientMomentum"),
        ([c.MoreauEnvelope(), c.PartialAveraging()], "MoreauEnvelope and PartialAveraging"),
        ([c.MoreauEnvelope(), c.ProximalPersonalModel()], "what a client uses itself"),
    ):
        with pytest.raises(UserError, match=words):
            CallbackList(methods)
    for make, words in (
        (lambda: c.AlternatingHead(0), "head_epochs=0"),
        (lambda: c.ProximalPersonalModel(-1.0), "strength=-1"),
        (lambda: c.MoreauEnvelope(inner_steps=0), "inner_steps=0"),
        (lambda: c.MoreauEnvelope(strength=0.0), "strength=0.0"),
    ):
        with pytest.raises(UserError, match=words):
            make()
    with pytest.raises(UserError, match="AlternatingHead: no parameter is called 'haed'"):
        tiny_run(c.AlternatingHead(head="haed"), rounds=1)


def test_fedrep_says_what_momentum_sees() -> None:
    def optimizer(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    assert any(
        "gradient of 0" in n
        for n in tiny_run(c.AlternatingHead(), client_optimizer=optimizer).notes
    )
    assert not any("gradient of 0" in n for n in tiny_run(c.AlternatingHead()).notes)


class Slope(pl.LightningModule):
    """The loss has the gradient 1 on its body everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.head = nn.Linear(3, 3).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.body.sum() + nn.functional.cross_entropy(self.head(batch[0]), batch[1])


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: c.ClientMomentum(0.5), "ClientMomentum.delta"),
        (lambda: c.GlobalDirection(0.5, "mix"), "GlobalDirection.delta"),
        (lambda: c.ControlVariates(), "ControlVariates.c"),
    ],
)
def test_a_mean_gradient_of_fedreps_body_counts_the_bodys_steps(
    make: Any, key: str, engine: str
) -> None:
    settings: dict[str, Any] = {"participation": "all", "local_epochs": 5, "lr_decay": 1.0}
    settings["client_optimizer"] = lambda parameters: torch.optim.SGD(parameters, 0.1)
    learner: Any = Slope()
    with quiet():
        module = fit(
            [c.AlternatingHead(4, "head.*"), make()], 20, learner, engine=engine, **settings
        )
    body = module.server_states[key][module.layout["body"][0]]
    torch.testing.assert_close(body, torch.ones_like(body), rtol=0, atol=1e-5)


def test_fedrep_says_what_rates_that_change_in_a_round_mean() -> None:
    def said(*methods: Any) -> bool:
        notes = tiny_run(c.AlternatingHead(), *methods, local_epochs=2).notes
        return any("counts the steps of head and body alike" in note for note in notes)

    assert said(c.DecayWithinRound()) and not said()


def test_a_personal_model_that_diverges_stops_the_run_as_the_global_one_does() -> None:
    def training(**settings: Any) -> Any:
        module = federated(participation="all", local_epochs=2, **settings)
        trainer(20, [c.ProximalPersonalModel(1e9)]).fit(module, blobs(clients=3))
        return module

    with pytest.raises(Diverged, match="client 0 or a model that it keeps"):
        training()
    with pytest.warns(UserWarning, match=r"clients \[0, 1, 2\] were left out"):
        left_out = training(on_nonfinite="skip")
    assert all(bool(row.isfinite().all()) for row in client_rows(left_out).values())
