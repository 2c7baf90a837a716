"""The papers' printed results next to ours, and the differences between the settings.

:class:`Printed` makes the ``further`` tables of a study's report. A file of ``published/`` is a
list of columns:

    - configs: ["experiment/fedinit/table1-cifar10-dir0.6-100"]  # patterns of the runs' configs
      source: FedInit (NeurIPS 2023), Table 1
      metric: val/acc
      score: smoothed
      arms: {fedavg: [0.7877, 0.0011], "fedinit*": [0.8311, 0.0029]}  # mean, deviation
      setting: {model.participation: 0.1, trainer.max_epochs: 500}
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product, starmap
from pathlib import Path
from typing import Any

from fl_lightning.lab.cli.compose import class_name, packaged, parse_yaml
from fl_lightning.lab.report.cells import Rows, Table, cell
from fl_lightning.lab.report.claims import OF_TWO_ARMS
from fl_lightning.lab.report.evidence import between
from fl_lightning.lab.report.report_files import stable
from fl_lightning.lab.report.report_tables import (
    difference_unit,
    interval_cell,
    shown_first,
    unit_of,
)
from fl_lightning.lab.report.runs import Found, ReportedSweep
from fl_lightning.lab.report.scores import SCORE_TITLES
from fl_lightning.lab.report.summary import Summary
from studies import chosen

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


def columns(files: Sequence[Path]) -> Iterator[Published]:
    """Return every column of these YAML files."""
    for file in files:
        for item in parse_yaml(file.read_text(encoding="utf-8")):
            # A plain number was printed without a deviation.
            arms = {arm: (*numbers, None)[:2] for arm, numbers in item.pop("arms").items()}
            yield Published(configs=tuple(item.pop("configs")), arms=arms, **item)


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
    metric: str, scale: str, arms: Sequence[tuple[str, Path]], beside: Sequence[Beside]
) -> list[Gain]:
    """Return the printed numbers for two arms, each given by its name and the folder of one of
    its runs.
    """
    made: dict[float, Gain] = {}
    for table, folders in beside:
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
    for table in columns(files):
        folders = set()
        for run in found.runs:
            if any(starmap(fnmatch.fnmatchcase, product(named[run.folder], table.configs))):
                folders.add(run.folder)
        if folders:
            made.append((table, frozenset(folders)))
    return made


GAINS_NOTE = (
    "If the claim is about a ratio, both differences are logarithms of ratios. Our difference "
    "uses the claim's score, in a setting that differs from the paper's. A table below lists what "
    "differs. The published difference is computed from the numbers that the paper printed. They "
    "are not paired by seed, so it has no such interval. You can compare signs and sizes, but you "
    "cannot test them."
)


class Printed:
    """The printed results of some files next to those of a report.

    ``beside``: columns of papers next to the arms; ``gains``: id of a claim → the printed numbers
    for its arms.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.beside: list[Beside] = []
        self.gains: dict[str, list[Gain]] = {}

    def tables(self, summary: Summary) -> list[Table]:
        """Return the tables about a report, and that of what its sweeps chose."""
        self.beside = published(summary.found, self.files)
        for said in summary.verdicts:
            claim, arms = said.claim, summary.arms
            if claim.kind in OF_TWO_ARMS and claim.a in arms and claim.b in arms:
                sides = [(arms[name].own, arms[name].runs[0].folder) for name in (claim.a, claim.b)]
                self.gains[claim.id] = gains(claim.metric, claim.scale, sides, self.beside)
        made = [self.of_claims(summary), *self.of_arms(summary), chosen.table(summary)]
        return [table for table in made if table.rows]

    def of_claims(self, summary: Summary) -> Table:
        """Return differences next to those that papers printed for the same two arms."""
        titles = "claim|ours, a − b|95 % interval|published, a − b|printed|source"
        rows: Rows = []
        for said in shown_first(summary.verdicts):
            shown = difference_unit(summary, said)
            own = unit_of(summary, said.claim.metric)
            for gain in self.gains.get(said.claim.id, []):
                sign = "−" if said.claim.scale == "difference" else "/"
                row: list[Any] = [f"{said.claim.id}: {said.claim.a} {sign} {said.claim.b}"]
                row += [cell(shown.difference, said.interval.mean), interval_cell(shown, said)]
                numbers = f"{own.value(*gain.a)} {sign} {own.value(*gain.b)}"
                rows.append([*row, cell(shown.difference, gain.mean), numbers, gain.source])
        return Table("gains", "Published gains and ours", titles.split("|"), rows, GAINS_NOTE)

    def of_arms(self, summary: Summary) -> list[Table]:
        """Return each column next to our numbers, with the differences in the setting."""
        made = []
        shown = unit_of(summary)
        for number, (printed, folders) in enumerate(self.beside, start=1):
            ours = f"ours ({SCORE_TITLES[printed.score]})"
            titles = ["arm", "published", ours, "what differs: ours (published)"]
            rows: Rows = []
            for arm in summary.arms.values():
                theirs = printed.of(arm.own) if arm.runs[0].folder in folders else None
                if theirs is None or printed.metric != summary.metric:
                    continue
                config = arm.runs[0].config
                differs = "no config.yaml to compare"
                if config:
                    differs = "; ".join(printed.differences(arm.own, config)) or "nothing"
                mean = shown.cell(*arm.mean_sd(printed.score))
                rows.append([arm.name, shown.cell(*theirs), mean, differs])
            note = f"{printed.note} Smaller runs say nothing about the published number."
            title = f"Compared with {printed.source}"
            made.append(Table(f"published-{number}", title, titles, rows, note))
        return made

    def add_to(self, path: Path) -> None:
        """Add the printed differences to the claims of a report.json."""
        document = json.loads(path.read_text("utf-8"))
        for claim in document["claims"]:
            theirs = [{"source": g.source, "mean": g.mean} for g in self.gains.get(claim["id"], [])]
            if theirs:
                claim["published"] = stable(theirs)
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")


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
