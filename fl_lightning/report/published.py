"""What a paper printed for a setting, beside ours, and what differs between the two settings."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fl_lightning.cli.compose import class_name, packaged, parse_yaml
from fl_lightning.report.runs import Found, Run


@dataclass(frozen=True)
class Published:
    """A column of a paper's table: who stands in it, with (value, deviation), and under which settings."""

    experiments: tuple[str, ...]  # patterns of packaged configs
    source: str
    metric: str
    score: str  # of ours that comes nearest to theirs
    arms: Mapping[str, tuple[float, float | None]]  # pattern of an arm's name → what was printed
    setting: Mapping[str, Any]  # key of a config → the paper's value
    note: str = ""

    def of(self, arm: str) -> tuple[float, float | None] | None:
        """What was printed for ``arm``; None where nothing was."""
        return next(
            (
                printed
                for pattern, printed in self.arms.items()
                if fnmatch.fnmatchcase(arm, pattern)
            ),
            None,
        )

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        """Where ``config`` is not the paper's setting, as ``key ours (theirs)``."""
        found = []
        for key, theirs in self.setting.items():
            ours = _plain(_at(config, key))
            if ours != _plain(theirs):
                shown = "not set" if ours is None else ours
                found.append(f"{key.rpartition('.')[2]} {shown} ({_plain(theirs)})")
        return found


def tables() -> Iterator[Published]:
    """Every published column that is packaged."""
    for entry in sorted(
        files("fl_lightning.report").joinpath("published").iterdir(), key=lambda entry: entry.name
    ):
        if entry.name.endswith(".yaml"):
            for item in parse_yaml(entry.read_text(encoding="utf-8")):
                arms = {
                    pattern: (numbers[0], (*numbers, None)[1])
                    for pattern, numbers in item.pop("arms").items()
                }
                yield Published(experiments=tuple(item.pop("experiments")), arms=arms, **item)


def published(found: Found) -> list[Published]:
    """The columns of the experiments that the runs' configs name; empty where they name none."""
    named = experiments(found)
    return [
        table
        for table in tables()
        if any(
            fnmatch.fnmatchcase(name, pattern) for name in named for pattern in table.experiments
        )
    ]


def experiments(found: Found) -> list[str]:
    """Packaged configs called ``experiment/…`` in the sweeps' files and the runs' commands; packaged sweeps too."""
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
    """The packaged sweep that ``path`` keeps, whatever its folder is called: what was put over it stands at its end."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    sweeps = {name: entry for name, entry in packaged().items() if name.startswith("experiment/")}
    return [
        name for name, entry in sweeps.items() if text.startswith(entry.read_text(encoding="utf-8"))
    ]


def setting(run: Run) -> str:
    """Network and data of a run, as a verdict has to say them: ``MLP on Digits``; "" without a config.yaml."""
    learner, data = _at(run.config, "model.learner"), _at(run.config, "data.class_path")
    network = _at(run.config, "model.learner.init_args.network") or learner
    names = [class_name(item) for item in (network, data) if item is not None]
    return " on ".join(names)


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _plain(value: Any) -> Any:
    """Classes by their bare name, whole numbers as such: what is the same should look the same."""
    if isinstance(value, Mapping) and "class_path" in value:
        given = sorted((value.get("init_args") or {}).items())
        arguments = ", ".join(f"{key}={_plain(of)}" for key, of in given if of is not None)
        return f"{class_name(value)}({arguments})" if arguments else class_name(value)
    if isinstance(value, str):
        return class_name(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value
