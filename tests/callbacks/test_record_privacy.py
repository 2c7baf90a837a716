"""Differential privacy of single samples: the rule, its noise, what is spent, what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from scipy import stats
from torch import Tensor, nn

from fl_lightning import ClientState, FederatedCallback, InMemoryDataModule, UserError
from fl_lightning import callbacks as c
from fl_lightning.callbacks import RecordPrivacy
from fl_lightning.datamodules import FromDatasets, FromTable
from fl_lightning.lab.contracts import federation
from fl_lightning.lab.contracts.federation import SIZES, Learner, data, in_processes, outcome, quiet
from fl_lightning.round.privacy import calibrated, epsilon
from fl_lightning.sampling import generator
from tests.helpers.federation import Run, network
from tests.oracles import private as oracle
from tests.oracles.problems import TwoLayer

NET = TwoLayer(3, 4, 3)


def run(*methods: Any, rounds: int = 2, **arguments: Any) -> Any:
    with quiet():
        return federation.fit(list(methods), rounds, **{"buffers": "keep", **arguments})


def known(clip: float = 0.5, sigma: float | None = 0.7, **named: Any) -> RecordPrivacy:
    """With noise and coins that a test can compute."""
    return RecordPrivacy(clip, sigma, noise_seed=1, **named)


# ---- the rule


def agree(ours: Run, how: oracle.Setting) -> None:
    """Models and counts are NumPy's to 1e-9."""
    rounds: list[dict[int, Any]] = []
    for batches in ours.schedule.rounds:
        if how.shuffled:
            rounds.append({i: [[b] for b in each] for i, each in batches.items()})
        else:
            rounds.append({i: len(each) for i, each in batches.items()})
    samples = list(ours.schedule.data)
    draw = partial(generator, 1)
    left = oracle.run(NET, ours.start, samples, rounds, how, draw)
    for w, theirs in zip(ours.record.w, left.w, strict=True):
        assert np.abs(w - theirs).max() < 1e-9
    for rows, counts in zip(ours.record.rows, left.counts, strict=True):
        assert {i: int(n) for i, n in rows["RecordPrivacy.compositions"].items()} == counts
    counted = ours.record.server[-1]["RecordPrivacy.counted"]
    assert {i: int(n) for i, n in enumerate(counted) if n} == left.counts[-1]


CASES: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any]]] = {
    "FedAvg": ([], {}, {}),
    "decay, weights, clipping": (
        [],
        {"lr_decay": 0.9, "weighted": True, "clip_norm": 0.4},
        {"lr_decay": 0.9, "weighting": "samples", "clip_norm": 0.4},
    ),
    "FedProx": ([c.ProximalTerm(0.3)], {"mu": 0.3}, {}),
    "SCAFFOLD": ([c.ControlVariates()], {"scaffold": True}, {}),
    "shuffled": ([], {"shuffled": True}, {}),
    "two processors": ([], {}, {"engine": "concurrent", "workers": 2}),
}


@pytest.mark.parametrize("sigma", [0.0, 0.7])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_rule(name: str, sigma: float) -> None:
    methods, theirs, options = CASES[name]
    sampling: Any = "shuffle" if theirs.get("shuffled") else "poisson"
    method = RecordPrivacy(0.5, sigma, sampling=sampling, noise_seed=1)
    agree(network([method, *methods], 3, **options), oracle.Setting(sigma, 0.5, **theirs))


class Half(FederatedCallback):
    """Clients train every second coordinate."""

    alike = True

    def trained(self, clients: Any) -> Tensor:
        return (torch.arange(clients.x.shape[1]) % 2 == 0).expand_as(clients.x)


def test_norms_are_of_the_trained_coordinates() -> None:
    how = oracle.Setting(0.7, 0.2, trained=np.arange(31) % 2 == 0)
    agree(network([known(0.2), Half()], 3), how)


def test_accumulated_batches_are_one_draw_of_a_larger_batch() -> None:
    """cost/gradients counts one gradient a step."""
    module = run(known(), accumulate=2, participation="all", local_steps=3, rounds=1)
    assert int(module.trainer.callback_metrics["cost/gradients"]) == 3 * len(SIZES)
    shares = module.server_states["RecordPrivacy.shares"].tolist()
    assert shares == [min(8, n) / n for n in SIZES]


def test_without_noise_and_clipping_full_batches_are_fedavg() -> None:
    ours = run(RecordPrivacy(math.inf, 0.0), federation=data(batch_size=None))
    average = run(federation=data(batch_size=None))
    assert torch.allclose(ours.global_vector, average.global_vector, rtol=0, atol=1e-12)


def test_samples_together_in_parts_and_alone_agree() -> None:
    ends = [
        run(known(samples_at_once=n), buffers="keep", learner=Learner(buffers=False))
        for n in (None, 1, 2, 3)
    ]
    for other in ends[1:]:
        assert torch.allclose(ends[0].global_vector, other.global_vector, rtol=0, atol=1e-12)


class Branching(Learner):
    """Branches on a value, which vmap cannot, and logs what it sees."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        self.log("first", float(x[0, 0]))
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss) > 0 else loss * 1.0


def test_a_learner_that_vmap_cannot_take_runs_one_by_one_with_a_note() -> None:
    module = run(known(), learner=Branching(buffers=False), capture=False)
    assert any("one by one" in note and "vmap" in note for note in module.notes)
    whole = run(known(), learner=Learner(buffers=False))
    assert torch.allclose(module.global_vector, whole.global_vector, rtol=0, atol=1e-12)
    assert "first" in module.trainer.callback_metrics


def test_writes_to_buffers_are_undone() -> None:
    for at_once in (None, 1):
        module = run(known(samples_at_once=at_once))
        assert int(module.learner.batches) == 0 and not module.learner.running_mean.any()


class Masked(pl.LightningModule):
    """A linear model behind dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3).double())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


@pytest.mark.parametrize("at_once", [None, 1])
def test_each_sample_has_its_own_mask_and_a_run_repeats(at_once: int | None) -> None:
    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        ends.append(run(known(samples_at_once=at_once), learner=Masked()).global_vector)
    assert torch.equal(*ends)


# ---- noise and sensitivity


class Wide(pl.LightningModule):
    """Whose loss is flat, so that a step moves by noise alone."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numbers, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0.0 * self.w.sum() + 0.0 * batch[0].sum()


def test_the_noise_has_the_stated_variance() -> None:
    """10⁴ draws: a step of rate 1 moves each coordinate by σ C / B_i, normally."""
    sigma, clip = 1.5, 0.4
    module = run(
        RecordPrivacy(clip, sigma),
        rounds=1,
        learner=Wide(10_000),
        participation=1,
        local_steps=1,
        client_optimizer=lambda p: torch.optim.SGD(p, 1.0),
        lr_decay=1.0,
    )
    (client,) = module.participants(0)
    noise = module.global_vector.detach().numpy() / (sigma * clip / min(4, SIZES[client]))
    assert abs(noise.var() - 1) < 5 * math.sqrt(2 / len(noise))
    assert stats.kstest(noise, "norm").pvalue > 1e-4


def twins(changed: Callable[[Tensor], Tensor]) -> list[InMemoryDataModule]:
    """Data, and the same with another sample of client 2."""
    made = []
    for change in (lambda x: x, changed):
        module = data(batch_size=None)
        x, y = module._given_sets["train"]
        x = x.clone()
        first = SIZES[0] + SIZES[1]
        x[first] = change(x[first])
        clients = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
        made.append(InMemoryDataModule((x, y), clients=clients, batch_size=None))
    return made


@pytest.mark.parametrize("factor", [1e6, math.inf])
def test_one_sample_of_a_huge_gradient_moves_an_update_by_at_most_c(factor: float) -> None:
    """With one step of rate 1: by C/N_i for a sample of no weight, twice that for any two."""
    clip = 0.1
    ends = []
    for each in twins(lambda x: x * factor):
        module = run(
            known(clip, 0.7),
            rounds=1,
            federation=each,
            participation="all",
            weighting="uniform",
            local_steps=1,
            lr_decay=1.0,
            client_optimizer=lambda p: torch.optim.SGD(p, 1.0),
        )
        ends.append(module.global_vector.detach())
    assert bool(ends[1].isfinite().all())
    moved = float((ends[0] - ends[1]).norm()) * len(SIZES) * SIZES[2]
    assert 0 < moved <= 2 * clip * (1 + 1e-9)


def test_two_runs_of_one_seed_have_other_noise() -> None:
    """The difference is that of two draws, √2 times as wide as one."""
    clip, sigma = 0.05, 20.0
    options: dict[str, Any] = {
        "rounds": 1,
        "participation": 1,
        "local_steps": 1,
        "lr_decay": 1.0,
        "client_optimizer": lambda p: torch.optim.SGD(p, 1.0),
    }
    ends = [run(RecordPrivacy(clip, sigma), learner=Wide(3000), **options) for _ in range(2)]
    (client,) = ends[0].participants(0)
    deviation = sigma * clip / min(4, SIZES[client])
    difference = (ends[0].global_vector - ends[1].global_vector).detach().numpy() / deviation
    assert abs(difference.std() / math.sqrt(2) - 1) < 5 / math.sqrt(2 * len(difference))


def test_one_sum_at_two_scales_or_of_two_steps_has_other_noise() -> None:
    from fl_lightning.storage.secret import Secret, drawn_from

    secret = Secret("0" * 16, b"x" * 32)
    draws = {
        float(drawn_from(secret, purpose, *at, onto=onto).standard_normal())
        for purpose in ("a", "b")
        for at in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))
        for onto in (b"", b"1")
    }
    assert len(draws) == 16


# ---- ε


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_epsilon_is_the_library_s(sampling: Any) -> None:
    """Ten settings each: of the client that has spent most, after two rounds of all clients."""
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant

    for sigma, batch, steps, delta in [
        (1.0, 4, 1, 1e-5),  # the library takes long for little noise
        (2.0, 4, 3, 1e-5),
        (4.0, 4, 3, 1e-5),
        (4.0, 2, 3, 1e-5),
        (4.0, 1, 3, 1e-5),
        (6.0, 4, 3, 1e-5),
        (4.0, 4, 7, 1e-5),
        (4.0, 4, 3, 1e-3),
        (2.5, 3, 2, 1e-6),
        (3.0, None, 5, 1e-5),
    ]:
        module = run(
            RecordPrivacy(0.5, sigma, delta=delta, sampling=sampling),
            federation=data(batch_size=batch),
            local_steps=steps,
            participation="all",
        )
        worst = 0.0
        for size in SIZES:
            share, count = min(batch or size, size) / size, 2 * steps
            if sampling == "shuffle":
                share, count = 1.0, 2 * math.ceil(steps / math.ceil(size / (batch or size)))
            accountant = PLDAccountant()
            accountant.compose(dp.PoissonSampledDpEvent(share, dp.GaussianDpEvent(sigma)), count)
            worst = max(worst, accountant.get_epsilon(delta))
        logged = float(module.trainer.callback_metrics["privacy/record_epsilon_max"])
        assert logged == pytest.approx(worst, rel=1e-4)
        assert float(module.trainer.callback_metrics["privacy/record_noise"]) == sigma


def test_shuffled_batches_claim_no_amplification() -> None:
    """Also of clients with several batches, which the client that has spent most need not have."""
    module = run(known(0.5, 4.0, sampling="shuffle"), rounds=1, participation="all", local_steps=5)
    assert module.server_states["RecordPrivacy.shares"].tolist() == [1.0] * len(SIZES)
    epochs = [math.ceil(5 / math.ceil(size / 4)) for size in SIZES]
    assert module.server_states["RecordPrivacy.counted"].tolist() == epochs


def test_the_least_noise_is_found_and_the_run_stops_before_it_exceeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For so many rounds as asked, with every client in each; two rounds fit, the third stops."""
    pytest.importorskip("dp_accounting")
    method = RecordPrivacy(0.5, target_epsilon=2.0, rounds=2)
    options = {"local_steps": 3, "participation": "all", "federation": data(batch_size=None)}
    module = run(method, rounds=5, **options)
    sigma = float(module.server_states["RecordPrivacy.sigma"])
    assert sigma == calibrated(2.0, 1.0, 6, 1e-5)
    assert module.trainer.current_epoch == 2
    spent = float(module.trainer.callback_metrics["privacy/record_epsilon_max"])
    assert spent == pytest.approx(epsilon(sigma, 1.0, 6, 1e-5)) and spent <= 2.0
    printed = capsys.readouterr().out
    assert f"ε = {spent:.4g} at δ = 1e-05 for client 0" in printed and "in the middle" in printed


def test_a_first_round_that_exceeds_the_target_is_refused() -> None:
    pytest.importorskip("dp_accounting")
    with pytest.raises(UserError, match=r"round 0 would bring ε of client"):
        run(RecordPrivacy(0.5, 0.5, target_epsilon=0.5))


def test_epsilon_is_of_the_client_that_has_spent_most() -> None:
    """Not of the mean, nor of the latest round's clients."""
    pytest.importorskip("dp_accounting")
    module = run(RecordPrivacy(0.5, 4.0), rounds=4, participation=2)
    rows = {i: module.client_rows.read("RecordPrivacy.compositions", i) for i in range(len(SIZES))}
    spent = [
        epsilon(4.0, min(4, SIZES[i]) / SIZES[i], int(n), 1e-5)
        for i, n in rows.items()
        if n is not None
    ]
    logged = float(module.trainer.callback_metrics["privacy/record_epsilon_max"])
    assert logged == pytest.approx(max(spent)) and logged > float(np.mean(spent))


# ---- runs


def test_resumed_and_in_two_processes_it_has_the_same_bits(tmp_path: Any) -> None:
    """Resumed with the secret, which lies beside the checkpoint."""
    with quiet():
        federation.fit([RecordPrivacy(0.5, 4.0)], 2, buffers="keep", folder=str(tmp_path))
        import shutil

        ends = []
        for name in "ab":
            shutil.copytree(tmp_path, tmp_path.with_name(name))
            folder = str(tmp_path.with_name(name))
            resumed = federation.fit(
                [RecordPrivacy(0.5, 4.0)], 3, buffers="keep", folder=folder, resume=True
            )
            ends.append(outcome(resumed))
        assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
        shared = {"strategy": "federated", "devices": 2}
        alone = outcome(federation.fit([known()], 2, buffers="keep"))
        both = in_processes(
            2, lambda: outcome(federation.fit([known()], 2, buffers="keep", trainer=shared))
        )
    assert all(torch.equal(value, both[name]) for name, value in alone.items())


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (RecordPrivacy(0.5, 4.0), RecordPrivacy(0.5, 5.0)),
        (RecordPrivacy(0.5, 4.0), RecordPrivacy(0.6, 4.0)),
        (known(0.5, 4.0), RecordPrivacy(0.5, 4.0)),
        (c.ProximalTerm(0.0), RecordPrivacy(0.5, 4.0)),
    ],
)
def test_a_run_does_not_go_on_with_another_noise(then: Any, now: Any, tmp_path: Any) -> None:
    run(then, rounds=1, folder=str(tmp_path))
    with pytest.raises(UserError, match="ε would not hold"):
        run(now, rounds=2, folder=str(tmp_path), resume=True, strict_resume=False)


def test_nor_with_another_batch_size(tmp_path: Any) -> None:
    options = {"folder": str(tmp_path), "participation": "all"}
    run(RecordPrivacy(0.5, 4.0), rounds=1, **options)
    again = {"federation": data(batch_size=2), "resume": True, "strict_resume": False}
    with pytest.raises(UserError, match="another batch size"):
        run(RecordPrivacy(0.5, 4.0), rounds=2, **options, **again)


def test_beside_client_level_privacy_both_are_logged_and_every_client_counts() -> None:
    pytest.importorskip("dp_accounting")
    both = [RecordPrivacy(0.5, 4.0), c.DifferentialPrivacy(0.5, 4.0)]
    module = run(*both, sampling="poisson", participation=0.4, local_steps=2)
    metrics = module.trainer.callback_metrics
    assert {"privacy/epsilon", "privacy/record_epsilon_max"} <= metrics.keys()
    assert module.server_states["RecordPrivacy.counted"].tolist() == [4] * len(SIZES)


# ---- what it refuses


class Reads(FederatedCallback):
    """Reads one of the values of samples."""

    kept = ClientState(shape=(), synchronised=False)

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def on_local_end(self, clients: Any) -> None:
        if self.what == "full_gradient":
            clients.full_gradient(clients.w)
        elif self.what == "evaluate":
            clients.evaluate(clients.x)
        elif self.what == "label_counts":
            _ = clients.label_counts

    def on_local_step_end(self, clients: Any) -> None:
        if self.what == "gradient_at":
            clients.gradient_at(clients.x)


@pytest.mark.parametrize("what", ["full_gradient", "evaluate", "label_counts", "gradient_at"])
def test_values_of_samples_are_refused_by_both_names(what: str) -> None:
    with pytest.raises(UserError, match=f"RecordPrivacy and Reads cannot run together.*{what}"):
        run(known(), Reads(what))


@pytest.mark.parametrize(
    "other",
    [
        c.SharpnessAwareMinimization(),
        c.GlobalSharpnessAwareMinimization(),
        c.ModelContrast(),
        c.LogitCalibration(),
        c.ControlVariates("gradient"),
        c.DiscrepancyWeights(),
        c.ClusteredModels(),
        c.ProximalPersonalModel(),
        c.AdaptiveLocalAggregation(),
        c.FairAggregation(),
        c.PowerOfChoice(candidates=4),
        c.MetaGradient(),
    ],
    ids=lambda other: type(other).__name__,
)
def test_methods_that_look_at_samples_are_refused_by_both_names(other: Any) -> None:
    with pytest.raises(UserError) as refused:
        run(known(), other)
    assert "RecordPrivacy" in str(refused.value) and type(other).__name__ in str(refused.value)


class Loss(FederatedCallback):
    def on_local_end(self, clients: Any, loss: Tensor) -> None:
        pass


class OwnBatch(FederatedCallback):
    def local_batch(self, client: int, batch: Any) -> Any:
        return batch


def test_clients_losses_and_batches_are_refused() -> None:
    for other in (Loss(), OwnBatch()):
        with pytest.raises(UserError, match=f"RecordPrivacy and {type(other).__name__} cannot"):
            run(known(), other)


class Normed(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()


class Remembers(Learner):
    """Its loss depends on the sample before."""

    last = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + self.last)
        self.last = float(batch[0][0, 0])
        return loss


class Hooked(Learner):
    def on_after_backward(self) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"learner": Normed()}, "BatchNorm"),
        ({"learner": Remembers(buffers=False)}, "would depend on other samples"),
        ({"learner": Hooked(buffers=False)}, "on_after_backward"),
        ({"buffers": "average"}, "buffers='keep'"),
        ({"engine": "stacked", "learner": Learner(buffers=False)}, "RecordPrivacy"),
    ],
)
def test_runs_in_which_samples_meet_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        run(known(), **options)


class Looks(pl.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        pass


def test_callbacks_that_get_batches_are_refused() -> None:
    with pytest.raises(UserError, match="RecordPrivacy and Looks"):
        network([known(), Looks()], 1)


def test_data_that_mix_samples_are_refused() -> None:
    x, y = torch.rand(30, 1, 4, 4), torch.arange(30) % 3
    mixed = FromDatasets(
        torch.utils.data.TensorDataset(x, y), targets=y, num_clients=6, augment="mixup"
    )
    with pytest.raises(UserError, match="mixup mixes samples"):
        run(known(), federation=mixed)


def test_what_is_measured_on_samples_is_named() -> None:
    module = run(known(), c.DriftLogger())
    assert any("the measurements of DriftLogger" in note for note in module.notes)


def test_values_that_the_data_compute_from_all_samples_are_named() -> None:
    """Each sample of a standardised table depends on the client's others."""
    pd = pytest.importorskip("pandas", reason="pip install 'fl-lightning[tables]'")
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(60, 3)), columns=["a", "b", "c"])
    frame["y"] = draw.integers(0, 3, 60)
    frame["who"] = np.arange(60) % 6
    scaled = FromTable(frame, target="y", client="who", scale="client", batch_size=4)
    module = run(known(), federation=scaled, learner=InSingle())
    assert any("the means and deviations of the columns" in note for note in module.notes)


class InSingle(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_a_client_that_has_a_sample_twice_is_refused(sampling: Any) -> None:
    """It would move the client's sum by twice C."""
    x, y = data()._given_sets["train"]
    clients = [np.array([0, 1, 2]), np.array([3, 4, 5, 4])]
    twice = InMemoryDataModule((x, y), clients=clients, batch_size=2)
    with pytest.raises(UserError, match="client 1 has sample 4 2 times"):
        run(known(sampling=sampling), federation=twice, participation="all")


@pytest.mark.parametrize(
    "given", [{"clip": 0.0}, {"clip": math.inf}, {"noise_multiplier": -1.0}, {"delta": 1.0}]
)
def test_values_that_mean_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        RecordPrivacy(**{"clip": 1.0, "noise_multiplier": 1.0, **given})
    with pytest.raises(UserError, match="noise_multiplier or target_epsilon"):
        RecordPrivacy(1.0)


# ---- membership


class Along(pl.LightningModule):
    """Whose gradient of a sample is the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[0] @ self.w).mean()


class Sent(FederatedCallback):
    """Keeps what each client sends."""

    u = ClientState(synchronised=False)

    def on_local_end(self, clients: Any) -> None:
        self.u[clients] = clients.x - clients.w


def test_an_attacker_finds_less_than_epsilon_allows() -> None:
    """A sample in or out of 2,000 clients, each a run of its own: four steps on all samples.

    The sample's gradient has the direction that the others lack, so the best test is how far a
    client moves along it.
    """
    sigma, delta, clients = 2.0, 1e-5, 2000
    scores = []
    for inside in (1.0, 0.0):
        x = torch.tensor([[5.0 * inside, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.float64)
        module = run(
            RecordPrivacy(1.0, sigma, delta=delta),
            Sent(),
            rounds=1,
            learner=Along(),
            federation=InMemoryDataModule(
                (x.repeat(clients, 1), torch.zeros(3 * clients)),
                clients=np.arange(3 * clients).reshape(clients, 3),
                batch_size=None,
            ),
            participation="all",
            local_steps=4,
        )
        scores.append([-float(module.client_rows.read("Sent.u", i)[0]) for i in range(clients)])
    spent = float(module.trainer.callback_metrics["privacy/record_epsilon_max"])
    best = 0.0
    for threshold in np.quantile(scores[0], np.linspace(0.05, 0.95, 19)):
        caught, wrong = (int((np.array(each) > threshold).sum()) for each in scores)
        # Clopper and Pearson's bounds at 99.9 %.
        low = stats.beta.ppf(0.001, caught, clients - caught + 1)
        high = stats.beta.ppf(0.999, wrong + 1, clients - wrong)
        best = max(best, math.log((low - delta) / high))
    print(f"an attacker sees ε of at least {best:.3g}, printed is {spent:.3g}")
    assert 0.3 < best < spent
