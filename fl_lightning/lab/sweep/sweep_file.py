"""A sweep's file: configs, fixed options, the grid, the selection; and the overrides of the
command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fl_lightning.errors import UserError, suggest
from fl_lightning.introspection.accepted import Above, AtLeast, Below, PositiveInt, check
from fl_lightning.lab.cli.compose import find, plain_yaml, text_of
from fl_lightning.metrics import check_mode

KEYS = ("configs", "fixed", "grid", "select", "claims")
SELECT_KEYS = ("over", "arms", "from", "metric", "mode", "val_fraction", "seeds", "rounds")
SEEDS = "seed_everything"
ROUNDS = "trainer.max_epochs"
# A sweep sets these options itself.
OWN = ("trainer.default_root_dir", "ckpt_path")
# Keys that cannot be combined with the choices of another sweep.
_TRYING = ("over", "arms", "seeds", "rounds")


@dataclass(frozen=True)
class Selection:
    """The options that an arm chooses before its runs, by runs with seeds of their own.

    ``over``: option → its values. ``rounds``: rounds of the runs that measure; None: as many as the
    arms' own. ``arms``: arm → its own values, instead of ``over``. ``after``: arm → the arm whose
    choice it takes before its own. ``stored``: the choices of another sweep, instead of trying.
    ``mode``: max or min, if the metric does not show its better direction.
    """

    over: Mapping[str, Sequence[Any]]
    metric: str
    val_fraction: float
    seeds: tuple[int, ...]
    rounds: int | None = None
    arms: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    after: Mapping[str, str] = field(default_factory=dict)
    stored: Path | None = None
    mode: str | None = None


@dataclass
class Spec:
    """A sweep's file, with its overrides applied.

    ``name`` is the given name, ``stem`` the sweep's name, and ``overrides`` are the texts as typed.
    ``grid`` does not include the seeds; ``seeds`` None: the seed of the configs. ``own_rounds``:
    the rounds fixed by the file, before overrides.
    """

    name: str
    stem: str
    text: str
    configs: list[str]
    fixed: dict[str, Any]
    grid: dict[str, list[Any]]
    seeds: list[int] | None
    select: Selection | None
    claims: Path | None
    overrides: list[str] = field(default_factory=list)
    own_rounds: Any = None


def read_spec(name: str, overrides: Sequence[str] = ()) -> Spec:
    """Read the sweep called ``name``, a file or a packaged one, and apply ``key=value``.

    Raises:
        UserError: it cannot be read, or a key or value is not accepted; the error names the key.
    """
    file = find(name, "sweep")
    text, folder = text_of(file, f"sweep {name}"), Path(str(file)).parent
    document = plain_yaml(text, f"sweep {name}")
    check(f"sweep {name}: the sweep", document, dict)
    check_known(f"sweep {name}: ", document, KEYS)
    configs = [str(config) for config in as_list(document.get("configs") or [])]
    fixed = dict(_mapping(name, "fixed", document))
    grid = _grid(name, "grid", _mapping(name, "grid", document))
    select = dict(_mapping(name, "select", document))
    # Note the number of rounds before the overrides: arms with their own rounds keep their share of
    # it.
    own_rounds = fixed.get(ROUNDS)
    for override in overrides:
        _override(name, override, fixed, grid, select)
    if SEEDS in fixed:
        grid.setdefault(SEEDS, [fixed.pop(SEEDS)])
    for key in OWN:
        if key in {**fixed, **grid}:
            raise UserError(
                f"sweep {name}: the sweep sets {key} itself, one folder per run. Choose their "
                "place with --out."
            )
    seeds = None
    if SEEDS in grid:
        seeds = _seeds(name, f"grid.{SEEDS}", grid.pop(SEEDS))
    claims = document.get("claims")
    return Spec(
        name=name,
        stem=Path(name).name.removesuffix(".yaml").removesuffix(".yml"),
        text=text,
        configs=configs,
        fixed=fixed,
        grid=grid,
        seeds=seeds,
        select=_selection(name, select, folder) if select else None,
        claims=None if claims is None else folder / str(claims),
        overrides=list(overrides),
        own_rounds=own_rounds,
    )


def _grid(name: str, key: str, mapping: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return option → its values, of which each has at least one."""
    return {str(option): _values(name, f"{key}.{option}", its) for option, its in mapping.items()}


def check_known(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a name that is not among those ``known``."""
    accepted = list(map(str, known))
    for name in names:
        if name not in accepted:
            raise UserError(
                f"{where}{name} is not known.{suggest(name, accepted)} Accepted: "
                f"{', '.join(accepted)[:400] or 'none'}."
            )


def _mapping(name: str, key: str, document: Mapping[str, Any]) -> dict[str, Any]:
    value = document.get(key)
    check(f"sweep {name}: {key}", value, dict | None)
    return value or {}


def as_list(value: Any) -> list[Any]:
    """Return ``value`` if it is a list, else a list with only this value."""
    return value if isinstance(value, list) else [value]


def _values(name: str, key: str, value: Any) -> list[Any]:
    values = as_list(value)
    if not values:
        raise UserError(f"sweep {name}: {key} is empty. Give a list of values.")
    return values


def _seeds(name: str, key: str, value: Any) -> list[int]:
    values = _values(name, key, value)
    where = f"sweep {name}: {key}"
    check(where, values, list[Annotated[int, AtLeast(0), Below(2**32)]])
    return list(dict.fromkeys(values))


def _override(
    name: str,
    override: str,
    fixed: dict[str, Any],
    grid: dict[str, list[Any]],
    select: dict[str, Any],
) -> None:
    """Apply one ``key=value``.

    ``trainer.max_epochs=3`` fixes an option, ``select.seeds=[7]`` changes the selection, and for an
    axis of the grid it sets the values.
    """
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not key:
        raise UserError(
            f"sweep {name} {override}: give overrides as key=value, such as trainer.max_epochs=3."
        )
    value = plain_yaml(text, f"sweep {name} {key}")
    if key.startswith("select."):
        if key in ("select.over", "select.arms"):
            value = _mapping(name, key, {key: value})
        # The choices of another sweep replace the values to try.
        if key == "select.from":
            for other in _TRYING:
                select.pop(other, None)
        select[key.removeprefix("select.")] = value
        return
    for axis, items in grid.items():
        # Rounds that an item sets are scaled with the fixed number, so they do not replace it.
        shared = key == ROUNDS and key in fixed
        if not shared and any(isinstance(item, dict) and key in item for item in items):
            raise UserError(
                f"sweep {name} {override}: items of the grid's axis {axis} set {key} themselves; "
                "edit them."
            )
    if key in select.get("over", {}):
        select["over"] = {**select["over"], key: _values(name, f"select.over.{key}", value)}
    elif key in grid or key == SEEDS:
        grid[key] = _values(name, f"grid.{key}", value)
    else:
        fixed[key] = value


def _selection(name: str, entries: Mapping[str, Any], folder: Path) -> Selection:
    """Read ``select``."""
    check_known(f"sweep {name}: select.", entries, SELECT_KEYS)
    metric = str(entries.get("metric", "val/acc"))
    over = _mapping(name, "over", entries)
    of_arms = _mapping(name, "arms", entries)
    taken = "from" in entries
    tried = [key for key in _TRYING if key in entries]
    if (taken and tried) or not (taken or ((over or of_arms) and "seeds" in entries)):
        raise UserError(
            f"sweep {name}: select needs either over, a mapping of options to their values, and "
            "seeds of its own, or from, the choices of another sweep, which are not tried again."
        )
    if taken:
        return Selection({}, metric, 0.0, (), stored=_stored(str(entries["from"]), folder))
    rounds = entries.get("rounds")
    fraction = entries.get("val_fraction", 0.1)
    where = f"sweep {name}: select"
    check(f"{where}.rounds", rounds, PositiveInt | None)
    check(f"{where}.val_fraction", fraction, Annotated[float, Above(0), Below(1)])
    check_mode(f"{where}.mode", entries.get("mode"))
    own = _seeds(name, "select.seeds", entries["seeds"])
    over_of_arms, after = _of_arms(name, of_arms)
    return Selection(
        over=_grid(name, "select.over", over),
        metric=metric,
        rounds=rounds,
        arms=over_of_arms,
        after=after,
        val_fraction=float(fraction),
        seeds=tuple(own),
        mode=entries.get("mode"),
    )


def _of_arms(
    name: str, entries: Mapping[str, Any]
) -> tuple[dict[str, dict[str, list[Any]]], dict[str, str]]:
    """Read ``select.arms``: arm → its own values, and arm → the arm that it comes after."""
    over = {}
    after = {}
    for arm in map(str, entries):
        where = f"select.arms.{arm}"
        own = dict(_mapping(name, where, {where: entries[arm]}))
        before = own.pop("after", None)
        if before is not None:
            if not own:
                raise UserError(
                    f"sweep {name}: {where}.after {before}: give also candidates of this arm. A "
                    "single value of an option is enough."
                )
            after[arm] = str(before)
        over[arm] = _grid(name, where, own)
    return over, after


def _stored(given: str, folder: Path) -> Path:
    """Return the selections.yaml that ``given`` means.

    ``given`` is a file or a sweep's folder, relative to the sweep's file or to the current folder.
    """
    place = folder / given if (folder / given).exists() else Path(given)
    return place / "selections.yaml" if place.is_dir() else place
