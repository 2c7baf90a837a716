"""One progress bar over the rounds of a run, and the closing table."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any

from fl_lightning.callbacks.loggers.run_card import LABELS, closing_table
from fl_lightning.machine.escaping import plain
from fl_lightning.machine.lightning import ProgressBar, Tqdm, pl
from fl_lightning.record.shown_metrics import shown_metrics

_PAUSE = 0.1  # seconds between two drawings
_LINES = 20  # lines per run, if the output is not a terminal


class FederatedProgressBar(ProgressBar):
    """``round 12/100 · clients 3/10 · loss 0.5321 · accuracy 0.9123 · Δ 0.0123 |███  | 0:08 · 1:02
    left``.

    After the accuracy come the monitored metrics, and metrics logged with ``prog_bar=True``. If
    clients have their own parts, ``clients/acc`` takes the place of ``val/acc`` as soon as
    PerClientEvaluation has measured them.

    On a terminal and in a notebook it is redrawn at most ten times a second; elsewhere (a file, a
    pipe) about twenty plain lines are printed in a run. After the fit, the closing table and the
    run's warnings follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Any = None  # there is a bar only on a terminal and in a notebook
        self._reset(0, None)

    def _reset(self, first: int, total: int | None) -> None:
        self._first = first
        self._done = first
        self._total = total
        self._began = time.monotonic()
        self._drawn = -math.inf
        self._printed = first  # number of finished rounds at the last plain line
        self._clients = self._values = ""

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        Tqdm.write(" ".join(map(str, args)), **kwargs)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not trainer.is_global_zero:
            self.disable()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rounds = trainer.max_epochs
        self._reset(trainer.current_epoch, rounds if rounds is not None and rounds > 0 else None)
        self._open()

    def on_client_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, done: int, total: int
    ) -> None:
        """Show that ``done`` of this process's ``total`` clients are ready; the run calls it."""
        if self._bar is not None and time.monotonic() - self._drawn >= _PAUSE:
            self._clients = f" · clients {done}/{total}"
            self._draw(self._done + 1)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._enabled:
            return
        self._done = trainer.current_epoch + 1
        self._clients = ""
        if self._bar is not None:
            self._read(trainer)
            if time.monotonic() - self._drawn >= _PAUSE or self._done == self._total:
                self._draw(self._done)
            return
        every = 50
        if self._total is not None:
            every = math.ceil((self._total - self._first) / _LINES)
        if (self._done - self._first) % max(every, 1) == 0 or self._done == self._total:
            self._line(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._enabled or self._done == self._first:
            return self._close()
        if self._bar is not None:
            self._read(trainer)
            self._draw(self._done)
        # A run that stopped early prints its last round, too.
        elif self._printed != self._done:
            self._line(trainer)
        self._close()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._enabled:
            rows = closing_table(trainer)
            width = max(len(label) for label, _ in rows)
            lines = [plain(f"  {label:<{width}}  {value}") for label, value in rows]
            self.print("\n".join(["", *lines, ""]))

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def _open(self) -> None:
        self._close()
        in_notebook = "ipykernel" in sys.modules
        if not self._enabled or not (sys.stderr.isatty() or in_notebook):
            return
        shape = "{desc} · {elapsed}"
        if self._total is not None:
            shape = "{desc} |{bar:10}| {elapsed} · {remaining} left"
        # In a notebook, and in some containers' terminals, the number of columns is not known, and
        # the bar would be empty.
        known = not in_notebook and os.get_terminal_size(sys.stderr.fileno()).columns > 0
        width: dict[str, Any] = {"dynamic_ncols": True} if known else {"ncols": 100}
        self._bar = Tqdm(
            total=self._total, initial=self._first, bar_format=shape, file=sys.stderr, **width
        )

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _of(self, number: int) -> str:
        return f"{number}/{self._total}" if self._total is not None else str(number)

    def _read(self, trainer: pl.Trainer) -> None:
        metrics = trainer.callback_metrics
        texts = list[str]()
        for name in dict.fromkeys(
            ["train/loss", *shown_metrics(trainer), "divergence/participants"]
        ):
            if name not in metrics:
                continue
            form = "{:.4f}" if name in LABELS else "{:.4g}"
            # A distance may have any magnitude, so show three significant digits.
            if name == "divergence/participants":
                form = "{:.3g}"
            texts.append(f" · {LABELS.get(name, name)} {form.format(float(metrics[name]))}")
        self._values = "".join(texts)

    def _draw(self, number: int) -> None:
        self._bar.n = self._done
        self._bar.set_description_str(f"round {self._of(number)}{self._clients}{self._values}")
        self._drawn = time.monotonic()

    def _line(self, trainer: pl.Trainer) -> None:
        self._read(trainer)
        left = ""
        if self._total is not None:
            each = (time.monotonic() - self._began) / max(self._done - self._first, 1)
            left = f" · {Tqdm.format_interval(each * (self._total - self._done))} left"
        self._printed = self._done
        print(f"round {self._of(self._done)}{self._values}{left}", file=sys.stderr, flush=True)
