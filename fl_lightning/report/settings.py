"""Which arms stand side by side: the settings of a sweep of methods over anything else."""

from __future__ import annotations

from fl_lightning.report.runs import Found, Run

ALL = "all"  # the one setting where nothing but the method differs


def settings(found: Found) -> dict[str, dict[str, str]]:
    """Setting → method → arm, in the order of the runs.

    A setting is named by the values of the grid's axes other than the method. Where one method alone was swept, what
    changes the data is the setting, and the other axes take the method's place.
    """
    groups: dict[str, dict[str, Run]] = {}  # sweeps whose arms had to be kept apart, and all others
    for run in found.runs:
        groups.setdefault(found.apart.get(run.folder, ""), {}).setdefault(run.arm, run)
    placed = [
        (group, *_place(run, _axes(group_runs)))
        for group, group_runs in _each(groups)
        for run in group_runs
    ]
    of_setting: dict[str, set[str]] = {}
    for group, setting, _, _ in placed:
        of_setting.setdefault(setting, set()).add(group)
    made: dict[str, dict[str, str]] = {}
    for group, setting, method, arm in placed:
        shared = len(of_setting[setting]) > 1 and group
        own = made.setdefault(f"{group}/{setting}" if shared else setting, {})
        own[arm if method in own else method] = arm
    return made


def _each(groups: dict[str, dict[str, Run]]) -> list[tuple[str, list[Run]]]:
    return [(group, list(arms.values())) for group, arms in groups.items()]


def _axes(runs: list[Run]) -> tuple[list[str], list[str]]:
    """The keys that make a setting, and those that make a method, of the axes that have several values."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for key, value in run.axes.items():
            values.setdefault(key, set()).add(value)
    varying = [key for key, its in values.items() if len(its) > 1 and key != "method"]
    if len(values.get("method", ())) > 1:
        return varying, ["method"]
    of_data = [key for key in varying if key.split(".")[0] == "data"]
    return of_data, [key for key in varying if key not in of_data]


def _place(run: Run, axes: tuple[list[str], list[str]]) -> tuple[str, str, str]:
    """(setting, method, arm) of a run."""
    setting, method = ("_".join(run.axes[key] for key in keys if key in run.axes) for keys in axes)
    return setting or ALL, method or run.axes.get("method") or run.arm, run.arm
