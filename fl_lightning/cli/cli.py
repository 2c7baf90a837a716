"""A command's parser, model, data and Trainer, on LightningCLI."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from jsonargparse import Namespace
from torch.optim import Optimizer

import fl_lightning.callbacks
import fl_lightning.datamodules
import fl_lightning.models
import fl_lightning.schedules
import fl_lightning.strategies
from fl_lightning.callback import FederatedCallback
from fl_lightning.cli.compose import Command, class_name, is_file, plain_yaml
from fl_lightning.cli.learner_config import learner_config
from fl_lightning.cli.method_options import apply_method_options, full_options, full_paths
from fl_lightning.cli.network_sizes import fit_network_to_data
from fl_lightning.cli.parsing_errors import one_paragraph, why_not_built
from fl_lightning.cli.run_folder import (
    RunCheckpoint,
    RunFolder,
    check_name,
    check_writable,
    checkpoints,
    holds_run,
    next_free,
    numbered,
)
from fl_lightning.cli.run_record import RunRecord
from fl_lightning.cli.signals import GracefulStop
from fl_lightning.datamodules import FederatedDataModule, Partition
from fl_lightning.errors import UserError
from fl_lightning.lightning import DDPStrategy, LightningArgumentParser, LightningCLI, pl
from fl_lightning.metrics import check_mode
from fl_lightning.module import FederatedModule
from fl_lightning.schedules import Schedule
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO
from fl_lightning.storage.files import named

_BASES: dict[str, type] = {
    "method": FederatedCallback,
    "data": FederatedDataModule,
    "partition": Partition,
    "learner": pl.LightningModule,
    "callbacks": pl.Callback,
    "optimizer": Optimizer,
    "client_optimizer": Optimizer,
    "server_optimizer": Optimizer,
    "network": torch.nn.Module,
    "lr_decay": Schedule,
}
_TRAINER_DEFAULTS = {
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
}
_STANDING = ("FederatedProgressBar", "DivergenceLogger", "CommunicationLogger", "RunCard")


def _name_enums(node: Any) -> None:
    """Members of an Enum, which the defaults of Lightning's callbacks may be, as the text that is parsed back."""
    for key, value in list(vars(node).items() if isinstance(node, Namespace) else enumerate(node)):
        if isinstance(value, Enum):
            node[key] = str(value.value) if isinstance(value, str) else value.name
        elif isinstance(value, Namespace | list):
            _name_enums(value)


class Parser(LightningArgumentParser):
    """Raises a :class:`UserError` of one paragraph where its base classes print the usage."""

    command: Command | None = None

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        command = self.command
        if command is None:  # a parser for a class within another: the outer one words the message
            raise ValueError(message) from ex
        raise UserError(
            one_paragraph(message, self, command.config, command.options, _BASES)
        ) from ex


class FederatedCLI(LightningCLI):
    """One command: parses, builds ``datamodule``, ``model`` and ``trainer``; ``commands`` runs it.

    Args:
        command: fit, validate, test, predict, export or partition.
        prepared: its arguments, as :func:`~fl_lightning.cli.compose.prepare` sorts them.
    """

    def __init__(self, command: str, prepared: Command) -> None:
        prepared.config, prepared.options = (
            full_paths(prepared.config),
            full_options(prepared.options),
        )
        apply_method_options(prepared)
        if command != "partition":
            fit_network_to_data(prepared)
        for note in prepared.notes:
            print(note, file=sys.stderr)
        self.command, self.prepared = command, prepared
        self.stop = GracefulStop()
        self.checkpoint: str | None = None  # to start from
        super().__init__(
            model_class=FederatedModule,
            datamodule_class=FederatedDataModule,
            subclass_mode_data=True,
            save_config_callback=None,  # RunFolder writes it, once everything is known to work
            trainer_defaults=_TRAINER_DEFAULTS,
            parser_class=Parser,
            parser_kwargs={
                "prog": f"fl-lightning {command}",
                "description": "Options over those of the configs. Packaged configs: fl-lightning configs.",
                "allow_abbrev": False,
            },
            args=[],
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        if self.command == "partition":
            parser.add_lightning_class_args(FederatedDataModule, "data", subclass_mode=True)
        else:
            super().add_core_arguments_to_parser(parser)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        if self.command == "partition":
            return
        parser.add_argument(
            "--method",
            type=list[FederatedCallback],
            default=[],
            help="Callbacks that make the method. --method.beta 0.1 sets an argument of the one that has it.",
        )
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            default=None,
            help="Checkpoint to start from. last: go on where the run's folder stopped, or start it.",
        )
        parser.add_argument(
            "--weights_only",
            type=bool | None,
            default=None,
            help="false: read objects in the checkpoint too, which can run any code: for files you trust.",
        )
        if self.command == "export":
            parser.add_argument(
                "--client", type=int | None, default=None, help="Whose personal model to export."
            )
        parser.add_argument(
            "--monitor",
            type=str | None,
            default=None,
            help="Metric of best.ckpt (default: val/acc).",
        )
        parser.add_argument(
            "--monitor_mode",
            type=str | None,
            default=None,
            help="Which way is better in --monitor, where neither its name nor a torchmetrics metric tells.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        assert isinstance(parser, Parser)
        parser.command = self.prepared
        config = self.prepared.config
        if self.command == "partition":
            config = {
                key: value for key, value in config.items() if key in ("seed_everything", "data")
            }
        self.config = parser.parse_args(["--config", json.dumps(config), *self.prepared.options])
        seed = self.config.seed_everything
        if not isinstance(seed, bool) and seed is not None and not 0 <= seed < 2**32:
            raise UserError(
                f"--seed_everything {seed}: give an integer from 0 to 4294967295, or true to draw one."
            )

    def before_instantiate_classes(self) -> None:
        """Decide on folder and checkpoint, so that what is wrong with them is said before anything is built."""
        if self.command == "partition":
            return
        check_mode("--monitor_mode", self.config.monitor_mode)
        for key, value in vars(self.config.model).items():
            if key in ("participation", "clients_at_once", "workers", "capture") and isinstance(
                value, str
            ):
                # an option's text: 0.5 is a number, auto stays
                read = plain_yaml(value, f"--model.{key}")
                if type(read) in ((bool,) if key == "capture" else (int, float)):
                    self.config.model[key] = read
        given, ckpt = self.config.trainer.default_root_dir, self.config.ckpt_path
        self.stem = None if given else f"runs/{self._name()}"
        if given:
            self.folder = named(str(given))
            self.config.trainer.default_root_dir = str(self.folder)
        else:
            existing = numbered(self.stem or "")
            self.folder = (
                existing[-1][1] if existing and ckpt == "last" else next_free(self.stem or "")
            )
            if ckpt == "last":
                self.stem = None
        check_name(self.folder)
        there = checkpoints(self.folder)
        if ckpt == "last":
            self.checkpoint = str(there[0]) if there and there[0].name == "last.ckpt" else None
            if self.checkpoint is None and there:
                raise UserError(
                    f"--ckpt_path last: {self.folder / 'checkpoints' / 'last.ckpt'} is missing, but this run has "
                    f"another checkpoint: --ckpt_path {there[0]}."
                )
            if self.checkpoint is None and self.command != "fit":
                raise UserError(
                    f"--ckpt_path last: {self.folder} has no checkpoint yet (checkpoints/last.ckpt is missing). "
                    "Give the folder of a run that completed a round, or --ckpt_path FILE."
                )
        elif ckpt is not None:
            self.checkpoint = ckpt
            if not is_file(ckpt):
                raise UserError(
                    f"--ckpt_path {ckpt[:200]}: there is no such file. Accepted: a checkpoint's path, or last for the "
                    f"one in {self.folder}."
                )
        if self.command == "fit":
            own = self.checkpoint is not None and Path(self.checkpoint).resolve() in [
                p.resolve() for p in there
            ]
            if holds_run(self.folder) and not own:
                way_out = (
                    "Go on with it by --ckpt_path last, or"
                    if there
                    else "It has no checkpoint to go on from:"
                )
                raise UserError(
                    f"--trainer.default_root_dir {self.folder}: this folder already holds a run, which is left as it "
                    f"is. {way_out} give another folder."
                )
            check_writable(self.folder)

    def _name(self) -> str:
        """<data>-<method>, by the configs' names where these tell."""
        config, names = self.config, self.prepared.names
        data = class_name(self.config.data.class_path).lower()
        methods = [name.removeprefix("method/") for name in names if name.startswith("method/")]
        if not methods:
            methods = [class_name(item.class_path).lower() for item in config.method] or ["fedavg"]
        elif len(methods) > 1:  # the last whole method, and what was added to it
            whole = max((i for i, m in enumerate(methods) if m not in ("ri", "sam")), default=0)
            methods = methods[whole:]
        return f"{data}-{'+'.join(methods)}"

    def instantiate_classes(self) -> None:
        try:
            self.config_init = self.parser.instantiate_classes(self.config)
        except (ValueError, TypeError) as error:
            if isinstance(error, UserError) or (why := why_not_built(error)) is None:
                raise
            raise UserError(why) from error
        self.datamodule = self.config_init.data
        if self.command == "partition":
            return
        self.model = self.config_init.model
        learner = yaml.safe_load(self._config_text())["model"]["learner"]
        of_learner = learner_config(learner, self.config.model.learner, type(self.model.learner))
        self.model.global_model.config = of_learner
        self.trainer = self._trainer()

    def starts_from(self) -> dict[str, Any]:
        """The checkpoint to start from and how it is read, as arguments of the Trainer's fit, test, …"""
        return {"ckpt_path": self.checkpoint, "weights_only": self.config.weights_only}

    def _config_text(self) -> str:
        saved = self.config.clone()
        saved.pop("config", None)
        saved.pop("weights_only", None)
        saved.ckpt_path = None
        _name_enums(saved)
        return str(self.parser.dump(saved, skip_none=False, skip_validation=True))

    def _trainer(self) -> pl.Trainer:
        """The Trainer, with the run's folder, the method, the usual callbacks and atomic checkpoints."""
        settings: dict[str, Any] = vars(self.config_init.trainer).copy()
        users = settings["callbacks"] or []
        users = list(users) if isinstance(users, list) else [users]
        callbacks = [*self.config_init.method, *users]
        logger, plugins = settings["logger"], settings["plugins"] or []
        loggers = [] if logger is None or isinstance(logger, bool) else logger
        settings["logger"] = (
            (loggers if isinstance(loggers, list) else [loggers])
            if self.command == "fit"
            else False
        )
        settings["plugins"] = [
            *(plugins if isinstance(plugins, list) else [plugins]),
            AtomicCheckpointIO(),
        ]
        settings["default_root_dir"] = str(self.folder)
        writes = self.command == "fit" and not settings["fast_dev_run"]
        has = {type(callback).__name__ for callback in callbacks}
        for name in _STANDING:
            wanted = (
                settings["enable_progress_bar"] is not False
                if name == "FederatedProgressBar"
                else writes
            )
            if name not in has and wanted:
                callbacks.append(getattr(fl_lightning.callbacks, name)())
        if writes:
            run = RunFolder(self.folder, self.stem, self._config_text(), logger in (None, True))
            callbacks.insert(0, run)
            if settings["enable_checkpointing"] is not False:
                callbacks.append(RunCheckpoint(run, self.config.monitor, self.config.monitor_mode))
            # last: what is refused before training leaves no record
            typed = ["fl-lightning", *self.prepared.argv]
            own = self.prepared
            callbacks.append(
                RunRecord(self._config_text(), typed, own.arm, own.claims_hash, own.axes)
            )
        else:
            settings["enable_checkpointing"] = False
        if self.command == "fit":
            callbacks.append(self.stop)
        settings["callbacks"] = callbacks
        # on a CPU Lightning would quietly take another
        if str(settings["precision"]) in ("16", "16-mixed"):
            raise UserError(
                f"--trainer.precision {settings['precision']}: gradients in half precision would need a loss scale for "
                "every client. Accepted: 32-true, 64-true, bf16-mixed."
            )
        try:
            trainer = pl.Trainer(**settings)
        except (ValueError, TypeError) as error:
            raise UserError(f"trainer: {' '.join(str(error).split())[:400]}") from error
        except (
            ImportError
        ) as error:  # of a package that an accelerator, a strategy or a precision needs
            chosen = ", ".join(
                f"{key} {settings[key]}" for key in ("accelerator", "strategy", "precision")
            )
            raise UserError(f"trainer ({chosen}): {' '.join(str(error).split())[:300]}") from error
        if isinstance(trainer.strategy, DDPStrategy) and trainer.strategy._start_method != "popen":
            raise UserError(
                f"--trainer.strategy {settings['strategy']}: it starts its processes from within Python, and what they "
                "train does not come back to the command line. Accepted: auto, federated."
            )
        return trainer
