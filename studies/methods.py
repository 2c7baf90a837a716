"""The methods in a table, and how well they do: ``python -m studies.methods {page,keep}``.

``page`` writes the tables into docs: what a round of each packaged method costs and is, from what
its classes declare and from rounds of a small run (``docs/methods.md``), and the accuracy of all of
them with tuned coefficients (``studies/compared.md``), from the runs that are in
``studies/results/methods``. A method without such runs has empty cells. ``keep`` adds what has
ended under ``runs`` to the tables there. The runs are a sweep, which may be stopped and goes on:

    nice -n 19 fl-lightning sweep experiment/methods/fashionmnist-100 \\
        --out runs/methods/fashionmnist-100
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning import FederatedCallback, InMemoryDataModule, UserError, topologies
from fl_lightning.callback_list import CallbackList
from fl_lightning.introspection.init_args import made as object_of
from fl_lightning.lab.cli.cite_command import cited, references
from fl_lightning.lab.cli.classes import full_paths, method_class
from fl_lightning.lab.cli.compose import as_list, packaged, parse_yaml, read
from fl_lightning.lab.contracts.federation import LowRank, fit, quiet
from fl_lightning.machine.lightning import pl
from fl_lightning.models.multi_head import with_heads
from fl_lightning.systems import Buffered, Devices
from studies.compared import drawn, line, ranked, table, tables
from studies.kept import WALL, keep, unpacked
from studies.papers import sweeps

COSTS = Path("docs/methods.md")
COMPARED = Path("studies/compared.md")
PICTURE = COMPARED.with_suffix(".png")
RESULTS = Path("studies/results/methods")
# A generated table of studies/compared.md, and its sweep.
SWEEPS = {
    "accuracy": "experiment/methods/fashionmnist-100",
    "accuracy of later methods": "experiment/methods/fashionmnist-100-2026",
}
# What is added to other methods.
ADDED = ("ri", "sam", "byzantine")
# FedAvg and PartialAveraging on adapters.
FOR_ADAPTERS = ("fedit", "fedsa_lora")
# A config, and an argument by which it costs something else.
VARIANTS: dict[str, dict[str, Any]] = {
    "scaffold": {"estimate": "gradient"},
    "fedlesam": {"source": "last"},
    "randk": {"memory": True},
    "ef21": {"average": "all"},
}
# What a method decides or changes, by the hook with which it does.
KINDS = {
    "select": "who takes part",
    "steps": "steps",
    "broadcast": "what goes down",
    "local_batch": "data",
    "reduce_samples": "gradient of each sample",
    "scale_samples": "gradient of each sample",
    "perturbation": "where the gradient is taken",
    "local_loss": "loss",
    "local_output": "logits",
    "on_loss_gradient": "mixing",
    "on_local_gradient": "correction",
    "precondition": "direction of a step",
    "on_direction": "changed direction",
    "step_rate": "rate of a step",
    "transmit": "what goes up",
    "on_updates": "updates",
    "aggregate": "aggregation",
    "evaluated": "what is evaluated",
    "parts": "parts",
    "trained": "what clients train",
    "personal": "personal models",
    "neighbours": "no server",
}
COLUMNS = (
    *("method", "config", "kind", "paper", "down", "up", "client keeps", "server keeps"),
    *("gradients", "forwards", "engines", "asynchronous", "raises an error with"),
)
ENGINES = ("sequential", "concurrent", "recorded", "stacked")
CLIENTS = 12


class Small(pl.LightningModule):
    """A 784-64-10 network with a normalisation layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(784, 64), nn.LayerNorm(64), nn.Sigmoid(), nn.Linear(64, 10)
        )
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class SmallAdapted(Small):
    """The same network, frozen, with adapters of rank 8 and trained biases."""

    def __init__(self) -> None:
        super().__init__()
        for place in (0, 3):
            linear = self.net[place]
            assert isinstance(linear, nn.Linear)
            self.net[place] = LowRank(linear.in_features, linear.out_features, 8, 2.0)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in self.named_parameters():
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
            parameter.requires_grad_(not name.endswith("weight"))
            if name.endswith("lora_B"):
                parameter.data.zero_()


class SmallWithHeads(Small):
    """The same network, frozen, with two of RAVAN's heads of rank 4 and trained biases."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = with_heads(self.net, rank=4, heads=2, target_modules="*")
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.requires_grad_(True)


class Meter(FederatedCallback):
    """What the rounds cost but for the first, in which servers have nothing to send yet."""

    role = "measurement"

    def __init__(self) -> None:
        super().__init__()
        self.total = dict.fromkeys(("down", "up", "steps", "clients", "gradients", "forwards"), 0.0)
        self.kept = 0.0

    def on_round_start(self, server: Any) -> None:
        if server.round == 1:
            self.total = dict.fromkeys(self.total, 0.0)

    def on_local_end(self, clients: Any) -> None:
        self.total["steps"] += float(clients.steps.sum())
        self.total["clients"] += len(clients.client_ids)

    def on_round_end(self, server: Any) -> None:
        self.total["down"] += server.communication["down_bytes"]
        self.total["up"] += server.communication["up_bytes"]
        # A part that was just averaged is kept by nobody.
        self.kept = max(self.kept, server.kept_vectors)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        logged = trainer.callback_metrics
        self.total["gradients"] += float(logged.get("cost/gradients", 0))
        self.total["forwards"] += float(logged.get("cost/forwards", 0))


def federation() -> InMemoryDataModule:
    """Clients of 3 to 8 samples of ten classes."""
    rng = np.random.default_rng(1)
    sizes = [3 + client % 6 for client in range(CLIENTS)]
    ends = np.cumsum(sizes)
    x = torch.from_numpy(rng.normal(size=(sum(sizes), 784))).float()
    y = torch.from_numpy(rng.integers(0, 10, sum(sizes)))
    y[:10] = torch.arange(10)
    clients = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return InMemoryDataModule((x, y), clients=clients, batch_size=4)


def built(options: dict[str, Any]) -> dict[str, Any]:
    """A config's options, with the objects that it names."""
    made = {key: object_of(value) for key, value in full_paths(options).items()}
    if isinstance(made.get("topology"), str):
        made["topology"] = getattr(topologies, made["topology"])()
    return made


def optimizer_of(node: dict[str, Any]) -> Callable[[Any], torch.optim.Optimizer]:
    """What makes the optimizer that a config names."""
    module, _, name = node["class_path"].rpartition(".")
    return partial(getattr(import_module(module), name), **(node.get("init_args") or {}))


@dataclass(frozen=True)
class Packaged:
    """A packaged method; ``changed``: arguments of it that are others than its config's."""

    config: str
    changed: tuple[tuple[str, Any], ...] = ()

    @property
    def items(self) -> list[dict[str, Any]]:
        """Its classes with their arguments."""
        found: list[dict[str, Any]] = []
        for item in as_list(read(f"method/{self.config}").get("method")):
            # What is changed belongs to the first class.
            changed = {} if found else dict(self.changed)
            given = {**(item.get("init_args") or {}), **changed}
            found.append({"class_path": item["class_path"], "init_args": given})
        return found

    def made(self) -> list[FederatedCallback]:
        return [method_class(item)(**built(item["init_args"])) for item in self.items]

    def arguments(self) -> dict[str, Any]:
        """Of FederatedModule, by its config."""
        given = dict(read(f"method/{self.config}").get("model") or {})
        given.pop("local_steps", None)  # a round of one epoch costs as much a step
        for side in ("server_optimizer", "client_optimizer"):
            if (node := given.pop(side, None)) is not None:
                given[side] = optimizer_of(node)
        if "asynchronous" in given:
            options = dict(given["asynchronous"])
            devices = Devices(**built(options.pop("devices")))
            given["asynchronous"] = Buffered(devices, **built(options))
        return {"participation": 1.0, "local_epochs": 1, **given}

    def run(self, *more: FederatedCallback, rounds: int = 1, **options: Any) -> Any:
        """A small run; the configs of private runs draw from a seed here."""
        callbacks = self.made()
        for callback in callbacks:
            if getattr(callback, "noise_seed", 0) is None:
                vars(callback)["noise_seed"] = 1
        with quiet():
            return fit(
                [*callbacks, *more],
                rounds,
                learner=self.learner(),  # type: ignore[arg-type]
                federation=federation(),
                **{**self.arguments(), **options},
            )

    def learner(self) -> Small:
        """What it trains here: a network, with adapters or heads where it is for these."""
        if any(method.needs_adapters == "heads" for method in self.made()):
            return SmallWithHeads()
        adapted = any(method.needs_adapters for method in self.made())
        return SmallAdapted() if adapted or self.config in FOR_ADAPTERS else Small()

    def called(self) -> str:
        """Its name: what its config's first line begins with, of several classes with theirs."""
        line = packaged()[f"method/{self.config}"].read_text("utf-8").splitlines()[0]
        name = re.split(r" \(|: |, ", line.removeprefix("# "))[0]
        methods = self.made()
        if len(methods) > 1:
            name = f"{name} = {CallbackList(methods).title()}"
        return ", ".join([name, *(f"`{key}: {value}`" for key, value in self.changed)])

    def kind(self) -> str:
        """What it decides or changes, as its hooks tell."""
        methods = self.made()
        found = []
        for hook, words in KINDS.items():
            owners = [method for method in methods if method.has(hook)]
            if owners and hook == "perturbation" and all(method.blind for method in owners):
                words += ", by no gradient"
            if owners:
                found.append(words)
        if any(method.has("on_local_start") and method.moves_start for method in methods):
            found.insert(0, "start")
        given = self.arguments()
        if given.get("server_optimizer"):
            found.append("server optimizer")
        if given.get("asynchronous"):
            found.append("asynchronous")
        return "; ".join(found)

    def papers(self) -> str:
        """Where its papers appeared, each with its link, as references.bib has it."""
        config = {**read(f"method/{self.config}"), "method": self.items}
        keys = re.findall(r"^@\w+\{([^,]+),", cited(config), re.M)[:-1]
        # FedAvg's is among all of them.
        return ", ".join(map(appeared, keys[1:] or keys))

    def refused(self) -> str:
        """The hooks and classes that it refuses beside it."""
        names = [f"`{name}`" for method in self.made() for name in method.cannot_run_with]
        return ", ".join(dict.fromkeys(names))

    def engines(self) -> str:
        """The engines that take it, by a round with each."""
        found = ["sequential", "concurrent"]
        # A recording takes a few steps of a client.
        run = self.run(engine="concurrent", capture=True, local_epochs=8)
        if run.engine_facts["capture"].startswith("yes"):
            found.append("recorded")
        try:
            self.run(engine="stacked")
            found.append("stacked")
        except UserError:
            pass
        return "all" if tuple(found) == ENGINES else ", ".join(found)

    def asynchronous(self) -> str:
        """Whether it works in asynchronous runs, as its classes say."""
        sends = bool(CallbackList(self.made()).sent_to_clients())
        tolerant = all(method.tolerates_staleness for method in self.made())
        return "yes" if tolerant and not sends else ""

    def row(self) -> str:
        """Its row of the table."""
        meter = Meter()
        # A part may be averaged every tenth round.
        parts = any(method.has("parts") for method in self.made())
        run = self.run(meter, rounds=11 if parts else 4)
        total = meter.total
        vector = run.global_vector.numel()
        size = vector * run.global_vector.element_size()
        # A number that the server keeps beside vectors is none.
        state = [value.numel() for value in run.server_states.values()]
        for values in run.optimizers().state.values():
            state += [value.numel() for value in values.values() if isinstance(value, Tensor)]
        costs = [
            total["down"] / total["clients"] / size,
            total["up"] / total["clients"] / size,
            meter.kept,
            sum(state) / vector,
            total["gradients"] / total["steps"],
            total["forwards"] / total["steps"],
        ]
        cells = [self.called(), f"`{self.config}`", self.kind(), self.papers(), *map(short, costs)]
        return line([*cells, self.engines(), self.asynchronous(), self.refused()])


def appeared(key: str) -> str:
    """Where a paper of references.bib appeared, with a link where it has one."""
    entry = dict(re.findall(r"^  (\w+) = \{(.*)\},$", references()[key], re.M))
    venue = entry.get("booktitle") or entry.get("journal") or "arXiv"
    cell = f"{venue} {entry['year']}"
    if "eprint" in entry:
        return f"[{cell}](https://arxiv.org/abs/{entry['eprint']})"
    return f"[{cell}](https://doi.org/{entry['doi']})" if "doi" in entry else cell


def short(number: float) -> str:
    """Two digits behind the point, or fewer.

    >>> short(1.0), short(0.031), short(1.499), short(0.00002)
    ('1', '0.03', '1.5', '0')
    """
    return f"{number:.2f}".rstrip("0").rstrip(".")


def rows() -> list[Packaged]:
    """All packaged methods, FedAvg first, and some with another argument."""
    names = [name.removeprefix("method/") for name in packaged() if name.startswith("method/")]
    names = sorted(set(names) - {"fedavg", *ADDED})
    found = [Packaged("fedavg")]
    for name in names:
        found.append(Packaged(name))
        if name in VARIANTS:
            found.append(Packaged(name, tuple(VARIANTS[name].items())))
    return found


def between(page: str, key: str) -> tuple[str, str, str]:
    """A page before, in and after the place of a generated table."""
    head, begin, rest = page.partition(f"<!-- {key}: python -m studies.methods page -->\n")
    middle, end, tail = rest.partition(f"<!-- end of {key} -->")
    assert begin and end, f"the place of {key} is not marked"
    return head + begin, middle, end + tail


# --------------------------------------------------------------------------- accuracy


def accuracy(results: Path, sweep: str) -> tuple[str, bytes | None]:
    """The tables of the sweep's arms, with the names of those that have not run, and the picture.

    None for the picture where nothing has run.
    """
    grid = parse_yaml(packaged()[sweep].read_text("utf-8"))["grid"]
    names = [item["name"] for item in grid["method"]]
    settings = [item["name"] for item in grid.get("data", [{"name": "dir0.1"}])]
    with unpacked(results) as runs:
        folders = [path for path in sweeps(runs) if path.name == sweep.rpartition("/")[2]]
        rows = ranked(folders)
    if len(settings) == 1 == len(rows):
        rows = {settings[0]: next(iter(rows.values()))}
    return tables(rows, names, settings), drawn(rows) if rows else None


def page(results: Path) -> None:
    """Write the tables into their pages, and a picture of the first sweep."""
    made = {"costs": (COSTS, table(COLUMNS, [method.row() for method in rows()]))}
    for key, sweep in SWEEPS.items():
        text, picture = accuracy(results, sweep)
        made[key] = (COMPARED, text)
        if picture and key == "accuracy":
            PICTURE.write_bytes(picture)
    for key, (file, text) in made.items():
        head, _, tail = between(file.read_text("utf-8"), key)
        file.write_text(head + text + tail, "utf-8")
        print(f"→ {file}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m studies.methods", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("what", choices=["page", "keep"])
    if parser.parse_args().what == "keep":
        # Two runs at a time, each on a core of its own: processor seconds can be compared.
        return keep(Path("runs/methods"), RESULTS, clocks=WALL)
    page(RESULTS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
