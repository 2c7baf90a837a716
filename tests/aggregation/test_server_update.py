"""The server's step: the mean of what clients sent, the server optimizer on it, and when neither
happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning.callback import FederatedCallback, ServerState, Upload
from fl_lightning.callbacks import ControlVariates, PartialAveraging
from fl_lightning.errors import Diverged
from tests.helpers.learners import InPlace, Lit, blobs, client_rows, federated, trainer


class Watching(FederatedCallback):
    """What clients brought home and what the server made of it, in each round."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[dict[int, Tensor]] = []
        self.seen: list[dict[str, Tensor]] = []

    def on_round_start(self, server: Any) -> None:
        self.ends.append({})

    def on_local_end(self, clients: Any) -> None:
        self.ends[-1][clients.client_ids[0]] = clients.x[0].detach().clone()

    def on_round_end(self, server: Any) -> None:
        names = ("w_before", "update", "w", "evaluated")
        self.seen.append({name: getattr(server, name).detach().clone() for name in names})


def test_the_state_that_a_method_returns_as_the_update_is_not_changed_by_others() -> None:
    class Averaging(FederatedCallback):
        mean = ServerState()

        def aggregate(self, server: Any) -> Tensor:
            self.mean += server.mean_change
            returned.append(self.mean.clone())
            return self.mean

    class Doubling(FederatedCallback):
        def on_server_update(self, server: Any) -> None:
            server.update *= 2

    returned: list[Tensor] = []
    module = federated()
    trainer(2, [Averaging(), Doubling()]).fit(module, blobs())
    assert torch.equal(module.server_states["Averaging.mean"], returned[-1])


def test_an_update_of_the_server_that_is_not_finite_ends_the_run_before_its_step() -> None:
    class Overflowing(FederatedCallback):
        def on_server_update(self, server: Any) -> None:
            if server.round == 1:
                server.update /= 0.0

    module, watching = federated(), Watching()
    with pytest.raises(Diverged, match="the server's update in round 1"):
        trainer(3, [Overflowing(), watching]).fit(module, blobs())
    assert len(watching.seen) == 1 and torch.equal(module.global_vector, watching.seen[0]["w"])


class Telling(torch.optim.SGD):
    """Keeps something in its group, as optimizers that find their rate do."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["taken"] = self.param_groups[0].get("taken", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("parts", [[], [PartialAveraging(periods={"net.2.*": "never"})]])
def test_a_round_that_fails_at_its_end_leaves_the_server_as_it_was(parts: list[Any]) -> None:
    class Failing(FederatedCallback):
        def on_round_end(self, server: Any) -> None:
            if server.round == 1:
                raise RuntimeError("at the end")

    found = []
    for rounds in (1, 2):
        torch.manual_seed(3)
        module = federated(InPlace(), server_optimizer=lambda p: Telling(p, 1.0, momentum=0.9))
        run = trainer(rounds, [*parts, Failing()])
        if rounds == 1:
            run.fit(module, blobs())
        else:
            with pytest.raises(RuntimeError, match="at the end"):
                run.fit(module, blobs())
        (group,), (state,) = run.optimizers[0].param_groups, run.optimizers[0].state.values()
        assert group["taken"] == 1 and run.global_step == 1
        evaluated = [value.detach().clone() for value in module.learner.state_dict().values()]
        found.append([module.global_vector.detach(), state["momentum_buffer"], *evaluated])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_round_that_no_client_finished_changes_nothing_but_the_clock() -> None:
    class Diverging(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (
                float("nan") if self.current_epoch == 1 else 1.0
            )

    found = []
    for rounds in (1, 2):
        watching = Watching()
        torch.manual_seed(3)
        module = federated(
            Diverging(),
            on_nonfinite="skip",
            server_optimizer=lambda p: torch.optim.SGD(p, 1.0, momentum=0.9),
        )
        run = trainer(rounds, [ControlVariates(), watching])
        run.fit(module, blobs())
        (state,) = run.optimizers[0].state.values()
        optimizer = {"momentum": state["momentum_buffer"]}
        found.append(
            {"w": module.global_vector, **optimizer, **module.server_states, **client_rows(module)}
        )
        # hooks of the server's side find no clients, so they are not called
        assert len(watching.seen) == 1
    assert found[0].keys() == found[1].keys() and len(found[0]) > 3
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


def test_a_part_that_is_not_averaged_stays_at_the_server_and_is_evaluated_as_the_clients_mean() -> (
    None
):
    watching = Watching()
    module = federated(server_optimizer=lambda p: torch.optim.SGD(p, 0.5, momentum=0.9))
    run = trainer(3, [PartialAveraging(periods={"net.2.*": "never"}), watching])
    run.fit(module, blobs())
    own = torch.zeros(module.layout.size, dtype=torch.bool)
    for name in ("net.2.weight", "net.2.bias"):
        own[module.layout[name][0]] = True
    (state,) = run.optimizers[0].state.values()
    assert not state["momentum_buffer"][own].any() and state["momentum_buffer"][~own].all()
    for ends, seen in zip(watching.ends, watching.seen, strict=True):
        assert torch.equal(seen["w"][own], seen["w_before"][own]) and not seen["update"][own].any()
        mean = torch.stack([x - seen["w_before"] for x in ends.values()]).mean(0) + seen["w_before"]
        torch.testing.assert_close(seen["evaluated"][own], mean[own], rtol=1e-12, atol=1e-12)
        assert torch.equal(seen["evaluated"][~own], seen["w"][~own])


def test_buffers_are_the_clients_weighted_mean_and_of_integers_the_maximum() -> None:
    class Counting(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.ones(()))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.running_mean += 1.0
            self.count += 1
            return super().training_step(batch, batch_idx)

    module, data = (
        federated(Counting(), participation="all", weighting="samples"),
        blobs(clients=5, batch_size=4),
    )
    trainer(2).fit(module, data)
    sizes, steps = [24, 22, 20, 18, 16], [6, 6, 5, 5, 4]
    mean = sum(n * k for n, k in zip(sizes, steps, strict=True)) / sum(sizes)
    assert (
        float(module.learner.running_mean) == pytest.approx(1 + 2 * mean, rel=1e-12)
        and int(module.learner.count) == 12
    )


def test_state_of_the_server_is_kept_however_it_was_changed() -> None:
    class Kept(FederatedCallback):
        assigned, in_place = (
            ServerState(synchronised=False, shape=()),
            ServerState(synchronised=False, shape=(2,)),
        )
        untouched, sent = (
            ServerState(synchronised=False, shape=()),
            Upload(shape=(), dtype=torch.int64),
        )

        def on_local_end(self, clients: Any) -> None:
            self.sent[clients] = clients.ids

        def on_server_update(self, server: Any) -> None:
            total = self.assigned + self.sent.sum()
            self.assigned = total
            total.zero_()

        def on_round_end(self, server: Any) -> None:
            self.in_place[1] += server.n

    module = federated()
    trainer(3, [Kept()]).fit(module, blobs())
    who = [module.participants(t) for t in range(3)]
    assert float(module.server_states["Kept.assigned"]) == sum(map(sum, who))
    assert module.server_states["Kept.in_place"].tolist() == [0, sum(map(len, who))]
    assert "Kept.untouched" not in module.server_states
