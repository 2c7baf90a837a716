"""A LightningCLI for your own learner and data, which trains them in a federated run."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

# This import makes the short names of packaged methods known to the parser.
import fl_lightning.callbacks  # noqa: F401
from fl_lightning.callback import FederatedCallback
from fl_lightning.datamodules import FederatedDataModule, FromDataModule
from fl_lightning.errors import UserError, debugging
from fl_lightning.machine.lightning import (
    LightningArgumentParser,
    LightningCLI,
    instantiate_class,
    pl,
)
from fl_lightning.module import FederatedModule


class MethodCLI(LightningCLI):
    """``LightningCLI`` with ``--method``, the callbacks that make the method.

    It is the base of ``FederatedCLI`` and of the commands of ``fl-lightning``.
    """

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_core_arguments_to_parser(parser)
        parser.add_argument(
            "--method",
            type=list[FederatedCallback],
            default=[],
            help="Callbacks that make the method.",
        )

    def callbacks_with_method(self, given: Any) -> list[pl.Callback]:
        """Return the method's callbacks, then those that ``trainer.callbacks`` gives."""
        given = given or []
        others = given if isinstance(given, list) else [given]
        return [*self._get(self.config_init, "method", default=[]), *others]


class FederatedCLI(MethodCLI):
    """``LightningCLI(MyLearner, MyDataModule, …)``, federated; it takes the same arguments.

    ``--trainer``, ``--model`` and ``--data`` keep their meaning, and ``add_arguments_to_parser``
    and ``link_arguments`` of a subclass work. Besides there are

    - ``--federated.participation 0.1``, …: the arguments of ``FederatedModule``;
    - ``--method+=ControlVariates``, …: the callbacks that make the method;
    - ``--split.num_clients 10``, ``--split.partition Dirichlet``, …: the arguments of
      ``FromDataModule``, for a data module without clients;
    - ``--optimizer``: each client's optimizer, a new one every round.

    ``model`` is the ``FederatedModule``, ``learner`` the LightningModule inside it. LightningCLI
    sets folders, checkpoints and loggers; it does not add the callbacks and files of ``fl-lightning
    fit``.

    If the user has to correct something, the command prints one paragraph and exits with status 2,
    as parsers do; ``FL_DEBUG=1`` shows where the error occurred.

    Raises:
        UserError: a program gave ``args`` with ``--lr_scheduler``, or with a value that training
            refuses.
    """

    learner: pl.LightningModule

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except UserError as error:
            # A program that passes `args` itself can also catch the error itself.
            if kwargs.get("args") is not None or debugging():
                raise
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
            raise SystemExit(2) from None

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_core_arguments_to_parser(parser)
        # The parser builds neither class: each needs an object that is built before it.
        parser.add_class_arguments(
            FederatedModule, "federated", skip={"learner"}, instantiate=False
        )
        parser.add_class_arguments(FromDataModule, "split", skip={"datamodule"}, instantiate=False)

    def instantiate_classes(self) -> None:
        self.config_init = self.parser.instantiate_classes(self.config)
        self.learner = self._get(self.config_init, "model")
        self.model = self._federated_module()
        self.datamodule = self._federated_data()
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        settings = self._get(self.config_init, "trainer", default={})
        given = kwargs.pop("callbacks", settings.get("callbacks"))
        return super().instantiate_trainer(callbacks=self.callbacks_with_method(given), **kwargs)

    def _federated_module(self) -> pl.LightningModule:
        settings = {**vars(self._get(self.config_init, "federated"))}
        optimizer = self._get(self.config_init, "optimizer")
        if self._get(self.config_init, "lr_scheduler"):
            raise UserError(
                "--lr_scheduler: it would step a single optimizer, but each client has its own. "
                "Give --federated.lr_decay, or --federated.client_scheduler for the learner's own."
            )
        if optimizer:
            settings["client_optimizer"] = partial(instantiate_class, init=optimizer.as_dict())
        return FederatedModule(self.learner, **settings)

    def _federated_data(self) -> Any:
        data = self._get(self.config_init, "data")
        if data is None or isinstance(data, FederatedDataModule):
            return data
        return FromDataModule(data, **vars(self._get(self.config_init, "split")))
