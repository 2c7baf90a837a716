"""Client-level differential privacy: the rule, its noise, what is spent, what it refuses."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fl_lightning import ClientState, FederatedCallback, Upload, UserError, callbacks
from fl_lightning.callbacks import DifferentialPrivacy
from fl_lightning.lab.contracts.federation import SIZES, fit, outcome, quiet
from fl_lightning.round.privacy import calibrated, epsilon
from fl_lightning.sampling import generator

COINS = {"sampling": "poisson", "participation": 0.4, "buffers": "keep"}
M = len(SIZES)


class Sent(FederatedCallback):
    """Writes down what each client sends, after what comes before it in the list of callbacks."""

    update = ClientState(synchronised=False)

    def on_local_end(self, clients):
        self.update[clients] = clients.x - clients.w


def known(*arguments, **named):
    """With noise and coins that a test can compute."""
    return DifferentialPrivacy(*arguments, noise_seed=1, **named)


def run(*methods, rounds=4, **arguments):
    with quiet():
        return fit(list(methods), rounds, **{**COINS, **arguments})


@settings(max_examples=80, deadline=None)
@example(torch.float16, 1, 3.75, 0.03125, 0)  # 0.03125/5600 is among float16's smallest numbers
@example(torch.float16, 4000, 0.0, 0.001, 0)  # and so are the clipped update's
@given(
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    st.integers(1, 4000),
    st.floats(-8, 4),
    st.floats(0.001, 100),
    st.integers(0, 2**31),
)
def test_no_transmitted_norm_exceeds_c(dtype, size, exponent, clip, seed):
    rng = torch.Generator().manual_seed(seed)
    update = (torch.randn(3, size, generator=rng, dtype=torch.float64) * 10.0**exponent).to(dtype)
    update[0] = 0
    clipped = DifferentialPrivacy(clip, 1.0).clipped(update)
    norms, before = clipped.double().norm(dim=1), update.double().norm(dim=1)
    assert (norms <= clip).all()
    assert torch.equal(clipped[before <= clip], update[before <= clip]), (
        "what is short enough stays as it is"
    )
    far = (before > clip) & before.isfinite()
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * size**0.5
    least = clip * (1 - torch.finfo(dtype).eps - 1e-13) - smallest
    assert (norms[far] >= least).all(), "no shorter than rounding makes it"


@pytest.mark.parametrize("size", [3_000, 300_000])
def test_nor_does_that_of_many_alike_whose_rounding_goes_one_way(size):
    update = torch.linspace(1, 2, 10, dtype=torch.float64)[:, None].repeat(1, size)
    for row in DifferentialPrivacy(1.0, 0.0).clipped(update):
        (sent,) = set(row.tolist())
        assert 1 - Fraction(1, 10**13) < size * Fraction(sent) ** 2 <= 1


@pytest.mark.parametrize("sigma", [0.0, 0.7])
def test_the_round_is_algorithm_1(sigma):
    """w ← w + (Σ clipped u_i + σ C N(0, I))/(q m), with the updates that FedAvg's clients would
    send from there."""
    clip, rounds = 0.05, 5
    whole = [run(known(clip, sigma), Sent(), rounds=t) for t in range(1, rounds + 1)]
    w = fit_start()
    for t, module in enumerate(whole):
        total = torch.zeros_like(w)
        for client in module.participants(t):
            u = module.client_rows.read("Sent.update", client)
            total += u * min(1.0, clip / float(u.norm()))
        if sigma:
            noise = generator(1, "method: differential privacy", t).standard_normal(len(w))
            total += sigma * clip * torch.from_numpy(noise)
        w = w + total / (0.4 * M)
        assert torch.allclose(module.global_vector, w, rtol=0, atol=1e-9)


def fit_start():
    """w^0 of the contracts' learner."""
    begun = []
    with quiet():
        fit([], 1, started=lambda module: begun.append(module.global_vector.detach().clone()))
    return begun[0]


def test_a_round_without_clients_takes_its_noise():
    empty = {"participation": 1e-9}
    module = run(known(0.5, 1.0), rounds=3, **empty)
    assert module.participants(0) == module.participants(1) == ()
    w = fit_start()
    for t in range(3):
        noise = generator(1, "method: differential privacy", t).standard_normal(len(w))
        w = w + 0.5 * torch.from_numpy(noise) / (1e-9 * M)
    assert torch.allclose(module.global_vector, w, rtol=1e-12)
    assert torch.equal(run(rounds=3, **empty).global_vector, fit_start()), (
        "other methods stay where they are"
    )


def test_what_is_spent_agrees_with_two_accountants():
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant

    for sigma, share, rounds, delta in [
        (1.0, 0.1, 40, 1e-5),
        (0.7, 0.4, 3, 1e-3),
        (2.0, 1.0, 7, 1e-6),
    ]:
        accountant = PLDAccountant()
        accountant.compose(dp.PoissonSampledDpEvent(share, dp.GaussianDpEvent(sigma)), rounds)
        assert abs(epsilon(sigma, share, rounds, delta) - accountant.get_epsilon(delta)) < 1e-6
    prv = pytest.importorskip("opacus.accountants").PRVAccountant()
    prv.history = [(1.0, 0.1, 40)]
    assert epsilon(1.0, 0.1, 40, 1e-5) == pytest.approx(prv.get_epsilon(1e-5), rel=0.01)


def test_little_noise_has_its_price_in_moderate_time_and_memory():
    """At dp-accounting's own grid, σ = 0.05 takes gigabytes.

    Its ε is that of a finer grid where there is one.
    """
    pytest.importorskip("dp_accounting")
    assert epsilon(0.1, 0.1, 100, 1e-5) == pytest.approx(1200.576, rel=1e-5)
    spent = [epsilon(sigma, 0.1, 2, 1e-5) for sigma in (0.3, 0.05, 0.001, 1e-5)]
    assert spent == sorted(spent) and spent[-2] < spent[-1] == math.inf


def test_it_is_logged_each_round_and_the_run_stops_at_the_target():
    logged = []
    method = DifferentialPrivacy(0.5, 1.0, target_epsilon=5.0)
    with quiet():
        module = fit(
            [method],
            12,
            **COINS,
            ended=lambda m: logged.append(float(m.trainer.callback_metrics["privacy/epsilon"])),
        )
    expected = [epsilon(1.0, 0.4, t + 1, 1e-5) for t in range(12)]
    assert logged == pytest.approx(expected[: len(logged)], abs=1e-6)
    assert module.trainer.current_epoch == len(logged) == sum(e <= 5.0 for e in expected) < 12


@pytest.mark.parametrize("participation", [3, "all", 0.5])
def test_the_share_is_the_coin_of_each_client(participation):
    module = run(DifferentialPrivacy(0.5, 3.0), rounds=1, participation=participation)
    share = {"all": 1.0, 3: 3 / M}.get(participation, participation)
    logged = float(module.trainer.callback_metrics["privacy/epsilon"])
    assert logged == pytest.approx(epsilon(3.0, share, 1, 1e-5), rel=1e-6)


def test_a_target_without_an_end_of_the_run_is_refused():
    with pytest.raises(UserError, match="needs max_epochs, to divide it"):
        run(
            DifferentialPrivacy(0.5, target_epsilon=2.0),
            rounds=-1,
            trainer={"max_time": "00:01:00:00"},
        )


def test_the_least_noise_is_found_to_1_part_in_ten_thousand():
    pytest.importorskip("dp_accounting")
    for target in (2000.0, 0.5):
        sigma = calibrated(target, 1.0, 1, 1e-5)
        assert epsilon(sigma, 1.0, 1, 1e-5) <= target < epsilon(sigma * (1 - 1.1e-4), 1.0, 1, 1e-5)


def test_a_target_alone_chooses_the_noise_and_a_resumed_run_keeps_it(tmp_path):
    def half(rounds, resume=False):
        with quiet():
            method = DifferentialPrivacy(0.5, target_epsilon=2.0)
            return outcome(fit([method], rounds, folder=str(tmp_path), resume=resume, **COINS))

    left = half(6)
    sigma = float(left["server state DifferentialPrivacy.sigma"])
    assert sigma == calibrated(2.0, 0.4, 6, 1e-5)
    assert 1.99 < epsilon(sigma, 0.4, 6, 1e-5) <= 2.0
    with pytest.raises(UserError, match=r"round 6 would bring ε to"):
        half(9, resume=True)


def test_what_attackers_send_is_clipped_too():
    attack = callbacks.ByzantineClients("noise", fraction=0.99, scale=1e6)
    w0 = fit_start()
    for methods in (
        [attack, DifferentialPrivacy(0.1, 0.0)],
        [DifferentialPrivacy(0.1, 0.0), attack],
    ):
        module = run(*methods, rounds=1, participation=1.0)
        assert 0.01 < float((module.global_vector - w0).norm()) <= 0.1


def test_attackers_who_read_the_honest_updates_are_refused():
    alie = callbacks.ByzantineClients("alie", fraction=0.5)
    for methods in ([alie, DifferentialPrivacy(0.1, 1.0)], [DifferentialPrivacy(0.1, 1.0), alie]):
        with pytest.raises(UserError, match=r"DifferentialPrivacy and ByzantineClients.*alie"):
            run(*methods, rounds=1)


class Peeks(FederatedCallback):
    def on_updates(self, server):
        server.updates = server.updates.sign()


class Attacks(FederatedCallback):
    order = -1

    def on_updates(self, server):
        server.updates = torch.full_like(server.updates, 1000.0)


class Sends(FederatedCallback):
    more = Upload()


class Swaps(FederatedCallback):
    """Puts the mean of raw changes in the place of the noised one."""

    raw = Upload(sent=False)

    def on_local_end(self, clients):
        self.raw[clients] = clients.x - clients.w

    def on_server_update(self, server):
        server.update = self.raw.mean()


@pytest.mark.parametrize(
    ("others", "arguments", "said"),
    [
        ([Sends()], {}, "Sends cannot run together"),
        ([Swaps()], {}, "Swaps cannot run together"),
        ([Peeks()], {}, "it sees all updates"),
    ],
)
def test_what_would_reveal_clients_is_refused(others, arguments, said):
    with pytest.raises(UserError, match=said):
        run(DifferentialPrivacy(1.0, 1.0), *others, **arguments)


def test_what_others_put_in_place_of_updates_is_clipped_wherever_their_hook_lies():
    module = run(DifferentialPrivacy(0.01, 0.0), Attacks(), rounds=1, participation=1.0)
    moved = float((module.global_vector - fit_start()).norm())
    assert moved == pytest.approx(0.01, rel=1e-9)  # the attack is the same of all


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([DifferentialPrivacy(0.5, 0.5)], {}),
        ([DifferentialPrivacy(0.5, 5.0)], {"participation": 0.2}),
        ([], {}),
    ],
)
def test_rounds_of_less_privacy_are_not_counted_as_of_more(tmp_path, first, then):
    """``strict_resume=False`` goes on with other settings: ε would be of the present ones only."""
    run(*first, rounds=2, folder=str(tmp_path))
    with pytest.raises(UserError, match="had no privacy, other noise or coins"):
        run(
            DifferentialPrivacy(0.5, 5.0),
            rounds=3,
            folder=str(tmp_path),
            resume=True,
            strict_resume=False,
            **then,
        )


@pytest.mark.parametrize("policy", ["average", "own"])
def test_averaged_buffers_are_refused(policy):
    with pytest.raises(UserError, match="the buffer running_mean neither clipped nor noised"):
        run(DifferentialPrivacy(1.0, 1.0), buffers=policy)


@pytest.mark.parametrize("name", ["DivergenceLogger", "GlobalLossLogger"])
def test_loggers_are_named_as_outside_the_guarantee(name):
    module = run(DifferentialPrivacy(1.0, 1.0), getattr(callbacks, name)(), rounds=1)
    outside = f"who takes part, what is logged of the training, and what {name} measures"
    assert f"outside its guarantee: {outside}." in [
        note.partition(": ")[2] for note in module.notes
    ]


# --------------------------------------------------------------------------- adaptive clipping


def adaptive(first, sigma, gamma=0.5, **named):
    return known(first, sigma, target_quantile=gamma, **named)


@pytest.mark.parametrize(("sigma", "deviation"), [(0.0, None), (0.7, 1.5)])
def test_the_bound_follows_a_quantile_of_the_norms(sigma, deviation):
    """Round t clips and noises with C^t; sum and count together have the noise σ."""
    first, rate, gamma, rounds = 0.05, 0.5, 0.6, 5
    options = {"clip_learning_rate": rate, "count_stddev": deviation}
    whole = []
    for t in range(1, rounds + 1):
        method = adaptive(first, sigma, gamma, **options)
        whole.append(run(method, Sent(), rounds=t))
    w, clip = fit_start(), first
    expected = 0.4 * M
    for t, module in enumerate(whole):
        total, inside = torch.zeros_like(w), 0.0
        for client in module.participants(t):
            u = module.client_rows.read("Sent.update", client)
            total += u * min(1.0, clip / float(u.norm()))
            inside += float(u.norm() <= clip) - 0.5
        if sigma:
            noise = generator(1, "method: differential privacy", t).standard_normal(len(w))
            of_sum = (sigma**-2 - (2 * deviation) ** -2) ** -0.5
            total += of_sum * clip * torch.from_numpy(noise)
        if deviation:
            inside += deviation * float(generator(1, "method: clip", t).standard_normal())
        assert float(module.trainer.callback_metrics["privacy/clip"]) == pytest.approx(clip)
        w = w + total / expected
        assert torch.allclose(module.global_vector, w, rtol=0, atol=1e-9)
        clip *= math.exp(-rate * (0.5 + inside / expected - gamma))
        kept = module.server_states["DifferentialPrivacy.limit"]
        assert float(kept) == pytest.approx(clip, rel=1e-12)


@pytest.mark.parametrize("first", [1e-4, 10.0])
def test_the_bound_comes_to_the_quantile_from_both_sides(first):
    """The published slip counts clipped updates by the rule for unclipped ones, and runs away."""
    everyone = {"participation": 1.0, "lr_decay": 1.0}
    method = adaptive(first, 0.0, 0.5, clip_learning_rate=1.0)
    module = run(method, Sent(), rounds=40, **everyone)
    norms = [float(module.client_rows.read("Sent.update", i).norm()) for i in range(M)]
    clip = float(module.server_states["DifferentialPrivacy.limit"])
    assert min(norms) * 0.5 < clip < max(norms) * 2
