"""Networks of the transformers library, made here or read from a local folder.

Nothing is ever downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_lightning.errors import UserError, suggest
from fl_lightning.models.frozen_linear import freeze_linears

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TASKS = {"CausalLM": "CAUSAL_LM", "SequenceClassification": "SEQ_CLS"}
"""Names that transformers and peft use for what a network does."""


def optional(library: str, extra: str, wanted_by: str) -> Any:
    """Import a library that comes with one of our extras.

    Raises:
        UserError: it is not installed; the error says how to install it.
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
    base_dtype: str = "float32",
    quantize: int | None = None,
    gradient_checkpointing: bool = False,
    **fixed: Any,
) -> nn.Module:
    """Return a network for ``task``; its frozen weights have ``base_dtype``.

    Args:
        task: of ``TASKS``.
        wanted_by: the learner's class, for messages.
        path, config, trainable, lora, base_dtype, quantize, gradient_checkpointing: as in
            :class:`~fl_lightning.models.CausalLanguageModel`.
        fixed: further entries of the architecture.

    Raises:
        UserError: a library is missing, a folder has no network, an architecture cannot be made, or
            a pattern matches no parameter.
    """
    check_base(wanted_by, base_dtype, quantize, trainable, lora, path)
    transformers = optional("transformers", "text", wanted_by)
    # Weights that are trained are loaded in full precision.
    whole = trainable is not None or bool((lora or {}).get("modules_to_save"))
    dtype = torch.float32 if whole else DTYPES[base_dtype]
    options: dict[str, Any] = {"dtype": dtype}
    if quantize is not None:
        options |= _quantized(transformers, quantize)
    auto = getattr(transformers, f"AutoModelFor{task}")
    entries = {**(config or {}), **fixed}
    model: nn.Module
    if path is not None:
        model = _read(transformers, auto, wanted_by, Path(path), entries, options)
    else:
        model = _made(transformers, auto, wanted_by, entries, dtype)
    sizes = sizes_of(model)
    # Classification looks for the last token before the padding, so padding needs a token.
    if sizes.pad_token_id is None:
        sizes.pad_token_id = 0
    if gradient_checkpointing:
        _save_activations(model, wanted_by)
    if lora is not None:
        model = _with_lora(model, TASKS[task], wanted_by, lora, trainable)
    elif trainable is not None:
        _freeze(model, wanted_by, trainable)
    if base_dtype != "float32":
        _set_dtypes(model, DTYPES[base_dtype])
        freeze_linears(model)
    return model


def check_base(
    wanted_by: str,
    base_dtype: str,
    quantize: int | None,
    trainable: Any,
    lora: Any,
    path: str | None,
) -> None:
    """Refuse a type of frozen weights that is not available here.

    Raises:
        UserError: an option is refused; the error names it, what is missing, and what to do
            instead.
    """
    if base_dtype not in DTYPES:
        raise UserError(
            f"{wanted_by}: base_dtype={base_dtype!r} is not known; accepted are "
            f"{', '.join(DTYPES)}.{suggest(str(base_dtype), DTYPES)}"
        )
    if quantize not in (None, 4, 8):
        raise UserError(
            f"{wanted_by}: quantize={quantize!r} is not accepted; give 8 or 4 bits, or null."
        )
    option = f"quantize={quantize}" if quantize is not None else f"base_dtype={base_dtype!r}"
    if (quantize is not None or base_dtype != "float32") and lora is None and trainable is None:
        raise UserError(
            f"{wanted_by}: {option} is for frozen weights, and here all weights are trained, in "
            "float32. Give lora, such as {r: 8, target_modules: [q_proj, v_proj]}, or trainable; "
            "for a forward pass in bfloat16 give --trainer.precision bf16-mixed."
        )
    if quantize is None:
        return
    missing = [] if find_spec("bitsandbytes") else ["the package bitsandbytes is not installed"]
    if not torch.cuda.is_available():
        missing.append("there is no CUDA GPU")
    if path is None:
        missing.append("no path is given, and random weights are not quantized")
    if missing:
        raise UserError(
            f"{wanted_by}: {option} keeps the frozen weights in {quantize} bits, which needs "
            f"bitsandbytes, a CUDA GPU and a path; here {', and '.join(missing)}. Use base_dtype: "
            "bfloat16, which needs 2 bytes per frozen weight and runs on every device."
        )


def _quantized(transformers: Any, bits: int) -> dict[str, Any]:
    given: dict[str, Any] = {"load_in_8bit": True}
    if bits == 4:
        given = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    config = transformers.BitsAndBytesConfig(**given)
    return {"quantization_config": config, "device_map": {"": torch.cuda.current_device()}}


def _save_activations(model: Any, wanted_by: str) -> None:
    """Compute activations again in the backward pass, instead of keeping them."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(
            f"{wanted_by}: gradient_checkpointing is true, and {type(model).__name__} of "
            "transformers cannot compute its activations again. Leave it out."
        )
    # Reentrant checkpoints need an input that has a gradient, and tokens have none.
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # of newer transformers
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _set_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    """Set frozen weights to ``dtype``, and trained ones to float32."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            wanted = torch.float32 if parameter.requires_grad else dtype
            parameter.data = parameter.data.to(wanted)


def sizes_of(made: Any) -> Any:
    """Return ``vocab_size``, ``pad_token_id`` and, with some networks,
    ``max_position_embeddings``.
    """
    return made.config.get_text_config()


def _read(
    transformers: Any,
    auto: Any,
    wanted_by: str,
    path: Path,
    entries: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    if not (path / "config.json").is_file():
        problem = "has no config.json" if path.is_dir() else "is not a folder"
        raise UserError(
            f"{wanted_by}: path is {str(path)!r}, which {problem}. Give a local folder that "
            "save_pretrained wrote or that was downloaded by hand (config.json beside "
            "model.safetensors or pytorch_model.bin); nothing is downloaded."
        )
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    # Reading a local folder is fast, so hide the progress bar.
    bars.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, **entries)
        # from_pretrained returns the network in evaluation mode, without dropout.
        return auto.from_pretrained(path, config=config, local_files_only=True, **options).train()
    except Exception as error:
        # The library and its file formats raise many kinds of errors.
        raise UserError(
            f"{wanted_by}: the network in path {str(path)!r} cannot be read ({_short(error)}). The "
            "folder must hold config.json and complete weights of an architecture that "
            "transformers knows."
        ) from error
    finally:
        if shown:
            bars.enable_progress_bar()


def _made(
    transformers: Any, auto: Any, wanted_by: str, entries: dict[str, Any], dtype: torch.dtype
) -> Any:
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
        return auto.from_config(config, dtype=dtype)
    except Exception as error:
        # Sizes that do not fit together raise many kinds of errors.
        raise UserError(
            f"{wanted_by}: no network can be made of config.model_type {kind!r} with {entries} "
            f"({_short(error)})."
        ) from error


def _with_lora(
    made: Any, task: str, wanted_by: str, lora: Mapping[str, Any], trainable: Any
) -> nn.Module:
    if trainable is not None:
        raise UserError(
            f"{wanted_by}: lora and trainable both choose the parameters to train; give one of "
            "them (lora's "
            "modules_to_save names further modules to train)."
        )
    peft = optional("peft", "lora", f"{wanted_by} with lora")
    try:
        adapted: nn.Module = peft.get_peft_model(made, peft.LoraConfig(task_type=task, **lora))
    except Exception as error:
        # For example modules that do not exist, or arguments that peft does not know.
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
                f"{wanted_by}: trainable has {pattern!r}, but no parameter of the network has such "
                f"a name: there are {', '.join(names)[:200]}, ….{suggest(pattern, names)}"
            )
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in trainable))


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
