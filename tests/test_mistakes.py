"""What people try in Python first, and cannot work: each ends in a paragraph with the way out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedModule, UserError
from fl_lightning.checks import optimizers
from fl_lightning.introspection.accepted import PositiveFloat, check
from fl_lightning.optim import FedAdagrad, FedAdam
from fl_lightning.schedules import Cosine, Exponential, Schedule, Steps
from tests.helpers.learners import Lit, blobs, federated, trainer

MADE = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
CONFIG = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}


@pytest.mark.parametrize("name", ["client_optimizer", "server_optimizer"])
@pytest.mark.parametrize("given", [CONFIG, "SGD", 0.1, [torch.optim.SGD], MADE])
def test_an_optimizer_that_is_no_function(name: str, given: Any) -> None:
    words = f"^{name}=.* is not a function.*lambda params: torch.optim.SGD"
    with pytest.raises(UserError, match=words):
        FederatedModule(Lit(), **{name: given})


W = torch.nn.Parameter(torch.zeros(2))
UNUSABLE = [  # what cannot work, and what is said of it
    (torch.optim.SGD([W], lr=float("nan")), "SGD: lr=nan"),
    (torch.optim.LBFGS([W]), "LBFGS evaluates the loss several times"),
    (None, "it gives nothing"),
    ([torch.optim.SGD([W], lr=0.1)], "it gives a list"),
]


@pytest.mark.parametrize(("wrong", "says"), UNUSABLE)
def test_optimizers_that_cannot_work(wrong: Any, says: str) -> None:
    optimizers.check_optimizer("client_optimizer", torch.optim.SGD([W], lr=0.0))
    with pytest.raises(UserError, match=f"^client_optimizer: {says}"):
        optimizers.check_optimizer("client_optimizer", wrong)
    for make in (FedAdam, FedAdagrad):
        with pytest.raises(UserError, match=r"lr=nan"):
            make([W], lr=float("nan"))


GOES = [1, 0.998, 1.01, Exponential(0.0), Exponential(1.001), Cosine(5), Steps({3: 0.0})]


@pytest.mark.parametrize("decay", GOES)
def test_what_stays_finite_is_taken(decay: float | Schedule) -> None:
    check("lr_decay", decay, PositiveFloat | Schedule)
    optimizers.rates_over("lr_decay", decay, 500)


@pytest.mark.parametrize("name", ["client_optimizer", "server_optimizer"])
def test_an_optimizer_of_other_parameters(name: str) -> None:
    other = torch.nn.Linear(20, 4).double()
    module = federated(**{name: lambda params: torch.optim.SGD(other.parameters(), lr=0.1)})
    with pytest.raises(UserError, match=f"^{name}: SGD holds none of the parameters"):
        trainer(1).fit(module, blobs())


def test_what_is_no_learner_but_nearly() -> None:
    with pytest.raises(UserError, match=r"Lit is a class\. Give an object of it"):
        FederatedModule(Lit)
    with pytest.raises(UserError, match="is a FederatedModule already"):
        FederatedModule(FederatedModule(Lit()))


def test_a_checkpoint_loads_as_the_learner_and_not_as_the_module(tmp_path: Path) -> None:
    module, run = federated(), trainer(1)
    run.fit(module, blobs())
    run.save_checkpoint(path := tmp_path / "one.ckpt")
    for learner in ({}, {"learner": Lit()}):
        with pytest.raises(UserError, match=r"L\w+\.load_from_checkpoint\(path\).*load\(folder\)"):
            FederatedModule.load_from_checkpoint(path, **learner)


def test_an_optimizer_s_class_is_one() -> None:
    FederatedModule(Lit(), client_optimizer=torch.optim.SGD, server_optimizer=None)


def test_a_learner_by_itself_on_federated_data() -> None:
    told = r"but the Trainer got Lit without a FederatedModule. Wrap it: .*FederatedModule\(Lit"
    with pytest.raises(UserError, match=told):
        trainer(1).fit(Lit(), blobs())
    trainer(1).validate(Lit().double(), blobs(), verbose=False)  # which needs no rounds


OTHER = """
import {first}
import {second} as pl
from tests.helpers.learners import Lit, blobs
from fl_lightning import FederatedModule
module = FederatedModule(Lit(), local_epochs=1)
trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False)
for command in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
    try:
        command(module, blobs())
    except Exception as error:
        print(type(error).__name__, error)
import {second}.demos.boring_classes as demos
quiet = {{"enable_progress_bar": False, "enable_model_summary": False}}
pl.Trainer(fast_dev_run=True, logger=False, **quiet).fit(model=demos.BoringModel())
print("its own fits")
"""


def test_a_variable_chooses_the_lightning_before_imports_do(bare_python: str) -> None:
    """A function that cloudpickle brings to a worker cannot import in an order of its own."""
    pytest.importorskip("lightning.pytorch")
    code = "import pytorch_lightning, fl_lightning.machine.lightning as ours; print(ours.NAMESPACE)"
    for name, said in (("lightning.pytorch", "lightning.pytorch\n"), ("lightning", "Accepted: py")):
        environment = {**os.environ, "FL_LIGHTNING_NAMESPACE": name}
        command = [bare_python, "-c", code]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert said in ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("first", ["pytorch_lightning", "lightning.pytorch"])
def test_the_trainer_of_the_other_lightning(bare_python: str, first: str) -> None:
    """A package that was imported before decided which is ours."""
    pytest.importorskip("lightning.pytorch")
    if pl.__name__ != "pytorch_lightning":
        pytest.skip(
            "under make test-lightning both names are one package, so there is no other Trainer"
        )
    (second,) = {"pytorch_lightning", "lightning.pytorch"} - {first}
    code = OTHER.format(first=first, second=second)
    ended = subprocess.run([bare_python, "-c", code], capture_output=True, text=True, timeout=300)
    begin = f"UserError this Trainer is of {second}"
    told = [line for line in ended.stdout.splitlines() if line.startswith(begin)]
    assert len(told) == 4 and f"FederatedModule of {first}" in told[0], ended.stdout + ended.stderr
    assert "its own fits" in ended.stdout
