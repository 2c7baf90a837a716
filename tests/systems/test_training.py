"""Training on simulated devices: who is accepted trains as ever, and old updates count less."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning import Coefficient, FederatedCallback, UserError
from fl_lightning import callbacks as c
from fl_lightning.lab.contracts.federation import fit, in_processes, outcome, quiet, require_same
from fl_lightning.schedules import Steps
from fl_lightning.systems import (
    Buffered,
    Constant,
    Devices,
    HalfNormal,
    LogNormal,
    Polynomial,
    SystemHeterogeneity,
    VirtualClock,
)
from tests.helpers.commands import table
from tests.helpers.federation import _batches, network
from tests.helpers.zygote import Cli
from tests.oracles import events
from tests.oracles.problems import TwoLayer

ROUNDS = 10
UNEQUAL = Devices(LogNormal(0.1, 1.0), HalfNormal(), up=1e4)
SYSTEM: dict[str, Any] = {
    "seed": 1,
    "m": 8,
    "compute": ("lognormal", 0.1, 1.0),
    "up": ("constant", 1e4),
    "down": None,
    "jitter": "half",
    "latency": 0.0,
    "dropout": 0.2,
    "min_work": 0.5,
    "availability": 0.8,
}


@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
@pytest.mark.parametrize(
    ("weighting", "options"),
    [
        ("uniform", {"size": 3}),
        ("samples", {"size": 3}),
        ("uniform", {"size": 2, "normalise": True, "staleness": Polynomial(1.0)}),
        ("uniform", {"size": 3, "max_staleness": 1, "staleness": "constant"}),
        ("uniform", {"mixing": 0.6, "staleness": Polynomial(0.5)}),
    ],
    ids=["FedBuff", "by samples", "normalised", "not too old", "FedAsync"],
)
def test_it_is_the_rule_by_hand(engine: str, weighting: str, options: dict[str, Any]) -> None:
    """w ← w + Σ p σ(τ) (x_s - w^{v_s}), each client on the model that it was given."""
    asynchronous = Buffered(UNEQUAL, concurrency=5, **options)
    system = SystemHeterogeneity(dropout=0.2, min_work=0.5, availability=0.8)
    given = {"engine": engine, "asynchronous": asynchronous, "weighting": weighting}
    ours = network([system], ROUNDS, **given, lr_decay=0.9)
    module = ours.module
    data = module.trainer.datamodule
    epochs = [math.ceil(n / 4) for n in data.client_sizes()]
    simulated = events.System(
        steps=[n + math.ceil(n / 2) for n in epochs],
        bytes_down=31 * 8,
        bytes_up=31 * 8,
        concurrency=5,
        size=asynchronous.buffer,
        max_staleness=asynchronous.max_staleness,
        **SYSTEM,
    )
    jobs, updates = events.buffered(simulated, ROUNDS)
    problem = TwoLayer(3, 4, 3)
    versions = [ours.start.copy()]
    ages = []
    for t in range(ROUNDS):
        w = versions[-1]
        top = np.zeros_like(w)
        bottom = discounted = 0.0
        for job in sorted((j for j in jobs if j["update"] == t), key=lambda j: j["client"]):
            v, i = job["version"], job["client"]
            x = versions[v].copy()
            for batch in _batches(module, data, v, i):
                x -= 0.3 * 0.9**v * (problem.gradient(x, i, batch) + 0.01 * x)
            p = 1.0 if weighting == "uniform" else float(data.client_sizes()[i])
            sigma = asynchronous.weight(t - v)
            top += p * sigma * (x - (w if asynchronous.mixing else versions[v]))
            bottom += p
            discounted += p * sigma
            ages.append(t - v)
        share = discounted if asynchronous.normalise else bottom
        versions.append(w + top / share if share else w.copy())
        assert ours.record.w[t] == pytest.approx(versions[-1], rel=1e-9, abs=1e-12)
        logged = ours.record.metrics[t]
        assert logged["time/virtual"] == pytest.approx(updates[t]["time"] / 1e6)
        assert logged["system/running"] == updates[t]["running"]
    # Otherwise nothing old was looked at.
    assert max(ages) > (0 if asynchronous.max_staleness else 1)


@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
def test_a_schedule_is_read_at_the_version_that_a_client_trains(engine: str) -> None:
    """Clients' hooks read it as their learning rate is; the server's at its own round."""
    at = {t: float(t) for t in range(ROUNDS)}
    read: set[tuple[str, int, float, float]] = set()
    at_server = []

    class Scheduled(FederatedCallback):
        tolerates_staleness = True
        mu = Coefficient()

        def __init__(self) -> None:
            super().__init__()
            self.mu = Steps(at)

        def seen(self, hook: str, clients: Any) -> None:
            read.add(
                (hook, clients.round, self.mu, round(float(clients.lr / 0.9**clients.round), 6))
            )

        def on_round_start(self, server: Any) -> None:
            at_server.append((server.round, self.mu))

        def on_local_start(self, clients: Any) -> None:
            self.seen("start", clients)

        def on_local_end(self, clients: Any) -> None:
            self.seen("end", clients)

        def transmit(self, clients: Any, update: Tensor) -> Tensor:
            self.seen("transmit", clients)
            return update

        def on_server_update(self, server: Any) -> None:
            at_server.append((server.round, self.mu))

    asynchronous = Buffered(UNEQUAL, size=2, concurrency=5)
    with quiet():
        module = fit([Scheduled()], ROUNDS, engine=engine, asynchronous=asynchronous, lr_decay=0.9)
        plan = module.run.loop.device_plan
        stale = {v for t in range(ROUNDS) for v in plan.planned(t).versions.values() if v < t}
    assert {mu - v for _, v, mu, _ in read} == {0.0}
    assert {rate for *_, rate in read} == {0.2}
    for hook in ("start", "end", "transmit"):
        assert stale <= {v for name, v, *_ in read if name == hook}
    assert stale and at_server == [(t, t) for t in range(ROUNDS) for _ in range(2)]


def test_equal_devices_and_a_buffer_for_all_that_run_are_fedavg_to_the_bit() -> None:
    with quiet():
        average = fit([], rounds=4, participation=2, local_steps=3)
        limit = Buffered(Devices(Constant(0.1)), size=2, concurrency=2, staleness="constant")
        ours = fit([], rounds=4, asynchronous=limit, local_steps=3)
    assert [ours.participants(t) for t in range(4)] == [average.participants(t) for t in range(4)]
    assert torch.equal(ours.global_vector, average.global_vector)


def test_a_clock_that_waits_for_all_is_fedavg_to_the_bit() -> None:
    with quiet():
        average = fit([c.ControlVariates()])
        ours = fit([c.ControlVariates(), VirtualClock(UNEQUAL), SystemHeterogeneity()])
    left = {k: v for k, v in outcome(ours).items() if k in outcome(average)}
    require_same(left, outcome(average), 0.0, "the clock", "")


def test_whoever_is_too_late_or_drops_out_has_not_trained() -> None:
    """The accepted clients' rounds are those of a run in which they alone take part."""
    clock = VirtualClock(UNEQUAL, deadline=0.3, over_selection=1.5)
    system = SystemHeterogeneity(dropout=0.3)
    ours = network(
        [clock, system, c.RelaxedInitialization(0.1, "updates")], ROUNDS, participation=4
    )
    given = SYSTEM | {"availability": None, "min_work": 1.0, "dropout": 0.3}
    sizes = ours.module.trainer.datamodule.client_sizes()
    steps = [n + math.ceil(n / 2) for n in (math.ceil(s / 4) for s in sizes)]
    simulated = events.System(
        steps=steps, bytes_down=248, bytes_up=248, n=4, over=1.5, deadline=0.3, **given
    )
    _, rounds = events.synchronous(simulated, ROUNDS)
    assert any(len(r["accepted"]) == 4 for r in rounds) and any(r["late"] for r in rounds)
    previous: dict[int, Any] = {}
    for t, expected in enumerate(rounds):
        logged = ours.record.metrics[t]
        assert logged["time/virtual"] == pytest.approx(expected["time"] / 1e6)
        found = [logged["system/late"], logged["system/dropped"]]
        assert found == [expected["late"], expected["dropped"]]
        rows = ours.record.rows[t]["RelaxedInitialization.last"]
        changed = {i for i in rows if not np.array_equal(rows[i], previous.get(i, np.nan))}
        assert changed == set(expected["accepted"])
        previous = rows


def test_who_dropped_out_was_sent_the_model_and_sent_nothing() -> None:
    system = SystemHeterogeneity(dropout=0.5)
    with quiet():
        ours = fit([system, c.CommunicationLogger()], rounds=6, participation=4)
        logged = {k: float(v) for k, v in ours.trainer.callback_metrics.items()}
        drops = [system.conditions(ours.run_seed, 6).drops(t, i) for t in range(6) for i in
                 ours.participants(t)]  # fmt: skip
    numbers = ours.global_vector.numel()
    assert logged["communication/down_parameters"] == numbers * 6 * 4
    assert logged["communication/up_parameters"] == numbers * (6 * 4 - sum(drops))
    assert 0 < sum(drops) < 24


@pytest.mark.parametrize("method", [None, c.DynamicRegularization, c.ProximalTerm])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, method: Any) -> None:
    asynchronous = Buffered(UNEQUAL, size=2, concurrency=4)
    options: dict[str, Any] = {"asynchronous": asynchronous, "folder": str(tmp_path)}

    def callbacks() -> list[Any]:
        return [SystemHeterogeneity(0.1), c.CommunicationLogger(), *([method()] if method else [])]

    with quiet():
        whole = fit(callbacks(), rounds=7, **{**options, "folder": str(tmp_path / "whole")})
        fit(callbacks(), rounds=4, **options)
        resumed = fit(callbacks(), rounds=7, resume=True, **options)
    assert resumed.run.state.versions
    require_same(outcome(resumed), outcome(whole), 0.0, "resumed", "")


@pytest.mark.parametrize(
    "method",
    [
        lambda: c.QuantizedUpdate(7),
        lambda: c.SignUpdate(),
        lambda: c.RandomK(0.3, memory=True),
        lambda: c.LowRankUpdate(1),
        lambda: c.TopKCompression(0.2),
        lambda: c.ErrorFeedback21(c.TopKCompression(0.2)),
        lambda: c.RandomEpochs(1, 3),
    ],
    ids=["QSGD", "sign", "rand-k", "PowerSGD", "top-k", "EF21", "epochs"],
)
@pytest.mark.parametrize("options", [{"size": 2}, {"mixing": 0.6}], ids=["FedBuff", "FedAsync"])
def test_what_is_sent_is_complete_in_itself(
    tmp_path: Path, method: Any, options: dict[str, Any]
) -> None:
    """An old update is decoded by what its client has alone, whatever delivered meanwhile: a
    resumed run, which knows nothing else, goes on to the same bits."""
    system: dict[str, Any] = {"asynchronous": Buffered(UNEQUAL, concurrency=4, **options)}
    with quiet():
        whole = fit([method()], rounds=7, folder=str(tmp_path / "whole"), **system)
        plan = whole.run.loop.device_plan
        fit([method()], rounds=4, folder=str(tmp_path), **system)
        resumed = fit([method()], rounds=7, folder=str(tmp_path), resume=True, **system)
    require_same(outcome(resumed), outcome(whole), 0.0, "resumed", "")
    assert any(min(plan.planned(t).versions.values()) < t for t in range(7))


def test_a_client_compresses_its_way_from_the_model_that_it_was_given() -> None:
    """FedAsync mixes with the server's present model, which the client does not have."""
    gaps: list[float] = []

    class Seen(FederatedCallback):
        tolerates_staleness = True

        def transmit(self, clients: Any, update: Tensor) -> Tensor:
            gaps.append(float((update - (clients.x - clients.w)).abs().max()))
            return update

    asynchronous = Buffered(UNEQUAL, concurrency=4, mixing=0.6)
    ours = network([Seen()], 7, engine="sequential", asynchronous=asynchronous)
    plan = ours.module.run.loop.device_plan
    assert any(min(plan.planned(t).versions.values()) < t for t in range(7))
    assert len(gaps) == 7 and max(gaps) == 0.0


@pytest.mark.parametrize(
    ("callbacks", "options", "says"),
    [
        ([c.ControlVariates()], {}, "ControlVariates does not say that it tolerates staleness"),
        ([VirtualClock(UNEQUAL)], {}, "has its own clock"),
        ([], {"sampling": "poisson"}, "sampling='poisson' beside asynchronous"),
        ([], {"asynchronous": Buffered(UNEQUAL, size=7)}, "size=7 is more than the 6 clients"),
        ([], {"asynchronous": UNEQUAL}, "asynchronous="),
        (
            [VirtualClock(UNEQUAL)],
            {"asynchronous": None, "sampling": "poisson"},
            "VirtualClock: sampling='poisson'",
        ),
        (
            [VirtualClock(UNEQUAL), c.PowerOfChoice(4)],
            {"asynchronous": None},
            "cannot run together",
        ),
        ([SystemHeterogeneity(availability=[0.5])], {"asynchronous": None}, "1 probabilities"),
    ],
)
def test_what_cannot_be_together_is_refused(
    callbacks: list[Any], options: dict[str, Any], says: str
) -> None:
    with quiet(), pytest.raises(UserError, match=says):
        fit(callbacks, **{"asynchronous": Buffered(UNEQUAL, size=2), **options})


@pytest.mark.parametrize("asynchronous", [Buffered(UNEQUAL, size=3, concurrency=5), None])
def test_two_processes_leave_the_bits_of_one(asynchronous: Any) -> None:
    clock = [] if asynchronous else [VirtualClock(UNEQUAL, deadline=0.3, over_selection=1.5)]
    system = SystemHeterogeneity(dropout=0.2, min_work=0.5)

    def job(**trainer: Any) -> dict[str, torch.Tensor]:
        callbacks = [*clock, system, c.DynamicRegularization()]
        with quiet():
            return outcome(fit(callbacks, 6, asynchronous=asynchronous, trainer=trainer))

    two = in_processes(2, lambda: job(strategy="federated", devices=2))
    require_same(job(), two, 0.0, "2 processes", "")


COLUMNS = {
    "system/constant": {"time/virtual", "system/late"},
    "system/tiers": {"time/virtual", "system/seconds_per_step"},
    "system/flaky": {"system/dropped"},
    "method/fedbuff": {"time/virtual", "staleness/max", "system/running"},
    "method/fedasync": {"time/virtual", "staleness/max", "system/running"},
}
TITLES = {"method/fedbuff": "FedBuff", "method/fedasync": "FedAsync + FedProx"}


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
def test_a_config_of_a_system_runs_and_logs_its_columns(cli: Cli, name: str) -> None:
    short = ("--trainer.max_epochs", 2, "--model.local_steps", 1)
    done = cli("fit", "-c", "base", "-c", "data/digits", "-c", name, *short)
    assert done.returncode == 0, done.stderr
    (folder,) = (cli.folder / "runs").iterdir()
    rows = table(folder / "metrics.csv")
    assert len(rows) == 2 and COLUMNS[name] <= {key for key, value in rows[1].items() if value}
    assert json.loads((folder / "run.json").read_text())["title"] == TITLES.get(name, "FedAvg")
