"""``analyse`` on real runs: what it writes is what loggers logged, and what the exported model
has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning import load
from fl_lightning.lab.analysis.landscape import directions
from fl_lightning.learner.layout import Layout
from fl_lightning.models import ResNet20
from tests.helpers.commands import table, typed
from tests.helpers.zygote import Cli

FIT = typed("fit -c base -c data/digits -c trainer/cpu --trainer.enable_progress_bar false")
FIT = (*FIT, *typed("--model.engine sequential --trainer.max_epochs 2 --model.local_epochs 1"))
MEASURED = ("--method+", "GlobalLossLogger", "--method+", "HessianLogger", "--method.probes", "5")


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def last(folder: Path) -> dict[str, float]:
    """The metrics of the last round."""
    return {name: float(value) for name, value in table(folder / "metrics.csv")[-1].items()}


def fitted(cli: Cli, name: str, *argv: str) -> Path:
    result = cli(*FIT, *argv, *MEASURED, "--trainer.default_root_dir", name)
    assert result.returncode == 0, result.stderr
    return cli.folder / name


@pytest.mark.slow
def test_a_run_with_its_own_head_is_analysed_as_it_is_evaluated(cli: Cli) -> None:
    folder = fitted(
        cli, "x", "--method", "PartialAveraging", "--method.periods", '{"network.layers.2.*": 5}'
    )
    found = cli("analyse", "hessian", "x", "--probes", "5")
    assert found.returncode == 0 and "largest eigenvalue" in found.stdout and not found.stderr, (
        found.stderr
    )
    ours = read(folder / "hessian.json")
    logged = last(folder)
    for name in ("top_eigenvalue", "trace", "trace_stderr", "norm"):
        assert ours[name] == pytest.approx(logged[f"hessian/{name}"], rel=1e-6)
    assert ours["samples"] == 1438
    assert ours["loss"] == pytest.approx(logged["global/train_loss"], rel=1e-6)
    (row,) = table(folder / "hessian.csv")
    assert float(row["top_eigenvalue"]) == ours["top_eigenvalue"]
    assert (folder / "hessian.png").stat().st_size > 10_000
    slice_ = ours["slice"]
    assert slice_["losses"][20] == ours["loss"] and slice_["steps"][20] == 0


FOLLOWING = """
import torch
from torch import nn
from fl_lightning.models import MLP, Classifier

class Following(Classifier):
    def __init__(self):
        super().__init__(MLP([64, 16, 10]), num_classes=10)
        self.teacher = nn.Linear(64, 10).requires_grad_(False)
        self.student = nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        self.teacher.weight.data.mul_(0.5).add_(0.5 * self.student.weight.detach())
        x = batch[0].flatten(1)
        apart = self.student(x) - self.teacher(x)
        return super().training_step(batch, batch_idx) + apart.square().mean()
"""


@pytest.mark.slow
def test_frozen_weights_that_steps_write_are_the_run_s_in_each_batch(cli: Cli) -> None:
    (cli.folder / "following.py").write_text(FOLLOWING)
    folder = fitted(cli, "f", "--model.learner", "following.Following")
    found = cli(*typed("analyse hessian f --probes 5"))
    assert found.returncode == 0, found.stderr
    logged = last(folder)
    ours = read(folder / "hessian.json")
    assert ours["loss"] == pytest.approx(logged["global/train_loss"], rel=1e-9)
    assert ours["trace"] == pytest.approx(logged["hessian/trace"], rel=1e-6)


@pytest.mark.slow
def test_landscapes_of_two_runs_have_their_losses_in_the_middle(cli: Cli) -> None:
    folders = [fitted(cli, "a"), fitted(cli, "b", "-c", "method/fedprox")]
    result = cli(
        *typed("analyse landscape a b/checkpoints/last.ckpt --points 5 --samples all --out o")
    )
    assert result.returncode == 0, result.stderr
    found = read(cli.folder / "o/landscape.json")
    assert len(found["steps"]) == 5 and found["steps"][2] == 0 and found["normalised"] == "filter"
    for folder, one in zip(folders, found["runs"], strict=True):
        logged = last(folder)["global/train_loss"]
        assert one["losses"][2][2] == one["loss"] == pytest.approx(logged, rel=1e-6)
        assert min(one["losses"][0][0], one["losses"][4][4]) > one["loss"]
    run = load(folders[0])
    w = torch.cat([p.detach().reshape(-1) for p in run.learner.parameters()])
    first, second = directions(Layout(run.learner), w, 0)
    torch.nn.utils.vector_to_parameters(
        w + found["steps"][1] * first + found["steps"][4] * second, run.learner.parameters()
    )
    losses = [
        run.learner.training_step(batch, 0) * n
        for i in range(10)
        for batch, n in run.data.full_batches(i)
    ]
    assert float(sum(losses)) / 1438 == pytest.approx(found["runs"][0]["losses"][1][4], rel=1e-5)
    rows = table(cli.folder / "o/landscape.csv")
    assert len(rows) == 50 and {row["run"] for row in rows} != {"a"}
    assert (cli.folder / "o/landscape.png").exists()


def test_directions_have_the_filters_norms() -> None:
    torch.manual_seed(0)
    network = ResNet20(10, depth=8)
    layout = Layout(network)
    w = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
    first, second = directions(layout, w, seed=3)
    for where, shape in layout.values():
        for direction in (first, second):
            d, own = direction[where].view(shape), w[where].view(shape)
            if len(shape) > 1:
                assert torch.allclose(
                    d.flatten(1).norm(dim=1), own.flatten(1).norm(dim=1), rtol=1e-5
                )
            else:
                assert not d.any()
    assert abs(float(torch.cosine_similarity(first, second, dim=0))) < 0.1
    twice, _ = directions(layout, 2 * w, seed=3)
    assert torch.allclose(twice, 2 * first)
    assert not torch.equal(directions(layout, w, seed=4)[0], first)


@pytest.mark.parametrize(
    "argv, said",
    [
        (("hessian", "none"), "analyse none: not a run's folder"),
        (("hessian", "a", "b"), "2 runs were given"),
        (("hessian", "a", "--samples", "few"), "argument --samples: invalid"),
        (("hessian", "a", "--probes", "1"), "--probes=1 is not accepted"),
        (("hessian", "empty"), "last.ckpt cannot be loaded: it does not exist"),
    ],
)
def test_what_cannot_work_is_said_in_one_paragraph(
    cli: Cli, argv: tuple[str, ...], said: str
) -> None:
    (cli.folder / "empty").mkdir()
    (cli.folder / "empty/config.yaml").write_text("data: {}\n")
    result = cli("analyse", *argv)
    assert result.returncode == 2 and said in result.stderr and result.stderr.count("\n") == 1
