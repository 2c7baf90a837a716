"""Runs over sites in threads leave the bits of the simulation."""

from __future__ import annotations

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

from fl_lightning import Diverged, FederatedModule, InMemoryDataModule, UserError, callbacks, load
from fl_lightning.callback import Clients, FederatedCallback, ServerState, Upload
from fl_lightning.callbacks import (
    CommunicationLogger,
    ControlVariates,
    DivergenceLogger,
    DriftLogger,
    DynamicRegularization,
    GlobalLossLogger,
    GlobalSharpnessAwareMinimization,
    LowRankUpdate,
    PartialAveraging,
    PowerOfChoice,
    RandomSkips,
    RelaxedInitialization,
    RobustAggregation,
    TopKCompression,
)
from fl_lightning.deploy import site as at_site
from fl_lightning.deploy.at_server import AtServer
from fl_lightning.deploy.site import AtSite, Ended
from fl_lightning.deploy.transport import InMemoryTransport, Killed, Message, Post
from tests.deploy.flower_runs import rows_at, rows_of
from tests.helpers.rows import Times

SIZES = [10, 6, 12, 4, 7, 20, 3, 8, 6]
SHARES = {"north": [0, 3, 8], "south": [1, 2, 7], "west": [4, 5, 6]}
ROUNDS = 5
pytestmark = pytest.mark.slow


class Learner(pl.LightningModule):
    """With batch statistics and a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        for parameter in self.parameters():
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)
        self.seen = torchmetrics.Accuracy("multiclass", num_classes=3)

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


def site(
    clients: list[int],
    folder: Path,
    methods: Callable[[], list[Any]],
    options: Any,
    post: Post,
    fewest_samples: int = 0,
) -> None:
    """What a site's process does: the same fit, whose first epoch serves the server."""
    with suppress(Ended):
        at = AtSite(post, clients, folder, fewest_samples=fewest_samples)
        trained([*methods(), at], 1, [], **options)


def over_sites(
    methods: Callable[[], list[Any]],
    folder: Path,
    shares: dict[str, list[int]] | None = None,
    timeout: float = 600,
    wrap: Callable[[str, Post], Post] = lambda name, post: post,
    rounds: int = ROUNDS,
    carrier: type[InMemoryTransport] = InMemoryTransport,
    min_sites: int | None = None,
    fewest_samples: int = 0,
    **options: Any,
) -> tuple[FederatedModule, list[dict[str, float]], InMemoryTransport]:
    """A run over sites, each with a folder of its own below ``folder``."""
    shares = SHARES if shares is None else shares
    server_alone = ("resume", "save", "root")
    own = {name: value for name, value in options.items() if name not in server_alone}

    def serve(name: str, post: Post) -> None:
        site(shares[name], folder / name, methods, own, wrap(name, post), fewest_samples)

    transport = carrier({name: partial(serve, name) for name in shares})
    metrics: list[dict[str, float]] = []
    at = AtServer(transport, run=7, timeout=timeout, min_sites=min_sites or len(shares))
    try:
        module = trained([*methods(), at], rounds, metrics, **options)
    finally:
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
    "fedsmoo": (
        lambda: [DynamicRegularization(0.1), GlobalSharpnessAwareMinimization(0.1)],
        {},
    ),
    "fedals": (federated_als, {}),
    "fedals, empty rounds": (federated_als, {"sampling": "poisson", "participation": 0.08}),
    "fedals, whole upload": (lambda: [*federated_als(), WholeUpload()], {}),
    "fedexp, evaluated": (lambda: [callbacks.ExtrapolatedStep(), PullToEvaluated()], {}),
    "top-k": (lambda: [TopKCompression(0.25), CommunicationLogger()], {}),
    "median": (lambda: [RobustAggregation("median")], {}),
    "samples": (lambda: [ControlVariates()], {"weighting": "samples"}),
    "power of choice": (lambda: [PowerOfChoice(), CommunicationLogger()], {"participation": 4}),
    "q-fedavg": (lambda: [callbacks.FairAggregation(), CommunicationLogger()], {}),
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
    "averaged muon": (lambda: [callbacks.MuonDirection(start="averaged")], {}),
    "fedmoswa": (lambda: [callbacks.DecayWithinRound(), ControlVariates(momentum=0.4)], {}),
    "fedacg": (lambda: [callbacks.LookaheadMomentum(), CommunicationLogger()], {}),
    "fedgloss": (lambda: [callbacks.ServerAscent(), DynamicRegularization(0.1)], {}),
    "fedwmsam": (lambda: [callbacks.MomentumGuidedPerturbation()], {}),
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


class Lost(FederatedCallback):
    """Loses two clients to infinity."""

    def on_local_end(self, clients: Clients) -> None:
        if clients.client_ids[0] in (1, 5):
            clients.x *= torch.inf


def test_all_whose_updates_are_not_finite_are_named_with_their_sites(tmp_path: Path) -> None:
    told = "the update of client 1 at site south, of client 5 at site west in round 0 is not finite"
    with pytest.raises(Diverged, match=told):
        over_sites(lambda: [Lost()], tmp_path, participation="all")


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


@pytest.mark.parametrize("learner", [Learner, Half])
@pytest.mark.parametrize("carrier", [InMemoryTransport, Restarted])
def test_a_client_without_a_row_starts_from_the_initial_model(
    carrier: type[InMemoryTransport], learner: type[Learner], tmp_path: Path
) -> None:
    methods, _ = METHODS["fedinit"]
    options = {"participation": 4, "learner": learner}
    simulated = trained(methods(), 3, [], **options)
    over, _, _ = over_sites(methods, tmp_path, carrier=carrier, rounds=3, timeout=60, **options)
    check_same(simulated, over, tmp_path)


@pytest.mark.parametrize("carrier", [InMemoryTransport, Restarted])
def test_buffers_of_clients_own_start_from_the_servers_present_ones(
    carrier: type[InMemoryTransport], tmp_path: Path
) -> None:
    options = {"participation": 3, "buffers": "own"}
    simulated = trained([], ROUNDS, [], **options)
    over, _, _ = over_sites(lambda: [], tmp_path, carrier=carrier, timeout=60, **options)
    check_same(simulated, over, tmp_path)


@pytest.mark.parametrize("name", ["scaffold", "top-k"])
def test_one_client_a_site_is_the_simulation_too(name: str, tmp_path: Path) -> None:
    methods, _ = METHODS[name]
    simulated = trained(methods(), ROUNDS, [])
    shares = {f"site{i}": [i] for i in range(len(SIZES))}
    over, _, _ = over_sites(methods, tmp_path, shares=shares)
    check_same(simulated, over, tmp_path)


def test_engines_of_sites_may_train_their_clients_side_by_side(tmp_path: Path) -> None:
    methods, _ = METHODS["scaffold"]
    simulated = trained(methods(), 2, [])
    options = {"engine": "concurrent", "workers": 2, "capture": False}
    over, _, _ = over_sites(methods, tmp_path, rounds=2, **options)
    check_same(simulated, over, tmp_path)


class Smaller(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.net[3] = nn.Linear(6, 3, bias=False)


def test_all_sites_that_refuse_are_told_in_one_paragraph(tmp_path: Path) -> None:
    """So that they are mended in one go, and not one a try."""

    def other(name: str, post: Post) -> None:
        learner = Smaller if name != "sound" else Learner
        site([len(name)], tmp_path / name, lambda: [], {"learner": learner}, post)

    transport = InMemoryTransport({name: partial(other, name) for name in ("a", "sound", "odd")})
    with pytest.raises(UserError) as error:
        trained([AtServer(transport, run=7)], 1, [])
    transport.close()
    for name in ("a", "odd"):
        assert f"site {name}: its model has 54 parameters, and the server's" in str(error.value)
    assert "site sound" not in str(error.value)
    assert "\n" not in str(error.value)


def test_another_version_is_told_with_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_site, "version_of", lambda package: "0.0.7")
    with pytest.raises(UserError, match=r"site a: it has fl-lightning 0\.0\.7, and the server"):
        over_sites(lambda: [], tmp_path, shares={"a": [0]}, rounds=1)


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
            raise Killed
        self.post.give(answer)


def test_a_site_that_is_killed_between_its_rows_and_its_reply_is_asked_again(
    tmp_path: Path,
) -> None:
    methods, options = METHODS["scaffold"]
    killed = []

    def wrap(name: str, post: Post) -> Post:
        if name == "south" and not killed:
            killed.append(name)
            return Broken(post, at=2)
        return post

    simulated = trained(methods(), ROUNDS, [], **options)
    over, _, carried = over_sites(methods, tmp_path, wrap=wrap, **options)
    check_same(simulated, over, tmp_path)
    asked = [what for way, site, what, _ in carried.array_bytes if (way, site) == ("down", "south")]
    assert killed == ["south"] and asked.count("hello") == 2


class OtherNumber(InMemoryTransport):
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
    methods, options = METHODS["scaffold"]

    def serve(name: str, post: Post) -> None:
        folder = name.removesuffix(" again")
        wrapped = Broken(post, at=2) if name == "south" else post
        site(SHARES[folder], tmp_path / folder, methods, {}, wrapped)

    names = [*SHARES, "south again"]
    transport = OtherNumber({name: partial(serve, name) for name in names})
    simulated = trained(methods(), ROUNDS, [], **options)
    at = AtServer(transport, run=7, timeout=60, min_sites=3)
    over = trained([*methods(), at], ROUNDS, [], **options)
    transport.close()
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


def test_a_checkpoint_that_is_older_than_both_versions_is_refused(tmp_path: Path) -> None:
    methods, _ = METHODS["scaffold"]
    options = {"participation": "all"}
    path = tmp_path / "last.ckpt"
    over_sites(methods, tmp_path / "sites", rounds=1, save=path, **options)
    over_sites(methods, tmp_path / "sites", rounds=4, resume=path, **options)
    with pytest.raises(UserError, match="resumes client"):
        over_sites(methods, tmp_path / "sites", rounds=4, resume=path, **options)


def test_a_site_that_does_not_answer_counts_as_dropped(tmp_path: Path) -> None:
    """Without the others' clients the round is that of a run in which they diverge."""
    shares = {"here": [0, 1, 2, 3, 4, 5, 6, 8], "away": [7]}
    metrics: list[dict[str, float]] = []

    def serve(name: str, post: Post) -> None:
        site(shares[name], tmp_path / name, lambda: [], {"participation": "all"}, post)

    transport = InMemoryTransport({name: partial(serve, name) for name in shares})
    transport.swallows = lambda m: m.site == "away" and m.what == "round"
    at = AtServer(transport, run=7, timeout=20, min_sites=2)
    module = trained([at], 1, metrics, participation="all")
    transport.close()
    assert any("clients [7] dropped" in note for note in module.notes)
    store = module.client_rows.store
    assert store.clients("sites.round").tolist() == shares["here"]
    assert bool(torch.isfinite(module.global_vector).all())


def test_a_client_of_two_sites_is_refused_and_so_is_a_folder_of_another_run(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match="two sites, east and west, have client 3"):
        over_sites(lambda: [], tmp_path, shares={"east": [0, 3], "west": [3, 4]}, rounds=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "site.json").write_text(
        '{"run": 9, "committed": {}, "staged": [], "rows": {}}', "utf-8"
    )
    with pytest.raises(UserError, match="rows of another run"):
        over_sites(lambda: [], tmp_path, shares={"other": [0]}, rounds=1)


def test_what_needs_clients_at_the_server_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="GlobalLossLogger needs the clients' samples"):
        over_sites(lambda: [GlobalLossLogger()], tmp_path, rounds=1)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "top-k"])
def test_the_arrays_of_a_round_take_what_the_logger_counts(name: str, tmp_path: Path) -> None:
    # What a logger sends beside is no method's, and counted nowhere.
    methods = METHODS[name][0] if name != "fedavg" else lambda: [CommunicationLogger()]
    options = {"participation": 2, "local_epochs": 1, "learner": Wide}
    _, metrics, carried = over_sites(
        methods, tmp_path, shares={str(i): [i] for i in range(9)}, rounds=1, **options
    )
    for way in ("down", "up"):
        sent = sum(
            size
            for where, _, what, size in carried.array_bytes
            if where == way and what in ("round", "trained")
        )
        counted = metrics[-1][f"communication/{way}_bytes"]
        counted += metrics[-1]["communication/buffers_bytes"] / 2
        assert sent == pytest.approx(counted, rel=0.02)


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
