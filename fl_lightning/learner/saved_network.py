"""Write a learner's network of peft or transformers in the format of these libraries."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.errors import UserError

# Values of init_lora_weights. These leave the base as it is.
PLAIN = (True, False, "gaussian", "orthogonal", "eva", "mica")
# These change the base, in the same way whenever the adapter is loaded onto the same base. Others
# change it by numbers that peft draws or reads from data.
DECOMPOSED = ("pissa", "olora")
# How far logits may be apart relative to the largest, in units of the precision of the weights.
ROUNDING = 1000
FARTHEST = 0.1


def is_of(module: nn.Module, library: str, name: str) -> bool:
    """Return whether a module's class descends from ``library``'s class of this name."""
    homes = [cls.__module__ for cls in type(module).__mro__ if cls.__name__ == name]
    return any(home.split(".")[0] == library for home in homes)


def network_of(learner: nn.Module) -> Any:
    """Return the learner's one network of peft or transformers.

    Raises:
        UserError: there is none, or there are several.
    """
    found: dict[str, nn.Module] = {}
    for path, module in learner.named_modules():
        inside = any(path.startswith(f"{outer}." if outer else "") for outer in found)
        known = is_of(module, "peft", "PeftModel") or is_of(
            module, "transformers", "PreTrainedModel"
        )
        if known and not inside:
            found[path] = module
    if len(found) == 1:
        return next(iter(found.values()))
    what = f"{len(found)}: {', '.join(found)}" if found else "none"
    raise UserError(
        f"save_pretrained: it writes the learner's one network of peft or transformers, and "
        f"{type(learner).__name__} has {what}. Save the learner itself: module.export(path), or "
        "fl-lightning export RUN."
    )


def save(learner: nn.Module, folder: str | Path, merged: bool, changed_base: bool) -> None:
    """Write the learner's network into a folder, and compare what is read back. The learner is a
    copy, and this function may take it apart.

    Args:
        merged: add the adapters to the weights.
        changed_base: whether a method changed the weights under the adapters.

    Raises:
        UserError: there is not exactly one network, or no library can read its kind back, or it
            would read another network.
    """
    network = network_of(learner).eval()
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made,
    ):
        if not is_of(network, "peft", "PeftModel"):
            save_whole(network, Path(made), "")
        elif merged:
            save_merged(network, Path(made))
        else:
            save_adapter(network, Path(made), changed_base)
        folder.mkdir(exist_ok=True)
        if (folder / "adapter_config.json").exists():
            # A base of an earlier call would be taken for this adapter's.
            shutil.rmtree(folder / "base", ignore_errors=True)
        for item in Path(made).iterdir():
            put(item, folder / item.name)


def put(item: Path, place: Path) -> None:
    """Move a file or folder to a place, and replace what is there."""
    if place.is_dir():
        shutil.rmtree(place)
    shutil.move(item, place)


def save_whole(network: Any, folder: Path, way_out: str) -> nn.Module:
    """Write a network of transformers, and return it as it is read back.

    Raises:
        UserError: transformers cannot read it back as it is.
    """
    if not hasattr(network, "save_pretrained"):
        raise UserError(
            f"save_pretrained: the base under the adapters is a {type(network).__name__}, which "
            "transformers cannot read back. Use module.export(path), which saves the learner."
        )
    network.save_pretrained(folder)
    read: nn.Module = type(network).from_pretrained(folder)
    if name := differing(network.state_dict(), read.state_dict()):
        raise UserError(
            f"save_pretrained: transformers reads {name} back with other values than the run's "
            f"model has. Use {way_out}module.export(path), which saves the learner."
        )
    return read


def save_merged(network: Any, folder: Path) -> None:
    """Add the adapters to the weights, and write the result.

    Raises:
        UserError: peft cannot merge them, or the result has other outputs.
    """
    inputs = random_inputs(network)
    expected = outputs(network, inputs)
    try:
        base = network.merge_and_unload()
    except Exception as error:
        line = (str(error).splitlines() or [""])[0][:200]
        raise UserError(
            f"save_pretrained: peft cannot merge these adapters ({type(error).__name__}: {line}). "
            "Leave out merged=True, or use module.export(path), which saves the learner."
        ) from error
    read = save_whole(base, folder, "")
    found = outputs(read.eval(), inputs)
    if expected is None or found is None:
        return
    scale = expected.abs().max()
    kinds = {p.dtype for p in base.parameters() if p.is_floating_point()}
    tolerance = min(ROUNDING * max(torch.finfo(kind).eps for kind in kinds), FARTHEST)
    away = (found.to(expected) - expected).abs().max()
    if not bool(away <= tolerance * scale):
        raise UserError(
            f"save_pretrained: with merged=True the outputs are up to {float(away):.2g} away from "
            "those of the run's model. A weight under an adapter may be another module's, too "
            "(tied weights, such as lm_head's). Leave out merged=True, or use "
            "module.export(path), which saves the learner."
        )


def save_adapter(network: Any, folder: Path, changed_base: bool) -> None:
    """Write the adapter, and beside it the base, if the adapter belongs to another base than the
    one that the run began with.

    Raises:
        UserError: what peft reads back differs from the network.
    """
    import peft

    expected = in_use(network)
    config = network.peft_config[network.active_adapter]
    begins = getattr(config, "init_lora_weights", True)
    saved = peft.get_peft_model_state_dict(
        network, adapter_name=network.active_adapter, save_embedding_layers=False
    )
    places = {tensor.data_ptr() for tensor in saved.values()}
    in_file = {name for name, tensor in expected.items() if tensor.data_ptr() in places}
    if config.is_prompt_learning:
        # The file holds what the encoder of prompts computes.
        in_file |= {name for name in expected if name.startswith("prompt_encoder.")}
    left_out = [name for name in moving(network) if name not in in_file]
    if begins not in (*PLAIN, *DECOMPOSED):
        left_out.append(f"the base that init_lora_weights={begins!r} made")
    # Otherwise peft asks a server whether the base model has other embeddings.
    network.save_pretrained(folder, save_embedding_layers=False)
    base = network.unload() if hasattr(network.base_model, "unload") else network.get_base_model()
    if changed_base or left_out:
        if left_out and not hasattr(base, "save_pretrained"):
            raise UserError(
                f"save_pretrained: peft's files of the adapter do not hold {left_out[0]}, and "
                f"transformers cannot write the base, a {type(base).__name__}. Use "
                "module.export(path), which saves the learner."
            )
        if hasattr(config, "init_lora_weights"):
            # peft must not change the base that is saved here, as it did before the run.
            config.init_lora_weights = True
            config.inference_mode = True
            config.save_pretrained(folder)
        base = save_whole(base, folder / "base", "merged=True, or ")
    elif begins in DECOMPOSED:
        # The base with which the run began is not known here any more.
        expected = {name: expected[name] for name in in_file}
    if name := differing(expected, read_onto(base, folder)):
        raise UserError(
            f"save_pretrained: peft reads {name} back with other values than the run's model has. "
            "Use merged=True, which adds the adapters to the weights, or module.export(path), "
            "which saves the learner."
        )


def in_use(network: nn.Module) -> dict[str, Tensor]:
    """Return a network's state without the modules that peft's ``modules_to_save`` replaces."""
    replaced = tuple(
        f"{path}.original_module."
        for path, module in network.named_modules()
        if is_of(module, "peft", "ModulesToSaveWrapper")
    )
    state = network.state_dict().items()
    return {name: value for name, value in state if not name.startswith(replaced)}


def moving(network: nn.Module) -> list[str]:
    """Return what a run may change in a network: trainable parameters, and buffers of real
    numbers, such as BatchNorm's.
    """
    parameters = dict(network.named_parameters(remove_duplicate=False))
    return [
        name
        for name, value in in_use(network).items()
        if (parameters[name].requires_grad if name in parameters else value.is_floating_point())
    ]


def read_onto(base: nn.Module, folder: Path) -> Mapping[str, Tensor]:
    """Return what peft reads from a folder, onto a base that it may change; empty: it cannot."""
    import peft

    try:
        state: Mapping[str, Tensor] = peft.PeftModel.from_pretrained(base, folder).state_dict()
    except Exception:
        return {}
    return state


def differing(expected: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> str:
    """Return the first name whose tensor is another one, or was not read; empty: there is none."""
    for name, value in expected.items():
        other = read.get(name)
        if other is None or other.shape != value.shape:
            return name
        if not torch.equal(value.cpu(), other.cpu().to(value.dtype)):
            return name
    return ""


def random_inputs(network: Any) -> dict[str, Tensor]:
    """Return an input of the kind that a network of transformers takes; empty: it is not known."""
    base = network.get_base_model()
    config = getattr(base, "config", None)
    kind = getattr(base, "main_input_name", "")
    draws = torch.Generator().manual_seed(0)
    vocabulary = getattr(config, "vocab_size", None)
    size = getattr(config, "image_size", None)
    if kind == "input_ids" and isinstance(vocabulary, int):
        tokens = torch.randint(vocabulary, (1, 6), generator=draws)
        decoder = getattr(config, "is_encoder_decoder", False)
        return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if decoder else {})
    if kind == "pixel_values" and isinstance(size, int):
        shape = (1, getattr(config, "num_channels", 3), size, size)
        return {"pixel_values": torch.randn(shape, generator=draws)}
    return {}


def outputs(network: Any, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return a network's logits, or its first output; None if it does not take these inputs."""
    device = next(network.parameters()).device
    if not inputs:
        return None
    try:
        found = network(**{name: value.to(device) for name, value in inputs.items()})
    except Exception:
        return None
    logits: Tensor = found.logits if hasattr(found, "logits") else found[0]
    return logits.detach().double().cpu()
