"""Networks of the transformers library, made here or read from a local folder.

Nothing is ever downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_lightning.errors import UserError, suggest

TASKS = {"CausalLM": "CAUSAL_LM", "SequenceClassification": "SEQ_CLS"}
"""transformers' names of what a network does, and peft's."""


def optional(library: str, extra: str, wanted_by: str) -> Any:
    """A library that comes with one of our extras.

    Raises:
        UserError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise UserError(
            f"{wanted_by} needs {library}, which cannot be imported ({error}). "
            f"Install it: pip install 'fl-lightning[{extra}]'."
        ) from None


def network(
    task: str,
    wanted_by: str,
    path: str | None,
    config: Mapping[str, Any] | None,
    trainable: Sequence[str] | None,
    lora: Mapping[str, Any] | None,
    **fixed: Any,
) -> nn.Module:
    """A network for ``task``, in float32, its parameters frozen where they are not to be trained.

    Args:
        task: of ``TASKS``.
        wanted_by: the learner's class, for messages.
        path, config, trainable, lora: as :class:`~fl_lightning.models.CausalLanguageModel` has
            them.
        fixed: further entries of the architecture.

    Raises:
        UserError: a library that is missing, a folder without a network, an architecture that
            cannot be made, a pattern that names no parameter.
    """
    transformers = optional("transformers", "text", wanted_by)
    auto = getattr(transformers, f"AutoModelFor{task}")
    entries = {**(config or {}), **fixed}
    model: nn.Module
    if path is not None:
        model = _read(transformers, auto, wanted_by, Path(path), entries)
    else:
        model = _made(transformers, auto, wanted_by, entries)
    sizes = sizes_of(model)
    # Classification looks for the last token before padding, so there has to be one for it.
    if sizes.pad_token_id is None:
        sizes.pad_token_id = 0
    if lora is not None:
        return _with_lora(model, TASKS[task], wanted_by, lora, trainable)
    if trainable is not None:
        _freeze(model, wanted_by, trainable)
    return model


def sizes_of(made: Any) -> Any:
    """``vocab_size``, ``pad_token_id`` and, with some networks, ``max_position_embeddings``."""
    return made.config.get_text_config()


def _read(transformers: Any, auto: Any, wanted_by: str, path: Path, entries: dict[str, Any]) -> Any:
    if not (path / "config.json").is_file():
        problem = "has no config.json" if path.is_dir() else "is no folder"
        raise UserError(
            f"{wanted_by}: path is {str(path)!r}, which {problem}. Give a local folder that "
            "save_pretrained wrote or that was downloaded by hand (config.json beside "
            "model.safetensors or pytorch_model.bin); nothing is downloaded."
        )
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    # Reading from a local folder takes no time that a bar would have to show.
    bars.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, **entries)
        options = {"local_files_only": True, "dtype": torch.float32}
        # It comes in evaluation mode, in which there is no dropout.
        return auto.from_pretrained(path, config=config, **options).train()
    except Exception as error:
        # The library and its file formats raise many kinds.
        raise UserError(
            f"{wanted_by}: the network in path {str(path)!r} cannot be read ({_short(error)}). The "
            "folder has to hold config.json and the weights, whole, of an architecture that "
            "transformers knows."
        ) from error
    finally:
        if shown:
            bars.enable_progress_bar()


def _made(transformers: Any, auto: Any, wanted_by: str, entries: dict[str, Any]) -> Any:
    kind = entries.pop("model_type", None)
    if kind is None:
        raise UserError(
            f"{wanted_by}: neither path nor config.model_type is given. Give path, a local folder "
            "with a network, or config with model_type and sizes, such as "
            "{model_type: opt, hidden_size: 64} (-c model/tiny_opt)."
        )
    known = sorted(transformers.CONFIG_MAPPING.keys())
    if kind not in known:
        raise UserError(
            f"{wanted_by}: config.model_type is {kind!r}, which transformers does not know."
            f"{suggest(kind, known)}"
        )
    try:
        config = transformers.AutoConfig.for_model(kind, **entries)
        return auto.from_config(config, dtype=torch.float32)
    except Exception as error:
        # Sizes that do not fit each other raise many kinds.
        raise UserError(
            f"{wanted_by}: no network can be made of config.model_type {kind!r} with {entries} "
            f"({_short(error)})."
        ) from error


def _with_lora(
    made: Any, task: str, wanted_by: str, lora: Mapping[str, Any], trainable: Any
) -> nn.Module:
    if trainable is not None:
        raise UserError(
            f"{wanted_by}: lora and trainable both say what is trained; give one of them (lora's "
            "modules_to_save names further modules to train)."
        )
    peft = optional("peft", "lora", f"{wanted_by} with lora")
    try:
        adapted: nn.Module = peft.get_peft_model(made, peft.LoraConfig(task_type=task, **lora))
    except Exception as error:
        # Such as modules that are not there, or arguments that peft does not know.
        raise UserError(
            f"{wanted_by}: lora is {dict(lora)}, which peft cannot apply ({_short(error)}). "
            "Accepted are LoraConfig's arguments, such as {r: 8, target_modules: [q_proj, v_proj]}."
        ) from error
    return adapted


def _freeze(made: nn.Module, wanted_by: str, trainable: Sequence[str]) -> None:
    names = [name for name, _ in made.named_parameters()]
    for pattern in trainable:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"{wanted_by}: trainable has {pattern!r}, but no parameter of the network is "
                f"called so: there are {', '.join(names)[:200]}, ….{suggest(pattern, names)}"
            )
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in trainable))


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
