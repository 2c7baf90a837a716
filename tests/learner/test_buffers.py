"""What becomes of buffers: statistics have a mean, counters a maximum, memory is nobody's but its
own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import FederatedCallback, RunFolder, UserError, load
from tests.helpers.learners import Lit, blobs, federated, trainer

QUEUE = 16


class Remembering(Lit):
    """As CrossBatchMemory: embeddings with their labels, in a queue. And as SNGP: a sum over
    samples."""

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


class Centre(nn.Module):
    """Subtracts a running mean that a ``state_dict`` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(20), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - 3 * self.running_mean


class Volatile(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(0, Centre())


def test_a_buffer_that_is_not_persistent_is_read_with_its_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kept = RunFolder(tmp_path / "run")
    run = trainer(2, [kept], enable_checkpointing=True)
    module = federated(Volatile(), engine="sequential")
    run.fit(module, blobs())
    mean = module.learner.net[0].running_mean
    assert bool(mean.any())
    loss = float(run.callback_metrics["val/loss"])
    again = federated(Volatile())
    (values,) = trainer().validate(again, blobs(), ckpt_path=kept.last, verbose=False)
    assert values["val/loss"] == pytest.approx(loss, rel=1e-6)
    opened: Any = load(tmp_path / "run", learner=Volatile().double()).learner
    assert torch.equal(opened.net[0].running_mean, mean)
