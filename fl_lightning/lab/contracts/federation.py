"""A federation small enough to run forty times in seconds, and comparisons of the results of
runs.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException, start_processes

from fl_lightning import callbacks as packaged
from fl_lightning.callback import FederatedCallback, Refusal
from fl_lightning.datamodules.sources.memory import InMemoryDataModule
from fl_lightning.evaluation import personal_models
from fl_lightning.lab.contracts.check_report import Failed
from fl_lightning.machine.lightning import LOGGERS, ModelCheckpoint, pl
from fl_lightning.machine.processes import place
from fl_lightning.models import MultiHead
from fl_lightning.module import FederatedModule
from fl_lightning.round.settings import SEQUENTIAL

# With batches of 4 these sizes give a client with one sample, short last batches, and different
# K_i.
SIZES = [1, 5, 9, 4, 12, 7]
ROUNDS = 3
Outcome = dict[str, Tensor]


class LowRank(nn.Linear):
    """A linear layer with an adapter: ``(W + scaling B A) x + bias``, W frozen, B 0 at first."""

    def __init__(self, d_in: int, out: int, rank: int, scaling: float) -> None:
        super().__init__(d_in, out)
        self.lora_A = nn.Parameter(torch.zeros(rank, d_in))
        self.lora_B = nn.Parameter(torch.zeros(out, rank))
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scaling * (x @ self.lora_A.T) @ self.lora_B.T


def layer(into: int, out: int, scaling: float, adapters: bool | str) -> nn.Module:
    """Return a linear layer, with adapters of rank 2 or with RAVAN's heads; its bias is trained."""
    if adapters != "heads":
        return LowRank(into, out, 2, scaling) if adapters else nn.Linear(into, out)
    made = MultiHead(nn.Linear(into, out), rank=2, heads=2)
    made.linear.bias.requires_grad_(True)
    return made


class Learner(pl.LightningModule):
    """Two layers in float64, and a buffer that follows the inputs, not the weights.

    One class serves all checks.

    Args:
        frozen: whether the first bias is frozen.
        dead: whether the loss is constant, so that all gradients are zero.
        embedding: None, or whether the gradient of an embedding before the layers is sparse. The
            embedding's second row and an extra parameter get no gradient at all.
        adapters: whether the two layers' weights are frozen and have adapters, of rank 2; or
            ``"heads"``: RAVAN's.
        buffers: whether it has buffers, without an embedding; with buffers it cannot be stacked.
    """

    running_mean: Tensor
    batches: Tensor

    def __init__(
        self,
        frozen: bool = False,
        dead: bool = False,
        embedding: bool | None = None,
        adapters: bool | str = False,
        buffers: bool = True,
    ) -> None:
        super().__init__()
        self.dead = dead
        self.has_buffers = buffers and embedding is None
        self.embeds = embedding is not None
        if embedding is not None:
            self.table = nn.Embedding(3, 3, sparse=embedding)
            self.unused = nn.Parameter(torch.zeros(2))
        self.first: nn.Module = layer(3, 4, 0.5, adapters)
        self.head: nn.Module = layer(4, 3, 1.5, adapters)
        self.double()
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data = 0.5 * torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
        for each in self.modules():
            if isinstance(each, LowRank):
                each.weight.requires_grad_(False)
                each.lora_B.data.zero_()
            if isinstance(each, MultiHead):
                each.linear.weight.requires_grad_(False)
                each.heads_s.data.fill_(1.0)
        if frozen:
            self.first_bias.requires_grad_(False)
        if self.has_buffers:
            # Both buffers depend only on the batches, so every method must leave them as FedAvg
            # does.
            self.register_buffer("running_mean", torch.zeros(3, dtype=torch.float64))
            self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    @property
    def first_bias(self) -> Tensor:
        """The bias that ``frozen`` freezes."""
        first = self.first.linear if isinstance(self.first, MultiHead) else self.first
        assert isinstance(first, nn.Linear)
        return first.bias

    def forward(self, x: Tensor) -> Tensor:
        if self.embeds:
            x = x + self.table((x[:, 0] > 0).long())
        logits: Tensor = self.head(torch.tanh(self.first(x)))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.has_buffers:
            self.running_mean += 0.1 * (x.mean(0) - self.running_mean)
            self.batches += 1
        loss = nn.functional.cross_entropy(self(x), y)
        return loss * 0.0 if self.dead else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self(x)
        self.log("val/loss", nn.functional.cross_entropy(scores, y))
        self.log("val/acc", (scores.argmax(1) == y).double().mean())


def data(order: Sequence[int] | None = None, batch_size: int | None = 4) -> InMemoryDataModule:
    """Return heterogeneous clients, each with three test samples of its own.

    ``order`` registers them in another order.
    """
    rng = np.random.default_rng(3)
    # Draw all inputs first, and then all labels.
    inputs = [rng.normal(size=(size, 3)) + rng.normal(size=3) for size in SIZES]
    labels = []
    for client, size in enumerate(SIZES):
        own = rng.random(size) < 0.6
        labels.append(np.where(own, client % 3, rng.integers(0, 3, size)))
    x = np.concatenate(inputs)
    y = np.concatenate(labels)
    ends = np.cumsum(SIZES)
    clients = [np.arange(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    tests = list(np.arange(3 * len(SIZES)).reshape(-1, 3))
    if order is not None:
        clients = [clients[i] for i in order]
        tests = [tests[i] for i in order]
    test_x = rng.normal(size=(3 * len(SIZES), 3))
    test_y = rng.integers(0, 3, 3 * len(SIZES))
    return InMemoryDataModule(
        (torch.from_numpy(x), torch.from_numpy(y)),
        test=(torch.from_numpy(test_x), torch.from_numpy(test_y)),
        clients=clients,
        test_clients=tests,
        batch_size=batch_size,
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Use one thread, without warnings and messages.

    Afterwards the caller's settings and random state are restored.
    """
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    threads = torch.get_num_threads()
    # The compared bits depend on the number of threads.
    torch.set_num_threads(1)
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def unprinted() -> Iterator[None]:
    """Within, methods' ``trainer.print`` shows nothing: each of many runs would end with it."""
    own = pl.Trainer.print
    pl.Trainer.print = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        pl.Trainer.print = own  # type: ignore[method-assign]


class Watch(pl.Callback):
    """Calls ``started(module)`` before the first round and ``ended(module)`` after each."""

    def __init__(
        self, started: Callable[[Any], object] | None, ended: Callable[[Any], object] | None
    ) -> None:
        self.started = started
        self.ended = ended

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.started is not None:
            self.started(pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.ended is not None:
            self.ended(pl_module)


def required_by(method: type[FederatedCallback]) -> dict[str, Any]:
    """Return the arguments of FederatedModule without which a method refuses to run."""
    required: dict[str, Any] = {}
    for name in method.needs_callbacks:
        required |= required_by(getattr(packaged, name))
    for note in method.notes:
        required |= note.settings if isinstance(note, Refusal) else {}
    return required


def with_needed(callbacks: Sequence[FederatedCallback]) -> list[FederatedCallback]:
    """Return the callbacks, and those that they need beside them."""
    there = {type(callback).__name__ for callback in callbacks}
    added: dict[str, FederatedCallback] = {}
    for callback in callbacks:
        for name in callback.needs_callbacks:
            if name not in there:
                added[name] = getattr(packaged, name)()
    return [*callbacks, *added.values()]


@cache
def own_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for the files of this process's runs; it is removed at the end."""
    return tempfile.TemporaryDirectory()


def fit(
    callbacks: Sequence[FederatedCallback],
    rounds: int = ROUNDS,
    learner: Learner | None = None,
    federation: InMemoryDataModule | None = None,
    started: Callable[[Any], object] | None = None,
    ended: Callable[[Any], object] | None = None,
    folder: str | None = None,
    resume: bool = False,
    trainer: dict[str, Any] | None = None,
    adapters: bool | str = False,
    whole: bool = True,
    **arguments: Any,
) -> FederatedModule:
    """Run on the CPU, unless ``trainer`` has another accelerator.

    ``folder``: where to keep its checkpoint; ``resume``: resume from that one. ``adapters``:
    whether the learner has adapters, or ``"heads"``, as it has if a method needs them. ``whole``:
    whether callbacks that others need are added.
    """
    if whole:
        callbacks = with_needed(callbacks)
    required = dict(chain.from_iterable(required_by(type(each)).items() for each in callbacks))
    # Start with the defaults, apply the settings that the methods need, and then those that a check
    # varies.
    arguments = {
        "participation": 3,
        "local_epochs": 2,
        "seed": 1,
        "lr_decay": 0.9,
        "engine": SEQUENTIAL,
        "client_optimizer": lambda p: torch.optim.SGD(p, lr=0.2, weight_decay=0.01),
        **required,
        **arguments,
    }
    adapters = next((each.needs_adapters for each in callbacks if each.needs_adapters), adapters)
    module = FederatedModule(learner or Learner(adapters=adapters), **arguments)
    watchers: list[pl.Callback] = [Watch(started, ended)]
    if folder is not None:
        watchers.append(
            ModelCheckpoint(f"{folder}/checkpoints", filename="last", enable_version_counter=False)
        )
    fitted = pl.Trainer(
        max_epochs=rounds,
        callbacks=[*callbacks, *watchers],
        default_root_dir=folder or own_folder().name,
        logger=False,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        # The clients' test samples are for the methods; validation would take half of the time.
        **{"accelerator": "cpu", "limit_val_batches": 0, **(trainer or {})},
    )
    fitted.fit(
        module,
        federation or data(),
        ckpt_path=f"{folder}/checkpoints/last.ckpt" if resume else None,
    )
    return module


def outcome(module: FederatedModule) -> Outcome:
    """Return all results of a run.

    The results are models, buffers, server states, this process's client rows, and logged values.
    """
    # A failed check shows these names to the reader.
    left = {
        "the server's model": module.global_vector,
        "the evaluated model": module.evaluated_vector,
    }
    left |= {f"buffer {name}": buffer for name, buffer in module.learner.named_buffers()}
    left |= {f"server state {name}": value for name, value in module.server_states.items()}
    store = module.client_rows.store
    for name in store.names():
        for i in map(int, store.clients(name)):
            row = store.read(name, i)
            assert row is not None
            left[f"{name} of client {i}"] = row
    if module.run.methods.owner("personal") is not None:
        models = personal_models.of_run(module.run, module.trainer)
        world, rank = place()
        # The process that owns a client also keeps its model, like its rows of state.
        for i in range(rank, len(SIZES), world):
            left[f"personal model of client {i}"] = models.of(i)[0]
    for name, value in module.trainer.callback_metrics.items():
        # Times differ from run to run.
        if not name.startswith("time/"):
            left[f"log {name}"] = value
    return {name: value.detach().cpu().clone() for name, value in left.items()}


def require_same(ours: Outcome, theirs: Outcome, tolerance: float, what: str, hint: str) -> None:
    """Compare by the largest relative difference (:func:`distance`); 0 requires equal bits.

    Raises:
        Failed: the results differ; the error has ``what``, the quantities that differ and by how
            much, and ``hint``.
    """
    one_sided = sorted(set(ours) ^ set(theirs))
    differing = [f"{name} exists in only one of the runs" for name in one_sided]
    for name in ours:
        if name in theirs:
            away = distance(ours[name], theirs[name])
            # Written with `not`, so that NaN counts as a difference.
            if not away <= tolerance:
                differing.append(f"{name} by {away:.1e}")
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise Failed(f"{what}: {', '.join(differing[:3])}{more}", hint)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest |a - b| over max(1, |a|); 0 for equal bits, infinite for other shapes."""
    if a.shape != b.shape:
        return float("inf")
    a = a.double()
    b = b.double()
    if torch.equal(a, b) or not a.numel():
        return 0.0
    return float(((a - b).abs() / a.abs().clamp(min=1)).max())


def require_finite(left: Outcome, what: str, hint: str) -> None:
    for name, value in left.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise Failed(f"{what}: {name} is not finite", hint)


def in_processes(world: int, job: Callable[[], Outcome]) -> Outcome:
    """Run ``job`` in forked processes joined by gloo, and return their results together.

    Raises:
        Failed: one of the runs did not finish.
    """
    with held_port() as held, tempfile.TemporaryDirectory() as folder:
        given = (job, world, held.getsockname()[1], folder)
        context: Any = start_processes(_of_one, given, world, join=False, start_method="fork")
        try:
            # When one has failed, the others may wait for it, and are ended.
            while not context.join(grace_period=0.1):
                pass
        except ProcessException as error:
            seen = str(error).strip().splitlines()[-1]
            raise Failed(
                f"a run in {world} processes failed: {seen}",
                "server hooks run in every process and must do the same there: read values of all "
                "clients only through Upload or staged()",
            ) from None
        together: Outcome = {}
        # If several processes have an entry, use that of the first process.
        for rank in reversed(range(world)):
            together |= torch.load(Path(folder) / f"{rank}.pt", weights_only=True)
    return together


def held_port() -> socket.socket:
    """Return a socket that keeps a free port while it is open.

    No other program that asks for a free port gets it. Processes joined by torch can still listen
    on it, because they set SO_REUSEADDR, too.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _of_one(rank: int, job: Callable[[], Outcome], world: int, port: int, folder: str) -> None:
    """Run ``job`` in one of the processes, and write its results."""
    torch.set_num_threads(1)
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        # This variable makes Lightning believe that its processes exist already.
        "TORCHELASTIC_RUN_ID": "contracts",
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.save(job(), Path(folder) / f"{rank}.pt")
