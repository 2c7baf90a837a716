"""Networks, and the learner around them.

Code that needs torchvision, Lightning or transformers is imported at first use, so that light
commands start quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fl_lightning.models.lenet import LeNet
from fl_lightning.models.mlp import MLP
from fl_lightning.models.resnet20 import ResNet20
from fl_lightning.models.vgg11 import VGG11

if TYPE_CHECKING:
    from fl_lightning.models.image_classifier import ImageClassifier
    from fl_lightning.models.lstm import LSTM, NextToken
    from fl_lightning.models.resnet18gn import ResNet18GN
    from fl_lightning.models.text import CausalLanguageModel, TextClassifier

__all__ = [
    "LSTM",
    "MLP",
    "VGG11",
    "CausalLanguageModel",
    "ImageClassifier",
    "LeNet",
    "NextToken",
    "ResNet18GN",
    "ResNet20",
    "TextClassifier",
]

_HEAVY = {
    "LSTM": "lstm",
    "CausalLanguageModel": "text",
    "ImageClassifier": "image_classifier",
    "NextToken": "lstm",
    "ResNet18GN": "resnet18gn",
    "TextClassifier": "text",
}


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HEAVY[name]}"), name)
    # Next time Python finds the name without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
