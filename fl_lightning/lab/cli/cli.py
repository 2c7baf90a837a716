"""A command's parser, model, data and Trainer, on LightningCLI."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn

import yaml

import fl_lightning.callbacks
from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.errors import UserError, check_on_disk
from fl_lightning.introspection.init_args import NotKnown, described
from fl_lightning.lab.cli.classes import class_of, method_class
from fl_lightning.lab.cli.compose import (
    OF_METHODS,
    Command,
    Option,
    as_list,
    class_name,
    is_file,
)
from fl_lightning.lab.cli.drop_in import MethodCLI
from fl_lightning.lab.cli.network_sizes import fit_network_to_data
from fl_lightning.lab.cli.options import apply_options
from fl_lightning.lab.cli.run_folder import (
    RunCheckpoint,
    RunEvents,
    RunFolderWriter,
    check_writable,
    checkpoints,
    next_free,
    numbered,
    refuse_other_run,
)
from fl_lightning.lab.cli.run_record import RunRecord, completed
from fl_lightning.lab.cli.signals import GracefulStop
from fl_lightning.lab.cli.wrong_settings import explained, why_not_built
from fl_lightning.machine.lightning import NAMESPACE, DDPStrategy, LightningArgumentParser, pl
from fl_lightning.metrics import check_mode, read_record
from fl_lightning.module import FederatedModule
from fl_lightning.storage.atomic_files import named
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO, is_plain

_TRAINER_DEFAULTS: dict[str, Any] = {"log_every_n_steps": 1, "num_sanity_val_steps": 0}
_TRAINER_DEFAULTS["enable_model_summary"] = False
# Options beside LightningCLI's own, and those that only `export` has.
_OPTIONS: dict[str, Any] = dict.fromkeys(("ckpt_path", "monitor", "monitor_mode"), str | None)
_OPTIONS["weights_only"] = bool | None
_OF_EXPORT: dict[str, Any] = {"client": int | str | None, "pretrained": str | None}
_OF_EXPORT["merged"] = bool | None
# The callbacks of every fit, with their arguments. By default DivergenceLogger keeps no model.
_STANDING: dict[str, dict[str, Any]] = {
    "FederatedProgressBar": {},
    "DivergenceLogger": {"all_clients": False},
    "CommunicationLogger": {},
    "RunCard": {},
}


def _plain(node: Any) -> Any:
    """Return a config without the arguments that have no text, such as a device.

    They then are their classes' defaults.
    """
    if isinstance(node, list | tuple):
        return [_plain(item) for item in node]
    if isinstance(node, dict):
        kept = {}
        for key, value in node.items():
            with suppress(NotKnown):
                kept[key] = _plain(value)
        return kept
    return described(node)


def _refuse_without_effect(data: Any, options: Sequence[Option]) -> None:
    """Refuse a number of clients that was typed for data that have clients of their own.

    Packaged configs give a number, too, which such data may leave unused.
    """
    typed = {"data.num_clients", "data.init_args.num_clients"} & {option for option, _ in options}
    cls = class_of(data.class_path)
    # A class of the user's may use the number, even if the packaged class that it extends does not.
    if typed and getattr(cls, "__module__", "").startswith("fl_lightning."):
        given = vars(data.init_args)
        if given.get("num_clients") is not None and cls.own_clients(**given):
            raise UserError(
                f"--data.num_clients has no effect: {cls.__name__} takes its clients from the "
                "data. Leave the option out, or give --data.partition, which splits all samples "
                "anew."
            )


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
            print(self.config_text(), end="")
            raise SystemExit(0)
        _refuse_without_effect(self.config.data, self.prepared.options)

    def before_instantiate_classes(self) -> None:
        """Decide on folder and checkpoint before anything is built."""
        if self.command == "partition":
            return
        check_mode("--monitor_mode", self.config.monitor_mode)
        self._choose_folder()
        if self.command == "fit":
            check_writable(self.folder)
        found = checkpoints(self.folder)
        self._choose_checkpoint(found)
        if self.command == "fit":
            way = f"fl-lightning fit {self.folder}"
            refuse_other_run("--trainer.default_root_dir", self.folder, self.checkpoint, way)

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

    def _choose_checkpoint(self, found: list[Path]) -> None:
        """Set ``checkpoint``; the word ``last`` means one of those ``found`` in the folder."""
        path = self.config.ckpt_path
        if path is None and self.command == "export":
            raise UserError(
                "export: which run? Give its folder, fl-lightning export runs/x, or --ckpt_path "
                "FILE."
            )
        if path is None or (path == "last" and self.command == "fit" and not found):
            return
        last = str(self.folder / "checkpoints" / "last.ckpt")
        self.checkpoint = last if path == "last" else path
        if not is_file(self.checkpoint):
            other = f" This run has --ckpt_path {found[0]}." if found else ""
            raise UserError(
                f"--ckpt_path {path[:200]}: there is no such file. Accepted: a checkpoint's path, "
                f"or last for {last}, which is there once a round is done.{other}"
            )

    def _name(self) -> str:
        """Return <data>-<method>, by the configs' names if these are known."""
        data = class_name(self.config.data.class_path).lower()
        configs = [name for name in self.prepared.names if name.startswith(OF_METHODS)]
        methods = [re.sub("^(method|recipe/[^/]+)/", "", name) for name in configs]
        if not methods:
            paths = [item.class_path for item in self.config.method]
            # Callbacks that only measure or simulate are not part of the method.
            whole_paths = [path for path in paths if method_class(path).is_method()]
            return f"{data}-{'+'.join(map(class_name, whole_paths)).lower() or 'fedavg'}"
        # The run is named after the last complete method and the additions to it.
        whole = [place for place, method in enumerate(methods) if method not in ("ri", "sam")]
        return f"{data}-{'+'.join(methods[whole[-1] if whole else 0 :])}"

    def instantiate_classes(self) -> None:
        config = self.config
        if self.command != "partition":
            goes_on = self.command == "fit" and self.checkpoint
            ids = read_record(self.folder).get("trackers") if goes_on else None
            config = completed(config, ids or {})
        try:
            self.config_init = self.parser.instantiate_classes(config)
        except (ValueError, TypeError, ArithmeticError, OSError, ImportError) as error:
            message = why_not_built(error)
            if message is None and not isinstance(error, ValueError | TypeError):
                # A file, a package or a number that the system, Python or NumPy refused.
                message = f"{' '.join(str(error).split())[:400]}. Correct the option for it."
            if isinstance(error, UserError) or message is None:
                raise
            raise UserError(message) from error
        self.datamodule = self.config_init.data
        if self.command == "partition":
            return
        self.model = self.config_init.model
        written = yaml.safe_load(self.config_text())["model"]["learner"]
        learner = type(self.model.learner)
        self.model.global_model.config = _of_learner(written, self.config.model.learner, learner)
        self.trainer = self._trainer()

    def starts_from(self) -> dict[str, Any]:
        """Return the checkpoint to start from and how to read it, as arguments of fit, test, …"""
        return {"ckpt_path": self.checkpoint, "weights_only": self.config.weights_only}

    def config_text(self) -> str:
        saved = self.config.as_dict()
        for name in ("config", "weights_only"):
            saved.pop(name, None)
        saved["ckpt_path"] = None
        # strict_resume holds for one command only: a later resume is compared again. An app's run
        # has no other place for it.
        if self.command != "deploy" and "strict_resume" in saved.get("model", {}):
            saved["model"]["strict_resume"] = True
        return yaml.safe_dump(_plain(saved), sort_keys=False, allow_unicode=True)

    def _trainer(self) -> pl.Trainer:
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
        for name, arguments in _STANDING.items():
            wanted = writes and name not in self.without
            if name == "FederatedProgressBar":
                wanted = settings["enable_progress_bar"] is not False
            if name not in names and wanted:
                callbacks.append(getattr(fl_lightning.callbacks, name)(**arguments))
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


def _of_learner(written: dict[str, Any], parsed: Any, learner: type) -> dict[str, Any]:
    """Return the learner's arguments in the form that its ``load_from_checkpoint`` reads.

    A class that takes objects needs Lightning's ``_instantiator``, which imports the classes that
    the checkpoint names. Plain data, and arguments that the class builds itself
    (``builds_arguments``, see Classifier), need none.

    Args:
        written: ``model.learner`` of config.yaml; ``parsed``: the same, with typed values.
    """
    arguments = {**written.get("init_args", {}), **written.get("dict_kwargs", {})}
    values = {**dict(parsed.get("init_args") or {}), **dict(parsed.get("dict_kwargs") or {})}
    built = getattr(learner, "builds_arguments", ())
    if all(
        name in built or (is_plain(values.get(name)) and values[name] == value)
        for name, value in arguments.items()
    ):
        return arguments
    config = {"_instantiator": f"{NAMESPACE}.cli.instantiate_module"}
    # If arguments were given in dict_kwargs, the instantiator needs the class itself.
    if "dict_kwargs" in written:
        config["_class_path"] = written["class_path"]
    return {**config, **arguments}


def _own(logger: Any) -> list[Any]:
    return [] if isinstance(logger, bool) else as_list(logger)


def _built(settings: dict[str, Any]) -> pl.Trainer:
    # Without a GPU Lightning would take bf16-mixed in its place.
    precision = settings["precision"]
    if str(precision) in ("16", "16-mixed"):
        raise UserError(
            f"--trainer.precision {precision}: gradients in half precision would need a loss scale "
            "for every client. Accepted: 32-true, 64-true, bf16-mixed."
        )
    try:
        trainer = pl.Trainer(**settings)
    except (ValueError, TypeError, OverflowError, ImportError) as error:
        raise UserError(f"trainer: {' '.join(str(error).split())[:400]}") from error
    if isinstance(trainer.strategy, DDPStrategy) and trainer.strategy._start_method != "popen":
        raise UserError(
            f"--trainer.strategy {settings['strategy']}: this strategy starts its processes from "
            "within Python, so the command line does not get the model that they train. "
            "Accepted: auto, federated."
        )
    return trainer
