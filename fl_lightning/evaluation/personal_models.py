"""Clients' personal models after a round, and their values on each client's test samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fl_lightning.aggregation.update_accumulator import AT_SITES, FINISHED
from fl_lightning.callback_list import CallbackList, checked_rows
from fl_lightning.checkpoint import federated_part
from fl_lightning.client.client_trainer import ClientTrainer
from fl_lightning.client.forward_pass import in_full_precision
from fl_lightning.client.local_step import LocalTraining
from fl_lightning.engines.engine_context import LearnerCopies, engine_context_of
from fl_lightning.errors import UserError
from fl_lightning.evaluation.evaluator import Evaluator
from fl_lightning.evaluation.in_round import ClientEvaluation
from fl_lightning.evaluation.validated_model import evaluated, in_learner
from fl_lightning.machine.processes import gathered, place
from fl_lightning.machine.random_state import random_state_kept
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.clients import Clients
from fl_lightning.round.context import BUFFER, ClientRates, Evaluate, Round
from fl_lightning.round.global_model import GlobalModel
from fl_lightning.round.transaction import RoundTransaction
from fl_lightning.sampling import generator
from fl_lightning.schedules import decay_factor
from fl_lightning.storage.client_rows import ClientRows
from fl_lightning.storage.client_store import ClientStore
from fl_lightning.storage.rows_on_disk import KEY

PersonalModel = tuple[Tensor, Mapping[str, Tensor]]  # weights (D,), and buffers by name


class SampleCounts(dict[int, int]):
    """N_i of a client, computed on request, because only a few of a million clients are read."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self._data = data

    def __missing__(self, client: int) -> int:
        return int(self._data.client_sizes()[client])


@dataclass(frozen=True)
class PersonalModels:
    """The clients' personal models: those of ``personal``, else the evaluated one and kept parts.

    Args:
        round: the facts of the last committed round; w, the evaluated model and buffers are those
            after it. ``read`` returns committed rows of clients.
        evaluate: function behind ``clients.evaluate``; ``transaction``: through which methods read
            their state.
    """

    round: Round
    methods: CallbackList
    evaluate: Evaluate | None = None
    transaction: Callable[[Round], RoundTransaction] = RoundTransaction

    def of(self, client: int) -> PersonalModel:
        """Return the model of one client.

        The model is the evaluated one if the client never finished a round, except for methods with
        one model for all. Parts that were not averaged after the last round have the values of w.

        Raises:
            UserError: the client's own state is at its site.
        """
        round = replace(self.round, ids=[client])
        if round.read(AT_SITES, client) is not None:
            raise UserError(
                f"client {client}: its personal state is at its site, and this is the server's "
                "run, so the client's own model cannot be computed here. Leave out `client` to get "
                "the model that all clients share."
            )
        # The parts that a client keeps are those with which the next round would begin.
        start = round.evaluated
        if round.parts is not None:
            pending = round.parts.pending(round.t, round.server_states)
            start = torch.where(pending, round.w, start)
        after = ClientGroup(replace(round, t=round.t + 1), [client], start.clone().view(1, -1))
        with torch.no_grad():
            after.take_kept_parts()
            x = after.x
            hook = self.methods.owner("personal")
            finished = round.read(FINISHED, client) is not None
            if hook is not None and (finished or self.methods.personal_of_all):
                self.methods.bind(self.transaction(round))
                group = ClientGroup(round, [client], x, evaluate=self.evaluate)
                x = checked_rows(hook, self.methods.call(hook, Clients(group)), x).to(x)
        return x[0], round.buffers_of(client)


def of_run(run: Any, trainer: Any) -> PersonalModels:
    """Return personal models of a FederatedRun after its rounds so far.

    Each process has the values of the clients whose rows it keeps. ``trainer``: Trainer whose
    callbacks may average weights, or None.
    """
    if run.loop is None:
        raise UserError(
            "personal models exist only after a run has begun. Ask for personal models after "
            "trainer.fit, or in a callback."
        )
    with in_learner(trainer, averages=False) as averages:
        facts = run.loop.round_at(max(run.state.rounds - 1, 0))
        # In a validation w's memory holds averages.
        facts = replace(facts, w=facts.w.clone() if averages else facts.w)
    vector, buffers = evaluated(run.model, trainer)
    sizes = SampleCounts(run.loop.cohort.data)
    facts = replace(facts, sizes=sizes, evaluated=vector, buffers=buffers)
    return PersonalModels(facts, run.methods, run.evaluate)


def of_checkpoint(
    saved: dict[str, Any],
    model: GlobalModel,
    methods: CallbackList,
    trainer: Any,
    data: Any,
    path: str,
) -> PersonalModels:
    """Return personal models of a checkpoint; w and the buffers are set, too.

    Args:
        trainer: Trainer on whose device clients' samples are evaluated, if a method needs it.
        model: its learner must hold the checkpoint's state dict already.
        methods: the run's methods from its config; ``data``: its data module, from which sizes are
            read if a method needs them; ``path``: path of the checkpoint, beside which client rows
            lie.
    """
    held = federated_part(saved)
    rows = ClientRows(ClientStore())
    model.as_buffers = () if held.engine is None else held.engine.as_buffers
    state = held.restore(rows, model, path)
    w = model.w.detach()
    buffers = model.buffers()
    layout = model.layout
    owned = {name.removeprefix(BUFFER) for name in rows.store.names() if name.startswith(BUFFER)}
    round = Round(
        t=max(state.rounds - 1, 0),
        sizes=SampleCounts(data),
        num_clients=int(data.num_clients),
        w=w,
        w0=state.initial_vector,
        evaluated=model.evaluated.detach(),
        buffers=buffers,
        layout=layout,
        rates=ClientRates(1.0, torch.zeros((), dtype=torch.float64)),
        read=rows.read,
        server_states=state.server,
        parts=methods.parts(layout, w.device),
        seed=held.seed,
        own_buffers=owned,
    )

    def make() -> Evaluator:
        check_partition(data, saved, path)
        return Evaluator.of_model(model, trainer, data, held.seed)

    return PersonalModels(round, methods, ClientEvaluation(model.learner, data, make))


def split_by_run(data: Any, checkpoint: dict[str, Any]) -> None:
    """Give a run's data module, which no Trainer has, the seed by which the run split the data."""
    if getattr(data, "seed", None) is None:
        data.seed = checkpoint.get(KEY, {}).get("seed")


def check_partition(data: Any, checkpoint: dict[str, Any], what: str) -> None:
    """Refuse data split in another way than the checkpoint's; ``what`` begins the message."""
    partition = checkpoint.get(KEY, {}).get("partition")
    if partition and partition != data.partition_hash:
        raise UserError(
            f"{what}: the data give partition {data.partition_hash}, the run had {partition}. Are "
            "the files in its --data.root still the same?"
        )


def check_client(client: int, m: int) -> None:
    if not 0 <= client < m:
        raise UserError(f"client {client}: there are {m} clients, numbered from 0 to {m - 1}.")


def of_client(run: Any, client: int, trainer: Any) -> PersonalModel:
    models = of_run(run, trainer)
    check_client(client, models.round.num_clients)
    # The process that stores the client's rows has its model, and sends it to all other processes.
    world, rank = place()
    model_here = models.of(client) if client % world == rank else None
    (model,) = filter(None, gathered(model_here))
    return model


def elsewhere(trainer: Any) -> Any:
    """Return the callback that measures clients of other processes; None: all are in this run.

    ``one_client(module)`` returns one client's values at the present model, or None.
    ``measured(module, ids, finetune_epochs)`` is as :func:`measured`, with each client's number of
    test samples.
    """
    found = (c for c in trainer.callbacks if getattr(c, "measures_clients", False))
    return next(found, None)


def measured(
    run: Any,
    trainer: Any,
    ids: Sequence[int],
    finetune_epochs: float = 0,
    models: PersonalModels | None = None,
) -> dict[int, dict[str, dict[str, float]]]:
    """Return each client's personal model's values on its own test samples; every process calls it.

    Args:
        run: a FederatedRun; ``trainer``: the Trainer that fits it.
        finetune_epochs: local epochs of fine-tuning before a second measurement.
        models: the clients' models; None: the run's, after its rounds so far.

    Returns:
        ``{client: {"": values, "_finetuned": values}}``, as :meth:`Evaluator.validated` gives them:
        ``samples``, ``loss`` and the learner's validation logs, under their names; empty for a
        client without test samples. The second entry exists if ``finetune_epochs`` is above 0.
    """
    data = trainer.datamodule
    (world, rank) = place()
    models = models or of_run(run, trainer)
    evaluator = Evaluator.of_run(run, trainer)
    tuned = FineTuning(run, trainer, finetune_epochs) if finetune_epochs else None
    values_here: dict[int, dict[str, dict[str, float]]] = {}
    for client in ids:
        if client % world != rank:
            continue
        indices = data.client_test_indices(client)
        values: dict[str, dict[str, float]] = {}
        values_here[client] = values
        if not len(indices):
            continue
        weights, evaluator.buffers = models.of(client)
        values[""] = evaluator.validated(weights, client, indices)
        if tuned is not None:
            weights, evaluator.buffers = tuned(models.round, client, weights, evaluator.buffers)
            values["_finetuned"] = evaluator.validated(weights, client, indices)
    for client, texts in list(evaluator.failures.items())[:1]:
        run.note(f"{texts[0]} on the test samples of client {client}, which has no value of it")
    of_all: dict[int, dict[str, dict[str, float]]] = {}
    for values_there in gathered(values_here):
        of_all.update(values_there)
    return {client: of_all[client] for client in ids}


class FineTuning:
    """Trains a client's model for some more local epochs, on a copy of the learner.

    The fine-tuned model is not kept. The client optimizer trains all parameters at the rate of the
    last committed round, with the run's ``accumulate``, and without methods and clipping. Batches
    and random draws of a step are functions of (seed, round, client), and differ from the round's.
    """

    def __init__(self, run: Any, trainer: Any, epochs: float) -> None:
        self.epochs = epochs
        self.settings = run.settings
        self.loop = run.loop
        self.cohort = run.cohort(trainer)
        data = OtherBatches(trainer.datamodule)
        seed = int(generator(self.cohort.seed, "finetune").integers(2**63))
        work = LocalTraining(data, CallbackList([]), seed, accumulate=run.settings.accumulate)
        context = engine_context_of(
            trainer, run.settings, run.model, run.optimizers, work, self.cohort
        )
        copies = LearnerCopies(context)
        copies.treat_as_buffers(run.model.as_buffers)
        if run.plan is not None:
            copies.prepare(run.plan)
        ((self.copy, optimizer),) = copies.for_trials(1)
        self.worker = ClientTrainer(work, self.copy, optimizer)

    def __call__(
        self, round: Round, client: int, weights: Tensor, buffers: Mapping[str, Tensor]
    ) -> PersonalModel:
        steps = self.cohort.steps_of(client, self.epochs)
        factor = decay_factor(self.settings.lr_decay, round.t)
        own_round = replace(
            round,
            ids=[client],
            steps={client: steps},
            weights={client: 1.0},
            w=weights,
            buffers=buffers,
            own_buffers=(),
            parts=None,
            rates=self.loop.client_rates.in_round(round.t, factor, [steps]),
        )
        device = weights.device.type
        with in_full_precision(device), random_state_kept(weights):
            trained = self.worker.train(own_round, client)
        # The next client uses the same memory of the worker, so copy the model.
        tuned_buffers = {name: buffer.clone() for name, buffer in self.copy.buffers.items()}
        return trained.x[0].clone(), tuned_buffers


@dataclass(frozen=True)
class OtherBatches:
    """A data module in which clients' samples have another order."""

    data: Any

    def client_batches(self, client: int, round: int, steps: int, device: torch.device) -> Any:
        return self.data.client_batches(client, round, steps, device, purpose="finetune")

    def batches_per_epoch(self, client: int) -> int:
        return int(self.data.batches_per_epoch(client))
