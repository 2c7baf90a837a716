"""A checkpoint's content is checked before anything is restored from it.

A checkpoint may be damaged, or made by somebody else. The error names the first place that is not
as a run would have written it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.errors import UserError
from fl_lightning.storage.apart import places
from fl_lightning.storage.checkpoint_io import HYPER_PARAMETERS

Check = Callable[[Any], bool]
_ENGINES = ("sequential", "concurrent", "stacked")


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _size(value: Any) -> bool:
    """Tell whether this is an engine's size; older checkpoints had text."""
    if isinstance(value, str):
        return not value or value.isdecimal()
    return value is None or _count(value)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _whole(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.int64
        and value.ndim == 1
        and bool((value >= 0).all())
    )


def _each(check: Check) -> Check:
    def check_each(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return False
        return all(_text(key) and check(entry) for key, entry in value.items())

    return check_each


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _chosen(value: Any) -> bool:
    if not _each(_whole)(value) or not {"rounds", "numbers", "clients"} <= value.keys():
        return False
    numbers = value["numbers"]
    return len(numbers) == len(value["rounds"]) and int(numbers.sum()) == len(value["clients"])


def is_index(value: Any) -> bool:
    """Tell whether this is an index of client rows, as a run writes it."""
    if not _each(_each(_whole))(value):
        return False
    parts = []
    for key, entry in value.items():
        if not {"clients", "segments"} <= entry.keys():
            return False
        if len(entry["clients"]) != len(entry["segments"]):
            return False
        if key.startswith("parts."):
            parts.append(entry["clients"].sort().values)
    # The four rows of a client that keeps parts of the model are written together, by
    # round/clients.py.
    return len(parts) in (0, 4) and all(torch.equal(ids, parts[0]) for ids in parts)


def _engine(value: Any) -> bool:
    if not value:
        return value is None or isinstance(value, Mapping)
    if not isinstance(value, Mapping) or not isinstance(value.get("engine", ""), str):
        return False
    if not all(map(_text, value.get("written") or ())):
        return False
    sizes = ("workers", "threads", "server_threads", "clients", "at_once")
    return value.get("engine", "") in ("", *_ENGINES) and all(
        _size(value.get(name)) for name in sizes
    )


def _versions(value: Any) -> bool:
    """Tell whether these are models and buffers by the number of steps before them."""
    if not isinstance(value, Mapping):
        return False
    return all(
        _text(number)
        and number.isdecimal()
        and isinstance(entry, Mapping)
        and _tensor(entry.get("w"))
        and _each(_tensor)(entry.get("buffers"))
        for number, entry in value.items()
    )


# Each entry of the federated part: what it has to be, and whether it has to be there.
_OURS: dict[str, tuple[Check, bool]] = {
    "version": (_count, False),
    "seed": (_count, True),
    "rounds": (_count, False),
    "logged": (_each(_number), False),
    "chosen": (_chosen, False),
    "versions": (_versions, False),
    "w0": (_or_none(_tensor), True),
    "buffers": (_each(_tensor), True),
    "server": (_each(_tensor), True),
    "clients": (is_index, True),
    "folders": (
        lambda value: isinstance(value, list) and bool(value) and all(map(_text, value)),
        True,
    ),
    "arguments": (_each(_text), True),
    "methods": (_each(_text), True),
    "partition": (_or_none(_text), True),
    "engine": (_engine, True),
}


def kind(tensor: Tensor) -> tuple[bool, bool, bool]:
    """The kind of a tensor's numbers: real, complex or bool; integers are none of these."""
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool


def version_of(held: Any, default: int) -> int:
    """The version of the federated part's format, which decides how the rest is read.

    ``default``: the version where the part does not say.

    Raises:
        UserError: it is no version.
    """
    if not isinstance(held, Mapping):
        raise _damaged("federated")
    version = held.get("version", default)
    if not _count(version):
        raise _damaged("federated.version")
    return int(version)


def check_callbacks(held: Any, callbacks: Sequence[Any]) -> None:
    """Refuse states that callbacks of Lightning or of this package cannot take.

    Other people's callbacks raise their own errors.

    Raises:
        UserError: with the callback's name.
    """
    for callback in callbacks:
        home = type(callback).__module__.split(".")[0]
        state = None
        if isinstance(held, Mapping):
            state = held.get(getattr(callback, "state_key", None))
        if state is None or home not in ("pytorch_lightning", "lightning", "fl_lightning"):
            continue
        # Tried on copies of both, so that a refusal leaves the callback as it was.
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                copy.copy(callback).load_state_dict(copy.deepcopy(state))
        except Exception:  # whatever it stumbles over
            raise _damaged(f"callbacks.{type(callback).__name__}") from None


def check_readable(saved: dict[str, Any], learner: Any, trainer: Any) -> None:
    """Refuse a checkpoint whose restoring needs an object that lies apart in it.

    Raises:
        UserError: with its place, and how to have it read.
    """
    base: Any = next(c for c in reversed(type(learner).__mro__) if c.__name__ == "LightningModule")
    # A learner with a hook of its own may read any entry of the checkpoint.
    reads_all = type(learner).on_load_checkpoint is not base.on_load_checkpoint
    restored: tuple[str, ...] = ()
    if trainer.state.fn == "fit":
        restored = ("callbacks", type(trainer.datamodule).__qualname__)
    for key, part in saved.items():
        if key not in restored and (not reads_all or key in HYPER_PARAMETERS):
            continue
        place = next(places(part, f"checkpoint[{key!r}]"), None)
        if place is not None:
            raise UserError(
                f"ckpt_path: {place} is an object, which cannot be read without running code that "
                "the file names. If you trust the checkpoint, give trainer.fit(…, "
                "weights_only=False), at the command line --weights_only false."
            )


def check_ours(held: Any, names: Collection[str] = ()) -> None:
    """Refuse a federated part in which something is of another kind than a run puts there.

    ``names``: the entries that are checked; empty: all.

    Raises:
        UserError: with its place.
    """
    if not isinstance(held, Mapping):
        raise _damaged("federated")
    for name, (check, needed) in _OURS.items():
        asked = not names or name in names
        absent = needed and name not in held
        if asked and (absent or (name in held and not check(held[name]))):
            raise _damaged(f"federated.{name}")
    if not names and "w" not in held:
        raise _damaged("federated.w")


def check_alike(held: Mapping[str, Tensor], own: Mapping[str, Tensor], place: str) -> None:
    """Refuse tensors of other shapes or kinds of number than the run's of these names."""
    for name, value in held.items():
        if name not in own:
            continue
        if value.shape != own[name].shape or kind(value) != kind(own[name]):
            raise _damaged(f"{place}.{name}")


def check_states(held: Mapping[str, Tensor], declared: Mapping[str, Any], w: Tensor) -> None:
    """Refuse server states of another shape or kind than methods declared."""
    own: dict[str, Tensor] = {}
    for key, declaration in declared.items():
        own[key] = w.new_empty(declaration.sized(w.numel()), dtype=declaration.dtype or w.dtype)
    check_alike(held, own, "federated.server")


def check_lightning_s(saved: Mapping[str, Any], loops: Mapping[str, Any]) -> None:
    """Refuse entries that Lightning could not restore.

    ``loops``: the entries that the Trainer's loops would save now, by name.

    Raises:
        UserError: with its place.
    """
    for name in ("epoch", "global_step"):
        if not _count(saved.get(name)):
            raise _damaged(name)
    held = saved.get("loops")
    if not isinstance(held, Mapping):
        raise _damaged("loops")
    for name, own in loops.items():
        _like(held.get(name), own, f"loops.{name}", _as_loops)
    callbacks = saved.get("callbacks", {})
    if not _each(lambda value: True)(callbacks):
        raise _damaged("callbacks")
    for name in ("lr_schedulers", "optimizer_states"):
        if not isinstance(saved.get(name), list):
            raise _damaged(name)


def check_optimizer(held: Any, optimizer: Optimizer) -> None:
    """Refuse a state that the server optimizer could not take up, or not step with.

    Raises:
        UserError: with its place.
    """
    place = "optimizer_states"
    if not isinstance(held, list) or len(held) != 1 or not isinstance(held[0], Mapping):
        raise _damaged(place)
    state = held[0].get("state")
    groups = held[0].get("param_groups")
    if not isinstance(state, Mapping) or not all(
        isinstance(values, Mapping) for values in state.values()
    ):
        raise _damaged(f"{place}.state")
    own_groups = optimizer.state_dict()["param_groups"]
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise _damaged(f"{place}.param_groups")
    for group, own in zip(groups, own_groups, strict=False):
        # Versions of torch differ in the options that their optimizers have, so an option that is
        # missing is no damage; but without a number or a list no step can be taken.
        needed = {name for name in own if name in group or type(own[name]) in (int, float, list)}
        _like(group, {name: own[name] for name in needed}, f"{place}.param_groups", _as_options)
    if len(groups) != len(own_groups):
        raise _damaged(f"{place}.param_groups")
    shape = optimizer.param_groups[0]["params"][0].shape
    for values in state.values():
        for name, value in values.items():
            fits = not isinstance(value, (str, list, Mapping))
            if isinstance(value, Tensor):
                fits = not value.is_complex() and (value.numel() == 1 or value.shape == shape)
            if not fits:
                raise _damaged(f"{place}.state.{name}")


def _as_loops(held: Any, own: Any) -> bool:
    """Tell whether this fits into a loop's state: a count from 0, or any number for a float."""
    if type(own) is float:
        return _number(held)
    return type(held) is type(own) and (type(own) is not int or _count(held))


def _as_options(held: Any, own: Any) -> bool:
    """Tell whether this fits an optimizer's option; a number may be one of another kind."""
    if type(own) in (int, float):
        return (_number(held) and abs(held) < 2**63) or _tensor(held)
    return type(held) is type(own)


def _like(held: Any, own: Any, place: str, fits: Callable[[Any, Any], bool]) -> None:
    """Refuse an entry of another kind than ``own``, or one that lacks something that it has."""
    if isinstance(own, Mapping):
        if not isinstance(held, Mapping):
            raise _damaged(place)
        for name, part in own.items():
            if name not in held:
                raise _damaged(f"{place}.{name}")
            _like(held[name], part, f"{place}.{name}", fits)
    elif isinstance(own, (list, tuple)):
        if not isinstance(held, (list, tuple)) or len(held) != len(own):
            raise _damaged(place)
        for number, part in enumerate(own):
            _like(held[number], part, f"{place}[{number}]", fits)
    elif type(own) in (bool, str, int, float) and not fits(held, own):
        raise _damaged(place)


def _damaged(place: str) -> UserError:
    return UserError(
        f"ckpt_path: the checkpoint is damaged: {place} in it is not what a run puts there. Take "
        "another checkpoint (such as checkpoints/best.ckpt of the same run), or start anew."
    )
