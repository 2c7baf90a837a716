"""Write a learner's network of peft or transformers in the format of these libraries."""

from __future__ import annotations

import os
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
    """Write the network of a copy of the learner, which may be taken apart, into a folder.

    Args:
        merged: add the adapters to the weights.
        changed_base: whether a method changed the weights under the adapters.

    Raises:
        UserError: there is not exactly one network, or no library can read its kind back.
    """
    network = network_of(learner).eval()
    folder = Path(folder).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as aside,
    ):
        made = Path(aside) / "made"
        made.mkdir()
        if not is_of(network, "peft", "PeftModel"):
            merge_layers(network)
            save_whole(network, made)
        elif merged:
            save_whole(network.merge_and_unload(), made)
        else:
            save_adapter(network, made, changed_base)
        put(made, folder)


def put(made: Path, folder: Path) -> None:
    """Make the folder hold what lies in ``made``, at once; its other files stay.

    Raises:
        UserError: the folder holds something else than such files.
    """
    if folder.is_file():
        raise UserError(f"save_pretrained: {folder} is a file. Give a folder.")
    there = {item.name for item in folder.iterdir()} if folder.exists() else set()
    if there and not there & {"adapter_config.json", "config.json"}:
        raise UserError(
            f"save_pretrained: {folder} holds other files ({min(there)}). Give a new folder, or "
            "that of an earlier export."
        )
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as aside:
        old = Path(aside) / "old"
        if folder.exists():
            os.replace(folder, old)
        try:
            os.replace(made, folder)
        except BaseException:
            if old.exists():
                os.rename(old, folder)
            raise
        written = {item.name for item in folder.iterdir()}
        if "adapter_config.json" in there:
            # A base of an earlier call would be taken for this adapter's.
            written.add("base")
        for name in there - written:
            os.replace(old / name, folder / name)


def merge_layers(network: nn.Module) -> None:
    """Replace each layer that has ``as_linear``, which transformers cannot read, by a linear one.

    ``fl_lightning.models.MultiHead`` is such a layer.
    """
    for path, layer in list(network.named_modules()):
        if hasattr(layer, "as_linear"):
            parent, _, own = path.rpartition(".")
            setattr(network.get_submodule(parent), own, layer.as_linear())


def save_whole(network: Any, folder: Path) -> None:
    """Write a network of transformers.

    Raises:
        UserError: it is not one.
    """
    if not hasattr(network, "save_pretrained"):
        raise UserError(
            f"save_pretrained: the base under the adapters is a {type(network).__name__}, which "
            "transformers cannot read back. Use module.export(path), which saves the learner."
        )
    network.save_pretrained(folder)


def save_adapter(network: Any, folder: Path, changed_base: bool) -> None:
    """Write the adapter, and the base if it is another than the one that the run began with.

    Raises:
        UserError: the adapter needs another base, which transformers cannot write.
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
        save_whole(base, folder / "base")


def in_use(network: nn.Module) -> dict[str, Tensor]:
    replaced = tuple(
        f"{path}.original_module."
        for path, module in network.named_modules()
        if is_of(module, "peft", "ModulesToSaveWrapper")
    )
    state = network.state_dict().items()
    return {name: value for name, value in state if not name.startswith(replaced)}


def moving(network: nn.Module) -> list[str]:
    """What a run may change: trainable parameters, and buffers of real numbers (BatchNorm's)."""
    parameters = dict(network.named_parameters(remove_duplicate=False))
    return [
        name
        for name, value in in_use(network).items()
        if (parameters[name].requires_grad if name in parameters else value.is_floating_point())
    ]
