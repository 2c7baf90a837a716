"""The federated loop: one round, from the token to the commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.aggregation import metric_states, server_update, traffic
from fl_lightning.aggregation.exchange import NeighbourExchange, refuse_other_updates
from fl_lightning.aggregation.over_processes import share_of, visiting_order
from fl_lightning.aggregation.server_update import ServerStep, check_finite, diverged_text
from fl_lightning.aggregation.update_accumulator import UpdateAccumulator
from fl_lightning.callback import Assigned
from fl_lightning.callback_list import CallbackList, checked_choice, checked_rows
from fl_lightning.engines.engine import Engine
from fl_lightning.errors import Diverged
from fl_lightning.learner.buffers import BufferPolicy
from fl_lightning.machine.processes import gathered, processor_seconds
from fl_lightning.round.client_group import LOSS
from fl_lightning.round.client_sums import Total
from fl_lightning.round.cohort import Cohort
from fl_lightning.round.context import ClientRates, Round
from fl_lightning.round.global_model import GlobalModel
from fl_lightning.round.model_parts import Parts
from fl_lightning.round.partial_training import mask_of_round, remember_sent
from fl_lightning.round.server import Server
from fl_lightning.round.settings import Settings
from fl_lightning.round.transaction import RoundTransaction
from fl_lightning.schedules import decay_factor
from fl_lightning.storage.run_state import BaseAfter, RoundOutcome, RunState, Versions
from fl_lightning.storage.secret import Key
from fl_lightning.virtual.planned_round import Plan

Participants = Callable[[int], tuple[int, ...]]  # of round t, ascending


@dataclass
class FederatedLoop:
    """Runs rounds on the objects of a run; a round that fails does not change them.

    Args:
        client_rates: the client optimizer's settings before any decay.
        participants: function that returns the clients sampled in a round.
        report: function that gets a round's metrics, before it is committed.
        progress: called after each client with (clients done, clients that this process trains).
        buffers: which of the learner's buffers are averaged, kept by the server, or each client's.
        rank, world_size: of this process, which trains every ``world_size``-th participant.
        device_plan: the clients whose updates a round aggregates on simulated devices; None without
            such devices.
        latest: (t, clients sampled or chosen) of the latest round; (-1, ()) before any.
        loss: the latest round's mean over clients of their steps' losses; None if no callback reads
            it.
        rows_elsewhere: whether clients' rows stay with the clients, at sites.
        noise_of_clients: the source of clients' noise; None: no method needs it.
        assigned_at_server, assigned_by_clients: called when a method assigns an attribute that it
            does not declare, in a hook of the server or while clients train; None: it may.
    """

    settings: Settings
    model: GlobalModel
    cohort: Cohort
    methods: CallbackList
    state: RunState
    engine: Engine
    server_step: ServerStep
    client_rates: ClientRates
    parts: Parts | None
    participants: Participants
    report: Callable[[RoundMetrics, int], None]
    progress: Callable[[int, int], None]
    note: Callable[[str], None]
    buffers: BufferPolicy
    rank: int = 0
    world_size: int = 1
    device_plan: Plan | None = None
    latest: tuple[int, tuple[int, ...]] = (-1, ())
    loss: float | None = None
    rows_elsewhere: bool = False
    assigned_at_server: Assigned | None = None
    assigned_by_clients: Assigned | None = None
    logged_metrics: Sequence[Metric] = ()
    noise_of_clients: Key | None = None

    def run_round(self, t: int) -> RoundMetrics:
        """Run round t, which is committed when this returns, and return its metrics."""
        start = time.perf_counter()
        start_cpu = processor_seconds()
        # Before the server's step nothing in the run changes: clients' rows and server states are
        # staged in the transaction. So an exception needs no undo.
        transaction = self.begin(t)
        round = transaction.round
        with transaction.server_hooks(), self.methods.telling(self.assigned_at_server):
            before = Server(round, transaction)
            self.methods.run("on_round_start", before)
            transaction.broadcast = self.broadcast(before)

        transaction.total, diverged = self.train(transaction.for_clients, transaction)
        transaction.finished = self.finished(round, diverged, transaction.dropped)

        server = Server(round, transaction)
        # The optimizer changes w and its own state in place, so both are copied before.
        server.w_before, undo = self.server_step.snapshot(self.model)
        try:
            with transaction.server_hooks(), self.methods.telling(self.assigned_at_server):
                self.update(transaction, server)
                self.step(transaction, server)
                self.evaluate(transaction, server)
            self.exchange(transaction, server)
            with transaction.server_hooks(), self.methods.telling(self.assigned_at_server):
                server.communication = traffic.of_round(transaction, self.methods)
                server.kept_vectors = traffic.kept_vectors(transaction, self.methods)
                self.methods.end_round(server, bool(transaction.finished))
            metrics = self.metrics(transaction, server)
            # Whatever may still fail comes before the commit: all processes send rows to their
            # owners, and loggers write.
            staged = (
                transaction.rows_to_commit(self.methods.declared) if transaction.finished else {}
            )
            rows = self.state.rows.bring_home(staged)
            server_states = self.server_states(transaction)
            metrics["time/round"] = time.perf_counter() - start
            # On a GPU the processor's seconds mean little.
            if self.model.w.device.type == "cpu":
                metrics["time/cpu"] = sum(gathered(processor_seconds() - start_cpu))
            self.report(metrics, t)
            chosen = self.latest[1] if self.methods.owner("select") else None
            versions = self.versions(transaction, server)
            sent = self.sent_to(transaction)
            base = self.changed_base(transaction)
            self.state.commit(
                RoundOutcome(t, rows, server_states, metrics, chosen, versions, sent, base)
            )
            # The store has the rows now, in memory or on disk.
            transaction.rows = {}
        except BaseException:
            # If the commit's one assignment is done, the round counts and its commit is finished.
            # If not, everything is undone.
            if not self.state.finish_commit(t):
                undo()
            raise
        # Writing to disk may fail, so it comes last: the round is committed in any case.
        self.state.rows.store.make_room()
        return metrics

    def sent_to(self, transaction: RoundTransaction) -> list[int]:
        if self.state.base is None and not remember_sent(self.methods):
            return []
        # A client has what it was sent, whether or not its update is used.
        others = () if transaction.planned is None else transaction.planned.others
        return [*(i for i in transaction.round.ids if i not in transaction.unsent), *others]

    def begin(self, t: int) -> RoundTransaction:
        # `select` may read server states, so the transaction is bound before participants are
        # chosen.
        transaction = RoundTransaction(self.round_at(t))
        transaction.rows_elsewhere = self.rows_elsewhere
        transaction.base_weights = self.state.base
        self.methods.bind(transaction)
        ids = self.participants_of(transaction)
        # Fetch the rows of the clients that this process trains from the processes that own them.
        self.state.rows.fetch(ids)
        transaction.round = self.with_participants(transaction, ids)
        # After this check nothing may refuse the round. From here until the commit, a checkpoint
        # holds the present model.
        self.model.hold(transaction.round.buffers)
        return transaction

    def participants_of(self, transaction: RoundTransaction) -> list[int]:
        """Return the round's participants, ascending: sampled or chosen by a method, and on
        simulated devices those whose updates arrive in this round.
        """
        t = transaction.t
        select = self.methods.owner("select")
        ids = list(self.participants(t)) if select is None else self.chosen(select, transaction)
        self.latest = t, tuple(ids)
        if self.device_plan is None:
            return ids
        transaction.planned = self.device_plan.planned(t, None if select is None else ids)
        transaction.base = transaction.round.w if transaction.planned.mixed else None
        return list(transaction.planned.ids)

    def with_participants(self, transaction: RoundTransaction, ids: list[int]) -> Round:
        """Return the facts of the round with those of its participants: K_i, N_i, weights, rates,
        and the coordinates that they train.
        """
        planned = transaction.planned
        sizes = self.cohort.sizes(ids)
        weights = Cohort.weights(sizes, self.settings.weighting)
        if planned is None:
            steps = self.cohort.steps_in(transaction.t, ids)
        else:
            steps = {i: self.cohort.steps(i, v) for i, v in planned.versions.items()}
            weights = {i: p * planned.discounts.get(i, 1.0) for i, p in weights.items()}
        factor = decay_factor(self.settings.lr_decay, transaction.t)
        # Sites fill the tables of their clients' steps.
        reached = () if self.rows_elsewhere else steps.values()
        round = replace(
            transaction.round,
            ids=ids,
            steps=steps,
            sizes=sizes,
            weights=weights,
            optimizer_rows=[n for n in self.state.rows.names() if n.startswith("optimizer.")],
            rates=self.client_rates.in_round(transaction.t, factor, reached),
        )
        return replace(
            round,
            trained=mask_of_round(self.methods, round),
            server_moves=self.methods.partial_training.server_moves,
        )

    def chosen(self, select: Callable[..., object], transaction: RoundTransaction) -> list[int]:
        there = self.cohort.there(transaction.t)
        if not len(there):  # every process knows that, so they agree
            return []
        available = torch.as_tensor(there, dtype=torch.int64, device=transaction.round.w.device)
        n = min(self.cohort.number(transaction.t), len(available))
        with transaction.server_hooks():
            choice = self.methods.call(select, Server(transaction.round, transaction), available, n)
        ids = checked_choice(select, choice, available, n)
        # Processes that train different rounds would add up unrelated updates.
        if any(other != ids for other in gathered(ids)):
            raise ValueError(
                f"{getattr(select, '__qualname__', select)} chose other clients in another "
                "process. Its choice may depend only on what the server knows, and it has to draw "
                "from server.generator"
            )
        return ids

    def round_at(self, t: int) -> Round:
        """Facts of round t before its participants; also set the server optimizer's rates."""
        self.set_server_rates(t)
        w = self.model.w.detach()
        buffers = self.model.buffers()
        return Round(
            t=t,
            num_clients=self.cohort.m,
            w=w,
            w0=self.state.initial_vector,
            evaluated=self.model.evaluated.detach(),
            buffers=buffers,
            layout=self.model.layout,
            rates=self.client_rates,
            read=self.state.rows.read,
            server_states=dict(self.state.server),
            parts=self.parts,
            seed=self.cohort.seed,
            all_sizes=self.cohort.data.client_sizes,
            steps_of=self.cohort.steps_of,
            steps_in=partial(self.cohort.steps_in, t),
            epoch_batches=self.cohort.data.batches_per_epoch,
            home=self.state.rows.at_home,
            own_buffers=self.buffers.own(buffers),
            noise=None if self.methods.draws_from is None else self.cohort.key,
            noise_of_clients=self.noise_of_clients,
            sent=self.state.sent,
            base_due=None if self.state.base is None else self.state.base.due,
            outputs=partial(self.model.outputs, buffers=buffers),
        )

    def set_server_rates(self, t: int) -> None:
        self.server_step.begin(decay_factor(self.settings.server_lr_decay, t))

    def broadcast(self, server: Server) -> Tensor | None:
        owner = self.methods.owner("broadcast")
        if owner is None:
            return None
        given = checked_rows(owner, self.methods.call(owner, server), server.w)
        # The method may keep the tensor that it returned, and w changes in place.
        given = given.detach().to(server.w).clone()
        check_finite(given, server.round, "the model that is sent to clients")
        return given

    def train(self, round: Round, transaction: RoundTransaction) -> tuple[Total, list[int]]:
        """Train this process's share, and return the sum over all participants and who diverged."""
        clients = share_of(round.ids, self.rank, self.world_size)
        contributions = UpdateAccumulator(transaction, self.methods, len(clients), self.buffers)
        done = 0

        def one_more() -> None:
            nonlocal done
            done += 1
            self.progress(done, len(clients))

        leaves = [(leaf, clients[leaf]) for leaf in visiting_order(len(clients))]
        transaction.make_server_states(self.methods.declared)
        for trained, group in self.by_version(round, transaction, leaves):
            with transaction.clients_at(trained.t), self.methods.telling(self.assigned_by_clients):
                self.engine.train(trained, group, contributions, one_more)
        sums, diverged = contributions.total()
        self.buffers.name_kept(contributions.changed, self.note)
        return sums, diverged

    def by_version(
        self, round: Round, transaction: RoundTransaction, leaves: list[tuple[int, int]]
    ) -> Iterator[tuple[Round, list[tuple[int, int]]]]:
        """Return (leaf, client) pairs by the version of the model from which they train.

        Each group comes with a ``Round`` that has this version's number, w, buffers and rates.
        In synchronous runs there is one group, of the round itself.
        """
        planned = transaction.planned
        if planned is None or set(planned.versions.values()) <= {round.t}:
            yield round, leaves
            return
        for v in sorted({planned.versions[client] for _, client in leaves}):
            group = [(leaf, client) for leaf, client in leaves if planned.versions[client] == v]
            w, buffers = self.state.versions[v] if v < round.t else (round.w, round.buffers)
            steps = {client: round.steps[client] for _, client in group}
            rates = self.client_rates.in_round(
                v, decay_factor(self.settings.lr_decay, v), steps.values()
            )
            of_version = replace(round, t=v, w=w, buffers=buffers, rates=rates)
            yield replace(of_version, current_w=round.w), group
        # The sequential engine leaves the learner with the buffers of the last group's version. Put
        # the present ones back.
        self.model.set_buffers(round.buffers)

    def server_states(self, transaction: RoundTransaction) -> dict[str, Tensor]:
        states = transaction.server_states_to_commit(self.methods.declared)
        if not self.server_steps(transaction):
            states = self.methods.of_every_round(states)
        if self.parts is not None:
            states |= self.parts.after(transaction.t, self.state.server, bool(transaction.finished))
        return states

    def versions(self, transaction: RoundTransaction, server: Server) -> Versions:
        """Return the models and buffers from which clients still train after this round."""
        needed = frozenset[int]() if transaction.planned is None else transaction.planned.needed
        kept = {v: model for v, model in self.state.versions.items() if v in needed}
        if transaction.t in needed:
            kept[transaction.t] = server.w_before, transaction.round.buffers
        return kept

    def finished(self, round: Round, diverged: list[int], dropped: list[int]) -> list[int]:
        """The clients that finished: all that neither dropped nor sent values not finite."""
        if diverged and self.settings.on_nonfinite == "stop":
            what = f"the update of client {diverged[0]} or a model that it keeps or sends"
            raise Diverged(diverged_text(round.t, what))
        if diverged:
            self.note(
                f"round {round.t}: clients {diverged} were left out, because their updates are not "
                "finite"
            )
        out = {*diverged, *dropped}
        return [i for i in round.ids if i not in out]

    def update(self, transaction: RoundTransaction, server: Server) -> None:
        """Set ``server.update``: aggregated, and changed by methods; zero without a step."""
        if not self.server_steps(transaction):
            server.update = torch.zeros_like(server.w)
            return
        transaction.takes_additions = True
        server.update = server_update.aggregated(transaction, self.methods, server)
        if self.methods.owner("neighbours") is None:
            self.methods.run("on_server_update", server)
        else:
            refuse_other_updates(self.methods, server)
        transaction.takes_additions = False
        server.update = server_update.masked(server)

    def server_steps(self, transaction: RoundTransaction) -> bool:
        """Whether the server takes a step: a client finished, or a method needs no client."""
        return bool(transaction.finished) or self.methods.aggregates_nobody

    def changed_base(self, transaction: RoundTransaction) -> BaseAfter | None:
        """Return the frozen weights that methods change, after the round.

        Raises:
            Diverged: they are not finite.
        """
        if self.state.base is None:
            return None
        after: BaseAfter = self.state.base.after(transaction.additions)
        for values in after[0].values():
            check_finite(values, transaction.round.t, "the base that the server changed")
        return after

    def step(self, transaction: RoundTransaction, server: Server) -> None:
        """Take the server optimizer's step to w^{t+1}.

        Raises:
            Diverged: w^{t+1} is not finite.
        """
        # Lightning counts one step per epoch, so the step is taken even if no client finished. It
        # then changes neither the coordinates nor the optimizer's state.
        moves = server.moves
        if not self.server_steps(transaction):
            moves = torch.zeros_like(server.w, dtype=torch.bool)
        self.server_step.step(self.model.w, server.update, moves)
        check_finite(server.w, server.round, "the server's model")

    def evaluate(self, transaction: RoundTransaction, server: Server) -> None:
        """Set the model that is evaluated from now on, and the server's buffers."""
        owner = self.methods.owner("evaluated")
        if owner is None:
            vector = server_update.evaluated(transaction, server)
        else:
            vector = checked_rows(owner, self.methods.call(owner, server), server.w)
            vector = vector.detach().to(server.w).clone()
        self.model.evaluate_at(vector)
        server.evaluated = self.model.evaluated.detach()
        self.model.set_buffers(server_update.averaged_buffers(transaction.round, transaction.total))

    def exchange(self, transaction: RoundTransaction, server: Server) -> None:
        """Let clients exchange values with their neighbours, if a method says who they are."""
        if self.methods.owner("neighbours") is None or not transaction.finished:
            return
        rows = self.state.rows
        exchange = NeighbourExchange(transaction, self.methods, rows, self.rank, self.world_size)
        with transaction.server_hooks(), self.methods.telling(self.assigned_at_server):
            transaction.neighbourhood = exchange.neighbourhood(server)
        with self.methods.telling(self.assigned_by_clients):
            exchange.run(transaction.neighbourhood)

    def metrics(self, transaction: RoundTransaction, server: Server) -> RoundMetrics:
        for text in transaction.notes:
            self.note(text)
        learner = self.model.learner
        metrics, self.loss = metrics_of_round(transaction, server, learner, self.note)
        self.logged_metrics = metric_states.logged_in(learner, transaction.metrics)
        return metrics


RoundMetrics = dict[str, float]
TIMES = frozenset({"time/round", "time/cpu"})  # names that are logged when a round is over


def metrics_of_round(
    transaction: RoundTransaction,
    server: Server,
    learner: Any,
    note: Callable[[str], None],
) -> tuple[RoundMetrics, float | None]:
    """Return a round's metrics by name, and its loss.

    The loss is the mean over clients of their steps' losses; None if no callback reads it.

    Args:
        note: function that reports a text to the user.
    """
    means: dict[str, float] = {}
    for name, total in transaction.total.logs.items():
        # A client need not log every name, so each name has its own number of values.
        means[name] = float(total / transaction.total.logged[name])
    loss = means.pop(LOSS, None)
    logged = {name: float(value) for name, value in server.logs.items()}
    metrics = metric_states.merged_into(learner, transaction.metrics, note)
    logged["cost/gradients"] = traffic.counted(transaction, traffic.GRADIENTS)
    logged["cost/forwards"] = traffic.counted(transaction, traffic.FORWARDS)
    logged["client_lr"] = float(transaction.round.rates.lr)
    if transaction.planned is not None:
        logged |= transaction.planned.metrics
    for name in sorted((means.keys() | metrics.keys()) & (logged.keys() | TIMES)):
        note(
            f"{name} is logged by the learner and by the run, and the run's value replaces the "
            "learner's. Log the learner's under another name"
        )
    return {**means, **metrics, **logged}, loss
