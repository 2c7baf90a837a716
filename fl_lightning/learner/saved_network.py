"""Write a learner's network of peft or transformers in the format of these libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fl_lightning.errors import UserError


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
    """Write the learner's network into a folder. The learner is a copy, and this function may take
    it apart.

    Args:
        merged: add the adapters to the weights.
        changed_base: whether a method changed the weights under the adapters.

    Raises:
        UserError: there is not exactly one network, or no library can read its kind back.
    """
    network = network_of(learner)
    folder = Path(folder)
    if not is_of(network, "peft", "PeftModel"):
        network.save_pretrained(folder)
        return
    if not merged:
        # Otherwise peft asks a server whether the base model has other embeddings.
        network.save_pretrained(folder, save_embedding_layers=False)
        if not changed_base:
            return
    base = network.merge_and_unload() if merged else network.unload()
    if not hasattr(base, "save_pretrained"):
        raise UserError(
            f"save_pretrained: the base under the adapters is a {type(base).__name__}, which "
            "transformers cannot read back. Use module.export(path), which saves the learner."
        )
    base.save_pretrained(folder if merged else folder / "base")
