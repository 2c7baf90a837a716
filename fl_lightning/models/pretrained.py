"""Networks of the transformers library, made here or read from a local folder.

Nothing is ever downloaded.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fl_lightning.errors import UserError, optional, suggest
from fl_lightning.models.multi_head import MultiHead, with_heads

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TASKS = {"CausalLM": "CAUSAL_LM", "SequenceClassification": "SEQ_CLS"}
"""Names that transformers and peft use for what a network does."""


def network(
    task: str,
    wanted_by: str,
    path: str | None,
    config: Mapping[str, Any] | None,
    trainable: Sequence[str] | None,
    lora: Mapping[str, Any] | None,
    base_dtype: str = "float32",
    quantize: int | str | None = None,
    gradient_checkpointing: bool = False,
    heads: Mapping[str, Any] | None = None,
    **fixed: Any,
) -> nn.Module:
    """Return a network for ``task``; its frozen weights have ``base_dtype``.

    Args:
        task: of ``TASKS``.
        wanted_by: the learner's class, for messages.
        path, config, trainable, lora, base_dtype, quantize, gradient_checkpointing, heads: as in
            :class:`~fl_lightning.models.CausalLanguageModel`.
        fixed: further entries of the architecture.

    Raises:
        UserError: a library is missing, a folder has no network or one of another architecture, an
            architecture cannot be made, a pattern matches no parameter, or nothing is frozen whose
            type is asked for.
    """
    chosen = {"lora": lora, "trainable": trainable, "heads": heads}
    check_trained(wanted_by, base_dtype, quantize, chosen)
    transformers = optional("transformers", "text", wanted_by)
    # Weights that are trained are loaded in full precision.
    whole = trainable is not None or bool((lora or {}).get("modules_to_save"))
    dtype = torch.float32 if whole else DTYPES[base_dtype]
    options: dict[str, Any] = {"dtype": dtype}
    if quantize is not None:
        options |= _quantized(transformers, wanted_by, quantize)
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
        _save_activations(model)
    if lora is not None:
        model = _with_lora(model, TASKS[task], wanted_by, lora)
    elif heads is not None:
        model = _with_heads(model, wanted_by, heads)
    elif trainable is not None:
        _freeze(model, wanted_by, trainable)
    if base_dtype != "float32":
        _set_dtypes(model, DTYPES[base_dtype])
        freeze_linears(model)
    return model


def check_trained(
    wanted_by: str, base_dtype: str, quantize: int | str | None, chosen: Mapping[str, Any]
) -> None:
    """Refuse two choices of what is trained, and a type of frozen weights if none is frozen.

    Args:
        chosen: the options that freeze weights, by name; None: it is not given.
    """
    given = [name for name, value in chosen.items() if value is not None]
    if len(given) > 1:
        raise UserError(
            f"{wanted_by}: {' and '.join(given)} both choose the parameters to train; give one of "
            "them (lora's modules_to_save names further modules to train)."
        )
    option = f"quantize={quantize!r}" if quantize is not None else f"base_dtype={base_dtype!r}"
    if (quantize is not None or base_dtype != "float32") and not given:
        raise UserError(
            f"{wanted_by}: {option} is for frozen weights, and here all weights are trained, in "
            "float32. Give lora, such as {r: 8, target_modules: [q_proj, v_proj]}, trainable or "
            "heads; for a forward pass in bfloat16 give --trainer.precision bf16-mixed."
        )


def _quantized(transformers: Any, wanted_by: str, bits: int | str) -> dict[str, Any]:
    if find_spec("bitsandbytes") is None or not torch.cuda.is_available():
        lacks = "CUDA GPU" if not torch.cuda.is_available() else "bitsandbytes"
        raise UserError(
            f"{wanted_by}: quantize={bits!r} needs a CUDA GPU and bitsandbytes (pip install "
            f"bitsandbytes), and there is no {lacks} here. Leave quantize out; "
            "base_dtype='bfloat16' takes 2 bytes per frozen weight."
        )
    given: dict[str, Any] = {"load_in_8bit": True}
    if bits != 8:
        given = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    if bits == "nf4":
        given |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = transformers.BitsAndBytesConfig(**given)
    return {"quantization_config": config, "device_map": {"": torch.cuda.current_device()}}


def _save_activations(model: Any) -> None:
    """Compute activations again in the backward pass, instead of keeping them."""
    # Reentrant checkpoints need an input that has a gradient, and tokens have none.
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # of newer transformers
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _set_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            wanted = torch.float32 if parameter.requires_grad else dtype
            parameter.data = parameter.data.to(wanted)


def sizes_of(made: Any) -> Any:
    """``vocab_size``, ``pad_token_id`` and, with some networks, ``max_position_embeddings``."""
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
        raise UserError(
            f"{wanted_by}: path is {str(path)!r}, which is not a folder with config.json. Give a "
            "local folder that save_pretrained wrote or that was downloaded by hand; nothing is "
            "downloaded."
        )
    kind = json.loads((path / "config.json").read_text("utf-8")).get("model_type")
    if entries.get("model_type", kind) != kind:
        raise UserError(
            f"{wanted_by}: path is {str(path)!r}, which has a network of model_type {kind!r}, and "
            f"config.model_type is {entries['model_type']!r}. To use the folder's own architecture "
            "leave config out; on the command line add --model.learner.config null."
        )
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    # Reading a local folder is fast, so hide the progress bar.
    bars.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, **entries)
        # from_pretrained returns the network in evaluation mode, without dropout.
        return auto.from_pretrained(path, config=config, local_files_only=True, **options).train()
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
    config = transformers.AutoConfig.for_model(kind, **entries)
    return auto.from_config(config, dtype=dtype)


def _with_lora(made: Any, task: str, wanted_by: str, lora: Mapping[str, Any]) -> nn.Module:
    peft = optional("peft", "lora", f"{wanted_by} with lora")
    adapted: nn.Module = peft.get_peft_model(made, peft.LoraConfig(task_type=task, **lora))
    return adapted


def _with_heads(made: nn.Module, wanted_by: str, heads: Mapping[str, Any]) -> nn.Module:
    if set(heads) != {"rank", "heads", "target_modules"}:
        raise UserError(
            f"{wanted_by}: heads={dict(heads)} is not accepted. Give rank, heads and "
            "target_modules: {rank: 4, heads: 4, target_modules: [q_proj, v_proj]}."
        )
    changed = with_heads(made, **heads)
    # A classifier's last layer is new, so it is trained, as peft does.
    for name in ("score", "classifier"):
        last = getattr(changed, name, None)
        if last is not None and not any(isinstance(each, MultiHead) for each in last.modules()):
            last.requires_grad_(True)
    return changed


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


# Number of entries of a weight that are in float32 at a time: 16 MB per worker.
WIDENED = 2**22


def blocks(weight: Tensor) -> Iterator[slice]:
    """Yield rows of a weight ``(out, in)``, some at a time."""
    rows = max(1, WIDENED // weight.shape[1])
    for start in range(0, len(weight), rows):
        yield slice(start, start + rows)


_scratch = threading.local()


def widened(rows: Tensor) -> Tensor:
    """Return these rows in float32, in memory that the thread's next call uses again."""
    # If the gradient is differentiated again, its graph keeps these rows, so they need their own
    # memory.
    if torch.is_grad_enabled():
        return rows.float()
    # New memory each time would stay with the thread's allocator, some 100 MB per worker.
    memory = getattr(_scratch, "memory", None)
    if memory is None or len(memory) < rows.numel():
        memory = _scratch.memory = torch.empty(max(rows.numel(), WIDENED))
    return memory[: rows.numel()].view(rows.shape).copy_(rows)


class Widened(torch.autograd.Function):
    """x Wᵀ + b with W in fewer bits, computed in float32, also in the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            parts = []
            for rows in blocks(weight):
                own = None if bias is None else bias[rows].float()
                # The product has the dtype of the stored weight, as in low precision.
                parts.append(linear(x, widened(weight[rows]), own).to(weight.dtype))
            return torch.cat(parts, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, bias = inputs
        # Save the weight itself, which all workers share, and not its float32 values.
        ctx.save_for_backward(weight)
        ctx.dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None]:
        (weight,) = ctx.saved_tensors
        of_bias: Tensor | None = None
        with torch.autocast("cpu", enabled=False):
            gradient = gradient.float()
            products = [gradient[..., rows] @ widened(weight[rows]) for rows in blocks(weight)]
            if ctx.needs_input_grad[2]:
                of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype)
            return torch.stack(products).sum(0).to(ctx.dtype), None, of_bias


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is not trained; its bias may be.

    On a processor without instructions for bfloat16, a product in bfloat16 takes a hundred times as
    long as in float32, and its gradient even longer. On such a processor the product is computed in
    float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        trained = self.weight.requires_grad or self.weight.dtype == torch.float32
        if input.device.type != "cpu" or trained or computes_in_bfloat16():
            return super().forward(input)
        apply: Any = Widened.apply
        product: Tensor = apply(input, self.weight, self.bias)
        return product


def computes_in_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def freeze_linears(model: nn.Module) -> None:
    """Replace linear layers whose weights are frozen by ``FrozenLinear``, in place."""
    for part in model.modules():
        if type(part) is nn.Linear and not part.weight.requires_grad:
            part.__class__ = FrozenLinear
