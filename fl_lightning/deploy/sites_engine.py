"""An engine whose clients train at sites: the server's side of the messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from fl_lightning.aggregation import traffic
from fl_lightning.aggregation.server_update import diverged_text
from fl_lightning.aggregation.update_accumulator import AT_SITES, ClientResult
from fl_lightning.callback_list import CallbackList
from fl_lightning.deploy import answers, round_messages
from fl_lightning.deploy.answers import Evaluated, Values
from fl_lightning.deploy.client_results import KnownMetrics, Results
from fl_lightning.deploy.fields import LONGEST_NAME, WrongField
from fl_lightning.deploy.progress import ServerProgress
from fl_lightning.deploy.register import ASK_AGAIN, Register
from fl_lightning.deploy.sent_model import SentBase, SentModel
from fl_lightning.deploy.site_data import Told
from fl_lightning.deploy.transport import Message, Number, Transport, visible
from fl_lightning.errors import Diverged, UserError
from fl_lightning.evaluation.personal_models import PersonalModel
from fl_lightning.loop import FederatedLoop
from fl_lightning.round.context import Round
from fl_lightning.round.model_parts import AVERAGED
from fl_lightning.round.transaction import RoundTransaction

Answer = TypeVar("Answer")
LATE = 30.0  # seconds of a question after which the terminal shows who has not answered
MOST_AGAIN = 10  # how often a site may be asked once more in one inquiry, with all of the model


@dataclass
class Inquiry(Generic[Answer]):
    """A question to the sites of some clients.

    Args:
        word: the kind of their answers.
        ask: function that returns the message for a site, about some of its clients.
        read: function that returns a site's checked answer about these clients.
        missing: clients that no site has been asked for.
        fits: function that returns whether a client may be asked for now, in view of its site.
        waiting: by site, the number of the question that it has not answered, and its clients.
        wrong: sites with wrong answers, each with what is wrong and the clients asked for.
        without: clients that bring nothing, because their sites' answers are wrong.
        again: how often sites asked for the whole model, or lost a message.
    """

    word: str
    ask: Callable[[str, list[int]], Message]
    read: Callable[[Message, list[int]], Answer]
    missing: set[int]
    fits: Callable[[int], bool] = lambda client: True
    waiting: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    wrong: dict[str, tuple[WrongField, list[int]]] = field(default_factory=dict)
    without: set[int] = field(default_factory=set)
    again: dict[str, int] = field(default_factory=dict)

    def take_back(self, site: str) -> None:
        """Note that a site does not answer its question: its clients may be asked for again."""
        _, clients = self.waiting.pop(site)
        self.missing |= {*clients}


class Sites:
    """An engine whose clients train at sites.

    ``config``: settings, methods and frozen weights, which sites need to have alike. ``progress``:
    the values that learners read of the run's progress. ``measured_names``: of metrics that the
    server itself measures. ``known``: what it knows of the metrics that clients log.
    ``validated``: the names that its learner's validation of a client logs. ``reads_evaluated``:
    whether a hook at sites reads the evaluated model.
    """

    def __init__(
        self,
        transport: Transport,
        loop: FederatedLoop,
        progress: ServerProgress,
        run: int,
        timeout: float,
        config: Mapping[str, Any],
    ) -> None:
        self.transport = transport
        self.loop = loop
        self.progress = progress
        self.facts: dict[str, Number] = {}  # the present round's numbers of `progress`
        self.run = run
        self.timeout = timeout
        self.register = Register(transport, loop, run, config, self.gone)
        self.measured_names: set[str] = set()
        self.known = KnownMetrics()
        self.validated: set[str] = set()
        self.base = None if loop.state.base is None else SentBase(loop.state.base)
        base = () if loop.state.base is None else loop.state.base.values
        progress.sent = {*base, *loop.buffers.as_buffers}
        self.reads_evaluated = any(c.asks_for("evaluated") for c in loop.methods.callbacks)
        self.sent = SentModel(loop.methods)
        codec = loop.methods.owner("transmit")
        callback: Any = getattr(codec, "__self__", None)
        self.decode: Callable[..., Any] | None = None
        if callback is not None and callback.has("decode"):
            self.decode = callback.decode
        elif callback is not None:
            loop.note(
                f"{type(callback).__name__} has no encode and decode: its clients send whole "
                "vectors"
            )

    def gone(self, site: str) -> None:
        """Note that a site has nothing of the model."""
        self.sent.forget(site)
        if self.base is not None:
            self.base.forget(site)

    def train(
        self,
        round: Round,
        leaves: list[tuple[int, int]],
        collect: Callable[[int, Any], None],
        tell: Callable[[], None],
    ) -> None:
        """Ask the sites of these clients to train them; clients without an answer in time have
        dropped.
        """
        self.facts = self.progress.numbers(round.t, round.t)
        leaf_of = {client: leaf for leaf, client in leaves}
        diverged: dict[int, str] = {}  # clients whose update is not finite → their site
        asked: set[int] = set()

        def fits(client: int) -> bool:
            # The round's weights were computed from the sizes that were known when it began.
            return self.loop.cohort.sizes([client])[client] == round.sizes[client]

        def ask(site: str, mine: list[int]) -> Message:
            asked.update(mine)
            message = self._message("round", round.t, round, site, mine)
            # A site is not told the numbers of samples of other sites' clients.
            message.numbers["total_weight"] = sum(round.weights.values())
            if any(weight != 1 for weight in round.weights.values()):
                weights = [round.weights[client] for client in mine]
                message.arrays["weights"] = np.asarray(weights, np.float64)
            return message

        results = Results(round, self.loop, self.decode, self.measured_names, self.known)
        read = partial(answers.trained, run=self.run, t=round.t, results=results)
        inquiry = Inquiry("trained", ask, read, {*leaf_of}, fits)
        for site, brought in self.answers(inquiry):
            self._note_left(site, brought.left)
            self.loop.buffers.name_kept(brought.changed, self.loop.note)
            for client, home in brought.clients.items():
                if home.finished:
                    home.rows[AT_SITES] = torch.tensor(round.t)
                else:
                    diverged[client] = site
                assert home.counts is not None
                # Only the server knows when it last sent the model to a client.
                traffic.count_down(home.counts, round, client, self.loop.methods)
                collect(leaf_of.pop(client), home)
                tell()
        self.judge(round.t, inquiry, diverged)
        self._note_withheld(results.withheld)
        silent = {*leaf_of} - inquiry.without
        if silent:
            self.loop.note(
                f"round {round.t}: clients {sorted(silent)} dropped: their sites did not answer "
                f"within timeout={self.timeout:g} s, or now report another number of samples than "
                "when the round began"
            )
        for client, leaf in leaf_of.items():
            counts = None
            if client in asked:
                counts = traffic.sent_down(round, client, self.loop.methods)
            collect(leaf, ClientResult(client, counts, answered=False))
            tell()

    def _note_left(self, site: str, left: Sequence[tuple[str, str]]) -> None:
        """Note values in a site's answer that do not count: field, and what is wrong with it."""
        if left:
            more = f" (and {len(left) - 1} more fields)" if len(left) > 1 else ""
            field, why = left[0]
            field = visible(field, LONGEST_NAME)
            self.loop.note(f"site {site}: the value in {field} is left out, because {why}{more}")

    def _note_withheld(self, withheld: list[bool]) -> None:
        """Note that metrics of a round's clients stay at their sites.

        ``withheld``: whether they do, of each client that finished.
        """
        if any(withheld):
            which = "all" if all(withheld) else "some"
            self.loop.note(
                f"the training metrics of {which} clients of a round stay at their sites, because "
                "fewer samples than their sites' fewest_samples are behind them. The round's "
                "values are those of the other clients. You can monitor a metric of the server's "
                "validation, or lower fewest_samples in site.yaml"
            )

    def judge(self, t: int, inquiry: Inquiry[Any], diverged: Mapping[int, str]) -> None:
        """Stop the run, or go on without the clients whose sites sent wrong answers.

        Raises:
            Diverged: with ``on_nonfinite="stop"``, numbers are not finite.
            UserError: with ``on_nonfinite="stop"``, answers are wrong otherwise.
        """
        wrong = {site: f"site {site}: {error}" for site, (error, _) in inquiry.wrong.items()}
        if wrong and not self.register.skips:
            finite = any(error.finite for error, _ in inquiry.wrong.values())
            raise (UserError if finite else Diverged)(
                f"round {t}: answers do not fit what this run declares ({'; '.join(wrong.values())}"
                "). Server and site need the same config and version. Look at the site, or leave "
                "such sites out of their rounds with on_nonfinite='skip'."
            )
        if diverged and not self.register.skips:
            each = [f"client {i} at site {site}" for i, site in sorted(diverged.items())]
            raise Diverged(diverged_text(t, f"the update of {', of '.join(each)}"))
        for site, text in wrong.items():
            clients = inquiry.wrong[site][1]
            self.loop.note(
                f"round {t}: the answer of {text}. Its clients {clients} are left out of this round"
            )
            self.register.was_wrong(site, inquiry.word, t, text)

    def answers(self, inquiry: Inquiry[Answer]) -> Iterator[tuple[str, Answer]]:
        """Ask the sites of the clients, again if necessary, until the time is over.

        Yields:
            Each site with its answer, which is about all clients that the site was asked for.
        """
        until = time.monotonic() + self.timeout
        late = time.monotonic() + min(LATE, self.timeout / 2)
        register, waiting = self.register, inquiry.waiting
        while True:
            gone = inquiry.missing & (register.clients_of_refused - register.holder.keys())
            inquiry.without |= gone
            inquiry.missing -= gone
            left = until - time.monotonic()
            if not (waiting or inquiry.missing) or left <= 0:
                return
            if time.monotonic() >= late:
                away = sorted(inquiry.missing.union(*(asked for _, asked in waiting.values())))
                print(f"waiting for clients {away}, at most {left:.0f} s more", flush=True)
                late = until
            register.find()
            for site in waiting.keys() - register.known.keys():
                inquiry.take_back(site)
            self._ask(inquiry)
            for message in self.transport.receive(min(left, ASK_AGAIN)):
                site = message.site
                try:
                    answer = self._heard(inquiry, message)
                except WrongField as error:
                    _, asked = waiting.pop(site)
                    inquiry.wrong[site] = error, asked
                    inquiry.without |= {*asked}
                    self.sent.forget(site)
                    continue
                if answer is not None:
                    register.was_right(site, inquiry.word)
                    yield site, answer

    def _ask(self, inquiry: Inquiry[Any]) -> None:
        """Send messages to the sites of missing clients that are present and not busy."""
        messages = []
        for site, clients in self.register.known.items():
            inquiry.missing -= {i for i in inquiry.missing & {*clients} if not inquiry.fits(i)}
            mine = sorted(inquiry.missing & {*clients})
            if mine and site not in inquiry.waiting:
                messages.append(inquiry.ask(site, mine))
                inquiry.waiting[site] = int(messages[-1].numbers["question"]), mine
                inquiry.missing -= {*mine}
        if messages:
            self.transport.send(messages)

    def _heard(self, inquiry: Inquiry[Answer], message: Message) -> Answer | None:
        """Return a site's answer; None: it is of no use, or about the site's process.

        Raises:
            WrongField: the site was asked, and its answer is wrong.
            UserError: the site reports an error, and the run stops for it.
        """
        site, what = message.site, message.what
        if site in self.register.refused:
            return None
        number, clients = inquiry.waiting.get(site, (None, []))
        if what == "lost":
            # A process that was lost before it knew the question gives no number.
            if message.numbers.get("question", number) == number:
                self._ask_again(inquiry, site)
                self.register.take(message)
            return None
        if number is None or (what == "here" and message.numbers.get("question") != number):
            if what in ("here", "failed", "refused", "damaged"):
                self.register.take(message)
            return None
        if not self.register.answers_to(message, number):
            return None
        if what == "failed":
            text = answers.failed(message)
            if not self.register.skips:
                raise UserError(f"site {site}: {text}")
            raise WrongField("text", f"says that it failed: {text}")
        if what == "whole":
            base = answers.whole(message, self.run)
            self._ask_again(inquiry, site)
            if self.base is not None:
                self.base.heard(site, base)
            return None
        if what != inquiry.word:
            raise WrongField("what", f"is not {inquiry.word}")
        answer = inquiry.read(message, clients)
        del inquiry.waiting[site]
        return answer

    def _ask_again(self, inquiry: Inquiry[Any], site: str) -> None:
        """Note that a site has to be asked again, with all of the model."""
        if site not in inquiry.waiting:
            return
        inquiry.again[site] = inquiry.again.get(site, 0) + 1
        if inquiry.again[site] > MOST_AGAIN:
            raise WrongField("what", f"asks for the model, or is lost, {MOST_AGAIN + 1} times")
        inquiry.take_back(site)
        self.sent.forget(site)

    def _message(self, what: str, t: int, round: Round, site: str, mine: list[int]) -> Message:
        """Return a message with w, or the part of it that the site lacks, and the round's states
        and buffers.

        The message names these clients of the site, and the last round of each that counted.

        Args:
            t: the round that the message names.
        """
        message = Message(what, site)
        question = self.register.next_question()
        message.numbers = {"run": self.run, "question": question, "round": t, **self.facts}
        arrays = message.arrays
        arrays["mine"] = np.asarray(mine, np.int64)
        counted = [round.read(AT_SITES, client) for client in mine]
        arrays["counted"] = np.asarray([-1 if c is None else int(c) for c in counted], np.int64)
        self.sent.put(message, round)
        # Send buffers that clients own, too. A client without its own buffers starts from these;
        # each client sends its change, and the server makes the next ones from the changes.
        for name, value in round.buffers.items():
            round_messages.put(arrays, "buffer/" + name, value)
        for key, value in self._states(self.loop.methods).items():
            round_messages.put(arrays, "state/" + key, value)
        if self.base is not None:
            self.base.put(message)
        wanted = what == "evaluate" or self.reads_evaluated
        if wanted and not torch.equal(round.evaluated, round.w):
            round_messages.put(arrays, "evaluated", round.evaluated)
        return message

    def _states(self, methods: CallbackList) -> dict[str, torch.Tensor]:
        """Return the server states that clients are sent, after this round's hooks."""
        states = {}
        for callback in methods.callbacks:
            for declaration in callback.declarations().values():
                key = declaration.key(callback)
                declared = methods.sent_to_clients().get(key)
                if declared is not None:
                    states[key] = callback._transaction.server_state(key, declared)
        if AVERAGED in self.loop.state.server:
            states[AVERAGED] = self.loop.state.server[AVERAGED]
        return states

    def measured(
        self, ids: Collection[int], finetune_epochs: float, model: PersonalModel
    ) -> Values:
        """Return values of these clients' own models after the rounds so far, measured at their
        sites.

        Clients whose sites do not answer in time are left out. ``model``: the weights and buffers
        to evaluate.
        """
        rounds = self.loop.state.rounds
        # A client's own model has the parts that the client would keep if the next round began now.
        self.facts = self.progress.numbers(max(rounds - 1, 0), rounds)
        vector, buffers = model
        facts = self.loop.round_at(max(rounds - 1, 0))
        facts = replace(facts, t=rounds, evaluated=vector, buffers=buffers)
        self.loop.methods.bind(RoundTransaction(facts))

        def ask(site: str, mine: list[int]) -> Message:
            message = self._message("evaluate", rounds - 1, facts, site, mine)
            message.numbers["epochs"] = finetune_epochs
            return message

        tests = self.register.tests

        def read(message: Message, mine: list[int]) -> Evaluated:
            known = {client: tests.get(client) for client in mine}
            tuned = finetune_epochs > 0
            return answers.evaluated(message, self.run, rounds - 1, known, tuned, self.validated)

        values: Values = {}
        inquiry = Inquiry("evaluated", ask, read, {*ids})
        for site, evaluated in self.answers(inquiry):
            self._note_left(site, evaluated.left)
            tests.update(evaluated.samples)
            values |= evaluated.values
        self.judge(max(rounds - 1, 0), inquiry, {})
        return {client: values[client] for client in ids if client in values}

    def tests_clients(self) -> bool:
        """Return whether a client has test samples; False: one may come that has.

        Raises:
            UserError: no site has any test samples, and no more sites will come.
        """
        register = self.register
        if any(register.tests.get(client) for client in register.holder):
            return True
        data = self.loop.cohort.data
        elsewhere = len(register.holder) < self.loop.cohort.m
        if elsewhere and (isinstance(data, Told) or getattr(data, "tests_clients", False)):
            return False
        raise UserError(
            "PerClientEvaluation: no client has test samples of its own at its site, or as many "
            "as the site's fewest_samples: give client_test_fraction in the sites' data (for "
            "example 0.25: each client holds out this share of its samples), or leave it out."
        )

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
