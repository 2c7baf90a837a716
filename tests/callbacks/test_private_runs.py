"""What a private run draws from.

A secret that is in one file, the same after a resume, and never the same twice.
"""

from __future__ import annotations

import base64
import functools
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from fl_lightning import ClientState, FederatedCallback, Upload, UserError, callbacks
from fl_lightning.callbacks import DifferentialPrivacy
from fl_lightning.datamodules import InMemoryDataModule
from fl_lightning.lab.contracts.federation import SIZES, Learner, fit, in_processes, outcome, quiet

COINS = {"sampling": "poisson", "participation": 0.4, "buffers": "keep"}
ROUNDS = 4


def run(*methods, rounds=1, **arguments):
    with quiet():
        return fit(
            list(methods) or [DifferentialPrivacy(0.5, 1.0)], rounds, **{**COINS, **arguments}
        )


class Wide(Learner):
    """Some thousand parameters."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.head = nn.Linear(3, 400).double(), nn.Linear(400, 3).double()
        for parameter in self.parameters():
            parameter.data = 0.1 * torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )


def neighbours():
    """Data, and the same with other samples of one client."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(sum(SIZES), 3)), rng.integers(0, 3, sum(SIZES))
    ends = np.cumsum(SIZES)
    clients = [np.arange(end - n, end) for end, n in zip(ends, SIZES, strict=True)]
    for shift in (0.0, 3.0):
        moved = x.copy()
        moved[clients[2]] += shift
        yield InMemoryDataModule(
            (torch.from_numpy(moved), torch.from_numpy(y)), clients=clients, batch_size=4
        )


def released(federation, method, rounds=1):
    return run(
        method, rounds=rounds, learner=Wide(), federation=federation, participation=1.0
    ).global_vector.detach()


def test_neighbouring_data_and_one_seed_do_not_cancel_the_noise():
    """The difference of the models is that of two draws, √2 times as wide as one.

    It tells nothing but noise.
    """
    clip, sigma = 0.05, 20.0
    deviation = sigma * clip / len(SIZES)
    ours, theirs = (
        released(federation, DifferentialPrivacy(clip, sigma)) for federation in neighbours()
    )
    difference = (ours - theirs).numpy() / deviation
    n = len(difference)
    assert n > 2500
    assert abs(difference.std() / math.sqrt(2) - 1) < 5 / math.sqrt(2 * n)
    assert stats.kstest(difference / math.sqrt(2), "norm").pvalue > 1e-5
    same = [
        released(federation, DifferentialPrivacy(clip, sigma, noise_seed=7))
        for federation in neighbours()
    ]
    assert float((same[0] - same[1]).norm()) < 2.1 * clip / len(SIZES), (
        "with a known seed it cancels: hence the note"
    )


def test_a_copy_of_the_folder_that_goes_on_with_other_data_has_other_noise(tmp_path):
    """One secret and one round, two sums; with the same sum it is the same release."""
    arguments = {"learner": Wide(), "participation": 1.0}
    first, second = neighbours()
    run(DifferentialPrivacy(0.05, 20.0), folder=str(tmp_path / "a"), federation=first, **arguments)
    left = []
    for name, federation in (("b", first), ("c", second), ("d", first)):
        shutil.copytree(tmp_path / "a", tmp_path / name)
        module = run(
            DifferentialPrivacy(0.05, 20.0),
            rounds=2,
            folder=str(tmp_path / name),
            federation=federation,
            resume=True,
            strict_resume=False,
            learner=Wide(),
            participation=1.0,
        )
        left.append(module.global_vector.detach())
    difference = (left[0] - left[1]).numpy() / (20.0 * 0.05 / len(SIZES))
    assert abs(difference.std() / math.sqrt(2) - 1) < 5 / math.sqrt(2 * len(difference))
    assert torch.equal(left[0], left[2])


def test_one_sum_at_two_scales_has_other_noise():
    """Two releases S + σ C z and S + σ' C z of one sum would tell S."""
    keyed = []

    class Server:
        n, num_clients, mean_change = 2, 10, torch.ones(3, dtype=torch.float64)

        def private_generator(self, purpose, onto):
            keyed.append(tuple(onto.tolist()))
            return np.random.default_rng(0)

    for clip, sigma in ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0)):
        DifferentialPrivacy(clip, sigma).aggregate(Server())
    assert len(set(keyed)) == 3


def test_two_runs_of_one_command_have_other_coins_and_other_bits():
    ours, theirs = run(), run()
    assert not torch.equal(ours.global_vector, theirs.global_vector)
    drawn = [[module.participants(t) for t in range(60)] for module in (ours, theirs)]
    plain = run(callbacks.ProximalTerm(0.0))
    assert drawn[0] != drawn[1] and [plain.participants(t) for t in range(60)] not in drawn


def test_without_noise_there_is_no_secret(tmp_path):
    ours, theirs = (
        run(DifferentialPrivacy(0.5, 0.0), folder=str(tmp_path / name)) for name in "ab"
    )
    assert torch.equal(ours.global_vector, theirs.global_vector)
    assert not list(tmp_path.rglob("secret-*"))
    assert ours.participants(5) == run(callbacks.ProximalTerm(0.0)).participants(5)


def secret_of(folder: Path) -> Path:
    (found,) = folder.glob("state/secret-*")
    return found


class Copies(FederatedCallback):
    """Copies the run's folder before each round but the first, as a kill would leave it there."""

    def __init__(self, folder: Path):
        super().__init__()
        vars(self)["_folder"] = folder

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch and trainer.is_global_zero:
            shutil.copytree(
                self._folder / "whole", self._folder / f"killed-{trainer.current_epoch}"
            )


@pytest.mark.slow
@pytest.mark.parametrize(("world", "then"), [(1, 1), (2, 2), (2, 1)])
def test_killed_after_any_round_it_ends_with_the_same_bits(world, then, tmp_path):
    def left(processes, name, *beside, **arguments):
        spread = {"strategy": "federated", "devices": 2} if processes == 2 else {}

        def job():
            methods = [DifferentialPrivacy(0.5, 1.0), *beside]
            made = {"trainer": spread, "folder": str(tmp_path / name), **COINS, **arguments}
            return outcome(fit(methods, ROUNDS, **made))

        with quiet():
            return in_processes(2, job) if processes == 2 else job()

    whole = left(world, "whole", Copies(tmp_path))
    for t in range(1, ROUNDS):
        resumed = left(then, f"killed-{t}", resume=True)
        assert all(torch.equal(whole[name], resumed[name]) for name in whole), t
        assert secret_of(tmp_path / f"killed-{t}").stat().st_mode & 0o777 == 0o600


def test_a_second_fit_by_the_same_trainer_keeps_the_secret_and_another_trainer_draws_one(tmp_path):
    module = run(folder=str(tmp_path))
    before = module.participants(7), secret_of(tmp_path).name
    with quiet():
        module.trainer.fit_loop.max_epochs = 2
        module.trainer.fit(module, module.trainer.datamodule)
    assert (module.participants(7), secret_of(tmp_path).name) == before
    run(folder=str(tmp_path / "other"), init_from=str(tmp_path / "checkpoints" / "last.ckpt"))
    assert secret_of(tmp_path / "other").read_bytes() != secret_of(tmp_path).read_bytes()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:31]),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
    ids=["lost", "cut", "pipe"],
)
def test_without_its_file_a_resumed_run_draws_another_and_says_so(spoil, tmp_path):
    run(folder=str(tmp_path / "a"), rounds=2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name in "ab":  # b remembers where a was
        spoil(secret_of(tmp_path / name))
    ours, theirs = (run(folder=str(tmp_path / name), rounds=3, resume=True) for name in "ab")
    assert not torch.equal(ours.global_vector, theirs.global_vector)
    assert any("secret" in note and "another is drawn" in note for note in ours.notes)


def test_a_file_that_others_can_read_is_closed_and_told(tmp_path):
    run(folder=str(tmp_path))
    path = secret_of(tmp_path)
    path.chmod(0o644)
    module = run(folder=str(tmp_path), rounds=2, resume=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert any("others than its owner" in note for note in module.notes)


def test_the_secret_is_in_its_own_file_alone(tmp_path):
    plain = {
        "client_optimizer": functools.partial(torch.optim.SGD, lr=0.1),
        "folder": str(tmp_path),
    }
    module = run(DifferentialPrivacy(0.5, 1.0), callbacks.CommunicationLogger(), rounds=2, **plain)
    module.export(tmp_path / "model.pt")
    torch.save(module, tmp_path / "module.pt")
    path = secret_of(tmp_path)
    value = path.read_bytes()
    shown = [value, value.hex().encode(), base64.b64encode(value), repr(value).encode()[2:-1]]
    others = [each for each in tmp_path.rglob("*") if each.is_file() and each != path]
    assert len(others) > 2 and not [
        each for each in others if any(form in each.read_bytes() for form in shown)
    ]
    assert not any(
        value.hex() in str(told) for told in (vars(module.run), module.notes, module.run.secret)
    )


class Reads(FederatedCallback):
    def on_server_update(self, server):
        server.update += 0 * server.mean_change


class ReadsRows(FederatedCallback):
    kept = ClientState(synchronised=False)

    def on_local_end(self, clients):
        self.kept[clients] = clients.x - clients.w

    def on_server_update(self, server):
        server.update += self.kept.rows(server, server.ids).sum(0)


class ReadsStaged(ReadsRows):
    def on_server_update(self, server):
        server.log("norm", sum(float(rows.norm()) for _, rows in self.kept.staged(server)))


class Measures(FederatedCallback):
    """Says that it only measures, and does not."""

    role = "measurement"
    raw = Upload(sent=False)

    def on_local_end(self, clients):
        self.raw[clients] = clients.x - clients.w

    def on_server_update(self, server):
        server.update = self.raw.mean()


class Weighted(Measures):
    def on_server_update(self, server):
        server.update = self.raw.weighted()


class ReadsNumber(FederatedCallback):
    def on_server_update(self, server):
        server.update *= server.n / server.num_clients


class ReadsWeights(FederatedCallback):
    def on_server_update(self, server):
        server.update /= server.weights.max()


@pytest.mark.parametrize(
    "reader",
    [Reads, ReadsRows, ReadsStaged, Measures, Weighted, ReadsNumber, ReadsWeights],
)
def test_methods_of_a_user_s_that_go_round_the_noise_are_refused(reader):
    with pytest.raises(UserError, match="in a private run"):
        run(DifferentialPrivacy(0.5, 1.0), reader(), participation=1.0)
    run(reader(), participation=1.0)  # without privacy they may


class LogsNumber(FederatedCallback):
    """A logger of a user's, which changes nothing."""

    role = "measurement"

    def on_server_update(self, server):
        server.log("participants", server.n + 0 * len(server.ids))


def test_who_takes_part_may_be_logged():
    """It is outside the guarantee, which a note says."""
    logged = run(DifferentialPrivacy(0.5, 1.0), LogsNumber(), participation=1.0)
    assert logged.trainer.callback_metrics["participants"] == len(SIZES)


def test_the_released_step_is_not_scaled_by_how_many_took_part():
    """Its length would show n, and without participants its noise would be lost."""
    with pytest.raises(UserError, match=r"MuonDirection and DifferentialPrivacy.* n/m"):
        run(DifferentialPrivacy(0.5, 1.0), callbacks.MuonDirection(average="all"))
    run(DifferentialPrivacy(0.5, 1.0), callbacks.MuonDirection())


class ReadsLogger(FederatedCallback):
    """Takes from a logger beside it what that sums."""

    def __init__(self, logger, name):
        super().__init__()
        self.logger = logger
        self.name = name

    def on_server_update(self, server):
        of_logger = getattr(self.logger, self.name)
        server.update = of_logger if isinstance(of_logger, torch.Tensor) else of_logger.mean()


@pytest.mark.parametrize(
    ("logger", "name"), [(callbacks.DriftLogger, "direction"), (callbacks.DivergenceLogger, "sum")]
)
def test_what_a_logger_sums_is_read_by_nobody_else(logger, name):
    """The logger itself runs beside privacy, and its sums have no noise."""
    beside = logger()
    with pytest.raises(UserError, match=f"ReadsLogger reads .*{name} in a private run"):
        run(DifferentialPrivacy(0.5, 1.0), beside, ReadsLogger(beside, name), participation=1.0)
    run(DifferentialPrivacy(0.5, 1.0), logger(), rounds=2, participation=1.0)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_round_without_the_method_or_of_a_known_seed_ends_the_claim(seed, tmp_path):
    """``strict_resume=False`` goes on with other settings."""
    going_on = {"folder": str(tmp_path), "resume": True, "strict_resume": False}
    run(folder=str(tmp_path))
    second = DifferentialPrivacy(0.5, 1.0, noise_seed=seed)
    run(callbacks.ProximalTerm(0.0) if seed is None else second, rounds=2, **going_on)
    with pytest.raises(UserError, match="had no privacy, other noise or coins"):
        run(rounds=3, **going_on)


def test_who_takes_part_is_not_known_before_the_fit_begins():
    class Asks(Learner):
        def configure_model(self):
            self.trainer.lightning_module.participants(0)

    with pytest.raises(UserError, match="draws its participants from a secret"):
        run(learner=Asks())


class Counts(Learner):
    """Its one buffer is ``held``; ``late``: made by ``configure_model``."""

    def __init__(self, held, late=False):
        super().__init__(embedding=False)
        self.held_value, self.late = held, late
        self.configure_model() if not late else None

    def configure_model(self):
        if "held" not in self._buffers:
            self.register_buffer("held", self.held_value)


@pytest.mark.parametrize(("dtype", "late"), [(torch.int64, False), (torch.complex64, True)])
def test_buffers_of_every_kind_of_number_are_refused(dtype, late):
    """A count of a client's samples, too."""
    with pytest.raises(UserError, match="the buffer held neither clipped nor noised"):
        run(
            DifferentialPrivacy(1.0, 1.0),
            learner=Counts(torch.zeros(2, dtype=dtype), late),
            buffers="average",
        )


class Writes(Learner):
    """Its local steps write a frozen parameter, which clients send as they send buffers."""

    def __init__(self):
        super().__init__(embedding=False)
        self.largest = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)

    def training_step(self, batch, batch_idx):
        self.largest.data += batch[0].abs().amax(0)
        return super().training_step(batch, batch_idx)


def test_frozen_parameters_that_steps_write_are_refused():
    with pytest.raises(UserError, match="the buffer largest neither clipped nor noised"):
        run(DifferentialPrivacy(1.0, 1.0), learner=Writes(), buffers="average")
    assert (
        run(
            DifferentialPrivacy(1.0, 1.0), learner=Writes(), buffers={"larg*": "keep"}
        ).trainer.current_epoch
        == 1
    )
