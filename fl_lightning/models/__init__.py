"""Networks, and the learner around them.

Code that needs torchvision, Lightning or transformers is imported at first use, so that light
commands start quickly.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fl_lightning.models.multi_head import MultiHead
from fl_lightning.models.small import MLP, VGG11, FedAvgCNN, LeNet, ResNet20

if TYPE_CHECKING:
    from fl_lightning.models.classifier import Classifier
    from fl_lightning.models.lstm import LSTM, NextToken
    from fl_lightning.models.resnet18gn import ResNet18, ResNet18GN
    from fl_lightning.models.text import CausalLanguageModel, TextClassifier
    from fl_lightning.models.vision import Timm, Torchvision

__all__ = [
    "LSTM",
    "MLP",
    "VGG11",
    "CausalLanguageModel",
    "Classifier",
    "FedAvgCNN",
    "LeNet",
    "MultiHead",
    "NextToken",
    "ResNet18",
    "ResNet18GN",
    "ResNet20",
    "TextClassifier",
    "Timm",
    "Torchvision",
]

_HEAVY = {
    "LSTM": "lstm",
    "CausalLanguageModel": "text",
    "Classifier": "classifier",
    "NextToken": "lstm",
    "ResNet18": "resnet18gn",
    "ResNet18GN": "resnet18gn",
    "TextClassifier": "text",
    "Timm": "vision",
    "Torchvision": "vision",
}


# Old names, which go in version 0.2, and the new ones.
DEPRECATED = {"ImageClassifier": "Classifier"}


def __getattr__(name: str) -> Any:
    if name in DEPRECATED:
        new = DEPRECATED[name]
        message = f"{name} is now called {new}: write {new}. The old name goes in version 0.2."
        warnings.warn(message, FutureWarning, stacklevel=2)
        return getattr(import_module(__name__), new)
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HEAVY[name]}"), name)
    # Next time Python finds the name without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
