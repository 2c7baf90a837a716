"""``card.md`` describes a run and its results, in its folder and in TensorBoard; also the closing
table.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_lightning.callback import FederatedCallback
from fl_lightning.machine.escaping import markdown
from fl_lightning.machine.lightning import TensorBoardLogger, pl
from fl_lightning.metrics import Metrics
from fl_lightning.record import description
from fl_lightning.record.metrics_csv import MetricsCSV
from fl_lightning.record.shown_metrics import metric_modes, shown_metrics
from fl_lightning.schedules import arguments
from fl_lightning.storage.atomic_files import written_aside

# Metrics that are shown under other names.
LABELS = {
    "train/loss": "loss",
    "val/acc": "accuracy",
    "clients/acc": "accuracy of clients",
    "divergence/participants": "Δ",
}


class RunCard(pl.Callback):
    """Writes ``card.md`` and ``partition.png`` in the run's folder, and both to TensorBoard.

    The card lists the run's methods, data, seed, versions and machine; after the fit also the
    closing table. A resumed run overwrites it.
    """

    def __init__(self) -> None:
        self._card: str | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._card = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Engine, loggers and folder are known only when the first round begins.
        if self._card is not None or not trainer.is_global_zero:
            return
        self._card = _card(trainer)
        path = Path(trainer.default_root_dir) / "card.md"
        new = trainer.current_epoch == 0 or not path.exists()
        _write(path, self._card)
        boards = [
            logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)
        ]
        if new:
            for board in boards:
                board.add_text("run card", self._card, 0)
        plot = getattr(getattr(trainer, "datamodule", None), "plot_partition", None)
        image = path.with_name("partition.png")
        if plot is not None and (trainer.current_epoch == 0 or not image.exists()):
            _draw(plot(), image, boards)
        for callback in vars(trainer)["callbacks"]:
            pictures = callback.pictures() if isinstance(callback, FederatedCallback) else {}
            for name, figure in pictures.items():
                _draw(figure, path.with_name(f"{name}.png"), boards)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._card is not None:
            path = Path(trainer.default_root_dir) / "card.md"
            _write(path, self._card + _section("Result", closing_table(trainer)))


def closing_table(trainer: pl.Trainer) -> list[tuple[str, str]]:
    """Return the results of a run as (label, value), for all that were logged; notes come last.

    They are those of metrics.csv. A run that writes none has only the values of its last round.
    """
    metrics = _metrics(trainer)
    folder = Path(trainer.default_root_dir)
    # Without a run's folder, the Trainer's logger decides where files are written.
    if not (folder / "run.json").is_file() and trainer.log_dir is not None:
        folder = Path(trainer.log_dir)
    rows = [("rounds", str(trainer.current_epoch))]
    for name in shown_metrics(trainer):
        if name != "train/loss" and name in metrics:
            rows.append((LABELS.get(name, name), metrics.described(name)))
    rows += [(f"{name} per client", text) for name, text in _over_clients(metrics)]
    for label, name, form in [
        ("training loss", "train/loss", "{:.4f}"),
        ("divergence Δ", "divergence/participants", "{:.4g}"),
    ]:
        if name in metrics:
            rows.append((label, form.format(metrics.last(name))))
    seconds = metrics.median("time/round")
    if not math.isnan(seconds):
        rows.append(("seconds per round", f"{seconds:.3g} (median)"))
    parameters = metrics.last("communication/total_parameters")
    nbytes = metrics.last("communication/total_bytes")
    if not math.isnan(parameters):
        sent = f"{_short(parameters, ' ')}parameters, {_short(nbytes)}B"
        rows.append(("communicated", sent))
    rows.append(("results in", str(folder)))
    if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        rows.append(("curves", f"tensorboard --logdir {folder}"))
    return rows + [("note", note) for note in getattr(trainer.lightning_module, "notes", [])]


def _over_clients(metrics: Metrics) -> Iterator[tuple[str, str]]:
    """Yield the mean, the deviation and the worst tenth of each metric that clients measured."""
    for column in metrics:
        name = column.removeprefix("clients/").removesuffix("_std")
        if column != f"clients/{name}_std" or f"clients/{name}" not in metrics:
            continue
        mean, deviation = metrics.last(f"clients/{name}"), metrics.last(column)
        worst = metrics.last(f"clients/{name}_worst10")
        yield name, f"{mean:.4f} ± {deviation:.4f} over clients, worst tenth {worst:.4f}"


def _metrics(trainer: pl.Trainer) -> Metrics:
    modes = metric_modes(trainer)
    for logger in trainer.loggers:
        if isinstance(logger, MetricsCSV) and logger.path.exists():
            return Metrics.read(logger.path, modes)
    last = {name: [float(value)] for name, value in trainer.callback_metrics.items()}
    return Metrics([trainer.current_epoch - 1], last, modes)


def _short(count: float, after: str = "") -> str:
    """Format 1234567 as "1.23 M"; ``after`` follows the factor, if there is one."""
    for factor, unit in [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]:
        if count >= factor:
            return f"{count / factor:.3g} {unit}{after}"
    return f"{count:.0f} "


def _card(trainer: pl.Trainer) -> str:
    module = trainer.lightning_module
    describe = getattr(module, "describe", None)
    data = getattr(trainer, "datamodule", None)
    head = describe() if describe is not None else type(module).__name__
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # Lightning does not declare it
    methods: list[tuple[str, str]] = []
    for callback in callbacks:
        if isinstance(callback, FederatedCallback):
            name = type(callback).__name__
            methods.append((name, arguments(callback)))
            for label, fact in callback.facts().items():
                methods.append((f"{name}: {label}", fact))
    run = getattr(module, "run", None)
    entries = description.of_learner(module) if run is None else description.settings(run, trainer)
    network = f" ({entries['learner/network']})" if "learner/network" in entries else ""
    named = f"{entries['learner']}{network}, {entries['learner/parameters']:,} trained parameters"
    of_run = [
        ("learner", named),
        ("data", type(data).__name__),
        ("rounds", f"{trainer.max_epochs}"),
    ]
    of_run.append(("seed", str(getattr(module, "run_seed", "not set"))))
    data_card = getattr(data, "card", None)
    device = torch.cuda.get_device_name() if module.device.type == "cuda" else _processor()
    machine = [("device", device), ("precision", precision(trainer))]
    machine.append(("processes", str(trainer.world_size)))
    for label, fact in getattr(module, "engine_facts", {}).items():
        machine.append((str(label), str(fact)))
    facts = {} if data_card is None else dict(data_card())
    told = {name.replace(" ", "_") for name in facts}
    of_data = [row for row in _below("data", entries) if row[0].split(".")[0] not in told]
    sections = [
        _section("Run", of_run),
        _section("Learner", [row for row in _below("learner", entries) if row[0] != "parameters"]),
        _section("Training", _training(entries)),
        _section("Callbacks", methods),
        _section("Data", [*facts.items(), *of_data]),
        _section("Versions", list(description.versions().items())),
        _section("Machine", machine),
    ]
    return f"# {markdown(head)}\n" + "".join(sections)


def _below(place: str, entries: description.HyperParameters) -> list[tuple[str, str]]:
    """Return the settings below a place, by the rest of their names."""
    prefix = f"{place}/"
    below = [(name, value) for name, value in entries.items() if name.startswith(prefix)]
    return [(name.removeprefix(prefix).replace("/", "."), str(value)) for name, value in below]


def _training(entries: description.HyperParameters) -> list[tuple[str, str]]:
    """Return the settings of the rounds, with each optimizer in one row."""
    rows = []
    for name, value in entries.items():
        if "/" in name or name in ("learner", "method", "data", "rounds", "precision"):
            continue
        # Most flags of an optimizer are off.
        own = [f"{k}={v}" for k, v in _below(name, entries) if v not in ("False", "None")]
        rows.append((name, ": ".join(filter(None, [str(value), ", ".join(own)]))))
    return rows


def precision(trainer: pl.Trainer) -> str:
    """Return the Trainer's precision, and the dtypes of the weights if frozen ones have another."""
    module = trainer.lightning_module
    types: dict[bool, set[str]] = {True: set(), False: set()}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            types[parameter.requires_grad].add(str(parameter.dtype).removeprefix("torch."))
    trained, frozen = (", ".join(sorted(types[kind])) for kind in (True, False))
    if not types[False] - types[True]:
        return str(trainer.precision)
    return f"{trainer.precision}: trained weights in {trained}, frozen ones in {frozen}"


def _section(title: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = []
    for label, value in rows:
        lines.append(f"| {markdown(label)} | {markdown(str(value))} |")
    return "\n".join(["", f"## {title}", "", "| | |", "|---|---|", *lines, ""])


def _processor() -> str:
    threads = torch.get_num_threads()
    unit = "thread" if threads == 1 else "threads"
    return f"{platform.processor() or platform.machine()} ({threads} {unit})"


def _write(path: Path, text: str) -> None:
    with written_aside(path, durable=False) as file:
        file.write(text.encode())


def _draw(figure: Any, path: Path, boards: list[Any]) -> None:
    """Write the figure as PNG and to TensorBoard, without pyplot and its global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    with written_aside(path, durable=False) as file:
        canvas.print_png(file)
    # Writing the file has drawn the figure.
    image = np.asarray(canvas.buffer_rgba())[..., :3]
    for board in boards:
        board.add_image(path.stem, image, 0, dataformats="HWC")
