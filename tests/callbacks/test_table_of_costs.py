"""docs/methods.md's table of what a round costs says what is measured, method by method."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fl_lightning import FederatedCallback
from fl_lightning.cli.cite_command import cited, references
from fl_lightning.cli.compose import as_list, read
from fl_lightning.cli.method_options import method_class
from fl_lightning.methods import looks
from fl_lightning.testing import tiny_run

PAGE = Path(__file__).parents[2] / "docs/methods.md"
D = 31
COLUMNS = ("down", "up", "client keeps", "server keeps", "gradients", "forwards")


def rows() -> dict[str, dict[str, str]]:
    """The table's rows by config, of those that say what they cost by plain numbers."""
    section = PAGE.read_text("utf-8").split("## What a round costs")[1]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    head, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {}
    for cells in body:
        row = dict(zip(head, cells, strict=True))
        for config in re.findall(r"`(\w+)`", row["config"]):
            found[config] = row
    return found


ROWS = rows()


def papers(configs: list[str]) -> str:
    """Where the papers of these configs appeared, each with its link, as references.bib has it."""
    keys: dict[str, None] = {}
    for config in configs:
        found = re.findall(r"^@\w+\{([^,]+),", cited(read(f"method/{config}")), re.M)[:-1]
        # FedAvg's is among all of them.
        keys.update(dict.fromkeys(found[1:] or found))
    cells = []
    for key in keys:
        entry = dict(re.findall(r"^  (\w+) = \{(.*)\},$", references()[key], re.M))
        venue = entry.get("booktitle") or entry.get("journal") or "arXiv"
        cell = f"{venue} {entry['year']}"
        if "eprint" in entry:
            cell = f"[{cell}](https://arxiv.org/abs/{entry['eprint']})"
        elif "doi" in entry:
            cell = f"[{cell}](https://doi.org/{entry['doi']})"
        cells.append(cell)
    return ", ".join(cells)


def refused(config: str) -> str:
    """The engine, hooks and classes that the methods of a config refuse beside them."""
    methods = made(config)
    names = ["engine `stacked`"] if any(map(looks, methods)) else []
    for method in methods:
        names += [f"`{name}`" for name in method.cannot_run_with]
    return ", ".join(dict.fromkeys(names))


def made(config: str) -> list[FederatedCallback]:
    """The methods of a packaged config."""
    items = as_list(read(f"method/{config}").get("method"))
    return [method_class(item)(**(item.get("init_args") or {})) for item in items]


def said(row: dict[str, str]) -> list[float]:
    """The numbers with which the cells begin; of a step's cell also that of its forwards."""
    step = row["gradients a step"]
    passes = re.search(r"\+ (\d) forward", step)
    cells = [*(row[name] for name in COLUMNS[:4]), step]
    numbers = [float(re.match(r"\d+", cell)[0]) for cell in cells]  # type: ignore[index]
    return [*numbers, float(passes[1]) if passes else 0.0]


class Measured(FederatedCallback):
    """What the last round cost, in vectors a participant and in gradients a step."""

    measures = True

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.sent: dict[str, int] = {}
        self.kept = 0.0

    def on_round_start(self, server: Any) -> None:
        self.steps.clear()

    def on_local_end(self, clients: Any) -> None:
        self.steps.append(int(clients.steps.sum()))

    def on_round_end(self, server: Any) -> None:
        self.sent = server.communication
        self.kept = server.kept_vectors


def measured(config: str) -> list[float]:
    """The columns of a method's row, by its second round on the contracts' federation."""
    costs = Measured()
    # Krum needs five clients, Scaffnew all.
    given = "all" if "krum" in config or config == "scaffnew" else 3
    run = tiny_run(*made(config), costs, rounds=2, participation=given)
    metrics = run.trainer.callback_metrics
    clients = len(costs.steps)
    server = sum(state.numel() for state in run.server_states.values())
    counts = [
        costs.sent["down_parameters"] / clients / D,
        costs.sent["up_parameters"] / clients / D,
        costs.kept,
        server / D,
        float(metrics["cost/gradients"]) / sum(costs.steps),
    ]
    return [*counts, float(metrics.get("cost/forwards", 0)) / sum(costs.steps)]


# What these cost depends on their arguments, or their unit is no vector.
BY_ARGUMENT = {"fedals", "topk", "qsgd", "signsgd", "randk", "powersgd", "ef21"}


@pytest.mark.parametrize("name", sorted(ROWS.keys() - BY_ARGUMENT))
def test_a_row_is_what_a_round_of_its_config_costs(name: str) -> None:
    # A state of one number is none of D.
    found = [round(number, 1) for number in measured(name)]
    assert dict(zip(COLUMNS, found, strict=True)) == dict(
        zip(COLUMNS, said(ROWS[name]), strict=True)
    )


@pytest.mark.parametrize("name", sorted(ROWS.keys() - {"ef21"}))
def test_a_row_names_the_papers_and_what_is_refused(name: str) -> None:
    row = ROWS[name]
    assert row["paper"] == papers(re.findall(r"`(\w+)`", row["config"]))
    assert row["refused beside"] == refused(name)
