"""Rates that no run can use end in a paragraph, before training and without a folder."""

from __future__ import annotations

import os

import pytest
import torch

from fl_lightning import checks
from fl_lightning.accepted import PositiveFloat, check
from fl_lightning.errors import UserError
from fl_lightning.optim import FedAdagrad, FedAdam
from fl_lightning.schedules import Cosine, Exponential, Schedule, Steps
from tests.helpers.commands import typed
from tests.helpers.zygote import Cli

FIT = typed("fit -c base -c trainer/cpu -c debug/tiny --trainer.default_root_dir x")
REFUSED = {
    "negative": (("--model.lr_decay", "-0.5"), "lr_decay=-0.5", "above 0"),
    "zero": (("--model.lr_decay", "0"), "lr_decay=0", "above 0"),
    "not a number": (("--model.server_lr_decay", ".nan"), "server_lr_decay=nan", "above 0"),
    "infinite": (("--model.server_lr_decay=.inf",), "server_lr_decay=inf", "above 0"),
    "overflows": (
        ("--model.server_lr_decay", "1e308"),
        "server_lr_decay=1e+308",
        "larger than any",
    ),
    "overflows late": (
        ("--model.lr_decay=1.1", "--trainer.max_epochs=1000"),
        "lr_decay=1.1",
        "1000 rounds",
    ),
    "grows for ever": (
        ("--model.lr_decay=1.1", "--trainer.max_epochs=-1"),
        "lr_decay=1.1",
        "max_epochs=-1",
    ),
    "gamma": (
        ("--model.lr_decay", "Exponential", "--model.lr_decay.gamma=.nan"),
        "gamma=nan",
        "finite",
    ),
    "alternating": (
        ("--model.lr_decay", "Exponential", "--model.lr_decay.gamma=-0.5"),
        "gives -0.5 in round 1",
    ),
    "end": (
        ("--model.lr_decay=Cosine", "--model.lr_decay.rounds=1", "--model.lr_decay.end=-1"),
        "Cosine",
        "gives -1",
    ),
    "steps": (
        ("--model.server_lr_decay={class_path: Steps, init_args: {values: {1: -3}}}",),
        "Steps",
        "gives -3.0",
    ),
    "server lr": (
        ("--model.server_optimizer=FedAdam", "--model.server_optimizer.lr=.inf"),
        "FedAdam: lr=inf",
    ),
    "learner's lr": (("--model.learner.lr", ".nan"), "lr=nan", "finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(cli: Cli, case: str) -> None:
    argv, *words = REFUSED[case]
    result = cli(*FIT, *argv)
    assert result.returncode == 2 and "Traceback" not in result.stderr, (
        result.stdout + result.stderr
    )
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("fl-lightning: ")]
    assert all(word in line for word in words) and len(line) <= 400, line
    assert os.listdir(cli.folder) == []


@pytest.mark.parametrize(
    "decay",
    [
        1,
        0.998,
        1.01,
        Exponential(0.0),
        Exponential(1.001),
        Cosine(5),
        Cosine(5, end=2.0),
        Steps({3: 0.0}),
    ],
)
def test_what_stays_finite_is_taken(decay: float | Schedule) -> None:
    check("lr_decay", decay, PositiveFloat | Schedule)
    checks.rates_over("lr_decay", decay, 500)


def test_optimizers_that_cannot_work() -> None:
    w = torch.nn.Parameter(torch.zeros(2))
    checks.check_optimizer("client_optimizer", torch.optim.SGD([w], lr=0.0))
    for wrong, says in (
        (torch.optim.SGD([w], lr=float("nan")), "SGD has lr=nan"),
        (torch.optim.LBFGS([w]), "LBFGS evaluates the loss several times"),
        (torch.optim.SparseAdam([w]), "SparseAdam takes sparse gradients"),
        (torch.optim.Adam([w], capturable=True), "Adam has capturable=True"),
        (None, "it gives nothing"),
        ([torch.optim.SGD([w], lr=0.1)], "it gives a list"),
    ):
        with pytest.raises(UserError, match=f"^client_optimizer: {says}"):
            checks.check_optimizer("client_optimizer", wrong)
    for make in (FedAdam, FedAdagrad):
        with pytest.raises(UserError, match=r"lr=nan"):
            make([w], lr=float("nan"))
