"""The work of each command, and how its errors are reported."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import fl_lightning
from fl_lightning.callback import FederatedCallback
from fl_lightning.callback_list import CallbackList
from fl_lightning.errors import Diverged, UserError, suggest
from fl_lightning.evaluation.personal_models import (
    check_client,
    check_partition,
    of_checkpoint,
    split_by_run,
)
from fl_lightning.lab.cli.cli import CommandCLI
from fl_lightning.lab.cli.compose import Command
from fl_lightning.lab.cli.run_folder import check_writable
from fl_lightning.lab.cli.run_record import end_killed, was_killed
from fl_lightning.lab.cli.wrong_settings import not_an_optimizer
from fl_lightning.learner import saved_network
from fl_lightning.machine.escaping import plain_lines
from fl_lightning.machine.lightning import LOGGERS, MisconfigurationException
from fl_lightning.metrics import read_record
from fl_lightning.storage.atomic_files import named, writable_as_file, written_aside
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO
from fl_lightning.storage.rows_on_disk import KEY

_NOISE = (
    ".*LeafSpec.*",
    ".*does not have many workers.*",
    ".*smaller than the logging interval.*",
    "No seed found.*",
    # Testing needs no RunCheckpoint.
    ".*callbacks used to create.*",
)

# Entries of a checkpoint that belong to the run; an exported model does not have them.
_OF_A_RUN = (
    *("epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers"),
    *("MixedPrecision", "datamodule_hyper_parameters", "datamodule_hparams_name"),
    "datamodule_hparams_type",
)


def _partition(cli: CommandCLI) -> None:
    folder = named(cli.prepared.output or ".")
    check_writable(folder, "-o")
    for name in ("partition.png", "partition.npz"):
        writable_as_file(folder / name)
    data = cli.datamodule
    data.prepare_data()
    data.setup("fit")
    print(data.partition_table())
    with written_aside(folder / "partition.png") as file:
        data.plot_partition().savefig(file)
    data.save_partition(folder / "partition.npz")
    print(f"→ {folder / 'partition.png'}, {folder / 'partition.npz'}")


def _output(cli: CommandCLI, name: str) -> Path:
    """Return the file that a command writes; refuse it before the work if it cannot be written."""
    path = cli.folder / name if cli.prepared.output is None else named(cli.prepared.output)
    check_writable(writable_as_file(path).parent, "-o")
    return path


def _predict(cli: CommandCLI) -> None:
    path = _output(cli, "predictions.pt")
    predictions = cli.trainer.predict(cli.model, cli.datamodule, **cli.starts_from())
    with written_aside(path) as file:
        torch.save(predictions, file)
    print(f"→ {path}")


def _export(cli: CommandCLI) -> None:
    whole = cli.config.weights_only
    checkpoint = AtomicCheckpointIO().load_checkpoint(str(cli.checkpoint), weights_only=whole)
    split_by_run(cli.datamodule, checkpoint)
    client = _client(cli, checkpoint)
    name = "model.pt" if client is None else f"client-{client}.pt"
    path = _output(cli, name)
    cli.model.learner.configure_model()
    # In float32 the weights of a run in double precision would be rounded.
    cli.trainer.precision_plugin.convert_module(cli.model.learner)
    # Loading fails if the checkpoint belongs to another learner.
    cli.model.load_state_dict(checkpoint["state_dict"])
    # Saving for transformers freezes the learner, so this comes before it.
    _say_whose_model(cli)
    if client is not None:
        checkpoint["state_dict"] = _personal_weights(cli, checkpoint, client)
    if cli.config.pretrained is not None:
        cli.model.load_state_dict(checkpoint["state_dict"])
        held = checkpoint.get(KEY) or {}
        folder = named(cli.config.pretrained)
        if folder.name == cli.config.pretrained:
            # A name without a folder is one in the run's, so that two runs do not share it.
            folder = cli.folder / folder
        changed = bool(held.get("base_kinds"))
        saved_network.save(cli.model.learner, folder, bool(cli.config.merged), changed)
        print(f"→ {folder}")
        return
    # The remaining entries are the learner's own, from its on_save_checkpoint.
    of_run = (*_OF_A_RUN, KEY, type(cli.datamodule).__qualname__)
    kept = {key: value for key, value in checkpoint.items() if key not in of_run}
    AtomicCheckpointIO().save_checkpoint(kept, path)
    print(f"→ {path}")


def _say_whose_model(cli: CommandCLI) -> None:
    """If clients use models of their own, print that this command uses the server's."""
    if cli.checkpoint is None or cli.config.get("client") is not None:
        return
    methods = _methods(cli)
    parts = methods.parts(cli.model.layout, torch.device("cpu"))
    if methods.owner("personal") is None and (parts is None or None not in parts.periods):
        return
    print(
        f"Note: clients of {methods.title()} use models of their own. {cli.command} used the "
        "server's model, in which the parts that clients keep are the mean of theirs or the "
        "initial ones. The clients' own values are clients/… of PerClientEvaluation "
        "(--trainer.callbacks+=PerClientEvaluation in fit), and fl-lightning export "
        f"{shlex.quote(str(cli.folder))} --client 3 writes the model of client 3.",
        file=sys.stderr,
    )


def _client(cli: CommandCLI, checkpoint: dict[str, Any]) -> int | None:
    """Return the number of the client that ``--client`` gives by number or name."""
    given = cli.config.client
    data = cli.datamodule
    if given is None:
        return None
    if not isinstance(given, int):
        data.setup("fit")
        check_partition(data, checkpoint, str(cli.checkpoint))
        names = [str(name) for name in data.client_names]
        if given not in names:
            raise UserError(
                f"--client {given}: no client has this name.{suggest(given, names)} Accepted: "
                f"{', '.join([*names[:20], '0'])} to {data.num_clients - 1}."
            )
        return names.index(given)
    check_client(given, int(data.num_clients))
    return given


def _personal_weights(cli: CommandCLI, checkpoint: dict[str, Any], client: int) -> Any:
    """Return the state dict of the model that ``client`` uses itself."""
    model = cli.model.global_model
    methods = _methods(cli, model.layout)
    data = cli.datamodule
    models = of_checkpoint(checkpoint, model, methods, cli.trainer, data, str(cli.checkpoint))
    return model.export(model=models.of(client)).state_dict()


def _methods(cli: CommandCLI, *layout: Any) -> CallbackList:
    callbacks = vars(cli.trainer)["callbacks"]
    return CallbackList([e for e in callbacks if isinstance(e, FederatedCallback)], *layout)


def _fit(cli: CommandCLI) -> None:
    trainer = cli.trainer
    folder = Path(cli.folder)
    record = read_record(folder)
    asked = record.get("rounds") or -1
    killed = was_killed(record) and 0 < asked <= (trainer.max_epochs or -1)
    if killed:
        _ends_again(trainer)
    try:
        trainer.fit(cli.model, cli.datamodule, **cli.starts_from())
    except MisconfigurationException as error:
        # A run with no rounds left is not an error; the message follows below.
        if "You restored a checkpoint with current_epoch" not in str(error):
            raise
    if not trainer.is_global_zero:
        return
    _say_stopped(cli)
    progress: Any = trainer.fit_loop.epoch_progress.current
    done = progress.processed
    if cli.stop.first is None:
        print(
            f"{folder}: {done} rounds are done already; --trainer.max_epochs above {done} goes on"
        )
        end_killed(folder, done)
    # EarlyStopping may also have ended the run before it was killed.
    if killed and read_record(folder).get("status") == "done" and cli.stop.first in (None, done):
        print("It was killed after its last round. Its final results are written now.")


def _ends_again(trainer: Any) -> None:
    """Let Lightning begin and end a fit even if no round is left, so that callbacks measure the
    last model and write what they write at the end.
    """
    loop = trainer.fit_loop
    loop.__class__ = type(type(loop).__name__, (type(loop),), {"skip": False})


def _say_stopped(cli: CommandCLI) -> None:
    """If a signal stopped the run, print how many rounds are done, and how to continue."""
    if cli.stop.received is None or not cli.trainer.is_global_zero or _all_done(cli):
        return
    done = cli.model.run.state.rounds
    asked = cli.trainer.max_epochs or -1
    rounds = f"{done} of {asked} rounds" if asked > 0 else f"{done} rounds"
    line = f"stopped after {rounds}"
    if (Path(cli.folder) / "checkpoints" / "last.ckpt").is_file():
        line += f"; this goes on: fl-lightning fit {shlex.quote(str(cli.folder))}"
    print(line, flush=True)


def _all_done(cli: CommandCLI) -> bool:
    rounds: int = cli.model.run.state.rounds
    return 0 <= (cli.trainer.max_epochs or -1) <= rounds


def _execute(cli: CommandCLI) -> int:
    if cli.command == "partition":
        _partition(cli)
        return 0
    if cli.checkpoint is not None:
        print(f"checkpoint: {cli.checkpoint}", flush=True)
    own = {"fit": _fit, "predict": _predict, "export": _export}
    if cli.command in own:
        own[cli.command](cli)
    else:
        getattr(cli.trainer, cli.command)(cli.model, cli.datamodule, **cli.starts_from())
    if cli.command not in ("fit", "export"):
        _say_whose_model(cli)
    # A signal in the last round stops nothing. Otherwise the exit status is the one that a shell
    # gives to a process that was ended by a signal.
    if cli.stop.received is None or (cli.command == "fit" and _all_done(cli)):
        return 0
    return 128 + cli.stop.received


def quiet() -> None:
    """Silence Lightning's tips, and warnings that do not apply here."""
    for name in LOGGERS:
        # Below this level Lightning logs tips, lines about devices, and "fit stopped".
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message)
    warnings.formatwarning = _as_note


_HERE = os.path.join(os.path.dirname(fl_lightning.__file__), "")
_with_place = warnings.formatwarning


def _as_note(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None
) -> str:
    """Return a warning's text, without a line of this package's code, which helps no user."""
    if category is UserWarning and filename.startswith(_HERE):
        return f"Note: {message}\n"
    return _with_place(message, category, filename, lineno, line)


def run(command: str, prepared: Command, debug: bool = False, **options: Any) -> int:
    """Run ``command`` and return its exit status; the caller prints a :class:`UserError`.

    Args:
        options: options of :class:`CommandCLI`.
    """
    quiet()
    cli: CommandCLI | None = None
    try:
        cli = CommandCLI(command, prepared, **options)
        return _execute(cli)
    except Diverged as error:
        print(plain_lines(f"fl-lightning: {error}"), file=sys.stderr)
        return 3
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        message = _told(error)
        if debug or isinstance(error, UserError) or not message:
            raise
        raise UserError(message) from error
    except SystemExit as error:
        if cli is not None and cli.stop.received is not None:
            _say_stopped(cli)
            return 128 + cli.stop.received
        return error.code if isinstance(error.code, int) else 0


def _told(error: Exception) -> str | None:
    """Return the paragraph for an error of Lightning or torch that the user can correct."""
    text = " ".join(str(error).split())
    if isinstance(error, MisconfigurationException):
        return text[:500]
    if text.startswith("Early stopping conditioned on metric"):
        return f"trainer.callbacks: {text[:500]}"
    if "is not in bounds, numpy accepts" in text:
        return f"--seed_everything: {text}"
    if "Error(s) in loading state_dict" in text:
        return f"--ckpt_path: this checkpoint is of another model. {text[:300]}"
    return not_an_optimizer(error) if isinstance(error, ValueError) else None
