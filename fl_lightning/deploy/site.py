"""A site: it trains its clients as the simulation does, round by round, as the server asks."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.aggregation import traffic
from fl_lightning.aggregation.metric_states import refuse_samples
from fl_lightning.aggregation.over_processes import visiting_order
from fl_lightning.aggregation.update_accumulator import UpdateAccumulator
from fl_lightning.callbacks import PerClientEvaluation
from fl_lightning.client.gradient_accumulation import batches_in
from fl_lightning.deploy import progress, questions, round_messages, what_leaves
from fl_lightning.deploy.answers import KINDS
from fl_lightning.deploy.fields import tensor_of
from fl_lightning.deploy.same_config import config_of
from fl_lightning.deploy.sent_model import BaseAtSite, completed
from fl_lightning.deploy.site_rows import SiteRows
from fl_lightning.deploy.transport import Array, Message, Number, Post, visible, words
from fl_lightning.deploy.what_leaves import LOGGED, told
from fl_lightning.engines.forked import Forked
from fl_lightning.errors import UserError
from fl_lightning.evaluation import personal_models
from fl_lightning.loop import FederatedLoop, RoundMetrics
from fl_lightning.machine.escaping import plain_lines
from fl_lightning.machine.lightning import pl
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.clients import Clients
from fl_lightning.round.context import Round
from fl_lightning.round.declared_state import Declaration
from fl_lightning.round.partial_training import mask_of_round
from fl_lightning.round.transaction import RoundTransaction
from fl_lightning.run import FederatedRun
from fl_lightning.schedules import decay_factor

ELSEWHERE = -1  # in place of the participants at other sites


class Ended(Exception):
    """The server has no more messages."""


class AtSite(pl.Callback):
    """Makes a fit a site: its first epoch serves a server until that ends, and then raises Ended.

    Args:
        clients: numbers of the site's clients, in the data.
        folder: the folder of their rows.
        own: whether the site brought its data; the server then knows only what the site sends.
        fewest_samples: metrics of a client with fewer samples stay at the site. 0: all are sent.
        first: a message that was taken from the post before.
    """

    # The server asks a site to measure its clients if the run's callbacks need it.
    measures_clients = True
    at_site = True  # which methods read

    def __init__(
        self,
        post: Post,
        clients: Sequence[int],
        folder: Path,
        own: bool = False,
        fewest_samples: int = 0,
        first: Message | None = None,
    ) -> None:
        self.post = post
        self.clients = list(clients)
        self.folder = folder
        self.own = own
        self.first = first
        self.fewest_samples = fewest_samples

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        m = int(trainer.datamodule.num_clients)
        for client in self.clients:
            if not 0 <= client < m:
                raise UserError(
                    f"clients={self.clients}: there is no client {client}; the data have {m}, "
                    f"0 to {m - 1}."
                )
        run: FederatedRun = pl_module.run
        assert run.loop is not None
        kept = run.settings.keep_optimizer_state
        optimizer = run.optimizers.accounts["client_optimizer"] if kept else ""
        rows = SiteRows(self.folder, run.state.rows.store, optimizer)
        run.loop = Site(trainer, run.loop, self, rows)

    def one_client(self, module: Any) -> dict[str, float] | None:
        return None


class Site(FederatedLoop):
    """Replaces a run's rounds: it computes a site's share of a server's rounds."""

    def __init__(self, trainer: Any, loop: FederatedLoop, at: AtSite, rows: SiteRows) -> None:
        vars(self).update(vars(loop))
        # A client's message is packed here, where its codes are, and not in forked processes.
        if isinstance(self.engine, Forked):
            self.engine = self.engine.one_after_the_other()
        self.trainer = trainer
        self.module = trainer.lightning_module
        # before hooks of rounds change the learner
        self.config = config_of(self.module.run, self.cohort.data, at.clients[0])
        self.post = at.post
        self.first = at.first
        self.clients = at.clients
        measuring = [c for c in trainer.callbacks if isinstance(c, PerClientEvaluation)]
        own = [float(c.finetune_epochs) for c in measuring]
        self.finetune_epochs = {0.0, *own} if own else set()
        self.rows = rows
        self.own_data = at.own
        self.fewest_samples = at.fewest_samples
        self.greeted = False  # whether the server knows this process's data
        self.given: Tensor | None = None  # the last complete w that the server sent
        self.question = -1  # number of the question that brought it
        self.w0: Tensor | None = None
        self.base = None if self.state.base is None else BaseAtSite(self.state.base)

    def run_round(self, t: int) -> RoundMetrics:
        """Answer the server until it ends.

        Raises:
            Ended: there are no more messages.
        """
        try:
            while (message := self.first or self.post.take()) is not None:
                self.first = None
                answer = self.answer(message)
                what_leaves.note(self.rows.folder, message, answer)
                self.post.give(answer)
        finally:
            self.rows.lock.release()
        raise Ended

    def answer(self, message: Message) -> Message:
        """Return the site's answer to a message, with the number of the question."""
        answer = self._answer(message)
        if "question" in message.numbers:
            answer.numbers["question"] = message.numbers["question"]
        return answer

    def _answer(self, message: Message) -> Message:
        answers = {"hello": self.here, "round": self.trained, "evaluate": self.evaluated}
        try:
            if message.what not in answers:
                raise UserError(
                    f"the message {visible(message.what)!r} is not known; do server and site have "
                    "the same version?"
                )
            if message.what != "hello" and not self.greeted:
                return Message("lost", message.site)
            questions.check(message, self)
            return answers[message.what](message)
        except Exception as error:
            # The text stays here: it may quote a cell.
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            text = f"{visible(message.what)}: {kind}{error}{notes}"
            print(plain_lines(text[:LOGGED]), file=sys.stderr, flush=True)
            failed = Message("failed", message.site)
            failed.numbers["user"] = int(isinstance(error, UserError))
            who = f"client{'s' * (len(self.clients) > 1)} {', '.join(map(str, self.clients))}: "
            failed.arrays["text"] = words(f"{who}{told(error)}")
            return failed

    def here(self, message: Message) -> Message:
        """Return the site's clients and config, with their samples and the batches of an epoch."""
        m = int(message.numbers["m"])
        if m != self.cohort.m:
            raise UserError(
                f"data.num_clients: the server's run has {m} clients, and the site's config "
                f"{self.cohort.m}. Server and site need the same config."
            )
        if self.own_data:
            round_messages.check_names(message.arrays, self.cohort.data)
        self.rows.check(int(message.numbers["run"]))
        data = self.cohort.data
        sizes = data.client_sizes()
        lists: dict[str, Sequence[int]] = {
            "clients": self.clients,
            "sizes": [sizes[i] for i in self.clients],
            "batches": [data.batches_per_epoch(i) for i in self.clients],
        }
        if message.numbers.get("tests") and self.finetune_epochs:
            lists["tests"] = [*map(self.tests_of, self.clients)]
        arrays: dict[str, Array] = {n: np.asarray(each, np.int64) for n, each in lists.items()}
        arrays["config"] = words(json.dumps(self.config))
        numbers: dict[str, Number] = {"run": message.numbers["run"], "place": self.rows.place}
        numbers["own"] = int(self.own_data)
        self.greeted = True
        return Message("here", message.site, numbers, arrays)

    def trained(self, message: Message) -> Message:
        """Train the clients that the message names, and keep both their new and their old rows."""
        numbers = message.numbers
        t = int(numbers["round"])
        self.rows.check(int(numbers["run"]))
        if self.lacks_model(message):
            return self.whole(message)
        counted = counted_in(message)
        mine = list(counted)
        self.rows.settle(counted)
        transaction = AtSiteLedger(self.round_of(t, message, mine))
        self.methods.bind(transaction)
        round = replace(transaction.round, trained=mask_of_round(self.methods, transaction.round))
        transaction.round = round
        contributions = AtSiteContributions(transaction, self.methods, len(mine), self.buffers)
        answer = Message("trained", message.site, {"run": numbers["run"], "round": t})
        declared = self.methods.declared
        finished: list[int] = []
        lock = threading.Lock()

        def collect(leaf: int, group: ClientGroup) -> None:
            home = contributions.result_of(group)
            if home.metrics is not None:
                refuse_samples(self.module.learner, home.metrics)
            # The engine may train clients in parallel.
            with lock:
                if home.finished:
                    finished.append(home.client)
                    home.kept = traffic.kept_numbers(home.rows, self.methods)
                    home.withheld = self.withholds(home.client, t, round.steps[home.client])
                for key, row in home.rows.items():
                    transaction.rows.setdefault(key, {})[home.client] = row
                code = contributions.codes.pop(home.client, None)
                # Copy the values before the engine reuses the client's memory.
                round_messages.packed_client(answer, home, round, code, declared)

        leaves = [(leaf, mine[leaf]) for leaf in visiting_order(len(mine))]
        with self.methods.telling(self.assigned_by_clients):
            self.engine.train(round, leaves, collect, lambda: None)
        for name in contributions.changed:
            answer.numbers["changed/" + name] = 1
        written = transaction.rows_to_commit(self.methods.declared)
        self.rows.stage(int(numbers["run"]), t, written, finished)
        return answer

    def evaluated(self, message: Message) -> Message:
        """Measure the models that the clients would use themselves, on their test samples.

        The clients' rows are read as of the round that the server names, and nothing is committed,
        because the server's checkpoint may be of the round before.
        """
        numbers = message.numbers
        self.rows.check(int(numbers["run"]))
        if self.lacks_model(message):
            return self.whole(message)
        counted = counted_in(message)
        data = self.cohort.data
        read = self.rows.reading(counted)
        round = self._taken(message, max(int(numbers["round"]), 0))
        round = replace(round, read=read, sizes=personal_models.SampleCounts(data))
        run: FederatedRun = self.module.run
        models = personal_models.PersonalModels(round, self.methods, run.evaluate, AtSiteLedger)
        epochs = numbers["epochs"]
        samples = {client: self.tests_of(client) for client in counted}
        tested = [client for client, number in samples.items() if number]
        measured = personal_models.measured(run, self.trainer, tested, epochs, models)
        answer = Message("evaluated", message.site)
        answer.numbers = {"run": numbers["run"], "round": numbers["round"]}
        answer.arrays["clients"] = np.asarray(list(counted), np.int64)
        answer.arrays["tests"] = np.asarray(list(samples.values()), np.int64)
        for client in tested:
            for word, kind in KINDS.items():
                for name, value in measured[client].get(kind, {}).items():
                    answer.numbers[f"{client}/{word}/{name}"] = value
        return answer

    def withholds(self, client: int, t: int, steps: int) -> bool:
        """Return whether the metrics of a client's local steps stay at the site, because they are
        of too few samples.
        """
        if self.fewest_samples <= 1:
            return False
        (samples,) = self.cohort.sizes([client]).values()
        batches = max(int(self.cohort.data.batches_per_epoch(client)), 1)
        # A round may read fewer samples than the client has.
        read = batches_in(steps, batches, self.cohort.accumulate) * -(-samples // batches)
        choose = self.methods.owner("step_samples")
        if choose is not None:
            read = len({*chain.from_iterable(choose(client, t, steps))})
        return min(samples, read) < self.fewest_samples

    def tests_of(self, client: int) -> int:
        """Return a client's number of test samples; 0 if they are too few for their metrics to
        leave the site.
        """
        number = len(self.cohort.data.client_test_indices(client))
        return number if number >= self.fewest_samples else 0

    def lacks_model(self, message: Message) -> bool:
        """Return whether the message builds on a model that the site does not have."""
        # A restarted site has neither w nor w^0. The server may not know of the restart, so the
        # site asks for them.
        lacks = message.numbers.get("since", self.question) != self.question
        if self.methods.start_from_w0 and "w0" not in message.arrays:
            lacks |= self.w0 is None
        return lacks or (self.base is not None and self.base.lacks(message))

    def whole(self, message: Message) -> Message:
        """Ask for the parts of the model that the site lacks, and report which base it has."""
        numbers = {name: message.numbers[name] for name in ("run", "round")}
        numbers["base"] = 0 if self.base is None else self.base.mark
        return Message("whole", message.site, numbers)

    def round_of(self, t: int, message: Message, mine: list[int]) -> Round:
        """Return the facts of round t from the message, with only this site's clients to train."""
        round = self._taken(message, t)
        weights = dict.fromkeys(mine, 1.0)
        if "weights" in message.arrays:
            weights = dict(zip(mine, message.arrays["weights"].tolist(), strict=True))
        # The sum has to be that of all participants, as in the simulation.
        weights[ELSEWHERE] = float(message.numbers["total_weight"]) - sum(weights.values())
        steps = self.cohort.steps_in(t, mine)
        factor = decay_factor(self.settings.lr_decay, t)
        return replace(
            round,
            ids=mine,
            steps=steps,
            sizes=self.cohort.sizes(mine),
            weights=weights,
            optimizer_rows=[n for n in self.state.rows.names() if n.startswith("optimizer.")],
            rates=self.client_rates.in_round(t, factor, steps.values()),
        )

    def _taken(self, message: Message, t: int) -> Round:
        """Return the facts of round t at the model that the message brings."""
        self._take_model(message)
        round = self.round_at(t)
        if "evaluated" not in message.arrays:
            return round
        return replace(round, evaluated=tensor_of(message.arrays["evaluated"]).to(round.w))

    def _take_model(self, message: Message) -> None:
        """Set the model, its buffers and the server's states to the received ones."""
        progress.take(self.trainer, message.numbers)
        w = self.model.w
        if self.given is None or "since" not in message.numbers:
            self.given = torch.zeros(w.shape, dtype=w.dtype)
        self.given = completed(message, self.given, self.methods, self.model.layout)
        self.question = int(message.numbers.get("question", -1))
        if self.base is not None:
            self.base.take(message)
        if "w0" in message.arrays:
            self.w0 = tensor_of(message.arrays["w0"]).to(w.device)
        self.model.move_to(self.given.to(w), None, round_messages.under(message.arrays, "buffer/"))
        states = round_messages.under(message.arrays, "state/")
        self.state.server = {key: value.to(w.device) for key, value in states.items()}
        if self.methods.start_from_w0:
            self.state.initial_vector = self.w0


def counted_in(message: Message) -> dict[int, int]:
    """Return the clients that a message is about, each with its last round that counted; -1:
    none.
    """
    clients = message.arrays["mine"].tolist()
    return dict(zip(clients, message.arrays["counted"].tolist(), strict=True))


class AtSiteLedger(RoundTransaction):
    """A round at a site: it knows only those server states that are sent to clients."""

    def server_state(self, key: str, declaration: Declaration) -> Tensor:
        if key not in self.round.server_states:
            raise UserError(
                f"method: {key} is read in a hook that takes clients, but it is not sent to "
                "clients, so sites do not have it. Declare it as ServerState(sent=True)."
            )
        return super().server_state(key, declaration)


class AtSiteContributions(UpdateAccumulator):
    """Clients' contributions at a site, with messages in fewer bytes from methods that can
    write them.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.codes: dict[int, dict[str, Array]] = {}

    def transmitted(self, group: ClientGroup, update: Tensor) -> Tensor:
        sent = super().transmitted(group, update)
        owner = self.methods.owner("transmit")
        callback: Any = getattr(owner, "__self__", None)
        if callback is not None and callback.has("encode"):
            code = callback.encode(Clients(group), update)
            self.codes[group.ids[0]] = {name: np.array(array) for name, array in code.items()}
        return sent


def numbers_of(text: str) -> list[int]:
    """Return the client IDs in ``"0,3,5"``.

    Raises:
        UserError: the text has another form.
    """
    found = text.replace(" ", "").split(",")
    if not all(map(str.isdecimal, found)):
        raise UserError(
            f"clients={text!r}: give client IDs with commas between them, such as '0,3,5'."
        )
    return [int(word) for word in found]
