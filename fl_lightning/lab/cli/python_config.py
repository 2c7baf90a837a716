"""The config.yaml of a run that was made in Python: the settings that its objects store."""

from __future__ import annotations

import inspect
from typing import Any

import yaml
from torch.optim import Optimizer

from fl_lightning.callback import FederatedCallback
from fl_lightning.introspection.init_args import NotKnown, described, described_object, path_of
from fl_lightning.machine.lightning import pl

# Every run from the command line has these callbacks, and Lightning adds its own.
_NO_SETTING = (
    "FederatedProgressBar",
    "FolderRelease",
    "ModelCheckpoint",
    "ModelSummary",
    "RichModelSummary",
    "RichProgressBar",
    "RunCard",
    "RunCheckpoint",
    "RunFolder",
    "RunFolderWriter",
    "RunRecord",
    "TQDMProgressBar",
)
_OF_TRAINER = ("max_epochs", "min_epochs", "check_val_every_n_epoch", "precision")


class PythonConfig:
    """The config of the run that ``trainer`` fits now.

    ``unknown``: the keys whose values are known only to the program.
    """

    def __init__(self, trainer: pl.Trainer, module: Any, folder: str) -> None:
        self.unknown: list[str] = []
        settings = {name: getattr(trainer, name) for name in _OF_TRAINER}
        settings |= {"default_root_dir": folder, "logger": False}
        methods: list[Any] = []
        others: list[Any] = []
        callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # Lightning does not declare it
        for callback in callbacks:
            if type(callback).__name__ in _NO_SETTING:
                continue
            of_method = isinstance(callback, FederatedCallback)
            key = "method" if of_method else "trainer.callbacks"
            found = self._object(callback, key)
            (methods if of_method else others).extend([found] if found else [])
        model = {"learner": self._object(module.learner, "model.learner"), **self._model(module)}
        self.content: dict[str, Any] = {
            "seed_everything": int(module.run_seed),
            "trainer": {**settings, "callbacks": others or None},
            "model": model,
            "method": methods,
        }
        data = self._object(module.run.loop.cohort.data, "data")
        if data is not None:
            self.content["data"] = data
        if model["learner"] is None:
            del model["learner"]

    def _model(self, module: Any) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        optimizers = module.run.optimizers
        for name, value in vars(module.settings).items():
            made = {"client_optimizer": optimizers.clients, "server_optimizer": optimizers.server}
            try:
                if name in made and value is not None:
                    settings[name] = _optimizer(made[name])
                else:
                    settings[name] = described(value)
            except NotKnown:
                self.unknown.append(f"model.{name}")
        return settings

    def _object(self, value: Any, key: str) -> dict[str, Any] | None:
        try:
            config, unknown = described_object(value)
        except NotKnown:
            self.unknown.append(f"{key} ({type(value).__name__})")
            return None
        of_class = key if key in ("data", "model.learner") else f"{key}.{type(value).__name__}"
        self.unknown += [f"{of_class}.{name}" for name in unknown]
        return config

    def text(self) -> str:
        """Return the config as YAML; its first lines name the settings that it lacks."""
        lines = ["# A run from Python: what its objects know of their settings."]
        if self.unknown:
            lines.append(f"# Not known, and left out: {', '.join(self.unknown)}")
        return "\n".join([*lines, yaml.safe_dump(self.content, sort_keys=False)])


def _optimizer(made: Optimizer) -> dict[str, Any]:
    """Return an optimizer by its class and options.

    Raises:
        NotKnown: its groups differ.
    """
    if len(made.param_groups) > 1:
        raise NotKnown
    accepted = inspect.signature(type(made)).parameters
    options = {name: value for name, value in made.defaults.items() if name in accepted}
    return {"class_path": path_of(type(made)), "init_args": described(options)}
