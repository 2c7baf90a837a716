"""A paper's printed results for a setting, next to ours, and the differences between the
settings.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product, starmap
from pathlib import Path
from typing import Any

from fl_lightning.errors import UserError
from fl_lightning.lab.cli.compose import class_name, packaged, parse_yaml
from fl_lightning.lab.report.evidence import between
from fl_lightning.lab.report.runs import Found, ReportedRun, ReportedSweep

# Each paper trained on all samples of its training set.
WHOLE = {"data.init_args.samples": None}


@dataclass(frozen=True)
class Published:
    """A column of a paper's table: its methods, and its settings.

    ``arms`` maps patterns of arms' names to the printed (value, deviation). ``score`` is our score
    that is most similar to theirs. ``setting`` maps keys of a config to the paper's values;
    ``configs`` are patterns of names of configs, which say to which runs the column belongs.
    ``unlike`` maps patterns of arms' names to differences in the method itself.
    """

    configs: tuple[str, ...]
    source: str
    metric: str
    score: str
    arms: Mapping[str, tuple[float, float | None]]
    setting: Mapping[str, Any]
    note: str = ""
    unlike: Mapping[str, str] = field(default_factory=dict)

    def of(self, arm: str) -> tuple[float, float | None] | None:
        """Return the numbers printed for ``arm``; None if there are none."""
        for pattern, printed in self.arms.items():
            if fnmatch.fnmatchcase(arm, pattern):
                return printed
        return None

    def differences(self, arm: str, config: Mapping[str, Any]) -> list[str]:
        """Return where ``config`` differs from the paper's setting, as ``key ours (theirs)``."""
        matching = (text for name, text in self.unlike.items() if fnmatch.fnmatchcase(arm, name))
        differences = list(matching)
        for key, theirs in {**self.setting, **WHOLE}.items():
            ours = _plain(_at(config, key))
            if ours != _plain(theirs):
                shown = "not set" if ours is None else ours
                # For a class, print the word before class_path: data, network.
                words = key.removesuffix(".class_path").rpartition(".")[2]
                printed = "all" if theirs is None else _plain(theirs)
                differences.append(f"{words} {shown} ({printed})")
        return differences


def tables(files: Sequence[Path]) -> Iterator[Published]:
    """Return every column of these YAML files, whose entries have the fields of
    :class:`Published`.

    Raises:
        UserError: a file is missing, or is not such a list.
    """
    for file in files:
        try:
            for item in parse_yaml(file.read_text(encoding="utf-8")):
                # A plain number was printed without a deviation.
                printed = {arm: (*numbers, None)[:2] for arm, numbers in item.pop("arms").items()}
                yield Published(configs=tuple(item.pop("configs")), arms=printed, **item)
        except (OSError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"report --published {file}: {type(error).__name__}: {error}. The file is a list "
                "of columns with configs, source, metric, score, arms and setting; docs/report.md "
                "has an example."
            ) from None


@dataclass(frozen=True)
class Gain:
    """The numbers that a paper printed for both arms of a claim; ``mean``: a − b, or the log of
    a / b.
    """

    source: str
    mean: float
    a: tuple[float, float | None]
    b: tuple[float, float | None]


# A column, and the folders of the runs that it is compared with.
Beside = tuple[Published, frozenset[Path]]


def gains(
    metric: str, scale: str, arms: Sequence[tuple[str, Path]], tables: Sequence[Beside]
) -> list[Gain]:
    """Return the printed numbers for two arms, each given by its name and the folder of one of
    its runs.
    """
    made: dict[float, Gain] = {}
    for table, folders in tables:
        if table.metric != metric or not all(folder in folders for _, folder in arms):
            continue
        a, b = (table.of(name) for name, _ in arms)
        # If one number stands for both arms, there is no difference between them.
        if a is None or b is None or a is b:
            continue
        mean = between(scale, a[0], b[0])
        # A number that a second table repeats is listed once.
        if mean is not None:
            made.setdefault(mean, Gain(table.source, mean, a, b))
    return list(made.values())


def published(found: Found, files: Sequence[Path]) -> list[Beside]:
    """Return the columns of ``files`` that belong to runs, each with these runs' folders."""
    named = configs_of(found) if files else {}
    made = []
    for table in tables(files):
        folders = set()
        for run in found.runs:
            if any(starmap(fnmatch.fnmatchcase, product(named[run.folder], table.configs))):
                folders.add(run.folder)
        if folders:
            made.append((table, frozenset(folders)))
    return made


def configs_of(found: Found) -> dict[Path, list[str]]:
    """Return a run's folder → the names of the configs from which the run was made.

    They are in the run's sweep's file and its command; a packaged sweep is itself such a config,
    and the sweep's folder may have its name.
    """
    of_sweep: dict[Path, list[Any]] = {}
    for sweep in found.sweeps:
        of_sweep |= dict.fromkeys(sweep.runs, _of_sweep(sweep))
    made = {}
    for run in found.runs:
        named = [*of_sweep.get(run.folder, []), *(run.record.get("command") or [])]
        made[run.folder] = [str(n).removeprefix("-c").removesuffix(".yaml") for n in named]
    return made


def _of_sweep(sweep: ReportedSweep) -> list[Any]:
    configs = sweep.spec.get("configs")
    configs = configs if isinstance(configs, list) else [configs]
    return [sweep.folder.name, *_packaged_sweep(sweep.folder / "sweep.yaml"), *configs]


def _packaged_sweep(path: Path) -> list[str]:
    """Return the packaged sweep of which ``path`` is a copy, whatever its folder is called.

    The file begins with the packaged text; overrides are at its end.
    """
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    packed = packaged().items()
    return [name for name, entry in packed if text.startswith(entry.read_text(encoding="utf-8"))]


def setting(run: ReportedRun) -> str:
    """Return network and data of a run: ``MLP(sizes=[64, 10]) on Digits``; "" without a
    config.yaml.

    Of the network's arguments it names the numbers.
    """
    data = _at(run.config, "data.class_path")
    network = _at(run.config, "model.learner.init_args.network")
    shown = network or _at(run.config, "model.learner")
    names = [class_name(item) for item in (shown, data) if item is not None]
    arguments = _at({"network": network}, "network.init_args")
    if isinstance(arguments, Mapping):
        numbers = [f"{k}={v}" for k, v in sorted(arguments.items()) if _has_numbers_only(v)]
        names[0] += f"({', '.join(numbers)})" * bool(numbers)
    return " on ".join(names)


def _has_numbers_only(value: Any) -> bool:
    numbers = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(number, int | float) for number in numbers)


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _plain(value: Any) -> Any:
    """Replace classes by their bare names, and whole numbers by integers, so that equal values
    look equal.
    """
    if isinstance(value, Mapping) and "class_path" in value:
        arguments = value.get("init_args")
        options = sorted(arguments.items()) if isinstance(arguments, Mapping) else []
        texts = [f"{key}={_plain(option)}" for key, option in options if option is not None]
        name = class_name(value)
        return f"{name}({', '.join(texts)})" if texts else name
    if isinstance(value, str):
        return class_name(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value
