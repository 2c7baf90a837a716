"""The grid of a sweep: its arms, each a name and the arguments of ``fl-lightning fit``, and the runs of each."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from fl_lightning.cli.compose import TOP_LEVEL, class_name, prepare
from fl_lightning.errors import UserError
from fl_lightning.sweep.spec import ROUNDS, SEEDS, Spec


@dataclass(frozen=True)
class Arm:
    """One setting of a sweep; ``share``: of the rounds that are fixed for all arms, where it sets its own."""

    name: str
    configs: tuple[str, ...]
    options: Mapping[str, Any]
    axes: Mapping[str, str] = field(default_factory=dict)  # key of the grid → value as named
    share: Fraction = Fraction(1)

    def argv(self, **more: Any) -> list[str]:
        """Arguments of ``fit``, with ``more`` options over the arm's."""
        options = {**self.options, **more}
        return [*(part for name in self.configs for part in ("-c", name)), *_flags(options)]

    def with_options(self, name: str, more: Mapping[str, Any]) -> Arm:
        """The arm with ``more`` options, under another name."""
        return replace(self, name=name, options={**self.options, **more})


@dataclass(frozen=True)
class Run:
    """One run of an arm; it lies in ``<sweep>/<place>``, and ``argv`` is what ``fl-lightning fit`` would be given."""

    sweep: Path
    place: str
    arm: str
    seed: int
    argv: tuple[str, ...]
    axes: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        return self.sweep / self.place


def arms(spec: Spec) -> list[Arm]:
    """The arms of the grid, the last axis varying fastest.

    Raises:
        UserError: an item that is none of the grid's, or two arms of one name.
    """
    axes = [[_item(spec, axis, value) for value in values] for axis, values in spec.grid.items()]
    names = [_names(items) for items in axes]
    differ = [number for number, items in enumerate(axes) if len(items) > 1] or list(
        range(len(axes))
    )
    found: dict[str, Arm] = {}
    for choice in itertools.product(*(range(len(items)) for items in axes)):
        name = "_".join(names[axis][choice[axis]] for axis in differ) or spec.stem
        picked = [axes[axis][position] for axis, position in enumerate(choice)]
        configs = (*spec.configs, *(config for item in picked for config in item.configs))
        own = {key: value for item in picked for key, value in item.options.items()}
        share = Fraction(1)
        if all(map(_whole, (own.get(ROUNDS), spec.own_rounds, spec.fixed.get(ROUNDS)))):
            # 15 of 150 rounds stay a tenth of whatever is fixed
            share = Fraction(own[ROUNDS], spec.own_rounds)
            own[ROUNDS] = part_of(spec.fixed[ROUNDS], share)
        options = {**spec.fixed, **own}
        if name in found or name in ("select", ".", ".."):
            why = "is the name of two arms" if name in found else "cannot be the name of an arm"
            raise UserError(
                f"sweep {spec.name}: {name!r} {why}. Give items of the grid a name: {{name: …, configs: […]}}."
            )
        values = {axis: names[place][choice[place]] for place, axis in enumerate(spec.grid)}
        found[name] = Arm(name, configs, options, values, share)
    return list(found.values())


def part_of(rounds: int, share: Fraction) -> int:
    """``share`` of ``rounds``, at least one."""
    return max(1, round(rounds * share))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def seeds(spec: Spec, arm: Arm) -> list[int]:
    """The seeds of ``arm``: the grid's, else that of its configs, else 0."""
    if spec.seeds is not None:
        return spec.seeds
    seed = prepare("fit", arm.argv()).config.get(SEEDS, 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(
            f"sweep {spec.name}: {SEEDS} is {seed!r}, and a run's folder is named by its seed. Give integers."
        )
    return [seed]


def runs(sweep: Path, prefix: str, arm: Arm, its_seeds: Sequence[int]) -> list[Run]:
    """The runs of ``arm`` in ``<sweep>/<prefix><arm>/seed-<s>``."""
    found = []
    for seed in its_seeds:
        place = f"{prefix}{arm.name}/seed-{seed}"
        own = {SEEDS: seed, "trainer.default_root_dir": str(sweep / place), "ckpt_path": "last"}
        found.append(
            Run(sweep, place, arm.name, seed, tuple(arm.argv(**own)), tuple(arm.axes.items()))
        )
    return found


def by_seed(groups: Sequence[Sequence[Run]]) -> list[Run]:
    """The first run of every group, then the second ones, …: what is done at any time is paired by seed.

    >>> by_seed([[1, 2], [3], [4, 5]])  # type: ignore[list-item]
    [1, 3, 4, 2, 5]
    """
    longest = max(map(len, groups), default=0)
    return [group[place] for place in range(longest) for group in groups if place < len(group)]


def value_name(value: Any) -> str:
    """A value as a part of a folder's name.

    >>> value_name(-0.1), value_name(True), value_name({"class_path": "a.Dirichlet", "init_args": {"alpha": 0.1}})
    ('-0.1', 'true', 'Dirichlet-0.1')
    """
    if isinstance(value, dict):
        head = [class_name(value)] if "class_path" in value else []
        inner = value.get("init_args", {}) if head else value
        text = "-".join([*head, *(value_name(item) for item in inner.values())])
    elif isinstance(value, list):
        text = "-".join(map(value_name, value))
    else:
        text = value if isinstance(value, str) else json.dumps(value)
        if text.startswith("-") and not isinstance(value, str):
            return text  # a sign, and no hyphen
    return re.sub(r"[^\w.+=-]+", "-", text).strip("-") or "none"


# --------------------------------------------------------------------------- items of an axis


@dataclass(frozen=True)
class _Item:
    """One value of an axis: configs and options that come with it; ``parts`` name it."""

    configs: tuple[str, ...]
    options: Mapping[str, Any]
    name: str | None = None

    @property
    def parts(self) -> list[tuple[str, str]]:
        """(what it is of, how it reads) of everything in the item, the configs first."""
        named = [
            (config, value_name(Path(config).name.removesuffix(".yaml"))) for config in self.configs
        ]
        return named + [
            (f"{key}={value!r}", value_name(value)) for key, value in self.options.items()
        ]


def _item(spec: Spec, axis: str, value: Any) -> _Item:
    where = f"sweep {spec.name}: grid.{axis}"
    bundle = isinstance(value, dict) and all(
        key in ("configs", "name") or "." in str(key) for key in value
    )
    if isinstance(value, dict) and (bundle or axis in TOP_LEVEL) and "class_path" not in value:
        configs = value.get("configs", [])
        configs = configs if isinstance(configs, list) else [configs]
        options = {str(key): item for key, item in value.items() if key not in ("configs", "name")}
        name = None if value.get("name") is None else value_name(value["name"])
        if not all(isinstance(config, str) for config in configs) or any(
            k.split(".")[0].rstrip("+") not in TOP_LEVEL for k in options
        ):
            raise UserError(
                f"{where}: {str(value)[:80]!r}: an item is a value, or {{configs: [names], option: value, …}}."
            )
        return _Item(tuple(configs), options, name)
    named_by_config = axis in ("method", "data", "model", "trainer", "configs")
    if named_by_config and isinstance(value, str | list):
        configs = value if isinstance(value, list) else [value]
        if not all(isinstance(config, str) for config in configs):
            raise UserError(
                f"{where}: {str(value)[:80]!r}: give names of configs, such as method/fedavg."
            )
        return _Item(tuple(configs), {})
    if axis.split(".")[0].rstrip("+") not in TOP_LEVEL:
        raise UserError(
            f"{where}: no option of a run. An axis is an option, such as model.participation, or one of method, data, "
            "model and trainer with names of configs or items {configs: [names], option: value, …}."
        )
    return _Item((), {axis: value})


def _names(items: Sequence[_Item]) -> list[str]:
    """What each item of an axis is called: by what not all of them have."""
    parts = [item.parts for item in items]
    common = {key for key, _ in parts[0]}.intersection(*({key for key, _ in own} for own in parts))
    short = ["-".join(text for key, text in own if key not in common) for own in parts]
    whole = ["-".join(text for _, text in own) for own in parts]
    chosen = short if all(short) else whole
    return [item.name or name or "none" for item, name in zip(items, chosen, strict=True)]


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        for item in value if key.endswith("+") and isinstance(value, list) else [value]:
            yield f"--{key}={item if isinstance(item, str) and item else json.dumps(item)}"
