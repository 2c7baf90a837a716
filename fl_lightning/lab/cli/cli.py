"""A command's parser, model, data and Trainer, on LightningCLI."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import deepcopy
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import Namespace

import fl_lightning.callbacks
import fl_lightning.datamodules
import fl_lightning.machine.federated_strategy
import fl_lightning.models
import fl_lightning.schedules
from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.errors import UserError, check_on_disk
from fl_lightning.lab.cli.classes import class_of, method_class
from fl_lightning.lab.cli.compose import (
    Command,
    Option,
    as_list,
    class_name,
    is_file,
    parse_yaml,
    plain_yaml,
)
from fl_lightning.lab.cli.drop_in import MethodCLI
from fl_lightning.lab.cli.learner_config import learner_config
from fl_lightning.lab.cli.network_sizes import fit_network_to_data
from fl_lightning.lab.cli.options import apply_options
from fl_lightning.lab.cli.run_folder import (
    RunCheckpoint,
    RunEvents,
    RunFolderWriter,
    check_name,
    check_writable,
    checkpoints,
    holds_run,
    next_free,
    numbered,
)
from fl_lightning.lab.cli.run_record import RunRecord
from fl_lightning.lab.cli.same_settings import UNREADABLE, check_same_settings
from fl_lightning.lab.cli.signals import GracefulStop
from fl_lightning.lab.cli.trackers import check_goes_on, check_installed, completed, trackers
from fl_lightning.lab.cli.wrong_settings import explained, not_found, why_not_built
from fl_lightning.machine.lightning import DDPStrategy, LightningArgumentParser, pl
from fl_lightning.metrics import check_mode
from fl_lightning.module import FederatedModule
from fl_lightning.storage.atomic_files import named
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO

_TRAINER_DEFAULTS = {
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
}
# Options beside LightningCLI's own, and those that only `export` has.
_OPTIONS: dict[str, Any] = {
    "ckpt_path": str | None,
    "weights_only": bool | None,
    "monitor": str | None,
    "monitor_mode": str | None,
}
_OF_EXPORT: dict[str, Any] = {
    "client": int | str | None,
    "pretrained": str | None,
    "merged": bool | None,
}
_STANDING = ("FederatedProgressBar", "DivergenceLogger", "CommunicationLogger", "RunCard")


def _name_enums(node: Any) -> None:
    """Write members of an Enum as the text that is parsed back.

    The defaults of Lightning's callbacks may be such members.
    """
    items = vars(node).items() if isinstance(node, Namespace) else enumerate(node)
    for key, value in list(items):
        if isinstance(value, Enum):
            node[key] = str(value.value) if isinstance(value, str) else value.name
        elif isinstance(value, Namespace | list):
            _name_enums(value)


def _refuse_without_effect(data: Any, options: Sequence[Option]) -> None:
    """Refuse a number of clients that was typed for data that have clients of their own.

    Packaged configs give a number, too, which such data may leave unused.
    """
    typed = ("data.num_clients", "data.init_args.num_clients")
    found = [option for option, _ in options if option in typed]
    cls = class_of(data.class_path)
    # A class of the user's may use the number, even if the packaged class that it extends does not.
    if not found or not getattr(cls, "__module__", "").startswith("fl_lightning."):
        return
    given = vars(data.init_args)
    if given.get("num_clients") is None or not cls.own_clients(**given):
        return
    ways = "give --data.partition, which splits all samples anew"
    if given.get("client") is not None:
        ways = "leave out data.client, and give --data.partition, which splits all samples anew"
    raise UserError(
        f"--{found[0]} has no effect: {cls.__name__} takes its clients from the "
        f"data. Leave the option out. For another number of clients, {ways}, or the data's own "
        "options; --data.help lists them."
    )


def _refuse_huge(node: Any, path: str = "") -> None:
    """Refuse integers of more than 63 bits, for which libraries raise errors of their own."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            _refuse_huge(value, path if key == "init_args" else f"{path}.{key}".removeprefix("."))
    elif isinstance(node, int) and not -(2**63) <= node < 2**63:
        raise UserError(f"--{path} {str(node)[:60]}: an integer here has 63 bits at most.")


def _readable(node: Any) -> Any:
    """Return a config without the arguments that have no text, which then are their classes'
    defaults.
    """
    if isinstance(node, list):
        return [_readable(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if not str(value).startswith(UNREADABLE)}
    return {key: _readable(value) for key, value in kept.items()}


class Parser(LightningArgumentParser):
    """Raises a :class:`UserError` of one paragraph; its base classes would print the usage."""

    # What is parsed, and its keys; set for the parser of the whole command.
    settings: dict[str, Any] | None = None
    options: list[str]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # A parser for a nested class has no settings; the outer parser words the message.
        if self.settings is None:
            raise ValueError(message) from ex
        raise UserError(explained(message, self.settings, self.options)) from ex


class CommandCLI(MethodCLI):
    """One command: it parses, and builds ``datamodule``, ``model`` and ``trainer``.

    ``commands`` runs it.

    Args:
        command: fit, validate, test, predict, export or partition.
        prepared: its arguments, as sorted by :func:`~fl_lightning.lab.cli.compose.prepare`.
        added: callbacks of a fit, in addition to those of its config.
        without: names of callbacks that every other fit has, and this one does not.
    """

    def __init__(
        self,
        command: str,
        prepared: Command,
        added: Sequence[pl.Callback] = (),
        without: Sequence[str] = (),
    ) -> None:
        apply_options(prepared)
        if command != "partition":
            fit_network_to_data(prepared)
        for note in prepared.notes:
            print(note, file=sys.stderr)
        self.command = command
        self.prepared = prepared
        self.added = added
        self.without = without
        self.stop = GracefulStop()
        # The checkpoint that the run starts from.
        self.checkpoint: str | None = None
        super().__init__(
            model_class=FederatedModule,
            datamodule_class=FederatedDataModule,
            subclass_mode_data=True,
            # RunFolderWriter writes the config after every check has passed.
            save_config_callback=None,
            trainer_defaults=_TRAINER_DEFAULTS,
            parser_class=Parser,
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
        assert isinstance(parser, Parser)
        parser.options = ["seed_everything", "data"]
        if self.command == "partition":
            return
        options = _OPTIONS | (_OF_EXPORT if self.command == "export" else {})
        for name, kind in options.items():
            parser.add_argument(f"--{name}", type=kind, default=None)
        parser.options += ["trainer", "model", "method", *options]

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        assert isinstance(parser, Parser)
        config = self.prepared.config
        if self.command == "partition":
            # A split depends on the data and the run's seed, so other settings change nothing.
            seed = config["model"].get("seed")
            config = {key: config[key] for key in ("seed_everything", "data") if key in config}
            if seed is not None:
                config["seed_everything"] = seed
        # The parser changes what it is given.
        parser.settings = deepcopy(config)
        try:
            self.config = parser.parse_object(config)
        except ValueError as error:
            # Of some values, such as the path of a module, jsonargparse raises this.
            if isinstance(error, UserError):
                raise
            parser.error(str(error), error)
        if self.prepared.print_config:
            _name_enums(self.config)
            parser.parse_args([self.prepared.print_config], namespace=self.config)
        _refuse_without_effect(self.config.data, self.prepared.options)
        seed = self.config.seed_everything
        if not isinstance(seed, bool) and seed is not None and not 0 <= seed < 2**32:
            raise UserError(
                f"--seed_everything {seed}: give an integer from 0 to 4294967295, or true to draw "
                "one."
            )
        _refuse_huge(self.config.as_dict())

    def before_instantiate_classes(self) -> None:
        """Decide on folder and checkpoint before anything is built.

        So errors in them are reported at once.
        """
        if self.command == "partition":
            return
        check_mode("--monitor_mode", self.config.monitor_mode)
        self._read_numbers()
        self._choose_folder()
        found = checkpoints(self.folder)
        self._choose_checkpoint(found)
        if self.command == "fit":
            self._refuse_other_run(found)
            if self.checkpoint is not None:
                strict = bool(self.config.model.get("strict_resume", True))
                now = parse_yaml(self.config_text())
                check_same_settings(Path(self.checkpoint), now, strict)
            check_writable(self.folder)

    def _read_numbers(self) -> None:
        """Convert options' text to numbers if an argument takes both: 0.5 becomes a number,
        auto stays text.
        """
        for key in ("participation", "clients_at_once", "workers", "capture"):
            value = self.config.model.get(key)
            if isinstance(value, str):
                number = plain_yaml(value, f"--model.{key}")
                if type(number) in ((bool,) if key == "capture" else (int, float)):
                    self.config.model[key] = number

    def _choose_folder(self) -> None:
        """Set ``folder``, or ``stem`` if the run has to find a free number."""
        root = self.config.trainer.default_root_dir
        going_on = self.config.ckpt_path == "last"
        self.stem: str | None = None
        if root:
            check_on_disk("--trainer.default_root_dir", root)
            self.folder = named(str(root))
            self.config.trainer.default_root_dir = str(self.folder)
        else:
            stem = f"runs/{self._name()}"
            existing = numbered(stem)
            # A resumed run uses the last folder of this name; any other run gets the next number.
            self.folder = existing[-1][1] if existing and going_on else next_free(stem)
            self.stem = None if going_on else stem
        check_name(self.folder)

    def _choose_checkpoint(self, found: list[Path]) -> None:
        """Set ``checkpoint``; the word ``last`` means one of the checkpoints ``found`` in the
        folder.
        """
        path = self.config.ckpt_path
        if path == "last":
            if found and found[0].name == "last.ckpt":
                self.checkpoint = str(found[0])
            elif found:
                last = self.folder / "checkpoints" / "last.ckpt"
                raise UserError(
                    f"--ckpt_path last: {last} is missing, but this run has another checkpoint: "
                    f"--ckpt_path {found[0]}."
                )
            elif self.command != "fit":
                raise UserError(
                    f"--ckpt_path last: {self.folder} has no checkpoint yet (checkpoints/last.ckpt "
                    "is missing). Give the folder of a run that completed a round, or "
                    "--ckpt_path FILE."
                )
        elif path is not None:
            self.checkpoint = path
            if not is_file(path):
                raise UserError(
                    f"--ckpt_path {path[:200]}: there is no such file. Accepted: a checkpoint's "
                    f"path, or last for the one in {self.folder}."
                )

    def _refuse_other_run(self, found: list[Path]) -> None:
        """Refuse a folder that holds a run, unless this run resumes from a checkpoint in it."""
        own = [path.resolve() for path in found]
        goes_on = self.checkpoint is not None and Path(self.checkpoint).resolve() in own
        if holds_run(self.folder) and not goes_on:
            way_out = "It has no checkpoint to go on from:"
            if found:
                way_out = f"Go on with it by fl-lightning fit {self.folder}, or"
            raise UserError(
                f"--trainer.default_root_dir {self.folder}: this folder already holds a run, and "
                f"it was not changed. {way_out} give another folder for a new run with these "
                "settings: --trainer.default_root_dir DIR."
            )

    def _name(self) -> str:
        """Return <data>-<method>, by the configs' names if these are known."""
        data = class_name(self.config.data.class_path).lower()
        configs = [name for name in self.prepared.names if name.startswith("method/")]
        methods = [name.removeprefix("method/") for name in configs]
        if not methods:
            paths = [item.class_path for item in self.config.method]
            # Callbacks that only measure or simulate are not part of the method.
            whole_paths = [path for path in paths if method_class(path).is_method()]
            methods = [class_name(path).lower() for path in whole_paths] or ["fedavg"]
        # The run is named after the last complete method and the additions to it.
        whole = [place for place, method in enumerate(methods) if method not in ("ri", "sam")]
        if configs and whole:
            methods = methods[whole[-1] :]
        return f"{data}-{'+'.join(methods)}"

    def instantiate_classes(self) -> None:
        config = self.config
        ids: dict[str, str] = {}
        if self.command != "partition":
            check_installed(config)
        if self.command == "fit":
            ids = trackers(self.folder) if self.checkpoint else {}
            config = completed(config, ids)
        try:
            self.config_init = self.parser.instantiate_classes(config)
        except (ValueError, TypeError, OSError) as error:
            message = not_found(error, config.as_dict()) or why_not_built(error)
            if isinstance(error, UserError) or message is None:
                raise
            raise UserError(message) from error
        self.datamodule = self.config_init.data
        if self.command == "partition":
            return
        check_goes_on(self.config_init.trainer.logger, ids, self.folder)
        self.model = self.config_init.model
        learner = yaml.safe_load(self.config_text())["model"]["learner"]
        written = learner_config(learner, self.config.model.learner, type(self.model.learner))
        self.model.global_model.config = written
        self.trainer = self._trainer()

    def starts_from(self) -> dict[str, Any]:
        """Return the checkpoint to start from and how to read it, as arguments of fit, test, …"""
        return {"ckpt_path": self.checkpoint, "weights_only": self.config.weights_only}

    def config_text(self) -> str:
        saved = self.config.clone()
        saved.pop("config", None)
        saved.pop("weights_only", None)
        saved.ckpt_path = None
        # strict_resume holds for one command only: a later resume is compared again. An app's run
        # has no other place for it.
        if self.command != "deploy" and "strict_resume" in saved.get("model", {}):
            saved.model.strict_resume = True
        _name_enums(saved)
        text = str(self.parser.dump(saved, skip_none=False, skip_validation=True))
        if UNREADABLE in text:
            text = yaml.safe_dump(_readable(parse_yaml(text)), sort_keys=False)
        return text

    def _trainer(self) -> pl.Trainer:
        """Return the Trainer, with the run's folder, the method and the callbacks of every run."""
        settings: dict[str, Any] = vars(self.config_init.trainer).copy()
        writes = self.command == "fit" and not settings["fast_dev_run"]
        logger = settings["logger"]
        settings["callbacks"] = self._callbacks(settings, writes)
        if not writes:
            settings["enable_checkpointing"] = False
        # RunFolderWriter adds the run's loggers after it has claimed the folder.
        settings["logger"] = False
        if self.command == "fit":
            settings["logger"] = [each for each in _own(logger) if not isinstance(each, RunEvents)]
        settings["plugins"] = [*as_list(settings["plugins"]), AtomicCheckpointIO()]
        settings["default_root_dir"] = str(self.folder)
        if self.command == "predict":
            # Each of several processes would predict its share, and overwrite the others' file.
            devices = settings["devices"]
            one = devices[:1] if isinstance(devices, list) and devices else 1
            settings |= {"strategy": "auto", "devices": one, "num_nodes": 1}
        return _built(settings)

    def _callbacks(self, settings: dict[str, Any], writes: bool) -> list[pl.Callback]:
        """Return the callbacks of the method, the user and the run, in the order of their hooks."""
        callbacks = [*self.added, *self.callbacks_with_method(settings["callbacks"])]
        names = {type(callback).__name__ for callback in callbacks}
        for name in _STANDING:
            wanted = writes and name not in self.without
            if name == "FederatedProgressBar":
                wanted = settings["enable_progress_bar"] is not False
            if name not in names and wanted:
                callbacks.append(getattr(fl_lightning.callbacks, name)())
        if writes:
            own = _own(settings["logger"])
            tensorboard = settings["logger"] in (None, True)
            tensorboard = tensorboard or any(isinstance(each, RunEvents) for each in own)
            config = self.config_text()
            run = RunFolderWriter(self.folder, self.stem, config, tensorboard)
            callbacks.insert(0, run)
            if settings["enable_checkpointing"] is not False:
                callbacks.append(RunCheckpoint(run, self.config.monitor, self.config.monitor_mode))
            # The record comes last: a run that is refused before training leaves no record.
            typed = ["fl-lightning", *self.prepared.argv]
            callbacks.append(RunRecord(config, typed, **self.prepared.record))
        if self.command == "fit":
            callbacks.append(self.stop)
        return callbacks


def _own(logger: Any) -> list[Any]:
    """Return the loggers that ``trainer.logger`` holds, which may also be true or false."""
    return [] if isinstance(logger, bool) else as_list(logger)


def _built(settings: dict[str, Any]) -> pl.Trainer:
    """Build the Trainer of these settings, or raise a paragraph about why it cannot be built."""
    # On a CPU Lightning would silently use another precision.
    if str(settings["precision"]) in ("16", "16-mixed"):
        raise UserError(
            f"--trainer.precision {settings['precision']}: gradients in half precision would need "
            "a loss scale for every client. Accepted: 32-true, 64-true, bf16-mixed."
        )
    try:
        trainer = pl.Trainer(**settings)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"trainer: {' '.join(str(error).split())[:400]}") from error
    except ImportError as error:
        # An accelerator, a strategy or a precision needs a package that is not installed.
        options = ("accelerator", "strategy", "precision")
        chosen = ", ".join(f"{option} {settings[option]}" for option in options)
        raise UserError(f"trainer ({chosen}): {' '.join(str(error).split())[:300]}") from error
    if isinstance(trainer.strategy, DDPStrategy) and trainer.strategy._start_method != "popen":
        raise UserError(
            f"--trainer.strategy {settings['strategy']}: this strategy starts its processes from "
            "within Python, so the command line does not get the model that they train. "
            "Accepted: auto, federated."
        )
    return trainer
