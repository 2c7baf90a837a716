"""Checks each question of the server against the site's own file and the run's config.

A site compares its config with the server's when it is greeted. So whatever the config does not
have, the server has no reason to ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fl_lightning.callbacks import PerClientEvaluation
from fl_lightning.deploy.fields import LARGEST, Fields, WrongField
from fl_lightning.deploy.progress import ATTRIBUTE, BOOL, FOREVER, may_be_sent
from fl_lightning.deploy.transport import Message, Number, visible
from fl_lightning.errors import UserError


class Permitted:
    """The questions that a site answers.

    Args:
        clients: those that the site holds, by its own file or ``--node-config``.
        callbacks: of the config; if there is a ``PerClientEvaluation``, the server may ask for
            measurements, and for fine-tuning of its ``finetune_epochs``.
        learner: its class names the attributes that may be set.
        most_rounds: the number of rounds in which the site takes part; None: any number.
    """

    def __init__(
        self,
        clients: Iterable[int],
        callbacks: Iterable[Any],
        learner: nn.Module,
        most_rounds: int | None = None,
    ) -> None:
        self.clients = frozenset(clients)
        self.learner = learner
        self.most_rounds = most_rounds
        measuring = [c for c in callbacks if isinstance(c, PerClientEvaluation)]
        self.epochs = {0.0, *(float(c.finetune_epochs) for c in measuring)} if measuring else set()

    def check(self, message: Message) -> None:
        """Refuse a question that goes further, before anything of it is used.

        Raises:
            UserError: it names what the server asked for.
        """
        try:
            fields = Fields.of(message)
            mine = fields.integers("mine", 0, LARGEST)
            fields.integers("counted", -1, LARGEST, len(mine))
            for name in ("run", "epoch", "steps"):
                fields.integer(name)
            t = fields.integer("round", 0 if message.what == "round" else -1)
            fields.integer("max_epochs", FOREVER)
            fields.flag("whole")
            epochs = 0.0 if message.what == "round" else fields.number("epochs", finite=True)
            if message.what == "round":
                fields.number("total_weight", finite=True)
        except WrongField as error:
            raise UserError(f"the server's question is refused: {error}.") from error
        if self.most_rounds is not None and t >= self.most_rounds:
            raise _refused(f"round {t}", f"takes part in {self.most_rounds} rounds (most_rounds)")
        others = sorted(set(mine) - self.clients)
        if others or len(set(mine)) < len(mine):
            raise _refused(f"clients {mine[:10]}", f"holds {sorted(self.clients)[:10]}")
        if message.what == "evaluate" and not self.epochs:
            raise _refused("measurements", "has a config without PerClientEvaluation")
        if message.what == "evaluate" and epochs not in self.epochs:
            raise _refused(f"{epochs:g} epochs of fine-tuning", f"has {max(self.epochs):g}")
        self._check_attributes(message.numbers)

    def _check_attributes(self, numbers: Mapping[str, Number]) -> None:
        for key in numbers:
            full = key.removeprefix(ATTRIBUTE).removesuffix(BOOL)
            if key.startswith(ATTRIBUTE) and not may_be_sent(self.learner, full):
                raise _refused(
                    f"another {visible(full)}",
                    "lets only those numbers of its learner be set that the learner's class names "
                    "in sent_to_sites",
                )


def _refused(what: str, instead: str) -> UserError:
    return UserError(f"the server asks for {what}, which is refused: this site {instead}.")
