"""A fit as the server of a run whose clients are at sites."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fl_lightning.callback import FederatedCallback
from fl_lightning.callbacks import PerClientEvaluation
from fl_lightning.deploy.answers import Values
from fl_lightning.deploy.client_results import KnownMetrics
from fl_lightning.deploy.progress import ServerProgress
from fl_lightning.deploy.same_config import config_of
from fl_lightning.deploy.site_data import Told
from fl_lightning.deploy.sites_engine import Sites
from fl_lightning.deploy.transport import Transport
from fl_lightning.errors import UserError
from fl_lightning.evaluation.validated_model import evaluated
from fl_lightning.learner.modules import overrides
from fl_lightning.loop import FederatedLoop
from fl_lightning.machine.lightning import pl
from fl_lightning.machine.processes import world_size
from fl_lightning.storage.atomic_files import written_aside

NUMBER = "sites.json"
TOLD = "told by sites"  # key in checkpoints: the clients' numbers of samples and batches
# Sites run these hooks of a method. The server runs all others, on its own copy of the callback, so
# sites know what those set only if it is a declared state that is sent.
AT_SITES = (
    "steps",
    "parts",
    "trained",
    "on_local_start",
    "step_samples",
    "reduce_samples",
    "scale_samples",
    "on_samples_reduced",
    "perturbation",
    "local_output",
    "local_loss",
    "local_batch",
    "on_loss_gradient",
    "on_local_gradient",
    "precondition",
    "on_direction",
    "step_rate",
    "on_local_step_end",
    "on_local_end",
    "transmit",
    "encode",
    "personal",
)
# Lightning's hooks that the server runs in each round, and sites do not.
OF_ROUNDS = (
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
)
SAMPLES = 8  # of the server's, on which it lets the learner log its metrics once


class AtServer(pl.Callback):
    """Makes a fit the server of its clients' sites: clients train there, and their rows stay there.

    Args:
        run: a number by which sites recognise the run, in all its fits; None: the folder's.
        timeout: seconds that a round waits for its sites; after that their clients count as
            dropped.
        min_sites: number of sites to wait for before the first round. If sites have their own data,
            the run also waits for all clients whose numbers of samples are not known yet.

    ``told``: samples and batches of clients, as their sites sent them before the run was resumed.
    ``measured_names``, ``known``: as :class:`~fl_lightning.deploy.sites_engine.Sites` reads them.
    """

    measures_clients = True
    sites: Sites  # set when the fit starts
    progress: ServerProgress

    def __init__(
        self, transport: Transport, run: int | None, timeout: float = 600.0, min_sites: int = 1
    ) -> None:
        self.transport = transport
        self.run = run
        self.timeout = timeout
        self.min_sites = min_sites
        self.measured_names: set[str] = set()
        self.known = KnownMetrics()
        self.told: dict[int, tuple[int, int]] = {}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        data = pl_module.run.loop.cohort.data
        if isinstance(data, Told):
            checkpoint[TOLD] = data.told()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.told = checkpoint.get(TOLD, {})

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.progress = ServerProgress(trainer, pl_module.learner, pl_module.note)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loop = pl_module.run.loop
        assert loop is not None
        refuse(loop, trainer.callbacks)
        run = self.run
        if run is None:
            run = number_in(Path(trainer.default_root_dir), trainer.current_epoch)
        if self.told:
            loop.cohort.data = Told(loop.cohort.data)
            for client, numbers in self.told.items():
                loop.cohort.data.tell(client, *numbers)
        facts = run, self.timeout, config_of(pl_module.run, loop.cohort.data)
        self.sites = sites = Sites(self.transport, loop, self.progress, *facts)
        sites.measured_names, sites.known = self.measured_names, self.known
        self.known.try_step(pl_module.run, trainer)
        check_learner(pl_module.learner, self.known.changed, pl_module.note)
        sites.register.counts_tests = any(
            isinstance(c, PerClientEvaluation) for c in trainer.callbacks
        )
        sites.register.wait_for(self.min_sites)
        if isinstance(loop.cohort.data, Told):
            # The server's own data have a partition too, but no site trains on them.
            vars(trainer.datamodule)["card"] = loop.cohort.data.card
            vars(trainer.datamodule)["plot_partition"] = None
        loop.engine = sites
        loop.rows_elsewhere = True
        loop.assigned_at_server = refuse_unsent
        loop.methods.tell(refuse_unsent)  # for Lightning's hooks, too
        if loop.parts is not None and bool(loop.parts.kept.any()):
            pl_module.note(
                "partial averaging over sites: the clients' copies of parts stay at their sites. "
                "So val/… is of w. In a simulation it is of w with the clients' mean on those "
                "parts. drift/… is missing. clients/… (PerClientEvaluation) is of the clients' own "
                "models"
            )

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        # Lightning forgets what the validation before round 0 measured.
        self.measured_names |= trainer.callback_metrics.keys() - self.known.heard

    def one_client(self, module: Any) -> dict[str, float] | None:
        """Return the values of the server's own samples, which tell the metrics' names."""
        if not self.sites.tests_clients():
            return None
        evaluator = module.evaluator()
        w, evaluator.buffers = evaluated(module.global_model, module.trainer)
        samples = int(module.trainer.datamodule.client_sizes().sum())
        values: dict[str, float] = evaluator.validated(w, 0, np.arange(min(SAMPLES, samples)))
        self.sites.validated = {*values}
        return values

    def measured(
        self, module: Any, ids: Collection[int], finetune_epochs: float
    ) -> tuple[Values, dict[int, int]]:
        model = evaluated(module.global_model, module.trainer)
        values = self.sites.measured(ids, finetune_epochs, model)
        if away := [client for client in ids if client not in values]:
            module.note(
                f"round {self.sites.loop.state.rounds - 1}: clients {away} are left out of "
                f"clients/…: their sites did not answer within timeout={self.timeout:g} s"
            )
        return values, {client: self.sites.register.tests[client] for client in values}


def number_in(folder: Path, begins: int) -> int:
    """Return the number by which sites recognise the run in a folder; a new run draws one.

    Raises:
        UserError: the run in the folder trained without sites.
    """
    path = folder / NUMBER
    if path.exists():
        return int(json.loads(path.read_text("utf-8"))["run"])
    if begins:
        raise UserError(
            f"--run-config folder={str(folder)!r}: the run in it trained {begins} rounds without "
            "sites, so the sites have no rows of its clients. Give another folder."
        )
    run = secrets.randbelow(2**53)
    with written_aside(path) as file:
        file.write(json.dumps({"run": run}).encode())
    return run


def refuse_methods(callbacks: list[Any]) -> None:
    """Refuse callbacks that cannot work while clients are at sites."""
    for callback in callbacks:
        if what := getattr(callback, "not_over_sites", ""):
            raise UserError(
                f"method: {type(callback).__name__} needs {what} at the server, but they stay at "
                "the sites. Leave it out, or simulate with `fl-lightning fit`."
            )


def refuse(loop: FederatedLoop, callbacks: list[Any]) -> None:
    """Before round 0, refuse what is impossible while clients are at sites."""
    refuse_methods(callbacks)
    if loop.methods.owner("neighbours") is not None:
        raise UserError(
            f"method: {loop.methods.name_of_owner('neighbours')} has no server, and sites send "
            "everything through one. Simulate the run with `fl-lightning fit`."
        )
    if loop.settings.asynchronous is not None:
        raise UserError(
            "asynchronous: sites train when the server asks them to, round by round; only "
            "`fl-lightning fit` simulates an order of arrivals. Leave this option out."
        )
    if world_size() > 1:
        raise UserError(
            f"trainer.devices: the server of sites is one process, and this run has {world_size()}."
            " Use --trainer.devices 1 --trainer.num_nodes 1."
        )


def refuse_unsent(callback: object, name: str) -> None:
    """Refuse an attribute that a method assigns at the server, if sites run hooks of the method,
    too.
    """
    if isinstance(callback, FederatedCallback) and any(map(callback.has, AT_SITES)):
        raise UserError(
            f"method: {type(callback).__name__} sets self.{name} in a hook that only the server "
            f"runs, and sites, which run its other hooks, would not see it. Declare it with {name} "
            "= ServerState(sent=True), or ServerState() if only hooks of the server read it; or "
            "simulate with `fl-lightning fit`."
        )


def check_learner(
    learner: nn.Module, changed: Collection[str], note: Callable[[str], None]
) -> None:
    """Note attributes that steps change, at sites, and that the server's hooks may read.

    Args:
        changed: names of the attributes that a training step changes.
    """
    hooks = [hook for hook in OF_ROUNDS if overrides(learner, hook)]
    for full in changed if hooks else ():
        note(
            f"learner {type(learner).__name__}: training_step changes self.{full} at the sites, "
            f"and {hooks[0]}, which only the server runs, finds it without these changes. In "
            "training_step, log the value (self.log gives the mean over steps and clients), or "
            "update a metric of torchmetrics"
        )
