"""What personal methods promise beside their rules. Recorded steps, what is refused and noted,
FedAvg's own bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_lightning import callbacks as c
from fl_lightning.errors import Diverged
from fl_lightning.testing import tiny_run
from tests.helpers.federation import network
from tests.helpers.learners import Normed, blobs, client_rows, federated, trainer
from tests.helpers.processes import launched


def test_in_fedrep_nothing_that_rests_moves_whatever_the_order_of_callbacks() -> None:
    """Momentum and weight decay, and a correction listed after it. Where the head takes all steps,
    the body rests."""
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


def test_fedrep_says_what_momentum_sees() -> None:
    def optimizer(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    assert any(
        "gradient of 0" in n
        for n in tiny_run(c.AlternatingHead(), client_optimizer=optimizer).notes
    )
    assert not any("gradient of 0" in n for n in tiny_run(c.AlternatingHead()).notes)


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


ROUNDS = 4


def fedbn(
    folder: Path | None = None, rounds: int = ROUNDS, start: str | None = None, **arguments: Any
) -> Any:
    """Three of ten clients a round. Clients of 24 to 16 samples by batches of 10, so that no batch
    is of one."""
    torch.manual_seed(3)
    strategy = {"strategy": "federated", "devices": 2} if arguments.pop("world", 1) > 1 else {}
    module = federated(Normed(), weighting="samples", lr_decay=0.9, **arguments)
    keeps: dict[str, Any] = {} if folder is None else {"default_root_dir": str(folder)}
    fitted = trainer(rounds, [c.PartialAveraging({"norms": "never"})], **strategy, **keeps)
    fitted.fit(module, blobs(batch_size=10), ckpt_path=start)
    if folder is not None and start is None:
        fitted.save_checkpoint(folder / "middle.ckpt")
    return module


def by_hand(module: Any) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Every parameter and buffer by name: the server's, and those of clients that took part. Plain
    PyTorch."""
    data = module.trainer.datamodule
    learner = _start()
    server = copy.deepcopy(learner.state_dict())
    norm = [name for name in server if name.startswith("net.1.")]
    kept: dict[int, dict[str, Tensor]] = {}
    for t in range(ROUNDS):
        ended = {}
        for i in module.participants(t):
            learner.load_state_dict({**server, **{k: kept[i][k] for k in norm if i in kept}})
            learner.train()
            optimizer = torch.optim.SGD(learner.parameters(), lr=0.1 * 0.9**t, weight_decay=1e-3)
            for x, y in data.client_batches(i, t, module.steps(t, i)):
                optimizer.zero_grad()
                cross_entropy(learner.net(x), y).backward()
                optimizer.step()
            ended[i] = kept[i] = copy.deepcopy(learner.state_dict())
        sizes = {i: float(data.client_sizes()[i]) for i in ended}
        for name, value in server.items():
            if name == "net.1.num_batches_tracked":
                server[name] = torch.stack([model[name] for model in ended.values()]).max()
            elif name not in norm or "running" in name:
                server[name] = sum(sizes[i] * m[name] for i, m in ended.items()) / sum(
                    sizes.values()
                )
            else:
                server[name] = value
    return server, kept


def _start() -> Any:
    torch.manual_seed(3)
    return Normed().double()


@pytest.mark.parametrize(
    "engine",
    [{"engine": "sequential"}, {"engine": "concurrent", "workers": 2}, {"engine": "stacked"}],
)
def test_it_agrees_with_plain_pytorch(engine: Any) -> None:
    module = fedbn(buffers="own", **engine)
    if engine["engine"] == "stacked":  # hands over: batch normalisation changes buffers
        assert (
            module.engine_facts["engine"] == "sequential"
            and "cannot be stacked" in module.engine_facts["why"]
        )
    server, kept = by_hand(module)
    w = module.global_vector.detach()
    for name, (where, shape) in module.layout.items():
        assert torch.allclose(w[where].view(shape), server[name], rtol=0, atol=1e-9), name
    buffers = dict(module.learner.named_buffers())
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.allclose(
            buffers["net.1." + name], server["net.1." + name], rtol=0, atol=1e-9
        ), name
    assert 3 < len(kept) < 10
    for i in range(10):
        personal = module.export(client=i).state_dict()
        for name, value in personal.items():
            expected = kept[i][name] if i in kept and name.startswith("net.1.") else server[name]
            assert torch.allclose(value, expected, rtol=0, atol=1e-9), (i, name)


def test_buffers_of_ones_own_are_not_sent() -> None:
    # Two vectors of eight doubles and a count: 136 bytes to and from each of three clients.
    for policy, bytes_ in (("average", 2 * 3 * 136), ("own", 0)):
        torch.manual_seed(3)
        module = federated(Normed(), buffers=policy)
        trainer(1, [c.CommunicationLogger()]).fit(module, blobs(batch_size=10))
        assert module.trainer.callback_metrics["communication/buffers_bytes"] == bytes_


def _ran(path: Any, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    module = fedbn(buffers="own", world=world)
    state = {i: module.export(client=i).state_dict() for i in range(10)}
    if rank == 0:
        torch.save(state, path / f"{world}.pt")


def test_one_and_two_processes_have_the_same_bits(tmp_path: Path) -> None:
    for world in (1, 2):
        assert launched(_ran, world, tmp_path) == [0] * world
    one, two = (torch.load(tmp_path / f"{world}.pt") for world in (1, 2))
    assert all(torch.equal(one[i][name], two[i][name]) for i in one for name in one[i])
