"""A fit as the server of a run whose clients are at sites."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.callbacks import PerClientEvaluation
from fl_lightning.deploy.answers import Values
from fl_lightning.deploy.logged import KnownMetrics
from fl_lightning.deploy.progress import ServerProgress
from fl_lightning.deploy.same_config import config_of
from fl_lightning.deploy.site_data import Told
from fl_lightning.deploy.site_hooks import check_learner, refuse_unsent
from fl_lightning.deploy.sites_engine import Sites
from fl_lightning.deploy.transport import Transport
from fl_lightning.errors import UserError
from fl_lightning.evaluation.validated_model import evaluated
from fl_lightning.loop import FederatedLoop
from fl_lightning.machine.lightning import pl
from fl_lightning.machine.processes import world_size
from fl_lightning.storage.atomic_files import written_aside

NUMBER = "sites.json"
# keys in checkpoints: the clients' numbers of samples and batches, and the names of the learner's
# attributes that hooks have changed
TOLD = "told by sites"
CHANGED = "sent to sites"
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
    ``changed``: names of the learner's attributes that hooks changed before that.
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
        self.changed: list[str] = []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        data = pl_module.run.loop.cohort.data
        if isinstance(data, Told):
            checkpoint[TOLD] = data.told()
        checkpoint[CHANGED] = self.progress.changed()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        try:
            told = checkpoint.get(TOLD, {}).items()
            self.told = {int(i): (int(size), int(batches)) for i, (size, batches) in told}
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"ckpt_path: {TOLD} in the checkpoint is damaged ({str(error)[:100]}). Resume from "
                "another one."
            ) from error
        changed = checkpoint.get(CHANGED, [])
        if not isinstance(changed, list) or not all(isinstance(name, str) for name in changed):
            raise UserError(
                f"ckpt_path: {CHANGED} in the checkpoint is damaged ({str(changed)[:100]}). Resume "
                "from another one."
            )
        self.changed = changed

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        learner, note = pl_module.learner, pl_module.note
        self.progress = ServerProgress(trainer, learner, note, self.changed)

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
        facts = run, self.timeout, config_of(pl_module.run)
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
        # Which way is better is known when the learner logs a metric, so it logs its metrics once
        # on the server's own samples.
        data = module.trainer.datamodule
        evaluator = module.evaluator()
        w, evaluator.buffers = evaluated(module.global_model, module.trainer)
        own = evaluator.validated(w, 0, np.arange(min(SAMPLES, int(data.client_sizes().sum()))))
        self.sites.validated = {*own}
        values = self.sites.one(evaluated(module.global_model, module.trainer))
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
    try:
        return int(json.loads(path.read_text("utf-8"))["run"])
    except FileNotFoundError:
        if begins:
            raise UserError(
                f"--run-config folder={str(folder)!r}: the run in it trained {begins} rounds "
                "without sites, so the sites have no rows of its clients. Give another folder."
            ) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(
            f"--run-config folder={str(folder)!r}: {NUMBER} in it is damaged ({str(error)[:100]}). "
            "Put it back from a copy, or give another folder."
        ) from error
    run = secrets.randbelow(2**53)
    with written_aside(path) as file:
        file.write(json.dumps({"run": run}).encode())
    return run


def refuse_methods(callbacks: list[Any]) -> None:
    """Refuse callbacks that cannot work while clients are at sites.

    Raises:
        UserError: naming one.
    """
    for callback in callbacks:
        if what := getattr(callback, "not_over_sites", ""):
            raise UserError(
                f"method: {type(callback).__name__} needs {what} at the server, but they stay at "
                "the sites. Leave it out, or simulate with `fl-lightning fit`."
            )


def refuse(loop: FederatedLoop, callbacks: list[Any]) -> None:
    """Before round 0, refuse what is impossible while clients are at sites.

    Raises:
        UserError: naming it.
    """
    refuse_methods(callbacks)
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
