"""A run from Python with ``RunFolder``: what ``report``, ``load``, ``test`` and ``cite`` read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pytorch_lightning.callbacks.timer import Interval

from fl_lightning import FederatedCallback, FederatedModule, RunFolder, load
from fl_lightning.__main__ import main
from fl_lightning.callbacks import ControlVariates, RelaxedInitialization
from fl_lightning.datamodules import Digits, Dirichlet
from fl_lightning.errors import UserError
from fl_lightning.lab.analysis.opened import opened
from fl_lightning.models import MLP, Classifier
from tests.helpers.learners import Lit, blobs, federated, trainer
from tests.helpers.zygote import Cli


def digits(folder: Path) -> Any:
    kept = RunFolder(folder)
    learner = Classifier(MLP([64, 16, 10]), num_classes=10, lr=0.1)
    module = FederatedModule(learner, participation=3, local_epochs=1, seed=1, engine="sequential")
    data = Digits(num_clients=10, partition=Dirichlet(alpha=0.3), batch_size=20)
    methods = [RelaxedInitialization(beta=0.05), kept]
    trainer(2, methods, enable_checkpointing=True).fit(module, data)
    return module


def test_all_settings_are_known_and_commands_take_the_folder(cli: Cli) -> None:
    folder = cli.folder / "runs" / "mine"
    module = digits(folder)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"run.json", "metrics.csv", "card.md", "partition.png", "checkpoints", "state"}
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "done" and record["title"] == "FedInit" and record["unknown"] == []
    tested = cli("test", "runs/mine")
    assert tested.returncode == 0 and "test/acc" in tested.stdout, tested.stderr
    cited = cli("cite", "runs/mine")
    assert "sun2023fedinit" in cited.stdout and "alpaydin1998digits" in cited.stdout
    reported = cli("report", "runs/mine", "--figures", "none")
    assert reported.returncode == 0, reported.stderr
    run = load(folder)
    assert torch.equal(
        torch.nn.utils.parameters_to_vector(run.learner.parameters()), module.evaluated_vector
    )
    assert sum(map(len, run.partition)) == 1430
    more = cli("fit", "runs/mine", "--trainer.max_epochs", 3)
    # It would have the loggers of a command's run.
    assert more.returncode == 2 and "method DivergenceLogger: absent then" in more.stderr


def lit(folder: Path, rounds: int, seed: int = 1, **fit: Any) -> Any:
    module = federated(engine="sequential", seed=seed)
    kept = RunFolder(folder, arm="mine")
    run = trainer(rounds, [ControlVariates(), kept], enable_checkpointing=True)
    run.fit(module, blobs(), **fit)
    return module


class Partly(Classifier):
    """Its checkpoints leave the first layer out, which is frozen."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(MLP([64, 16, 10]), num_classes=10, lr=0.1)
        self.strict_loading = False
        for parameter in self.frozen().values():
            parameter.requires_grad_(False)

    def frozen(self) -> dict[str, Any]:
        first, *_ = (each for each in self.modules() if isinstance(each, torch.nn.Linear))
        own = set(map(id, first.parameters()))
        return {name: each for name, each in self.named_parameters() if id(each) in own}

    def state_dict(self, *args: Any, **given: Any) -> Any:
        state, prefix = super().state_dict(*args, **given), given.get("prefix", "")
        for name in self.frozen():
            state.pop(prefix + name, None)
        return state


def test_a_learner_whose_checkpoints_leave_weights_out_is_read(tmp_path: Path) -> None:
    module = FederatedModule(Partly(), participation=3, local_epochs=1, seed=1)
    data = Digits(num_clients=10, partition=Dirichlet(alpha=0.3), batch_size=20)
    kept = [RunFolder(tmp_path / "a")]
    trainer(1, kept, enable_checkpointing=True, precision="64-true").fit(module, data)
    read = load(tmp_path / "a", learner=Partly()).learner
    for one, other in zip(read.parameters(), module.learner.parameters(), strict=True):
        assert torch.equal(one, other.to(one.dtype))
    assert torch.equal(opened(tmp_path / "a").vector, module.evaluated_vector)


def test_what_cannot_be_known_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = lit(tmp_path / "a", 2)
    record = json.loads((tmp_path / "a/run.json").read_text())
    assert record["unknown"] == ["data.train", "data.test", "data.clients"]
    text = (tmp_path / "a/config.yaml").read_text()
    assert "left out: data.train, data.test, data.clients" in text
    assert yaml.safe_load(text)["data"]["init_args"]["batch_size"] == 8
    assert main(["test", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err
    assert "made in Python" in said and "lacks data.train" in said and "data=…" in said
    run = load(tmp_path / "a")
    assert run.metrics["val/acc"].shape == (2,)
    found = load(tmp_path / "a", learner=Lit().double()).learner
    assert torch.equal(found.net[0].weight, module.learner.net[0].weight)
    assert torch.equal(run.learner.net[0].weight, found.net[0].weight.float())
    with pytest.raises(UserError, match=r"load\(.*data=…\)"):
        _ = run.data
    partition = load(tmp_path / "a", learner=Lit(), data=blobs()).partition
    assert list(map(len, partition)) == blobs().client_sizes().tolist()
    assert main(["report", str(tmp_path / "a"), "--figures", "none"]) == 0


def test_runs_that_differ_in_their_seed_are_of_one_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        for seed in (1, 2):
            lit(tmp_path / str(seed), 1, seed=seed)
    assert "weights_only" not in caplog.text
    records = [json.loads((tmp_path / name / "run.json").read_text()) for name in "12"]
    assert records[0]["config_hash"] == records[1]["config_hash"]


class Odd(FederatedCallback):
    """Has an argument called cls, arguments without a name, and one that holds itself."""

    def __init__(self, cls: int, *others: int, held: Any = None) -> None:
        super().__init__()


def test_arguments_of_any_name_are_taken_and_those_without_one_are_left_out(tmp_path: Path) -> None:
    round_list: list[Any] = []
    round_list.append(round_list)
    made = [(Odd(cls=1), []), (Odd(1, 2), ["*others"]), (Odd(1, held=round_list), ["held"])]
    made.append((Odd(1, held=Interval.step), []))  # a text that YAML does not take for one
    for j, (method, unknown) in enumerate(made):
        folder = tmp_path / str(j)
        run = trainer(1, [method, RunFolder(folder)], enable_checkpointing=True)
        run.fit(federated(), blobs())
        left_out = json.loads((folder / "run.json").read_text())["unknown"]
        assert [name.split(".")[-1] for name in left_out if "data" not in name] == unknown
        assert "cls: 1" in (folder / "config.yaml").read_text()


def test_a_folder_that_holds_a_run_is_gone_on_with_or_refused(tmp_path: Path) -> None:
    lit(tmp_path / "a", 2)
    with pytest.raises(UserError, match=r"already holds a run.*RunFolder\(.*\)\.last"):
        lit(tmp_path / "a", 3)
    # One callback does not put a second run over the first, either.
    kept = RunFolder(tmp_path / "c")
    trainer(1, [kept], enable_checkpointing=True).fit(federated(), blobs())
    with pytest.raises(UserError, match="already holds a run"):
        trainer(1, [kept], enable_checkpointing=True).fit(federated(seed=2), blobs())
    assert json.loads((tmp_path / "c/run.json").read_text())["status"] == "done"
    resumed = lit(tmp_path / "a", 4, ckpt_path=RunFolder(tmp_path / "a").last)
    whole = lit(tmp_path / "b", 4)
    assert torch.equal(resumed.global_vector, whole.global_vector)
    assert len(load(tmp_path / "a").metrics["val/acc"]) == 4


def test_a_refused_resume_leaves_no_best_value_to_the_next_run(tmp_path: Path) -> None:
    lit(tmp_path / "a", 3)
    folder, still = RunFolder(tmp_path / "b"), {"client_optimizer": standing}
    with pytest.raises(UserError, match="other settings"):
        start = RunFolder(tmp_path / "a").last
        run = trainer(4, [folder], enable_checkpointing=True)
        run.fit(federated(**still), blobs(), ckpt_path=start)
    trainer(1, [folder], enable_checkpointing=True).fit(federated(**still), blobs())
    best = load(tmp_path / "b").metrics["val/acc"].max()
    assert best < load(tmp_path / "a").metrics["val/acc"].max()
    assert (tmp_path / "b/checkpoints/best.ckpt").is_file()


def standing(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def test_a_run_has_one_folder(tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b", monitor="val/loss")]
    with pytest.raises(UserError, match=r"a run has one folder. Give the Trainer a single RunF"):
        trainer(1, folders, enable_checkpointing=True).fit(federated(), blobs())
    assert not list(tmp_path.iterdir())


def test_one_trainer_fits_twice_and_an_error_is_recorded(tmp_path: Path) -> None:
    module = federated(engine="sequential")
    run = trainer(1, [RunFolder(tmp_path / "a")], enable_checkpointing=True)
    run.fit(module, blobs())
    run.fit_loop.max_epochs = 3
    run.fit(module, blobs())
    assert len(load(tmp_path / "a").metrics["val/acc"]) == 3

    class Fails(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch == 1:
                raise RuntimeError("no")
            return super().training_step(batch, batch_idx)

    broken = trainer(3, [RunFolder(tmp_path / "b")], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="no"):
        broken.fit(federated(Fails(), engine="sequential"), blobs())
    assert json.loads((tmp_path / "b/run.json").read_text())["status"] == "failed"
