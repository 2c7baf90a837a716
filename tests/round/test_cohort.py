"""Who takes part, and how many steps each takes: functions of seed and round."""

from __future__ import annotations

from tests.helpers.learners import blobs, federated, trainer


def test_participants_and_steps_are_known_before_the_round() -> None:
    module, data = federated(participation=0.25, local_epochs=1.1), blobs(clients=10, per_client=80)
    trainer(1).fit(module, data)
    assert [len(module.participants(t)) for t in range(5)] == [3] * 5  # 2.5, half up
    assert len({module.participants(t) for t in range(5)}) > 1
    assert all(list(p) == sorted(set(p)) for p in map(module.participants, range(5)))
    assert module.steps(0, 0) == 11  # 1.1 epochs of 10 batches, exactly


def test_bernoulli_sampling_varies_the_number_and_never_takes_nobody() -> None:
    module = federated(participation=0.1, sampling="bernoulli")
    trainer(1).fit(module, blobs())
    sizes = [len(module.participants(t)) for t in range(300)]
    assert min(sizes) == 1 and max(sizes) >= 3 and 0.9 < sum(sizes) / 300 < 1.7
