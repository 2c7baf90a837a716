"""Who delivers when is known before training, and what another program computes from the rules."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning import FederatedModule, InMemoryDataModule, UserError, systems
from tests.helpers.federation import Network, samples
from tests.oracles import events

BATCH = 4


def federation() -> Any:
    x, y, clients = samples()
    return InMemoryDataModule((x, y), clients=clients, batch_size=BATCH)


def drawn_system(seed: int) -> dict[str, Any]:
    """A system at random, as the other program takes it."""
    rng = random.Random(seed)
    m = 8

    def speeds(scale: float) -> tuple[Any, ...]:
        tiers = [(0.3, scale), (0.6, 3 * scale), (0.1, 10 * scale)]
        return rng.choice(
            [("constant", scale), ("lognormal", scale, rng.choice([0.2, 1.0])), ("tiers", tiers)]
        )

    each = [rng.uniform(0.1, 1.0) for _ in range(m)]
    return {
        "seed": rng.randrange(1000),
        "m": m,
        # Microseconds, so that jobs end together, too.
        "compute": speeds(rng.choice([0.5, 1e-6, 0.1])),
        "up": rng.choice([None, speeds(1e3)]),
        "down": rng.choice([None, speeds(1e3)]),
        "min_work": rng.choice([1.0, 0.5, 0.1]),
        "jitter": rng.choice([None, "half", 0.5]),
        "latency": rng.choice([0.0, 0.2]),
        "dropout": rng.choice([0.0, 0.2, 0.9]),
        "availability": rng.choice([None, 0.5, each]),
        "concurrency": rng.choice([1, 2, 5, 40]),
        "size": rng.choice([1, 2, 5, 8]),
        "max_staleness": rng.choice([None, 0, 1, 3]),
        "n": rng.choice([1, 2, 4, 8]),
        "over": rng.choice([1.0, 1.3, 2.5]),
        "deadline": rng.choice([None, 0.3, 2.0]),
        "rounds": rng.choice([1, 5, 20]),
    }


def of_ours(kind: tuple[Any, ...] | None) -> Any:
    if kind is None:
        return math.inf
    made = {"constant": systems.Constant, "lognormal": systems.LogNormal, "tiers": systems.Tiers}[
        kind[0]
    ]
    return made(*kind[1:])


def devices(given: dict[str, Any]) -> systems.Devices:
    jitter = {None: None, "half": systems.HalfNormal(), 0.5: systems.LogNormalJitter(0.5)}[
        given["jitter"]
    ]
    ways = (of_ours(given["up"]), of_ours(given["down"]))
    return systems.Devices(of_ours(given["compute"]), jitter, *ways, latency=given["latency"])


def both(given: dict[str, Any], asynchronous: bool) -> tuple[list[Any], list[Any]]:
    """Our schedule, and the other program's, as tuples."""
    data = federation()
    system = systems.SystemHeterogeneity(given["dropout"], given["min_work"], given["availability"])
    callbacks: list[Any] = [system]
    options: dict[str, Any] = {"participation": given["n"]}
    if asynchronous:
        max_staleness = given["max_staleness"]
        options["asynchronous"] = systems.Buffered(
            devices(given), given["size"], given["concurrency"], max_staleness=max_staleness
        )
    else:
        clock = systems.VirtualClock(devices(given), given["deadline"], given["over"])
        callbacks.append(clock)
    module = FederatedModule(Network(), seed=given["seed"], local_epochs=1.5, **options)
    ours = systems.schedule(module, data, given["rounds"], callbacks)
    numbers = module.global_vector.numel() * 8
    batches = [math.ceil(n / BATCH) for n in data.client_sizes()]
    steps = [n + math.ceil(n / 2) for n in batches]
    other = events.System(steps=steps, bytes_down=numbers, bytes_up=numbers, **given)
    simulated = events.buffered if asynchronous else events.synchronous
    jobs, _ = simulated(other, given["rounds"])
    names = ("client", "version", "start", "end", "delivered", "update")
    theirs = [tuple(job[name] for name in names) for job in jobs]
    return [tuple(getattr(job, name) for name in names) for job in ours], theirs


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("seed", range(50))
def test_the_schedule_is_that_of_another_program(seed: int, asynchronous: bool) -> None:
    ours, theirs = both(drawn_system(seed), asynchronous)
    assert ours == theirs and ours


def test_staleness_counts_as_the_rules_say() -> None:
    devices = systems.Devices(systems.Constant(1.0))
    assert systems.Buffered(devices).weight(3) == 0.5
    assert systems.Buffered(devices, staleness="constant").weight(7) == 1.0
    assert systems.Buffered(devices, staleness=systems.Polynomial(1.0)).weight(3) == 0.25
    hinge = systems.Buffered(devices, staleness=systems.Hinge(10.0, 4.0))
    assert [hinge.weight(tau) for tau in (0, 4, 5, 6)] == [1.0, 1.0, 1 / 11, 1 / 21]
    assert systems.Buffered(devices, mixing=0.6, staleness=systems.Polynomial(0.5)).weight(3) == 0.3
    assert systems.Buffered(devices, mixing=0.6).size == 1 and systems.Buffered(devices).size == 10


def test_a_traces_lines_are_clients_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "speeds.txt"
    path.write_text("0.5\n\n2\n1e-1\n")
    assert systems.Trace(str(path)).of_clients(seed=0, m=5).tolist() == [0.5, 2.0, 0.1, 0.5, 2.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [("0.5\n-1\n", "numbers above 0"), ("a\n", "cannot be read.*'a'"), ("\n", "numbers above 0")],
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_a_damaged_trace_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "speeds.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        systems.Trace(str(path))


def test_tiers_are_cut_at_exact_decimals() -> None:
    numbers = systems.Tiers([(0.1, 1.0), (0.2, 2.0), (0.7, 3.0)]).of_clients(seed=3, m=45)
    assert np.unique(numbers, return_counts=True)[1].tolist() == [5, 9, 31]


@pytest.mark.parametrize(
    "made",
    [
        lambda: systems.Tiers([(0.5, 1.0)]),
        lambda: systems.Tiers("0.5"),  # type: ignore[arg-type]
        lambda: systems.Constant(0.0),
        lambda: systems.LogNormal(1.0, -1.0),
        lambda: systems.Devices(0.1),  # type: ignore[arg-type]
        lambda: systems.Devices(systems.Constant(1.0), up=0.0),
        lambda: systems.Devices(systems.Constant(1.0), latency=-1.0),
        lambda: systems.Buffered(systems.Devices(systems.Constant(1.0)), size=0),
        lambda: systems.Buffered(systems.Devices(systems.Constant(1.0)), size=2, mixing=0.5),
        lambda: systems.Buffered(
            systems.Devices(systems.Constant(1.0)), normalise=True, mixing=0.5
        ),
        lambda: systems.Buffered(systems.Devices(systems.Constant(1.0)), mixing=1.5),
        lambda: systems.Buffered(systems.Devices(systems.Constant(1.0)), staleness="none"),
        lambda: systems.VirtualClock(systems.Devices(systems.Constant(1.0)), over_selection=0.5),
        lambda: systems.VirtualClock(systems.Devices(systems.Constant(1.0)), deadline=0.0),
        lambda: systems.SystemHeterogeneity(dropout=1.0),
        lambda: systems.SystemHeterogeneity(min_work=0.0),
        lambda: systems.SystemHeterogeneity(availability=[0.5, 1.5]),
    ],
)
def test_what_cannot_be_is_refused(made: Any) -> None:
    with pytest.raises(UserError):
        made()
