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
    *("FederatedProgressBar", "ModelCheckpoint", "ModelSummary", "RichModelSummary"),
    *("RichProgressBar", "RunCard", "RunCheckpoint", "RunFolder", "RunFolderWriter", "RunRecord"),
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
        lists: dict[str, list[Any]] = {"method": [], "trainer.callbacks": []}
        callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # Lightning does not declare it
        for callback in callbacks:
            key = "method" if isinstance(callback, FederatedCallback) else "trainer.callbacks"
            if type(callback).__name__ not in _NO_SETTING:
                lists[key] += self._object(callback, key)
        others = {"default_root_dir": folder, "logger": False}
        content: dict[str, Any] = {
            "seed_everything": int(module.run_seed),
            "trainer": {**settings, **others, "callbacks": lists["trainer.callbacks"] or None},
            "model": self._model(module),
            "method": lists["method"],
        }
        for learner in self._object(module.learner, "model.learner"):
            content["model"]["learner"] = learner
        for data in self._object(module.run.loop.cohort.data, "data"):
            content["data"] = data
        # The first lines name the settings that it lacks.
        lines = ["# A run from Python: what its objects know of their settings."]
        if self.unknown:
            lines.append(f"# Not known, and left out: {', '.join(self.unknown)}")
        self.text = "\n".join([*lines, yaml.safe_dump(content, sort_keys=False)])

    def _model(self, module: Any) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        optimizers = module.run.optimizers
        made = {"client_optimizer": optimizers.clients, "server_optimizer": optimizers.server}
        for name, value in vars(module.settings).items():
            try:
                if name in made and value is not None:
                    settings[name] = _optimizer(made[name])
                else:
                    settings[name] = described(value)
            except NotKnown:
                self.unknown.append(f"model.{name}")
        return settings

    def _object(self, value: Any, key: str) -> list[dict[str, Any]]:
        """Return a list of the object's description, empty if it is not known."""
        try:
            config, unknown = described_object(value)
        except NotKnown:
            self.unknown.append(f"{key} ({type(value).__name__})")
            return []
        of_class = key if key in ("data", "model.learner") else f"{key}.{type(value).__name__}"
        self.unknown += [f"{of_class}.{name}" for name in unknown]
        return [config]


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
