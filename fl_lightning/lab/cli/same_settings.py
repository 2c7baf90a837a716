"""A run is resumed only with the learner and the data that its ``config.yaml`` names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.checkpoint import other_settings
from fl_lightning.lab.cli.compose import parse_yaml

# Settings of the data that may change at a resume: where files lie and how they are read.
_FREE = ("root", "download", "num_workers", "pin_memory", "eval_batch_size", "cache_dir")
# Files may move to another folder, but another file name means another file.
_FILES = ("path", "file", "test", "val", "folder", "data_dir", "tokenizer")
# If no value is given, the run's seed and the partition's hash decide these. The hash is compared
# elsewhere.
_BY_HASH = ("partition", "seed")
# The parser writes this for an object that has no text form.
UNREADABLE = "Unable to serialize"


def check_same_settings(checkpoint: Path, config: Mapping[str, Any], strict: bool) -> None:
    """Refuse to resume from a run's checkpoint with another learner or other data.

    The round's own settings, the methods and the optimizers are compared when the checkpoint is
    read, also for runs from Python. If a checkpoint was moved and its folder has no
    ``config.yaml``, only those settings are compared.

    Args:
        config: the whole config, as in ``config.yaml``.
        strict: ``model.strict_resume``; if False, nothing is compared.

    Raises:
        UserError: it names the settings that differ.
    """
    if not strict:
        return
    run = checkpoint.resolve().parent.parent
    # Without run.json, config.yaml is a user's own file.
    if not (run / "run.json").is_file():
        return
    try:
        before = parse_yaml((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return
    if not isinstance(before, dict):
        return
    differing = [*_differing(_learner(before), _learner(config), "model.learner")]
    differing += _differing(_data(before), _data(config), "data")
    if differing:
        raise other_settings(differing)


def _learner(config: Mapping[str, Any]) -> Any:
    model = config.get("model")
    return model.get("learner") if isinstance(model, dict) else None


def _data(config: Mapping[str, Any]) -> Any:
    """Return the data's config without settings that change no result, and files by their names."""
    data = config.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("init_args"), dict):
        return data
    kept = {}
    for key, value in data["init_args"].items():
        if key in _FILES and isinstance(value, str):
            kept[key] = Path(value).name
        elif key not in _FREE and not (key in _BY_HASH and value is None):
            kept[key] = value
    return {**data, "init_args": kept}


def _differing(then: Any, now: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Return (key, then, now) of each value that differs."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = list(then)
        # An argument that the config does not have was added to its class later, with a default.
        if path.rpartition(".")[2] != "init_args":
            keys += [key for key in now if key not in then]
        for key in keys:
            # If only one of the two configs has the key, the partition's hash decides.
            if key in now or key not in _BY_HASH:
                yield from _differing(then.get(key), now.get(key), f"{path}.{key}")
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for place, pair in enumerate(zip(then, now, strict=True)):
            yield from _differing(*pair, f"{path}.{place}")
    elif not _same(then, now):
        yield path.replace(".init_args", ""), _short(then), _short(now)


def _same(then: Any, now: Any) -> bool:
    """Return whether two values are equal, also NaN, or two paths of one class or function."""
    if then == now or str(then).startswith(UNREADABLE) or (then != then and now != now):
        return True
    found = _imported(now)
    return found is not None and found is _imported(then)


def _imported(path: Any) -> Any:
    """Return the class or function of this path, if its module has been imported."""
    module, _, name = str(path).rpartition(".")
    return getattr(sys.modules[module], name, None) if module in sys.modules else None


def _short(value: Any) -> str:
    """Return a value as text for readers: a class by its name."""
    if isinstance(value, dict) and isinstance(value.get("class_path"), str):
        return str(value["class_path"]).rpartition(".")[2]
    return str(value)[:80]
