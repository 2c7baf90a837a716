"""``card.md`` describes a run and its results, in its folder and in TensorBoard; also the closing
table.
"""

from __future__ import annotations

import math
import platform
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

_SHOWN = (
    "train/loss",
    "divergence/participants",
    "time/round",
    "communication/total_parameters",
    "communication/total_bytes",
)

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
        self._tally = Tally()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._card = None
        self._tally = Tally()

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

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._tally.add(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._card is not None:
            rows = closing_table(self._tally.metrics(trainer), trainer)
            path = Path(trainer.default_root_dir) / "card.md"
            _write(path, self._card + _section("Result", rows))


class Tally:
    """The metrics of a run: from metrics.csv if the run writes one, else noted after each round."""

    def __init__(self) -> None:
        self._rounds: list[int] = []
        self._rows: list[dict[str, float]] = []

    def add(self, trainer: pl.Trainer) -> None:
        """Note the round that ends."""
        if _csv(trainer) is None:
            self._rounds.append(trainer.current_epoch)
            self._rows.append(_values(trainer))

    def metrics(self, trainer: pl.Trainer) -> Metrics:
        """The table so far."""
        path = _csv(trainer)
        modes = metric_modes(trainer)
        if path is not None:
            return Metrics.read(path, modes)
        rows = self._rows
        # Take the last row again: it may have got values that were measured after its round.
        if rows:
            rows = [*rows[:-1], _values(trainer)]
        names: dict[str, None] = {}
        for row in rows:
            names.update(dict.fromkeys(row))
        columns: dict[str, list[float | None]] = {}
        for name in names:
            columns[name] = [row.get(name) for row in rows]
        return Metrics(self._rounds, columns, modes)


# The closing table names the clients' rows on disk from this number of bytes on.
ROOM = 10**7


def closing_table(metrics: Metrics, trainer: pl.Trainer) -> list[tuple[str, str]]:
    """Return the results of a run as (label, value), for all that were logged; notes come last."""
    folder = Path(trainer.default_root_dir)
    # Without a run's folder, the Trainer's logger decides where files are written.
    if not (folder / "run.json").is_file() and trainer.log_dir is not None:
        folder = Path(trainer.log_dir)
    rows = [("rounds", str(trainer.current_epoch))]
    for name in shown_metrics(trainer):
        if name != "train/loss" and name in metrics:
            rows.append((LABELS.get(name, name), metrics.described(name)))
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
    nbytes = sum(path.stat().st_size for path in (folder / "state").glob("rows-*.safetensors"))
    if nbytes >= ROOM:
        rows.append(("clients' rows", f"{_short(nbytes)}B in {folder / 'state'}, to go on from"))
    if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        rows.append(("curves", f"tensorboard --logdir {folder}"))
    return rows + [("note", note) for note in getattr(trainer.lightning_module, "notes", [])]


def _values(trainer: pl.Trainer) -> dict[str, float]:
    """Return the latest values of the metrics that are shown."""
    metrics = trainer.callback_metrics
    names = (*_SHOWN, *shown_metrics(trainer))
    return {name: float(metrics[name]) for name in names if name in metrics}


def _csv(trainer: pl.Trainer) -> Path | None:
    paths = (logger.path for logger in trainer.loggers if isinstance(logger, MetricsCSV))
    return next((path for path in paths if path.exists()), None)


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
    settings = getattr(module, "settings", None)
    if settings is not None and settings.asynchronous is not None:
        methods.append(("asynchronous", arguments(settings.asynchronous)))
    learner = description.of_learner(getattr(module, "learner", module))
    network = f" ({learner['learner/network']})" if "learner/network" in learner else ""
    named = f"{learner['learner']}{network}, {learner['learner/parameters']:,} trained parameters"
    run = [("learner", named), ("data", type(data).__name__), ("rounds", str(trainer.max_epochs))]
    run.append(("seed", str(getattr(module, "run_seed", "not set"))))
    data_card = getattr(data, "card", None)
    device = torch.cuda.get_device_name() if module.device.type == "cuda" else _processor()
    machine = [("device", device), ("precision", precision(trainer))]
    machine.append(("processes", str(trainer.world_size)))
    for label, fact in getattr(module, "engine_facts", {}).items():
        machine.append((str(label), str(fact)))
    sections = [
        _section("Run", run),
        _section("Callbacks", methods),
        _section("Data", [] if data_card is None else list(data_card().items())),
        _section("Versions", list(description.versions().items())),
        _section("Machine", machine),
    ]
    return f"# {markdown(head)}\n" + "".join(sections)


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
        board.add_image("partition", image, 0, dataformats="HWC")
