"""A run goes on with the learner and the data that its ``config.yaml`` names."""

from __future__ import annotations

import pydoc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.checkpoint import other_settings
from fl_lightning.cli.compose import parse_yaml

# Where things lie and how they are read decides nothing.
_FREE = ("root", "path", "download", "num_workers", "eval_batch_size")
# What the parser writes in place of an object that has no text.
UNREADABLE = "Unable to serialize"


def check_same_settings(checkpoint: Path, config: Mapping[str, Any]) -> None:
    """Refuse to go on from a run's checkpoint with another learner or other data.

    The round's own settings, the methods and the optimizers are compared when the checkpoint is
    read, for runs from Python too. A checkpoint without ``config.yaml`` in its run's folder, as one
    that was moved, is compared in these alone.

    Args:
        config: the whole one, as ``config.yaml`` has it.

    Raises:
        UserError: with what differs.
    """
    if not (config.get("model") or {}).get("strict_resume", True):
        return
    try:
        text = (checkpoint.parent.parent / "config.yaml").read_text(encoding="utf-8")
        before = parse_yaml(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return
    if not isinstance(before, dict):
        return
    differing = [*_differing(_part(before), _part(config))]
    if differing:
        raise other_settings(f"{key}: {then} then, {now} now" for key, then, now in differing)


def _part(config: Mapping[str, Any]) -> dict[str, Any]:
    model = config.get("model")
    learner = model.get("learner") if isinstance(model, dict) else None
    return {"model.learner": learner, "data": config.get("data")}


def _differing(then: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, then, now) of each value that differs."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = list(then)
        # An argument that a config lacks came to its class since, with a default.
        if path.rpartition(".")[2] != "init_args":
            keys += [key for key in now if key not in then]
        for key in keys:
            if key not in _FREE:
                inner = f"{path}.{key}".removeprefix(".")
                yield from _differing(then.get(key), now.get(key), inner)
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for place, pair in enumerate(zip(then, now, strict=True)):
            yield from _differing(*pair, f"{path}.{place}")
    elif then != now and not str(then).startswith(UNREADABLE) and not _same_object(then, now):
        yield path.replace(".init_args", ""), _short(then), _short(now)


def _same_object(then: Any, now: Any) -> bool:
    """Whether two texts are paths of one class or function, which may have several."""
    if not isinstance(then, str) or not isinstance(now, str):
        return False
    if "." not in now or then.rpartition(".")[2] != now.rpartition(".")[2]:
        return False
    try:
        found = pydoc.locate(now)
        return found is not None and found is pydoc.locate(then)
    except pydoc.ErrorDuringImport:
        return False


def _short(value: Any) -> str:
    """A value as one reads it: a class by its name."""
    if isinstance(value, dict) and isinstance(value.get("class_path"), str):
        return str(value["class_path"]).rpartition(".")[2]
    return str(value)[:80]
