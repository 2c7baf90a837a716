"""The federated loop: one round, from the token to the commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_lightning.aggregation import metric_states, server_update, traffic
from fl_lightning.aggregation.contributions import Contributions
from fl_lightning.aggregation.server_update import ServerStep, diverged_text
from fl_lightning.aggregation.tree_sum import visiting_order
from fl_lightning.buffers import BufferPolicy
from fl_lightning.engines.engine import Engine
from fl_lightning.errors import Diverged
from fl_lightning.learner import all_finite
from fl_lightning.methods import Methods, checked_choice
from fl_lightning.processes import gathered
from fl_lightning.round.clients import LOSS
from fl_lightning.round.cohort import Cohort
from fl_lightning.round.context import ClientRates, Round
from fl_lightning.round.global_model import GlobalModel
from fl_lightning.round.ledger import Ledger
from fl_lightning.round.partial import Parts
from fl_lightning.round.server import Server
from fl_lightning.schedules import decay_factor
from fl_lightning.settings import Settings
from fl_lightning.storage.run_state import RunState

Metrics = dict[str, float]
Participants = Callable[[int], tuple[int, ...]]  # of round t, ascending


@dataclass
class FederatedLoop:
    """Runs rounds on the objects of a run; a round that fails leaves all of them as if it had never
    begun.

    Args:
        client_rates: the client optimizer's settings before any decay.
        participants: who is sampled in a round.
        report: takes a round's metrics, before it is committed.
        tell: called after each client with how many are done, of how many of this process.
        note: takes what the user should know.
        buffers: what becomes of the learner's.
        rank, world_size: of this process, which trains every ``world_size``-th participant.
        present: the latest round that began, and who takes part in it.
        loss: the latest round's mean over clients of their steps' losses; None where nobody asks.
    """

    settings: Settings
    model: GlobalModel
    cohort: Cohort
    methods: Methods
    state: RunState
    engine: Engine
    server_step: ServerStep
    client_rates: ClientRates
    parts: Parts | None
    participants: Participants
    report: Callable[[Metrics, int], None]
    tell: Callable[[int, int], None]
    note: Callable[[str], None]
    buffers: BufferPolicy
    rank: int = 0
    world_size: int = 1
    present: tuple[int, tuple[int, ...]] = (-1, ())
    loss: float | None = None

    def run_round(self, t: int) -> Metrics:
        """Round t, committed when this returns; gives what was logged."""
        began = time.perf_counter()
        busy = time.process_time()
        ledger = self.begin(t)
        round = ledger.round
        with ledger.server_hooks():
            self.methods.run("on_round_start", Server(round, ledger))

        ledger.total, diverged = self.train(round, ledger)
        ledger.finished = self.finished(round, diverged)

        server = Server(round, ledger)
        server.w_before, undo = self.server_step.undoing(self.model)
        try:
            with ledger.server_hooks():
                self.update(ledger, server)
                self.step(ledger, server)
                self.evaluate(ledger, server)
                server.communication = traffic.of_round(ledger, self.methods)
                server.kept_vectors = traffic.kept_vectors(ledger)
                if ledger.finished:
                    self.methods.run("on_round_end", server)
            metrics = self.metrics(ledger, server)
            rows = self.state.rows.bring_home(
                ledger.settled_rows(self.methods.declared) if ledger.finished else {}
            )
            if self.counts(ledger):
                server_states = ledger.settled_server(self.methods.declared)
            else:
                server_states = {}
            metrics["time/round"] = time.perf_counter() - began
            if self.model.w.device.type == "cpu":  # elsewhere a processor's seconds say little
                metrics["time/cpu"] = sum(gathered(time.process_time() - busy))
            self.report(metrics, t)
            chosen = tuple(round.ids) if self.methods.owner("select") else None
            self.state.commit(t, rows, server_states, metrics, chosen)
            ledger.rows = {}  # the store has them, in memory or on disk
        except BaseException:
            if not self.state.settle(t):
                undo()
            raise
        self.state.rows.store.make_room()  # if this fails, the round is committed all the same
        return metrics

    def begin(self, t: int) -> Ledger:
        """The facts of the round, from which model and at which rates; then who takes part:
        sampled, or chosen.
        """
        ledger = Ledger(self.facts(t))
        self.methods.bind(ledger)
        select = self.methods.owner("select")
        ids = list(self.participants(t)) if select is None else self.chosen(select, ledger)
        self.state.rows.fetch(ids)  # from here on their rows are known here, whoever owns them
        steps = {i: self.cohort.steps(i) for i in ids}
        sizes = self.cohort.sizes(ids)
        ledger.round = replace(
            ledger.round,
            ids=ids,
            steps=steps,
            sizes=sizes,
            weights={
                i: float(sizes[i]) if self.settings.weighting == "samples" else 1.0 for i in ids
            },
            optimizer_rows=[n for n in self.state.rows.names() if n.startswith("optimizer.")],
            rates=self.client_rates.in_round(
                t, decay_factor(self.settings.lr_decay, t), max(steps.values(), default=1)
            ),
        )
        self.present = t, tuple(ids)
        self.model.hold(ledger.round.buffers)
        return ledger

    def chosen(self, select: Callable[..., object], ledger: Ledger) -> list[int]:
        """Who takes part by the choice of a method, ascending; the same in every process."""
        available = torch.arange(self.cohort.m, device=ledger.round.w.device)
        n = min(self.cohort.number(ledger.t), len(available))
        with ledger.server_hooks():
            given = select(Server(ledger.round, ledger), available, n)
        ids = checked_choice(select, given, available, n)
        if any(other != ids for other in gathered(ids)):
            raise ValueError(
                f"{getattr(select, '__qualname__', select)} chose other clients in another "
                "process; it may depend on what the server knows alone, and draws from "
                "server.generator"
            )
        return ids

    def facts(self, t: int) -> Round:
        """The facts of round t, before it is known who takes part."""
        self.server_step.begin(decay_factor(self.settings.server_lr_decay, t))
        w = self.model.w.detach()
        initial = self.state.initial_vector
        buffers = self.model.buffers()
        return Round(
            t=t,
            ids=[],
            steps={},
            sizes={},
            weights={},
            num_clients=self.cohort.m,
            w=w,
            w0=w if initial is None else initial,
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
            home=self.state.rows.at_home,
            own_buffers=self.buffers.own(buffers),
            noise=None if self.methods.draws_from is None else self.cohort.coins,
        )

    def train(self, round: Round, ledger: Ledger) -> tuple[dict[str, Tensor], list[int]]:
        """Train this process's participants; gives the ordered sum over all of the round's, and who
        diverged.
        """
        own = round.ids[self.rank :: self.world_size]
        contributions = Contributions(ledger, self.methods, len(own), self.buffers)
        done = 0

        def tell() -> None:
            nonlocal done
            done += 1
            self.tell(done, len(own))

        self.engine.train(
            round, [(leaf, own[leaf]) for leaf in visiting_order(len(own))], contributions.add, tell
        )
        total = contributions.total()
        self.buffers.tell(contributions.changed, self.note)
        return total

    def finished(self, round: Round, diverged: list[int]) -> list[int]:
        """The clients that finished: all but those whose update is not finite."""
        if diverged and self.settings.on_nonfinite == "stop":
            raise Diverged(diverged_text(round.t, f"the update of client {diverged[0]}"))
        if diverged:
            self.note(
                f"round {round.t}: clients {diverged} were left out, their updates are not finite"
            )
        return [i for i in round.ids if i not in set(diverged)]

    def update(self, ledger: Ledger, server: Server) -> None:
        """``server.update``: aggregated, and changed by methods; zero where the server takes no
        step.
        """
        if not self.counts(ledger):
            server.update = torch.zeros_like(server.w)
            return
        server.update = server_update.aggregated(ledger, self.methods, server)
        self.methods.run("on_server_update", server)
        server.update = server_update.masked(server)

    def counts(self, ledger: Ledger) -> bool:
        """Whether the server takes a step: where a client finished, or a method has it step without
        any.
        """
        return bool(ledger.finished) or self.methods.aggregates_nobody

    def step(self, ledger: Ledger, server: Server) -> None:
        """The server optimizer's step to w^{t+1}.

        Raises:
            Diverged: w^{t+1} is not finite.
        """
        if self.counts(ledger):
            keep = server.averaged
        else:
            keep = torch.zeros_like(server.w, dtype=torch.bool)
        self.server_step.step(self.model.w, server.update, keep)
        if not all_finite(server.w):
            raise Diverged(diverged_text(server.round, "the server's model"))

    def evaluate(self, ledger: Ledger, server: Server) -> None:
        """What is evaluated from here on, and the server's buffers."""
        self.model.evaluate_at(server_update.evaluated(ledger, server))
        server.evaluated = self.model.evaluated.detach()
        self.model.set_buffers(server_update.averaged_buffers(ledger.round, ledger.total))

    def metrics(self, ledger: Ledger, server: Server) -> Metrics:
        """What the learner, clients' and server hooks logged; sets ``loss``, and says what there is
        to note.
        """
        self.warn_of_mean_gradient(ledger)
        for text in ledger.notes:
            self.note(text)
        total = ledger.total
        means = {
            k[4:]: float(total[k] / total["num:" + k[4:]]) for k in total if k.startswith("log:")
        }
        self.loss = means.pop(LOSS, None)
        logged = {name: float(value) for name, value in server.logs.items()}
        metrics = metric_states.merged_into(self.model.learner, ledger.metrics)
        logged["cost/gradients"] = traffic.gradients(ledger)
        return {**means, **metrics, **logged, "client_lr": float(ledger.round.rates.lr)}

    def warn_of_mean_gradient(self, ledger: Ledger) -> None:
        """Say where ``clients.mean_gradient`` was read, but is not the mean of the steps'
        gradients.
        """
        if not ledger.mean_gradient_read:
            return
        rates = self.client_rates
        what = f"{ledger.mean_gradient_read} takes a client's displacement / (Σ η) for the mean gradient of its steps"
        if rates.optimizer == "SGD" and rates.momentum:
            self.note(
                f"{what}; with momentum={rates.momentum:g} it is up to "
                f"{1 / (1 - rates.momentum):.3g} times that"
            )
        elif not rates.plain_sgd:
            self.note(
                f"{what}; a step of {rates.optimizer} is not its gradient times the learning "
                "rate, so what the method keeps is on another scale than the gradients that it "
                "is added to. SGD is what the method is made for"
            )
        if float(ledger.total.get("log:clipped_steps", 0)) > 0:
            self.note(
                f"{what}; clipping is active (clip_norm={self.settings.clip_norm:g}), so it is "
                "less than that"
            )
