"""SIGTERM, SIGINT and SIGHUP end a run after its round, which is validated and saved.

The exit status shows the signal.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

from fl_lightning.machine.lightning import pl


class GracefulStop(pl.Callback):
    """Asks the module to stop after this round; a second Ctrl-C stops at once.

    ``received``: the signal's number, or None; ``first``: the next round when training began, None
    if no round was left. Once per round the processes agree on whether to stop.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.first: int | None = None
        self._module: Any = None
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.first = trainer.current_epoch
        # Install our handlers only now: they replace Lightning's, which would lose the round.
        self._module = pl_module
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # A signal that nohup has made this process ignore stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        # First of all, since Python drops what a second interrupt raises in a callback of fork.
        self._module.stop_requested = True
        if self.received is None:
            os.write(2, f"\n{signal.Signals(number).name}: stopping after this round\n".encode())
        self.received = number

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._restore()
