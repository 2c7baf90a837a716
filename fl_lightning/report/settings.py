"""Which arms stand side by side: the settings of a sweep of methods over anything else."""

from __future__ import annotations

from fl_lightning.report.runs import Found, ReportedRun

# The one setting, where nothing but the method differs.
ALL = "all"


def settings(found: Found) -> dict[str, dict[str, str]]:
    """Setting → method → arm, in the order of the runs.

    A setting is named by the values of the grid's axes other than the method. Where one method
    alone was swept, what changes the data is the setting, and the other axes take the method's
    place.
    """
    # Sweeps whose arms had to be kept apart are groups of their own, all others are one.
    groups: dict[str, dict[str, ReportedRun]] = {}
    for run in found.runs:
        groups.setdefault(run.group, {}).setdefault(run.arm, run)
    placed = []
    for group, arms in groups.items():
        runs = list(arms.values())
        placed += [(group, *_place(run, _axes(runs))) for run in runs]
    of_setting: dict[str, set[str]] = {}
    # Two sweeps may have settings of one name.
    for group, setting, _, _ in placed:
        of_setting.setdefault(setting, set()).add(group)
    made: dict[str, dict[str, str]] = {}
    for group, setting, method, arm in placed:
        # One setting in several groups has the name of its group before its own.
        name = setting
        if group and len(of_setting[setting]) > 1:
            name = f"{group}/{setting}"
        methods = made.setdefault(name, {})
        methods[arm if method in methods else method] = arm
    return made


def _axes(runs: list[ReportedRun]) -> tuple[list[str], list[str]]:
    """The axes with several values: those that make a setting, those that make a method."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for key, value in run.axes.items():
            values.setdefault(key, set()).add(value)
    varying = [key for key, swept in values.items() if len(swept) > 1 and key != "method"]
    if len(values.get("method", ())) > 1:
        return varying, ["method"]
    of_data = [key for key in varying if key.split(".")[0] == "data"]
    return of_data, [key for key in varying if key not in of_data]


def _place(run: ReportedRun, axes: tuple[list[str], list[str]]) -> tuple[str, str, str]:
    """(setting, method, arm) of a run."""
    setting = _values(run, axes[0])
    method = _values(run, axes[1])
    return setting or ALL, method or run.axes.get("method") or run.arm, run.arm


def _values(run: ReportedRun, keys: list[str]) -> str:
    return "_".join(run.axes[key] for key in keys if key in run.axes)
