"""``card.md``: what a run was and what came out, in its folder and in TensorBoard; the closing
table.
"""

from __future__ import annotations

import math
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_lightning import facts
from fl_lightning.callback import FederatedCallback
from fl_lightning.lightning import TensorBoardLogger, pl
from fl_lightning.loggers import MetricsCSV
from fl_lightning.metrics import Metrics
from fl_lightning.schedules import arguments
from fl_lightning.storage.files import written_aside

_SHOWN = (
    "train/loss", "divergence/participants", "time/round",
    "communication/total_parameters", "communication/total_bytes",
)  # fmt: skip


LABELS = {
    "train/loss": "loss", "val/acc": "accuracy", "clients/acc": "accuracy of clients", "divergence/participants": "Δ",
}  # fmt: skip
"""How metrics are called where they are shown to people, if not by their names."""


class RunCard(pl.Callback):
    """Writes ``card.md`` and ``partition.png`` in the run's folder, and both to TensorBoard.

    The card says what ran, with which methods, data, seed, versions and machine; after the fit,
    also the closing table. A resumed run writes it anew.
    """

    def __init__(self) -> None:
        self._card: str | None = None
        self._tally = Tally()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._card = None
        self._tally = Tally()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # here, as all know folder and loggers by now
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
            _write(
                Path(trainer.default_root_dir) / "card.md", self._card + _section("Result", rows)
            )


class Tally:
    """What a run logged: from metrics.csv where the run writes one, else as it was seen go by."""

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
        modes = facts.modes(trainer)
        if path is not None:
            return Metrics.read(path, modes)
        rows = self._rows
        if rows:  # The last row again, with what was measured after its round.
            rows = [*rows[:-1], _values(trainer)]
        names: dict[str, None] = {}
        for row in rows:
            names.update(dict.fromkeys(row))
        columns = {name: [row.get(name, math.nan) for row in rows] for name in names}
        return Metrics(self._rounds, columns, modes)


def closing_table(metrics: Metrics, trainer: pl.Trainer) -> list[tuple[str, str]]:
    """What came out of a run, as (what, value): only what was logged. Its notes come last."""
    folder = Path(trainer.default_root_dir)
    rows = [("rounds", str(trainer.current_epoch))]
    for name in facts.shown(trainer):
        if name != "train/loss" and not math.isnan(metrics.last(name)):
            rows.append((LABELS.get(name, name), metrics.described(name)))
    for label, name, form in [
        ("training loss", "train/loss", "{:.4f}"),
        ("divergence Δ", "divergence/participants", "{:.4g}"),
    ]:
        if not math.isnan(metrics.last(name)):
            rows.append((label, form.format(metrics.last(name))))
    if not math.isnan(seconds := metrics.median("time/round")):
        rows.append(("seconds per round", f"{seconds:.3g} (median)"))
    parameters, nbytes = (
        metrics.last(f"communication/total_{unit}") for unit in ("parameters", "bytes")
    )
    if not math.isnan(parameters):
        rows.append(("communicated", f"{_short(parameters)} parameters, {_short(nbytes)}B"))
    rows.append(("results in", str(folder)))
    if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        rows.append(("curves", f"tensorboard --logdir {folder}"))
    return rows + [("note", note) for note in getattr(trainer.lightning_module, "notes", [])]


def _values(trainer: pl.Trainer) -> dict[str, float]:
    """What was logged last of what is shown."""
    metrics = trainer.callback_metrics
    return {
        name: float(metrics[name]) for name in (*_SHOWN, *facts.shown(trainer)) if name in metrics
    }


def _csv(trainer: pl.Trainer) -> Path | None:
    paths = (logger.path for logger in trainer.loggers if isinstance(logger, MetricsCSV))
    return next((path for path in paths if path.exists()), None)


def _short(count: float) -> str:
    """1234567 → "1.23 M"."""
    for factor, unit in [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]:
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} "


def _card(trainer: pl.Trainer) -> str:
    module = trainer.lightning_module
    describe = getattr(module, "describe", None)
    data = getattr(trainer, "datamodule", None)
    head = describe() if describe is not None else type(module).__name__
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # Lightning does not declare it
    methods: list[tuple[str, str]] = []
    for method in (c for c in callbacks if isinstance(c, FederatedCallback)):
        methods.append((type(method).__name__, arguments(method)))
        methods += [
            (f"{type(method).__name__}: {what}", told) for what, told in method.facts().items()
        ]
    learner = facts.of_learner(getattr(module, "learner", module))
    network = f" ({learner['learner/network']})" if "learner/network" in learner else ""
    named = f"{learner['learner']}{network}, {learner['learner/parameters']:,} trained parameters"
    run = [("learner", named), ("data", type(data).__name__), ("rounds", str(trainer.max_epochs))]
    run.append(("seed", str(getattr(module, "run_seed", "not set"))))
    card = getattr(data, "card", None)
    machine = [
        ("device", torch.cuda.get_device_name() if module.device.type == "cuda" else _processor()),
        ("processes", str(trainer.world_size)),
        *((str(k), str(v)) for k, v in getattr(module, "engine_facts", {}).items()),
    ]
    return f"# {head}\n" + "".join(
        _section(title, rows)
        for title, rows in [
            ("Run", run), ("Callbacks", methods), ("Data", list(card().items()) if card is not None else []),
            ("Versions", list(facts.versions().items())), ("Machine", machine),
        ]
    )  # fmt: skip


def _section(title: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = [
        f"| {what} | {' '.join(str(value).split()).replace('|', '&#124;')} |"
        for what, value in rows
    ]
    return "\n".join(["", f"## {title}", "", "| | |", "|---|---|", *lines, ""])


def _processor() -> str:
    return f"{platform.processor() or platform.machine()} ({torch.get_num_threads()} threads)"


def _write(path: Path, text: str) -> None:
    with written_aside(path, durable=False) as file:
        file.write(text.encode())


def _draw(figure: Any, path: Path, boards: list[Any]) -> None:
    """The figure as PNG and in TensorBoard, without pyplot and its global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    with written_aside(path, durable=False) as file:
        canvas.print_png(file)
    for board in boards:
        board.add_image(
            "partition", np.asarray(canvas.buffer_rgba())[..., :3], 0, dataformats="HWC"
        )
