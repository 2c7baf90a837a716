"""What a paper printed for a setting, beside ours, and what differs between the two settings."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import product, starmap
from pathlib import Path
from typing import Any

from fl_lightning.cli.compose import class_name, packaged, parse_yaml
from fl_lightning.report.runs import Found, Run


@dataclass(frozen=True)
class Published:
    """A column of a paper's table: who stands in it, and under which settings.

    ``arms`` maps patterns of arms' names to (value, deviation) as printed. ``score`` is that of
    ours which comes nearest to theirs. ``setting`` maps keys of a config to the paper's values;
    ``experiments`` are patterns of packaged configs.
    """

    experiments: tuple[str, ...]
    source: str
    metric: str
    score: str
    arms: Mapping[str, tuple[float, float | None]]
    setting: Mapping[str, Any]
    note: str = ""

    def of(self, arm: str) -> tuple[float, float | None] | None:
        """The numbers printed for ``arm``; None where nothing was."""
        for pattern, printed in self.arms.items():
            if fnmatch.fnmatchcase(arm, pattern):
                return printed
        return None

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        """Where ``config`` is not the paper's setting, as ``key ours (theirs)``."""
        differences = []
        for key, theirs in self.setting.items():
            ours = _plain(_at(config, key))
            if ours != _plain(theirs):
                shown = "not set" if ours is None else ours
                differences.append(f"{key.rpartition('.')[2]} {shown} ({_plain(theirs)})")
        return differences


def tables() -> Iterator[Published]:
    """Every published column that is packaged."""
    folder = files("fl_lightning.report").joinpath("published")
    # A folder lists its files in an order of its own, and the report has one.
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not entry.name.endswith(".yaml"):
            continue
        for item in parse_yaml(entry.read_text(encoding="utf-8")):
            # A number alone was printed without a deviation.
            printed = {arm: (*numbers, None)[:2] for arm, numbers in item.pop("arms").items()}
            yield Published(experiments=tuple(item.pop("experiments")), arms=printed, **item)


def published(found: Found) -> list[Published]:
    """The columns of the experiments that the runs' configs name; empty where they name none."""
    named = experiments(found)
    # Reading the tables takes a quarter of a small report's time.
    if not named:
        return []

    def meant(table: Published) -> bool:
        return any(starmap(fnmatch.fnmatchcase, product(named, table.experiments)))

    return [table for table in tables() if meant(table)]


def experiments(found: Found) -> list[str]:
    """The packaged configs called ``experiment/…`` that the runs are of.

    They stand in the sweeps' files and the runs' commands; packaged sweeps are of themselves.
    """
    named: list[Any] = []
    for sweep in found.sweeps:
        named += _packaged_sweep(sweep.folder / "sweep.yaml")
        configs = sweep.spec.get("configs")
        named += configs if isinstance(configs, list) else [configs]
    for run in found.runs:
        named += run.record.get("command") or []
    names = (str(name).removeprefix("-c").removesuffix(".yaml") for name in named)
    return list(dict.fromkeys(name for name in names if name.startswith("experiment/")))


def _packaged_sweep(path: Path) -> list[str]:
    """The packaged sweep that ``path`` keeps, whatever its folder is called.

    The file begins with it: what was put over it stands at its end.
    """
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    names = []
    for name, entry in packaged().items():
        if name.startswith("experiment/") and text.startswith(entry.read_text(encoding="utf-8")):
            names.append(name)
    return names


def setting(run: Run) -> str:
    """Network and data of a run: ``MLP on Digits``; "" without a config.yaml."""
    data = _at(run.config, "data.class_path")
    network = _at(run.config, "model.learner.init_args.network") or _at(run.config, "model.learner")
    return " on ".join(class_name(item) for item in (network, data) if item is not None)


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _plain(value: Any) -> Any:
    """Classes by their bare name, whole numbers as such: what is the same should look the same."""
    if isinstance(value, Mapping) and "class_path" in value:
        options = sorted((value.get("init_args") or {}).items())
        texts = [f"{key}={_plain(option)}" for key, option in options if option is not None]
        name = class_name(value)
        return f"{name}({', '.join(texts)})" if texts else name
    if isinstance(value, str):
        return class_name(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value
