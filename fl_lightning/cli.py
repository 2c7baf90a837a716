"""The commands that train and evaluate, on LightningCLI."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import pytorch_lightning as pl
import torch
import yaml
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from torch.optim import Optimizer

import fl_lightning.callbacks
import fl_lightning.datamodules
import fl_lightning.models
import fl_lightning.schedules
import fl_lightning.strategies
from fl_lightning.callback import FederatedCallback
from fl_lightning.checkpoint import AtomicCheckpointIO
from fl_lightning.compose import Command, class_name, parse_yaml
from fl_lightning.datamodules import FederatedDataModule, Partition
from fl_lightning.errors import Diverged, UserError
from fl_lightning.method_options import apply_method_options, full_paths
from fl_lightning.module import FederatedModule
from fl_lightning.parsing_errors import one_paragraph
from fl_lightning.run_folder import RunCheckpoint, RunFolder, check_writable, holds_run, next_free, numbered
from fl_lightning.schedules import Schedule
from fl_lightning.signals import GracefulStop

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
_TRAINER_DEFAULTS = {"log_every_n_steps": 1, "num_sanity_val_steps": 0, "enable_model_summary": False}
_NOISE = (
    ".*LeafSpec.*",
    ".*does not have many workers.*",
    ".*smaller than the logging interval.*",
    "No seed found.*",
    ".*callbacks used to create.*",  # a test needs no RunCheckpoint
)
_STANDING = ("FederatedProgressBar", "DivergenceLogger", "CommunicationLogger", "RunCard")


class Parser(LightningArgumentParser):
    """Raises :class:`UserError` with one paragraph where its parents print the usage."""

    command: Command | None = None

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        command = self.command
        if command is None:  # one that jsonargparse makes for a class within: the outer one words it
            raise ValueError(message) from ex
        raise UserError(one_paragraph(message, self, command.config, command.options, _BASES)) from ex


class FederatedCLI(LightningCLI):
    """One command: parses, builds ``datamodule``, ``model`` and ``trainer``; ``main`` then runs it.

    Args:
        command: fit, validate, test, predict, export or partition.
        prepared: its arguments, sorted.
    """

    def __init__(self, command: str, prepared: Command) -> None:
        prepared.config, prepared.options = full_paths(prepared.config), full_paths(prepared.options)
        apply_method_options(prepared)
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
            "--monitor",
            type=str | None,
            default=None,
            help="Metric of best.ckpt: highest, or lowest for a loss (default: val/acc).",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        assert isinstance(parser, Parser)
        parser.command = self.prepared
        config = self.prepared.config
        if self.command == "partition":
            config = {key: value for key, value in config.items() if key in ("seed_everything", "data")}
        self.config = parser.parse_args(["--config", json.dumps(config), *self.prepared.options])

    def before_instantiate_classes(self) -> None:
        """Settle folder and checkpoint, so that what is wrong with them is said before anything is made."""
        if self.command == "partition":
            return
        for key, value in vars(self.config.model).items():
            if key in ("participation", "clients_at_once", "workers", "capture") and isinstance(value, str):
                self.config.model[key] = parse_yaml(value)  # an option's text: 0.5 is a number, auto stays
        given, ckpt = self.config.trainer.default_root_dir, self.config.ckpt_path
        self.stem = None if given else f"runs/{self._name()}"
        if given:
            self.folder = Path(given)
        else:
            existing = numbered(self.stem or "")
            self.folder = existing[-1][1] if existing and ckpt == "last" else next_free(self.stem or "")
            if ckpt == "last":
                self.stem = None
        last = self.folder / "checkpoints" / "last.ckpt"
        if ckpt == "last":
            self.checkpoint = str(last) if last.exists() else None
            if self.command != "fit" and not last.exists():
                raise UserError(
                    f"--ckpt_path last: {self.folder} has no checkpoint yet ({last} is missing). "
                    "Give the folder of a run that completed a round, or --ckpt_path FILE."
                )
        elif ckpt is not None:
            self.checkpoint = ckpt
            if not Path(ckpt).is_file():
                raise UserError(
                    f"--ckpt_path {ckpt}: there is no such file. Accepted: a checkpoint's path, or last for the "
                    f"one in {self.folder}."
                )
        if self.command == "fit":
            same = self.checkpoint is not None and Path(self.checkpoint).resolve() == last.resolve()
            if holds_run(self.folder) and ckpt != "last" and not same:
                raise UserError(
                    f"--trainer.default_root_dir {self.folder}: this folder already holds a run, which is left as it "
                    "is. Go on with it by --ckpt_path last, or give another folder."
                )
            check_writable(self.folder)

    def _name(self) -> str:
        """<data>-<method>, by the configs' names where they say it."""
        config, names = self.config, self.prepared.names
        data = class_name(self.config.data.class_path).lower()
        methods = [name.removeprefix("method/") for name in names if name.startswith("method/")]
        if self.prepared.method_options or not methods:
            methods = [class_name(item.class_path).lower() for item in config.method] or ["fedavg"]
        elif len(methods) > 1:  # the last whole method, and what was added to it
            whole = max((i for i, m in enumerate(methods) if m not in ("ri", "sam")), default=0)
            methods = methods[whole:]
        return f"{data}-{'+'.join(methods)}"

    def instantiate_classes(self) -> None:
        self.config_init = self.parser.instantiate_classes(self.config)
        self.datamodule = self.config_init.data
        if self.command == "partition":
            return
        self.model = self.config_init.model
        learner = yaml.safe_load(self._config_text())["model"]["learner"]
        self.model.learner_config = {  # what load_from_checkpoint needs to build the learner and what is in it
            "_instantiator": "pytorch_lightning.cli.instantiate_module",
            **({"_class_path": learner["class_path"]} if "dict_kwargs" in learner else {}),
            **learner.get("init_args", {}),
            **learner.get("dict_kwargs", {}),
        }
        self.trainer = self._trainer()

    def _config_text(self) -> str:
        saved = self.config.clone()
        saved.pop("config", None)
        saved.ckpt_path = None
        return str(self.parser.dump(saved, skip_none=False, skip_validation=True))

    def _trainer(self) -> pl.Trainer:
        """The Trainer, with the run's folder, the method, the standing callbacks and atomic checkpoints."""
        settings: dict[str, Any] = vars(self.config_init.trainer).copy()
        users = settings["callbacks"] or []
        users = list(users) if isinstance(users, list) else [users]
        callbacks = [*self.config_init.method, *users]
        logger, plugins = settings["logger"], settings["plugins"] or []
        loggers = [] if logger is None or isinstance(logger, bool) else logger
        settings["logger"] = (loggers if isinstance(loggers, list) else [loggers]) if self.command == "fit" else False
        settings["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()]
        settings["default_root_dir"] = str(self.folder)
        writes = self.command == "fit" and not settings["fast_dev_run"]
        has = {type(callback).__name__ for callback in callbacks}
        for name in _STANDING:
            wanted = settings["enable_progress_bar"] is not False if name == "FederatedProgressBar" else writes
            if name not in has and wanted:
                callbacks.append(getattr(fl_lightning.callbacks, name)())
        if writes:
            run = RunFolder(self.folder, self.stem, self._config_text(), logger in (None, True))
            callbacks.insert(0, run)
            if settings["enable_checkpointing"] is not False:
                callbacks.append(RunCheckpoint(run, self.config.monitor))
        else:
            settings["enable_checkpointing"] = False
        if self.command == "fit":
            callbacks.append(self.stop)
        settings["callbacks"] = callbacks
        if str(settings["precision"]) in ("16", "16-mixed"):  # on a CPU Lightning would quietly take another
            raise UserError(
                f"--trainer.precision {settings['precision']}: gradients in half precision would need a loss scale for "
                "every client. Accepted: 32-true, 64-true, bf16-mixed."
            )
        try:
            return pl.Trainer(**settings)
        except (ValueError, TypeError) as error:
            raise UserError(f"trainer: {' '.join(str(error).split())[:400]}") from error


def _partition(cli: FederatedCLI) -> None:
    folder = Path(cli.prepared.output or ".")
    check_writable(folder)
    data = cli.datamodule
    data.setup("fit")
    print(data.partition_table())
    folder.mkdir(parents=True, exist_ok=True)
    data.plot_partition().savefig(folder / "partition.png")
    data.save_partition(folder / "partition.npz")
    print(f"→ {folder / 'partition.png'}, {folder / 'partition.npz'}")


def _predict(cli: FederatedCLI) -> None:
    path = Path(cli.prepared.output or cli.folder / "predictions.pt")
    check_writable(path.parent)
    predictions = cli.trainer.predict(cli.model, cli.datamodule, ckpt_path=cli.checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(predictions, path)
    print(f"→ {path}")


def _export(cli: FederatedCLI) -> None:
    if cli.checkpoint is None:
        raise UserError("export: which run? Give its folder, fl-lightning export runs/x, or --ckpt_path FILE.")
    path = Path(cli.prepared.output or cli.folder / "model.pt")
    check_writable(path.parent)
    checkpoint = AtomicCheckpointIO().load_checkpoint(cli.checkpoint)
    cli.model.learner.configure_model()
    cli.model.load_state_dict(checkpoint["state_dict"])  # it is this learner's
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = ("state_dict", "hyper_parameters", "pytorch-lightning_version")
    torch.save({key: checkpoint[key] for key in kept if key in checkpoint}, path)
    print(f"→ {path}")


def _execute(cli: FederatedCLI) -> int:
    if cli.command == "partition":
        _partition(cli)
        return 0
    if cli.checkpoint is not None:
        print(f"checkpoint: {cli.checkpoint}", flush=True)
    if cli.command == "fit":
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=cli.checkpoint)
    elif cli.command == "predict":
        _predict(cli)
    elif cli.command == "export":
        _export(cli)
    else:
        getattr(cli.trainer, cli.command)(cli.model, cli.datamodule, ckpt_path=cli.checkpoint)
    return 0 if cli.stop.received is None else 128 + cli.stop.received


def _quiet() -> None:
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # tips, device lines, "fit stopped"
    for message in _NOISE:
        warnings.filterwarnings("ignore", message)


def run(command: str, prepared: Command, debug: bool = False) -> int:
    """Run ``command`` and give its exit status; a :class:`UserError` is the caller's to print."""
    _quiet()
    cli: FederatedCLI | None = None
    try:
        for note in prepared.notes:
            print(note, file=sys.stderr)
        cli = FederatedCLI(command, prepared)
        return _execute(cli)
    except Diverged as error:
        print(f"fl-lightning: {error}", file=sys.stderr)
        return 3
    except MisconfigurationException as error:
        if debug:
            raise
        raise UserError(" ".join(str(error).split())[:500]) from error
    except RuntimeError as error:
        if debug or "Error(s) in loading state_dict" not in str(error):
            raise
        raise UserError(
            f"--ckpt_path {cli.checkpoint if cli else ''}: this checkpoint is of another model. "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    except SystemExit as error:
        if cli is not None and cli.stop.received is not None:
            return 128 + cli.stop.received
        return error.code if isinstance(error.code, int) else 0
