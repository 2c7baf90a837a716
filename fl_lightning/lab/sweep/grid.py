"""The grid of a sweep: arms, each with a name and arguments of ``fl-lightning fit``, and their
runs.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import check
from fl_lightning.lab.cli.compose import TOP_LEVEL, class_name, prepare
from fl_lightning.lab.sweep.sweep_file import ROUNDS, SEEDS, Spec, as_list

# Axes whose items may be names of configs.
_OF_CONFIGS = ("method", "data", "model", "trainer", "configs")


@dataclass(frozen=True)
class PlannedArm:
    """One setting of a sweep.

    ``axes``: key of the grid → value as named. ``share``: the arm's share of the rounds that are
    fixed for all arms, if it sets its own. ``of_grid``: the options that the grid sets.
    """

    name: str
    configs: tuple[str, ...]
    options: Mapping[str, Any]
    axes: Mapping[str, str] = field(default_factory=dict)
    share: Fraction = Fraction(1)
    of_grid: frozenset[str] = frozenset()

    def argv(self, **more: Any) -> list[str]:
        """Return the arguments for ``fit``; options in ``more`` replace the arm's own."""
        configs: list[str] = []
        for name in self.configs:
            configs += ["-c", name]
        return [*configs, *_flags({**self.options, **more})]

    def with_options(self, name: str, more: Mapping[str, Any]) -> PlannedArm:
        """Return the arm with ``more`` options, under another name."""
        return replace(self, name=name, options={**self.options, **more})


@dataclass(frozen=True)
class PlannedRun:
    """One run of an arm; its folder is ``<sweep>/<place>``.

    ``argv``: the arguments for ``fl-lightning fit``.
    """

    sweep: Path
    place: str
    arm: str
    seed: int
    argv: tuple[str, ...]
    axes: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        return self.sweep / self.place

    @property
    def rounds(self) -> int | None:
        """Return the rounds that its options ask for; None: they come from a config."""
        head = f"--{ROUNDS}="
        asked = [word.removeprefix(head) for word in self.argv if word.startswith(head)]
        return int(asked[-1]) if asked and asked[-1].isdecimal() else None


def arms(spec: Spec) -> list[PlannedArm]:
    """Return the arms of the grid; the last axis varies fastest.

    Raises:
        UserError: an item is not valid in a grid, or two arms have one name.
    """
    items = {}
    for axis, values in spec.grid.items():
        items[axis] = [_item(spec, axis, value) for value in values]
    names = {axis: _names(its_items) for axis, its_items in items.items()}
    # An axis with a single value is not part of an arm's name, unless all axes have one.
    naming = [axis for axis in items if len(items[axis]) > 1] or list(items)
    made: dict[str, PlannedArm] = {}
    for places in itertools.product(*(range(len(its_items)) for its_items in items.values())):
        choice = dict(zip(items, places, strict=True))
        values_named = {axis: names[axis][place] for axis, place in choice.items()}
        name = "_".join(values_named[axis] for axis in naming) or spec.stem
        if name in made or name in ("select", ".", ".."):
            reason = "is the name of two arms" if name in made else "cannot be the name of an arm"
            raise UserError(
                f"sweep {spec.name}: {name!r} {reason}. "
                "Give items of the grid a name: {name: …, configs: […]}."
            )
        picked = [items[axis][place] for axis, place in choice.items()]
        made[name] = _arm(spec, name, picked, values_named)
    return list(made.values())


def _arm(spec: Spec, name: str, picked: Sequence[_Item], axes: Mapping[str, str]) -> PlannedArm:
    """Return the arm of one item of each axis."""
    configs = list(spec.configs)
    options: dict[str, Any] = {}
    for item in picked:
        configs += item.configs
        options |= item.options
    of_grid = frozenset(options)
    share = Fraction(1)
    if all(map(_whole, (options.get(ROUNDS), spec.own_rounds, spec.fixed.get(ROUNDS)))):
        # 15 of 150 rounds stay a tenth of the fixed number, whatever that is.
        share = Fraction(options[ROUNDS], spec.own_rounds)
        options[ROUNDS] = part_of(spec.fixed[ROUNDS], share)
    return PlannedArm(name, tuple(configs), {**spec.fixed, **options}, axes, share, of_grid)


def part_of(rounds: int, share: Fraction) -> int:
    """Return ``share`` of ``rounds``, at least one."""
    return max(1, round(rounds * share))


def _whole(value: Any) -> bool:
    return type(value) is int and value > 0


def seeds(spec: Spec, arm: PlannedArm) -> list[int]:
    """Return the seeds of ``arm``: the grid's seeds, else the seed of its configs, else 0.

    Raises:
        UserError: the seed of its configs is not an integer, or the sweep selects with such a seed.
    """
    own = _seed_of_configs(spec, arm) if spec.seeds is None else spec.seeds
    selecting = spec.select.seeds if spec.select else ()
    if shared := sorted(set(own) & set(selecting)):
        raise UserError(
            f"sweep {spec.name}: select.seeds: {shared[0]} is also a seed of {arm.name}. What is "
            "selected has to be measured with other seeds, such as [100, 101]."
        )
    return own


def _seed_of_configs(spec: Spec, arm: PlannedArm) -> list[int]:
    seed = prepare("fit", arm.argv()).config.get(SEEDS, 0)
    check(f"sweep {spec.name}: {SEEDS}", seed, int)
    return [seed]


def runs(sweep: Path, prefix: str, arm: PlannedArm, its_seeds: Sequence[int]) -> list[PlannedRun]:
    """Return the runs of ``arm`` in ``<sweep>/<prefix><arm>/seed-<s>``."""
    made = []
    for seed in its_seeds:
        place = f"{prefix}{arm.name}/seed-{seed}"
        folder = str(sweep / place)
        argv = arm.argv(**{SEEDS: seed, "trainer.default_root_dir": folder, "ckpt_path": "last"})
        made.append(PlannedRun(sweep, place, arm.name, seed, tuple(argv), tuple(arm.axes.items())))
    return made


def by_seed(groups: Sequence[Sequence[PlannedRun]]) -> list[PlannedRun]:
    """Take the first run of every group, then the second ones, so that done runs form pairs by
    seed.

    >>> by_seed([[1, 2], [3], [4, 5]])  # type: ignore[list-item]
    [1, 3, 4, 2, 5]
    """
    ordered: list[PlannedRun] = []
    for place in range(max(map(len, groups), default=0)):
        ordered += [group[place] for group in groups if place < len(group)]
    return ordered


def value_name(value: Any) -> str:
    """Return a value as a part of a folder's name.

    >>> value_name(-0.1), value_name(True)
    ('-0.1', 'true')
    >>> value_name({"class_path": "a.Dirichlet", "init_args": {"alpha": 0.1}})
    'Dirichlet-0.1'
    """
    if isinstance(value, dict):
        parts = list(value.values())
        if "class_path" in value:
            parts = [class_name(value), *value.get("init_args", {}).values()]
        text = "-".join(map(value_name, parts))
    elif isinstance(value, list):
        text = "-".join(map(value_name, value))
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value)
        # This "-" is a minus sign, and not a hyphen.
        if text.startswith("-"):
            return text
    return re.sub(r"[^\w.+=-]+", "-", text).strip("-") or "none"


# --------------------------------------------------------------------------- items of an axis


@dataclass(frozen=True)
class _Item:
    """One value of an axis: its configs and options; ``parts`` name it."""

    configs: tuple[str, ...]
    options: Mapping[str, Any]
    name: str | None = None

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Return (key, value as text) of everything in the item; the configs come first."""
        parts = []
        for config in self.configs:
            parts.append((config, value_name(Path(config).name.removesuffix(".yaml"))))
        for key, value in self.options.items():
            parts.append((f"{key}={value!r}", value_name(value)))
        return parts


def _item(spec: Spec, axis: str, value: Any) -> _Item:
    where = f"sweep {spec.name}: grid.{axis}"
    if isinstance(value, dict) and "class_path" in value and "name" in value:
        named = {key: part for key, part in value.items() if key != "name"}
        return replace(_item(spec, axis, named), name=value_name(value["name"]))
    made = _Item((), {axis: value})
    if isinstance(value, dict) and "class_path" not in value:
        bundle = all(key in ("configs", "name") or "." in str(key) for key in value)
        if bundle or axis in TOP_LEVEL:
            made = _bundle(value)
    elif isinstance(value, str | list) and axis in _OF_CONFIGS:
        made = _Item(tuple(map(str, as_list(value))), {})
    for key in made.options:
        if key.split(".")[0].rstrip("+") not in TOP_LEVEL:
            raise UserError(
                f"{where}: {key} is not an option of a run. An axis is an option, such as "
                "model.participation, or one of method, data, model and trainer with names of "
                "configs or items {configs: [names], option: value, …}."
            )
    return made


def _bundle(value: Mapping[str, Any]) -> _Item:
    """Return an item that combines configs and options, and may have a name."""
    configs = tuple(map(str, as_list(value.get("configs", []))))
    options = {str(key): item for key, item in value.items() if key not in ("configs", "name")}
    name = None if value.get("name") is None else value_name(value["name"])
    return _Item(configs, options, name)


def _names(items: Sequence[_Item]) -> list[str]:
    """Name each item of an axis by the parts that not all items have."""
    parts = [item.parts for item in items]
    common = set.intersection(*(set(dict(own)) for own in parts))
    short = []
    whole = []
    for own in parts:
        short.append("-".join(text for key, text in own if key not in common))
        whole.append("-".join(text for _, text in own))
    chosen = short if all(short) else whole
    return [item.name or name or "none" for item, name in zip(items, chosen, strict=True)]


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        several = key.endswith("+") and isinstance(value, list)
        for item in value if several else [value]:
            # Text is used as it is; the empty text becomes "", which reads back as text.
            text = item if isinstance(item, str) and item else json.dumps(item)
            yield f"--{key}={text}"
