"""Which arms are compared with each other: the settings of a sweep of methods over other
options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fl_lightning.lab.report.chosen import short
from fl_lightning.lab.report.runs import Found, ReportedRun

# The name of the only setting, if runs differ only in their methods.
ALL = "all"


def settings(found: Found) -> dict[str, dict[str, str]]:
    """Return setting → method → arm, in the order of the runs.

    A setting's name has the values of the grid's axes other than the method. If a sweep has only
    one method, options that change the data are the setting, and the other axes take the method's
    place.
    """
    placed = []
    for group, runs in _groups(found).items():
        placed += [(group, *_place(run, _axes(runs))) for run in runs]
    of_setting: dict[str, set[str]] = {}
    # Two sweeps may have settings with the same name.
    for group, setting, _, _ in placed:
        of_setting.setdefault(setting, set()).add(group)
    made: dict[str, dict[str, str]] = {}
    for group, setting, method, arm in placed:
        # If a setting's name occurs in several groups, prefix it with its group.
        name = setting
        if group and len(of_setting[setting]) > 1:
            name = f"{group}/{setting}"
        methods = made.setdefault(name, {})
        methods[arm if method in methods else method] = arm
    return made


def by_settings(found: Found) -> str:
    """Return the heading of methods by settings: it names the axes of both.

    Sweeps that are reported together may have different ones.
    """
    of_settings: dict[str, None] = {}
    of_methods: dict[str, None] = {}
    for runs in _groups(found).values():
        for_settings, for_methods = _axes(runs)
        for run in runs:
            of_settings[_worded([key for key in for_settings if key in run.axes])] = None
            of_methods[_worded([key for key in for_methods if key in run.axes])] = None
    return f"Methods{_listed(of_methods)} by settings{_listed(of_settings)}"


def sides(places: Mapping[tuple[str, str], ReportedRun]) -> tuple[str, str]:
    """Return the axes of the rows and of the columns of a grid, in words; "" if they are not known.

    ``places``: the texts of row and column → a run at that place. A column's text may be "".
    """
    keys = _varying(places.values())
    # If sweeps have different axes, no title fits all rows.
    if not all(run.axes.keys() >= set(keys) for run in places.values()):
        return "", ""
    for cut in range(1, len(keys) + 1):
        known = all(
            row.removeprefix(f"{run.group}/") == _values(run, keys[:cut])
            and column == _values(run, keys[cut:])
            for (row, column), run in places.items()
        )
        if known:
            return _worded(keys[:cut]), _worded(keys[cut:])
    return "", ""


def _listed(names: Iterable[str]) -> str:
    text = " or ".join(filter(None, names))
    return f" ({text})" if text else ""


def _worded(keys: Sequence[str]) -> str:
    # If the only axis is the method, no title is needed.
    return " × ".join(map(short, keys)) if list(keys) != ["method"] else ""


def _groups(found: Found) -> dict[str, list[ReportedRun]]:
    """Return a run of each arm; sweeps whose arms were kept apart are groups, and all others
    are one group.
    """
    groups: dict[str, dict[str, ReportedRun]] = {}
    for run in found.runs:
        groups.setdefault(run.group, {}).setdefault(run.arm, run)
    return {group: list(arms.values()) for group, arms in groups.items()}


def _varying(runs: Iterable[ReportedRun]) -> list[str]:
    """Return the axes with several values over ``runs``, in the order of the grid."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for key, value in run.axes.items():
            values.setdefault(key, set()).add(value)
    return [key for key, swept in values.items() if len(swept) > 1]


def _axes(runs: list[ReportedRun]) -> tuple[list[str], list[str]]:
    """Return the axes with several values, in two groups: axes of the setting, and axes of the
    method.
    """
    keys = _varying(runs)
    if "method" in keys:
        return [key for key in keys if key != "method"], ["method"]
    of_data = [key for key in keys if key.split(".")[0] == "data"]
    return of_data, [key for key in keys if key not in of_data]


def _place(run: ReportedRun, axes: tuple[list[str], list[str]]) -> tuple[str, str, str]:
    """Return (setting, method, arm) of a run."""
    setting = _values(run, axes[0])
    method = _values(run, axes[1])
    return setting or ALL, method or run.axes.get("method") or run.arm, run.arm


def _values(run: ReportedRun, keys: list[str]) -> str:
    return "_".join(run.axes[key] for key in keys if key in run.axes)
