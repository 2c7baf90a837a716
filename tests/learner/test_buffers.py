"""What becomes of buffers: statistics have a mean, counters a maximum, memory is nobody's but its
own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import FederatedCallback, UserError
from tests.helpers.learners import Lit, Normed, blobs, federated, trainer
from tests.helpers.processes import same_models_on_one_and_two

QUEUE = 16


class Remembering(Lit):
    """As CrossBatchMemory: embeddings with their labels, in a queue.

    And as SNGP: a sum over samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("embedding_memory", torch.zeros(QUEUE, 4))
        self.register_buffer("label_memory", torch.zeros(QUEUE, dtype=torch.int64))
        self.register_buffer("queue_idx", torch.zeros((), dtype=torch.int64))
        self.register_buffer("precision", torch.eye(8))
        self.register_buffer("positions", torch.arange(20.0))
        self.net.insert(1, nn.BatchNorm1d(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        where = (self.queue_idx + torch.arange(len(y))) % QUEUE
        self.embedding_memory[where] = out.detach()
        self.label_memory[where] = y
        self.queue_idx = (self.queue_idx + len(y)) % QUEUE
        hidden = self.net[0](x).detach()
        self.precision += hidden.T @ hidden
        return nn.functional.cross_entropy(out, y)


MEMORY = ("embedding_memory", "label_memory", "precision", "queue_idx")


@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
@pytest.mark.filterwarnings("ignore:you asked for engine='concurrent'")
def test_memory_stays_the_servers_and_is_said_by_name_before_round_0(engine: str) -> None:
    module = federated(Remembering(), engine=engine)
    begun = {name: value.clone() for name, value in module.learner.named_buffers()}
    told: list[str] = []

    class Watching(FederatedCallback):
        def on_train_batch_start(self, *args: Any) -> None:
            told.extend(
                note for note in module.notes if "label_memory" in note and note not in told
            )

    with pytest.warns(
        UserWarning,
        match="Remembering changes embedding_memory, label_memory, precision, queue_idx",
    ):
        trainer(2, [Watching()]).fit(module, blobs())
    assert len(told) == 1, "before round 0, once"
    assert "positions" not in told[0] and "running_mean" not in told[0]
    for name in MEMORY:
        assert torch.equal(module.learner.get_buffer(name), begun[name]), name
    assert not torch.equal(module.learner.net[1].running_mean, begun["net.1.running_mean"])
    # 3 steps of the longest client a round
    assert int(module.learner.net[1].num_batches_tracked) == 6


def test_patterns_decide_otherwise() -> None:
    policy = {"*_memory": "own", "precision": "average", "queue_idx": "average", "net.*": "keep"}
    module = federated(
        Remembering(), participation="all", local_steps=1, engine="sequential", buffers=policy
    )
    begun = {name: value.clone() for name, value in module.learner.named_buffers()}
    trainer(2).fit(module, blobs(clients=3))
    assert not any("changes" in note for note in module.notes)
    learner = module.learner
    assert torch.equal(learner.net[1].running_mean, begun["net.1.running_mean"])
    assert int(learner.queue_idx) in (0, 8)
    assert not torch.equal(learner.precision, begun["precision"])
    labels = [module.client_rows.read("buffer.label_memory", i) for i in range(3)]
    assert all(row is not None and bool(row.any()) for row in labels)
    assert module.client_rows.read("buffer.precision", 0) is None
    assert torch.equal(learner.label_memory, begun["label_memory"]), (
        "own, and no statistic: the server's stays"
    )


def test_norm_layers_of_users_are_known() -> None:
    class RunningNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(20))
            self.register_buffer("begun", torch.zeros((), dtype=torch.bool))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.centre += 0.1 * (x.detach().mean(0) - self.centre)
                self.begun.fill_(True)
            return x - self.centre

    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(20))
            self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.running_mean += 0.1 * (x.detach().mean(0) - self.running_mean)
                self.num_batches_tracked += 1
            return x - self.running_mean

    class Both(Lit):
        def __init__(self) -> None:
            super().__init__()
            norm = nn.InstanceNorm1d(20, track_running_stats=True)
            self.net = nn.Sequential(
                RunningNorm(), Scaling(), nn.Unflatten(1, (1, 20)), nn.Flatten(), *self.net
            )
            self.norm = norm
            self.net[-1] = nn.utils.parametrizations.spectral_norm(self.net[-1])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.norm(batch[0][..., None].expand(-1, -1, 3))
            return super().training_step(batch, batch_idx)

    module = federated(Both(), engine="sequential", participation="all")
    trainer(1).fit(module, blobs(clients=2))
    assert not any("changes" in note for note in module.notes)
    learner = module.learner
    assert bool(learner.net[0].centre.any()) and bool(learner.net[0].begun)
    assert bool(learner.net[1].running_mean.any()) and int(learner.net[1].num_batches_tracked) == 3
    assert bool(learner.norm.running_mean.any())


def test_a_memory_that_only_later_steps_write_is_said_when_it_is_met() -> None:
    class Late(Remembering):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                self.precision += 1
            return Lit.training_step(self, batch, batch_idx)

    module = federated(Late(), engine="sequential")
    with pytest.warns(UserWarning, match="Late changes precision in its local steps"):
        trainer(2).fit(module, blobs())


def test_own_buffers_resume_to_the_same_bits(tmp_path: Any) -> None:
    def ends(rounds: int, path: Any = None) -> Any:
        torch.manual_seed(0)  # where a fit starts, whatever tests drew before
        policy = {"*_memory": "own", "queue_idx": "own"}
        module = federated(Remembering(), buffers=policy, participation="all")
        run = trainer(rounds, default_root_dir=tmp_path)
        run.fit(module, blobs(clients=3), ckpt_path=path)
        run.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        rows = [module.client_rows.read("buffer.embedding_memory", i) for i in range(3)]
        return [module.global_vector, *rows, *module.learner.buffers()]

    whole = ends(3)
    ends(1)
    for one, other in zip(ends(3, tmp_path / "1.ckpt"), whole, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"*memry": "own"},
            "no buffer of Remembering is called '\\*memry'; there are embedding_memory",
        ),
        (
            {"*": "averaged"},
            "buffers={'\\*': 'averaged'} is not accepted; it has to be 'average', 'keep' or 'own'",
        ),
        ("averge", "buffers='averge' is not accepted"),
    ],
)
def test_what_is_refused(given: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        trainer(1).fit(federated(Remembering(), buffers=given), blobs())


def test_batch_norm_is_as_it_was() -> None:
    """The packaged rule: floating the p-weighted mean, counters the maximum."""
    module = federated(Normed(), participation="all", local_steps=2)
    trainer(2).fit(module, blobs(clients=3))
    assert int(module.learner.net[1].num_batches_tracked) == 4
    assert not any("changes" in note for note in module.notes)


def test_patterns_serve_a_network_without_buffers_too() -> None:
    trainer(1).fit(federated(Lit(), buffers={"*.running_*": "average", "*": "keep"}), blobs())


class Unsaved(Normed):
    """Its statistics are in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        norm: Any = self.net[1]
        norm._non_persistent_buffers_set = set(norm._buffers)


def test_statistics_that_no_state_dict_has_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    module, run = federated(Unsaved()), trainer(2, default_root_dir=tmp_path)
    run.fit(module, blobs())
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert "net.1.running_mean" not in module.state_dict()
    fresh = federated(Unsaved())
    (scores,) = trainer().validate(fresh, blobs(), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert scores["val/loss"] == pytest.approx(float(run.callback_metrics["val/loss"]), rel=1e-6)
    (tested,) = trainer().test(fresh, blobs(), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    (expected,) = trainer().test(module, blobs(), verbose=False)
    assert tested == expected


@pytest.mark.slow
def test_two_processes_agree(tmp_path: Path) -> None:
    same_models_on_one_and_two(on_ranks, tmp_path)


def on_ranks(folder: Path, rank: int, world: int) -> None:
    given = {} if world == 1 else {"strategy": "federated", "devices": world}
    policy = {"*_memory": "own", "queue_idx": "own"}
    torch.manual_seed(0)
    module = federated(Remembering(), participation="all", buffers=policy)
    trainer(2, default_root_dir=folder, **given).fit(module, blobs(clients=4))
    assert any("changes precision in its local steps" in note for note in module.notes), (
        "in every process"
    )
    if rank == 0:
        torch.save(module.export().state_dict(), folder / f"{world}.pt")
