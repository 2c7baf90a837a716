"""A sweep's file: configs, fixed options, the grid, the selection; and the overrides of the
command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.cli.compose import is_file, packaged, plain_yaml
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
    text, folder = _text(name)
    document = plain_yaml(text, f"sweep {name}")
    if not isinstance(document, dict):
        raise UserError(f"sweep {name}: a sweep is a mapping with the keys {', '.join(KEYS)}.")
    for key in document:
        if key not in KEYS:
            raise UserError(
                f"sweep {name}: the key {key!r} is not known.{suggest(key, KEYS)} Accepted: "
                f"{', '.join(KEYS)}. Options of every run belong under fixed, those that vary "
                "under grid."
            )
    configs = _texts(name, "configs", document.get("configs") or [])
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
    _check_options(name, fixed, grid, select)
    seeds = None
    if SEEDS in grid:
        seeds = _seeds(name, f"grid.{SEEDS}", grid.pop(SEEDS))
    claims = None
    if document.get("claims") is not None:
        claims = folder / str(document["claims"])
        if not is_file(claims):
            raise UserError(
                f"sweep {name}: claims {document['claims']}: there is no such file in {folder}, "
                "where the sweep's file is."
            )
    return Spec(
        name=name,
        stem=Path(name).name.removesuffix(".yaml").removesuffix(".yml"),
        text=text,
        configs=configs,
        fixed=fixed,
        grid=grid,
        seeds=seeds,
        select=_selection(name, select, folder) if select else None,
        claims=claims,
        overrides=list(overrides),
        own_rounds=own_rounds,
    )


def _grid(name: str, key: str, mapping: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return option → its values, of which each has at least one."""
    return {str(option): _values(name, f"{key}.{option}", its) for option, its in mapping.items()}


def _check_options(
    name: str, fixed: Mapping[str, Any], grid: Mapping[str, Any], select: Mapping[str, Any]
) -> None:
    """Refuse options that a sweep sets itself, and options that are both fixed and varied."""
    for key in (*fixed, *grid, *select.get("over", {})):
        if key in OWN:
            raise UserError(
                f"sweep {name}: the sweep sets {key} itself, one folder per run. Choose their "
                "place with --out."
            )
        if key in fixed and key in grid:
            raise UserError(
                f"sweep {name}: {key} is both fixed and in the grid. Leave one of them out."
            )


def _text(name: str) -> tuple[str, Path]:
    """Return (text, folder) of the sweep's file."""
    if is_file(name):
        try:
            return Path(name).read_text(encoding="utf-8"), Path(name).parent
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"sweep {name}: this file cannot be read ({error}).") from None
    entry = packaged().get(name.removesuffix(".yaml"))
    if entry is None:
        raise UserError(
            f"sweep {name[:200]}: neither a file nor a packaged config.{suggest(name, packaged())} "
            "Give a YAML file with configs, fixed and grid."
        )
    return entry.read_text(encoding="utf-8"), Path(str(entry)).parent


def _mapping(name: str, key: str, document: Mapping[str, Any]) -> dict[str, Any]:
    value = document.get(key)
    if value is not None and not isinstance(value, dict):
        raise UserError(
            f"sweep {name}: {key} is {type(value).__name__} {str(value)[:60]!r}: give a mapping."
        )
    return value or {}


def as_list(value: Any) -> list[Any]:
    """Return ``value`` if it is a list, else a list with only this value."""
    return value if isinstance(value, list) else [value]


def _values(name: str, key: str, value: Any) -> list[Any]:
    values = as_list(value)
    if not values:
        raise UserError(f"sweep {name}: {key} is empty. Give a list of values.")
    return values


def _texts(name: str, key: str, value: Any) -> list[str]:
    values = as_list(value)
    for item in values:
        if not isinstance(item, str):
            raise UserError(
                f"sweep {name}: {key}: {str(item)[:60]!r} is not the name of a config. "
                "Give text, such as base."
            )
    return list(values)


def _seeds(name: str, key: str, value: Any) -> list[int]:
    values = as_list(value)
    for seed in values:
        # A bool is an int in Python, so check the exact type.
        if type(seed) is not int or not 0 <= seed < 2**32:
            raise UserError(
                f"sweep {name}: {key}: {seed!r} is not a seed. Give integers from 0 to 4294967295, "
                "one per run."
            )
        if values.count(seed) > 1:
            raise UserError(
                f"sweep {name}: {key}: {seed} is given twice. A seed gives one run of an arm."
            )
    if not values:
        raise UserError(f"sweep {name}: {key} is empty. Give integers, one per run.")
    return list(values)


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
    for key in entries:
        if key not in SELECT_KEYS:
            accepted = f"Accepted: {', '.join(SELECT_KEYS)}."
            raise UserError(
                f"sweep {name}: select.{key} is not known.{suggest(key, SELECT_KEYS)} {accepted}"
            )
    metric = str(entries.get("metric", "val/acc"))
    if "from" in entries:
        if both := [key for key in _TRYING if key in entries]:
            raise UserError(
                f"sweep {name}: select has from and {both[0]}: options that another sweep has "
                "chosen are not tried again."
            )
        return Selection({}, metric, 0.0, (), stored=_stored(name, str(entries["from"]), folder))
    over = _mapping(name, "over", entries)
    of_arms = _mapping(name, "arms", entries)
    if not (over or of_arms) or "seeds" not in entries:
        raise UserError(
            f"sweep {name}: select needs over, a mapping of options to their values, and seeds of "
            "its own."
        )
    rounds = entries.get("rounds")
    fraction = entries.get("val_fraction", 0.1)
    _check_measuring(name, rounds, fraction)
    check_mode(f"sweep {name}: select.mode", entries.get("mode"))
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
            if not isinstance(before, str) or not own:
                raise UserError(
                    f"sweep {name}: {where}.after {str(before)[:60]!r}: give the name of the arm "
                    "whose choice this arm takes, and also candidates of this arm. A single value "
                    "of an option is enough."
                )
            after[arm] = before
        over[arm] = _grid(name, where, own)
    return over, after


def _check_measuring(name: str, rounds: Any, fraction: Any) -> None:
    """Refuse numbers of rounds and shares of the data with which nothing can be measured."""
    if rounds is not None and (type(rounds) is not int or rounds < 1):
        raise UserError(
            f"sweep {name}: select.rounds {rounds!r}: give how many rounds a candidate is tried, "
            "at least 1."
        )
    if type(fraction) not in (int, float) or not 0 < fraction < 1:
        raise UserError(
            f"sweep {name}: select.val_fraction {fraction!r}: give a share of the training data, "
            "such as 0.1."
        )


def _stored(name: str, given: str, folder: Path) -> Path:
    """Return the selections.yaml that ``given`` means.

    ``given`` is a file or a sweep's folder, relative to the sweep's file or to the current folder.
    """
    for place in (folder / given, Path(given)):
        path = place / "selections.yaml" if place.is_dir() else place
        if is_file(path):
            return path
    raise UserError(
        f"sweep {name}: select.from {given}: there is no such selection. Give a selections.yaml, "
        "or the folder of a sweep that has chosen."
    )
