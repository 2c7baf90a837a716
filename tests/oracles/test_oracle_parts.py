"""The oracle's partial averaging and its counts of communication, against values found by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles.cases import FIRST, D, M, constant, learning, quadratics, same, sampled
from tests.oracles.oracle import Config, Schedule, run, vectors


def test_scaffold_and_fedcm_measure_over_all_rounds_since_a_part_was_averaged() -> None:
    slopes = [0.5, -1.0]
    schedule = sampled(3, 2, [5, 3])
    cfg = Config(
        lr=0.1, lr_decay=0.5, scaffold="displacement", alpha=1.0, beta=0.3, parts=[(FIRST, 3)]
    )
    before, _, after = run(constant(slopes), cfg, 3, np.ones(D), schedule)
    assert np.allclose(before.clients["c_i"][1], [0, 0, -1, -1])
    assert np.allclose(before.server["Delta"], [0, 0, -0.25, -0.25])
    assert np.allclose(after.clients["c_i"][0], 0.5) and np.allclose(after.clients["c_i"][1], -1)
    assert np.allclose(after.server["Delta"][:2], -0.25)


def test_fedals_in_one_part_is_fedavg_with_more_steps() -> None:
    problem, w0 = quadratics(), np.ones(D)
    parts = run(problem, Config(parts=[(np.ones(D, bool), 4)]), 12, w0, sampled(12, M, [3] * M))
    assert same(parts[3::4], run(problem, Config(), 3, w0, sampled(3, M, [12] * M)))
    assert np.array_equal(parts[6].w, parts[3].w)
    assert np.allclose(parts[6].evaluated, np.mean(list(parts[6].x.values()), axis=0))


def test_parts_keep_only_copies_written_since_their_last_average() -> None:
    # Clients 0 and 1 move by -1 and -2 a round; the first half is averaged at the end of rounds 1
    # and 3.
    rounds = [{0: [None]}, {1: [None]}, {0: [None]}, {0: [None], 1: [None]}]
    cfg = Config(lr=1.0, parts=[(FIRST, 2)])
    history = run(constant([1.0, 2.0]), cfg, 4, np.zeros(D), Schedule(rounds, [3, 1]))
    # Round 0 never reaches the server, round 1 does; round 2 begins at the server's -2, round 3 at
    # 0's own -3.
    assert [after.w[0] for after in history] == [0.0, -2.0, -2.0, -4.0]
    assert [after.w[3] for after in history] == [-1.0, -3.0, -4.0, -5.5]
    assert [after.evaluated[0] for after in history] == [-1.0, -2.0, -3.0, -4.0]
    assert [after.start[min(after.start)][0] for after in history] == [0.0, 0.0, -2.0, -3.0]
    assert [after.down for after in history] == [{0: 4}, {1: 4}, {0: 4}, {0: 2, 1: 4}]
    assert [after.up for after in history] == [{0: 2}, {1: 4}, {0: 2}, {0: 4, 1: 4}]


def test_evaluated_parts_are_weighted_means() -> None:
    cfg = Config(lr=1.0, parts=[(FIRST, 2)], weighting="samples")
    schedule = Schedule([{0: [None], 1: [None]}], [3, 1])
    after = run(constant([1.0, 2.0]), cfg, 1, np.zeros(D), schedule)[0]
    assert np.allclose(after.evaluated, -1.25) and not after.w[:2].any()


def test_updates_of_a_part_are_counted_since_its_last_average() -> None:
    rounds = [{i: [None]} for i in (0, 0, 1, 1, 0, 0)]
    cfg = Config(lr=1.0, beta=0.5, aggregate="updates", parts=[(FIRST, 2)])
    history = run(constant([1.0, 2.0]), cfg, 6, np.zeros(D), Schedule(rounds, [1, 1]))
    assert [after.w[0] for after in history] == [0, -2, -2, -6, -6, -8]
    assert history[4].start[0][0] == -6 + 0.5 * (-6 - history[1].x[0][0])
    assert history[5].start[0][0] == history[4].x[0][0]


def test_server_optimizer_rests_on_parts_that_are_not_averaged() -> None:
    problem, cfg = quadratics(), Config(server=("adam", 0.1, 0.9, 0.99, 1e-3), parts=[(FIRST, 2)])
    history = run(problem, cfg, 3, np.ones(D), sampled(3, M, [2] * M))
    for name, initial in {"m": 0.0, "v": 1e-6}.items():
        assert (history[0].server[name][:2] == initial).all()
        assert (history[1].server[name] != history[0].server[name]).all()
        assert (history[2].server[name][:2] == history[1].server[name][:2]).all()
    assert (history[2].w[:2] == history[1].w[:2]).all() and (
        history[2].w[2:] != history[1].w[2:]
    ).all()


COSTS = {  # vectors down, up, kept
    "fedavg": (Config(), (1, 1, 0)),
    "fedinit": (Config(beta=0.1), (1, 1, 1)),
    "fedgamma": (Config(scaffold="displacement", sam=0.1), (2, 2, 1)),
    "feddyn": (Config(feddyn=0.1), (1, 1, 1)),
    "feddyn + ri": (Config(feddyn=0.1, beta=0.1, aggregate="updates"), (1, 2, 2)),
    "mofedsam": (Config(alpha=0.1, sam=0.1), (2, 1, 0)),
    "fedcm + ri": (Config(alpha=0.1, beta=0.1), (2, 2, 1)),
    "fedcm + ri, updates": (Config(alpha=0.1, beta=0.1, aggregate="updates"), (2, 1, 1)),
    "fedsmoo": (Config(feddyn=0.1, fedsmoo=0.1), (2, 2, 2)),
}


@pytest.mark.parametrize("name", COSTS)
def test_communication(name: str) -> None:
    config, expected = COSTS[name]
    assert vectors(config) == expected
    net, w, schedule = learning(2)
    metrics = run(net, config, 2, w, schedule)[-1].metrics
    assert metrics["communication/down_parameters"] == expected[0] * 2 * 3 * net.size
    assert metrics["communication/up_parameters"] == expected[1] * 2 * 3 * net.size


def test_communication_of_partial_averaging() -> None:
    rounds, alpha, never = 7, 3, np.arange(D) == 3
    cfg = Config(parts=[(FIRST, alpha), (never, None)], scaffold="displacement")
    metrics = run(quadratics(), cfg, rounds, np.ones(D), sampled(rounds, M, [2] * M))[-1].metrics
    down, up = 2 * -(-rounds // alpha) + rounds + 1, 2 * (rounds // alpha) + rounds
    assert metrics["communication/down_parameters"] == 2 * M * down
    assert metrics["communication/up_parameters"] == 2 * M * up
