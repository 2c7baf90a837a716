"""Runs over sites in threads leave the bits of the simulation."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn

from fl_lightning import FederatedModule, InMemoryDataModule, callbacks, load
from fl_lightning.callback import Clients, FederatedCallback, ServerState, Upload
from fl_lightning.callbacks import (
    CommunicationLogger,
    ControlVariates,
    DivergenceLogger,
    DriftLogger,
    DynamicRegularization,
    LowRankUpdate,
    PartialAveraging,
    PowerOfChoice,
    RandomSkips,
    RecordPrivacy,
    RelaxedInitialization,
    RobustAggregation,
    TopKCompression,
)
from fl_lightning.deploy.at_server import AtServer
from fl_lightning.deploy.site import AtSite, Ended
from fl_lightning.deploy.transport import InMemoryTransport, Message, Post
from tests.deploy.flower_runs import rows_at, rows_of
from tests.helpers.rows import Times

SIZES = [10, 6, 12, 4, 7, 20, 3, 8, 6]
SHARES = {"north": [0, 3, 8], "south": [1, 2, 7], "west": [4, 5, 6]}
ROUNDS = 5
pytestmark = pytest.mark.slow


class Learner(pl.LightningModule):
    """With batch statistics and a metric of its own: ``seen``, or the accuracy."""

    def __init__(self, seen: torchmetrics.Metric | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        for parameter in self.parameters():
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)
        accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.seen = copy.deepcopy(accuracy if seen is None else seen)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        self.seen(logits, y)
        self.log("train/acc", self.seen)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self.net(x), y))


def data() -> InMemoryDataModule:
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(sum(SIZES), 3))).float()
    y = torch.from_numpy(rng.integers(0, 3, sum(SIZES)))
    ends = np.cumsum(SIZES)
    clients = [np.arange(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    return InMemoryDataModule((x, y), val=(x[:20], y[:20]), clients=clients, batch_size=4)


class Wide(Learner):
    """A million parameters, and buffers that count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 112_000), nn.BatchNorm1d(112_000))
        self.head = nn.Linear(112_000, 3)
        self.net.append(self.head)


def trained(
    callbacks: Sequence[Any], rounds: int, metrics: list[dict[str, float]], **options: Any
) -> FederatedModule:
    """Fit with these callbacks; the metrics of each round are added to ``metrics``."""

    class Heard(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            seen = trainer.callback_metrics.items()
            metrics.append({k: float(v) for k, v in seen if not k.startswith("time/")})

    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    resume = options.pop("resume", None)
    save = options.pop("save", None)
    # Where it keeps a run's files; else it keeps none.
    root = options.pop("root", None)
    learner = options.pop("learner", Learner)
    module_of_data = options.pop("data", data)
    settings = {"participation": 7, "local_epochs": 2, "engine": "sequential", **options}
    settings.setdefault("client_optimizer", partial(torch.optim.SGD, lr=0.1, weight_decay=0.01))
    module = FederatedModule(learner(), seed=1, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            # Where what belongs to a checkpoint lies beside it.
            default_root_dir=root or next((path.parent for path in (save, resume) if path), None),
            max_epochs=rounds,
            callbacks=[*callbacks, Heard()],
            accelerator="cpu",
            logger=False if root is None else CSVLogger(root),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, module_of_data(), ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(save)
    return module


class Watched(InMemoryTransport):
    """Counts the bytes of the arrays of each message (way, site, what, bytes), and may lose some.

    ``swallows``: whether a message down is lost.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.array_bytes: list[tuple[str, str, str, int]] = []
        self.swallows: Callable[[Message], bool] = lambda message: False

    def send(self, messages: list[Message]) -> None:
        self._count("down", messages)
        super().send([message for message in messages if not self.swallows(message)])

    def receive(self, timeout: float) -> list[Message]:
        return self._count("up", super().receive(timeout))

    def _count(self, way: str, messages: list[Message]) -> list[Message]:
        self.array_bytes += [(way, m.site, m.what, m.array_bytes) for m in messages]
        return messages


def losing(lost: Callable[[Message], bool]) -> Callable[[Any], Watched]:
    """A carrier that loses these messages down."""

    def made(serving: Any) -> Watched:
        carrier = Watched(serving)
        carrier.swallows = lost
        return carrier

    return made


def over_sites(
    methods: Callable[[], list[Any]],
    folder: Path,
    shares: dict[str, list[int]] | None = None,
    timeout: float = 600,
    wrap: Callable[[str, Post], Post] = lambda name, post: post,
    rounds: int = ROUNDS,
    carrier: Callable[[Any], InMemoryTransport] = Watched,
    min_sites: int | None = None,
    fewest_samples: int = 0,
    at_site: Callable[[str], dict[str, Any]] = lambda name: {},
    **options: Any,
) -> tuple[FederatedModule, list[dict[str, float]], Any]:
    """A run over sites, each with a folder of its own below ``folder``.

    A site's process does the same fit, whose first epoch serves the server. ``at_site``: by a
    site's name, options that are others there, and whether it has its ``own`` data. ``carrier``:
    of the sites, or of those that an earlier server left.
    """
    shares = SHARES if shares is None else shares
    options.setdefault("close", True)
    own = {k: v for k, v in options.items() if k not in ("resume", "save", "root", "close")}

    def serve(name: str, post: Post) -> None:
        given = {"methods": methods, "own": False, **own, **at_site(name)}
        place = folder / name.removesuffix(" again")
        brought = given.pop("own")
        at = AtSite(wrap(name, post), shares[name], place, brought, fewest_samples)
        with suppress(Ended):
            trained([*given.pop("methods")(), at], 1, [], **given)

    transport = carrier({name: partial(serve, name) for name in shares})
    metrics: list[dict[str, float]] = []
    close = options.pop("close")
    at = AtServer(transport, run=7, timeout=timeout, min_sites=min_sites or len(shares))
    try:
        module = trained([*methods(), at], rounds, metrics, **options)
    finally:
        if close:
            transport.close()
    return module, metrics, transport


def same(ours: dict[Any, Tensor], theirs: dict[Any, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    assert not different
    # Equal numbers of two types count as equal above.
    assert [value.dtype for value in ours.values()] == [theirs[key].dtype for key in ours]


def check_same(
    simulated: FederatedModule, over: FederatedModule, folder: Path, whole: bool = True
) -> None:
    """w, buffers, server states and client rows are the same bits."""
    same({"w": simulated.global_vector}, {"w": over.global_vector})
    if whole:
        same({"w": simulated.evaluated_vector}, {"w": over.evaluated_vector})
    same(dict(simulated.learner.named_buffers()), dict(over.learner.named_buffers()))
    same(simulated.server_states, over.server_states)
    same(rows_of(simulated.client_rows.store), rows_at(sorted(folder.iterdir())))


def federated_als() -> list[Any]:
    parts = PartialAveraging(periods={"net.3.*": "never", "net.0.*": 2})
    return [parts, CommunicationLogger(), DivergenceLogger(all_clients=False), DriftLogger()]


class WholeUpload(FederatedCallback):
    """Sends D numbers in each round, also where the round averages only some coordinates."""

    moved = Upload()
    mean = ServerState(synchronised=False, sent=True)

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Tensor:
        return gradient + 0.05 * self.mean

    def on_local_end(self, clients: Clients) -> None:
        self.moved[clients] = clients.x - clients.w

    def on_server_update(self, server: Any) -> None:
        self.mean = self.moved.mean()


class PullToEvaluated(FederatedCallback):
    reads_evaluated = True

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Tensor:
        return gradient + 0.05 * (clients.x - clients.evaluated)


METHODS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "fedavg": (lambda: [CommunicationLogger(), DriftLogger(), DivergenceLogger()], {}),
    "scaffold": (lambda: [ControlVariates(), CommunicationLogger()], {}),
    "fedinit": (lambda: [RelaxedInitialization(beta=0.1), CommunicationLogger()], {}),
    "fedals": (federated_als, {}),
    "fedals, empty rounds": (federated_als, {"sampling": "poisson", "participation": 0.08}),
    "fedals, whole upload": (lambda: [*federated_als(), WholeUpload()], {}),
    "fedexp, evaluated": (lambda: [callbacks.ExtrapolatedStep(), PullToEvaluated()], {}),
    "top-k": (lambda: [TopKCompression(0.25), CommunicationLogger()], {}),
    "median": (lambda: [RobustAggregation("median")], {}),
    "samples": (lambda: [ControlVariates()], {"weighting": "samples"}),
    "power of choice": (lambda: [PowerOfChoice(), CommunicationLogger()], {"participation": 4}),
    "powersgd": (lambda: [LowRankUpdate(rank=1), CommunicationLogger()], {}),
    "scaffnew": (lambda: [RandomSkips(0.5)], {"participation": "all", "local_epochs": None}),
    "accumulated": (lambda: [ControlVariates(), CommunicationLogger()], {"accumulate": 2}),
    "kept optimizer": (lambda: [], {"keep_optimizer_state": True}),
    "fedadamw": (
        lambda: [
            callbacks.AdamDirection(second="averaged"),
            callbacks.GlobalDirection(),
            CommunicationLogger(),
        ],
        {},
    ),
    "fedgloss": (lambda: [callbacks.ServerAscent(), DynamicRegularization(0.1)], {}),
    "integers": (lambda: [Times(), CommunicationLogger()], {}),
}


@pytest.mark.parametrize("name", METHODS)
def test_sites_leave_the_bits_of_the_simulation(name: str, tmp_path: Path) -> None:
    methods, options = METHODS[name]
    metrics: list[dict[str, float]] = []
    simulated = trained(methods(), ROUNDS, metrics, **options)
    over, seen, _ = over_sites(methods, tmp_path, **options)
    stays = name.startswith("fedals")
    check_same(simulated, over, tmp_path, whole=not stays)
    assert any("val/… is of w" in note for note in over.notes) == stays
    assert ("parts.averaged" in simulated.server_states) == (name == "fedals, empty rounds")
    for ours, theirs in zip(metrics, seen, strict=True):
        if stays:
            # These need the parts that stay at the sites.
            away = ("val/", "divergence/participants", "drift/")
            assert not any(k.startswith(away[1:]) for k in theirs)
            ours = {k: v for k, v in ours.items() if not k.startswith(away)}
            theirs = {k: v for k, v in theirs.items() if not k.startswith(away)}
        assert ours == theirs


class Reads(FederatedCallback):
    """Reads what is of all participants, and loses one client to infinity."""

    reads_evaluated = True

    def on_local_end(self, clients: Clients) -> None:
        clients.log("share", clients.weights)
        clients.log("evaluated", clients.evaluated.norm().expand(len(clients.ids)))

    def on_local_step_end(self, clients: Clients) -> None:
        if clients.client_ids[0] == 5:
            clients.x *= torch.inf


def test_weights_of_all_participants_are_known_and_a_client_that_diverged_is_left_out(
    tmp_path: Path,
) -> None:
    options = {"weighting": "samples", "on_nonfinite": "skip"}
    metrics: list[dict[str, float]] = []
    simulated = trained([Reads()], ROUNDS, metrics, **options)
    over, seen, _ = over_sites(lambda: [Reads()], tmp_path, **options)
    check_same(simulated, over, tmp_path)
    assert metrics == seen
    told = [note for note in simulated.notes if "were left out" in note]
    assert told and told == [note for note in over.notes if "were left out" in note]


class Restarted(InMemoryTransport):
    """Each round starts its sites' processes, and the server hears nothing of those before."""

    begun: tuple[Any, ...] = ()

    def send(self, messages: list[Message]) -> None:
        last = messages[-1]
        # A process that has just started asks to be greeted first, and then goes on.
        if last.what != "hello" and (last.what, last.numbers["round"]) != self.begun:
            self.begun = (last.what, last.numbers["round"])
            self.close()
        super().send(messages)


class Half(Learner):
    """It has a buffer of numbers that NumPy does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.bfloat16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.scale.mul_(0.5)
        return super().training_step((batch[0] * self.scale, batch[1]), batch_idx)


STARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "the initial model, bfloat16": ("fedinit", {"participation": 4, "learner": Half}),
    "the server's present buffers": ("fedavg", {"participation": 3, "buffers": "own"}),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_client_without_a_row_starts_from(name: str, tmp_path: Path) -> None:
    method, options = STARTS[name]
    methods, _ = METHODS[method]
    simulated = trained(methods(), 4, [], **options)
    given = {"carrier": Restarted, "rounds": 4, "timeout": 60, **options}
    over, _, _ = over_sites(methods, tmp_path, **given)
    check_same(simulated, over, tmp_path)


def test_engines_of_sites_may_train_their_clients_side_by_side(tmp_path: Path) -> None:
    methods, _ = METHODS["scaffold"]
    simulated = trained(methods(), 2, [])
    options = {"engine": "concurrent", "workers": 2, "capture": False}
    over, _, _ = over_sites(methods, tmp_path, rounds=2, **options)
    check_same(simulated, over, tmp_path)


class Broken:
    """The post of a site that is killed before its reply of a round, or of its evaluation."""

    def __init__(self, post: Post, at: int, what: str = "trained") -> None:
        self.post = post
        self.at = at
        self.what = what

    def take(self) -> Message | None:
        return self.post.take()

    def give(self, answer: Message) -> None:
        # The rows of the round are staged by now.
        if answer.what == self.what and answer.numbers["round"] == self.at:
            raise SystemExit
        self.post.give(answer)


class KilledOnce:
    """Kills the site south once, before its answer of this kind in this round leaves."""

    def __init__(self, at: int, what: str = "trained") -> None:
        self.at, self.what = at, what
        self.killed: list[str] = []

    def __call__(self, name: str, post: Post) -> Post:
        if name == "south" and not self.killed:
            self.killed.append(name)
            return Broken(post, self.at, self.what)
        return post

    def check(self, carried: Watched) -> None:
        """It was killed, and asked again."""
        asked = [what for *place, what, _ in carried.array_bytes if place == ["down", "south"]]
        assert self.killed == ["south"] and asked.count("hello") == 2


def test_a_site_killed_between_its_rows_and_its_reply_is_asked_again(tmp_path: Path) -> None:
    methods, options = METHODS["scaffold"]
    wrap = KilledOnce(at=2)
    simulated = trained(methods(), ROUNDS, [], **options)
    over, _, carried = over_sites(methods, tmp_path, wrap=wrap, **options)
    check_same(simulated, over, tmp_path)
    wrap.check(carried)


class OtherNumber(Watched):
    """Its site south is killed in round 2, and comes back as another while it still seems there."""

    def sites(self) -> list[str]:
        return sorted({"north", "south", "west"} | ({"south again"} if self.dead else set()))

    dead = False

    def receive(self, timeout: float) -> list[Message]:
        came = super().receive(timeout)
        if any(message.what == "lost" for message in came):
            self.dead = True
            self.swallows = lambda message: message.site == "south"
            return []
        return came


def test_a_site_that_comes_back_under_another_name_is_the_same_site(tmp_path: Path) -> None:
    methods, _ = METHODS["scaffold"]
    shares = {**SHARES, "south again": SHARES["south"]}
    simulated = trained(methods(), ROUNDS, [])

    def wrap(name: str, post: Post) -> Post:
        return Broken(post, at=2) if name == "south" else post

    given = {"timeout": 60, "carrier": OtherNumber, "min_sites": 3}
    over, _, transport = over_sites(methods, tmp_path, shares, wrap=wrap, **given)
    check_same(simulated, over, tmp_path)
    assert transport.dead


@pytest.mark.parametrize("back", [0, 1])
def test_a_server_that_is_started_again_goes_on_from_its_last_checkpoint(
    back: int, tmp_path: Path
) -> None:
    """``back``: rounds that the sites are ahead of the checkpoint."""
    methods, options = METHODS["scaffold"]
    simulated = trained(methods(), 4, [], **options)
    sites = tmp_path / "sites"
    path = tmp_path / "last.ckpt"
    over_sites(methods, sites, rounds=3 - back, save=path, **options)
    if back:
        over_sites(methods, sites, rounds=3, resume=path, **options)
    over, _, _ = over_sites(methods, sites, rounds=4, resume=path, **options)
    check_same(simulated, over, sites)


@pytest.mark.parametrize("name", ["scaffold", "top-k"])
def test_the_arrays_of_a_round_take_what_the_logger_counts(name: str, tmp_path: Path) -> None:
    methods, _ = METHODS[name]
    options = {"participation": 2, "local_epochs": 1, "learner": Wide}
    shares = {str(i): [i] for i in range(9)}
    _, metrics, carried = over_sites(methods, tmp_path, shares=shares, rounds=1, **options)
    for way, sent in sent_bytes(carried).items():
        counted = metrics[-1][f"communication/{way}_bytes"]
        counted += metrics[-1]["communication/buffers_bytes"] / 2
        assert sent == pytest.approx(counted, rel=0.02)


def sent_bytes(carried: Watched) -> dict[str, int]:
    """The bytes of the arrays of rounds, down and up."""
    sent = dict.fromkeys(("down", "up"), 0)
    for way, _, what, size in carried.array_bytes:
        sent[way] += size * (what in ("round", "trained"))
    return sent


def test_rows_are_read_back_from_a_site_folder(tmp_path: Path) -> None:
    methods, _ = METHODS["scaffold"]
    over_sites(methods, tmp_path, rounds=2)
    rows = rows_at(sorted(tmp_path.iterdir()))
    assert rows
    for name, folder in SHARES.items():
        run = load(tmp_path / name)
        for client in folder:
            here = run.client_state("ControlVariates.c_i", client)
            there = rows.get(("ControlVariates.c_i", client))
            assert (here is None) == (there is None)
            assert here is None or torch.equal(here, there)


class WithoutNorm(pl.LightningModule):
    """Two layers in float64, whose samples do not meet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize("sigma", [2.0, None])
def test_privacy_of_samples(sigma: float | None, tmp_path: Path) -> None:
    """Each site draws the simulation's noise from a seed, and other noise from its secret."""
    options: dict[str, Any] = {"learner": WithoutNorm, "rounds": 2, "buffers": "keep"}
    options["participation"] = 3

    def known() -> list[Any]:
        target = 3.0 if sigma is None else None
        return [RecordPrivacy(0.5, sigma, target, noise_seed=3), ControlVariates()]

    simulated = trained(known(), metrics=[], **options)
    over, _, _ = over_sites(known, tmp_path, **options)
    check_same(simulated, over, tmp_path)

    def secret() -> list[Any]:
        return [RecordPrivacy(0.5, 2.0)]

    if sigma is not None:
        ends = [over_sites(secret, tmp_path / name, **options)[0].global_vector for name in "ab"]
        assert not torch.equal(*ends)
