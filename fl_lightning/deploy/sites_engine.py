"""An engine whose clients train at sites: the server's side of the messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from fl_lightning.aggregation import traffic
from fl_lightning.aggregation.server_update import diverged_text
from fl_lightning.aggregation.update_accumulator import AT_SITES, ClientResult
from fl_lightning.callback_list import CallbackList
from fl_lightning.deploy import answers, round_messages
from fl_lightning.deploy.answers import Evaluated, Trained, Values
from fl_lightning.deploy.client_results import Results
from fl_lightning.deploy.fields import LONGEST_NAME, WrongField
from fl_lightning.deploy.logged import KnownMetrics
from fl_lightning.deploy.partial_broadcast import SentModel
from fl_lightning.deploy.progress import ServerProgress
from fl_lightning.deploy.register import ASK_AGAIN, LeftOut, Register, raise_failed
from fl_lightning.deploy.sent_base import SentBase
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
MOST_AGAIN = 3  # how often a site may ask for the whole model in one inquiry
MOST_LOST = 10  # how often a site may lose a message in one inquiry, after which it gets all again


@dataclass
class Inquiry(Generic[Answer]):
    """A question to the sites of some clients.

    Args:
        word: the kind of their answers.
        ask: function that returns the message for a site, about some of its clients.
        read: function that returns a site's checked answer about these clients.
        fits: function that returns whether a client may be asked for now, in view of its site.
        wrong: sites with wrong answers, each with what is wrong and the clients asked for.
        without: clients that bring nothing, because their sites' answers are wrong.
        again: how often sites asked for the whole model; ``lost``: how often they lost a message.
    """

    word: str
    ask: Callable[[str, list[int]], Message]
    read: Callable[[Message, list[int]], Answer]
    fits: Callable[[int], bool] = lambda client: True
    wrong: dict[str, tuple[WrongField, list[int]]] = field(default_factory=dict)
    without: set[int] = field(default_factory=set)
    again: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)


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
        self.told: set[str] = set()  # sites that have the whole model
        self.base = None if loop.state.base is None else SentBase(loop.state.base)
        base = () if loop.state.base is None else loop.state.base.values
        progress.sent = {*base, *loop.buffers.as_buffers}
        self.reads_evaluated = any(c.asks_for("evaluated") for c in loop.methods.callbacks)
        # Otherwise all of w changes in each round.
        foresees = any(callback.has("foreseen") for callback in loop.methods.callbacks)
        partly = loop.methods.partial_training is not None or foresees
        self.sent = SentModel(loop.methods) if partly else None
        self._last: dict[str, int] = {}  # the number of each site's last question
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
        self.told.discard(site)
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
        sizes = self.loop.cohort.sizes

        def fits(client: int) -> bool:
            # The round's weights were computed from the sizes that were known when it began.
            return sizes([client])[client] == round.sizes[client]

        asked: set[int] = set()

        def ask(site: str, mine: list[int]) -> Message:
            asked.update(mine)
            return self.message(round, site, mine)

        metrics = self.measured_names, self.known
        results = Results(round, self.loop, self.decode, *metrics, self.register.fewest)

        def read(message: Message, mine: list[int]) -> Trained:
            return answers.trained(message, self.run, round.t, mine, results)

        inquiry = Inquiry("trained", ask, read, fits)
        for site, brought in self.answers(inquiry, leaf_of):
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
        self._settle(round.t, results)
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

    def _settle(self, t: int, results: Results) -> None:
        """Leave out the names of metrics about which a round's sites do not agree, and note which
        metrics are missing.
        """
        self._note_withheld(results.withheld)
        self.loop.disputed = results.disputed()
        if self.loop.disputed:
            names = ", ".join(sorted(self.loop.disputed)[:10])
            self.loop.note(
                f"round {t}: sites do not agree what {names} is, so the round has no value of it"
            )

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
        why = "fewer samples than their sites' fewest_samples are behind them"
        if withheld and all(withheld):
            self.loop.note(
                f"the training metrics of all clients of a round stay at their sites, because {why}"
                ". So the round has no value of what clients' steps log. Monitor a metric of the "
                "server's validation in their place, or lower fewest_samples in site.yaml"
            )
        elif any(withheld):
            self.loop.note(
                f"the training metrics of some clients stay at their sites, because {why}. The "
                "rounds' values are those of the other clients"
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

    def answers(
        self, inquiry: Inquiry[Answer], clients: Collection[int]
    ) -> Iterator[tuple[str, Answer]]:
        """Ask the sites of these clients, again if necessary, until the time is over.

        Yields:
            Each site with its answer, which is about all clients that the site was asked for.
        """
        until = time.monotonic() + self.timeout
        late = time.monotonic() + min(LATE, self.timeout / 2)
        waiting: dict[str, list[int]] = {}  # site → clients asked for
        missing = set(clients)  # clients that no site has been asked for
        while True:
            register = self.register
            gone = missing & (register.clients_of_refused - register.holder.keys())
            inquiry.without |= gone
            missing -= gone
            if not (waiting or missing) or time.monotonic() >= until:
                return
            if time.monotonic() >= late:
                away = sorted(missing.union(*waiting.values()))
                print(f"waiting for clients {away}, at most {until - late:.0f} s more", flush=True)
                late = until
            register.find()
            for site in set(waiting) - set(register.known):
                missing |= set(waiting.pop(site))
            self._ask(inquiry, waiting, missing)
            left = until - time.monotonic()
            for message in self.transport.receive(min(left, ASK_AGAIN)):
                site = message.site
                try:
                    answer = self._heard(inquiry, message, waiting, missing)
                except WrongField as error:
                    asked = waiting.pop(site)
                    inquiry.wrong[site] = error, asked
                    inquiry.without |= set(asked)
                    self.told.discard(site)
                    continue
                if answer is not None:
                    self.register.was_right(site, inquiry.word)
                    yield site, answer

    def _heard(
        self,
        inquiry: Inquiry[Answer],
        message: Message,
        waiting: dict[str, list[int]],
        missing: set[int],
    ) -> Answer | None:
        """Return a site's answer; None: it is of no use, or about the site's process.

        Raises:
            WrongField: the site was asked, and its answer is wrong.
            UserError: the site reports an error, and the run stops for it.
        """
        site = message.site
        if site in self.register.refused:
            return None
        current = message.numbers.get("question") == self._last.get(site)
        of_process = message.what == "lost" or (message.what == "here" and not current)
        if site not in waiting or of_process:
            if site in waiting and message.what == "lost":
                inquiry.lost[site] = inquiry.lost.get(site, 0) + 1
                if inquiry.lost[site] > MOST_LOST:
                    raise WrongField("what", f"is lost for the {MOST_LOST + 1}th time")
            self._of_process(message, waiting, missing)
            return None
        if message.what in ("damaged", "refused"):
            raise WrongField("…", f"is missing: {answers.refusal(message)}")
        # A process that ended before it knew the question reports an error without a number.
        unread = message.what == "failed" and "question" not in message.numbers
        if not unread and not self.register.answers_to(message, self._last[site]):
            return None
        if message.what == "failed":
            failed = answers.failed(message)
            if not self.register.skips:
                raise_failed(site, failed)
            raise WrongField("text", f"says that it failed: {failed.text}")
        if message.what == "whole":
            base = answers.whole(message, self.run).base
            inquiry.again[site] = inquiry.again.get(site, 0) + 1
            if inquiry.again[site] > MOST_AGAIN:
                raise WrongField("base", "asks once more for a model that the site was sent")
            missing |= set(waiting.pop(site))
            self.told.discard(site)
            if self.base is not None:
                self.base.heard(site, base)
            return None
        if message.what != inquiry.word:
            raise WrongField("what", f"is not {inquiry.word}")
        answer = inquiry.read(message, waiting[site])
        del waiting[site]
        return answer

    def _of_process(
        self, message: Message, waiting: dict[str, list[int]], missing: set[int]
    ) -> None:
        """Take a message about a site's process: it has started again, or has clients."""
        if message.what not in ("lost", "here", "failed", "refused", "damaged"):
            return
        site = message.site
        if message.what == "lost":
            number = message.numbers.get("question")
            if number is not None and (site not in waiting or number != self._last[site]):
                return
            missing |= set(waiting.pop(site, []))
            if self.base is not None:
                self.base.heard(site, 0)
        try:
            self.register.heard(message)
        except LeftOut as error:
            self.register.leave_out(site, str(error))
        except UserError as error:
            if not self.register.skips:
                raise
            missing |= set(waiting.pop(site, []))
            self.register.leave_out(site, str(error))

    def _ask(self, inquiry: Inquiry[Any], waiting: dict[str, list[int]], missing: set[int]) -> None:
        """Send messages to the sites of missing clients that are present and not busy."""
        messages = []
        for site, clients in self.register.known.items():
            missing -= {i for i in missing & set(clients) if not inquiry.fits(i)}
            mine = sorted(missing & set(clients))
            if mine and site not in waiting:
                message = inquiry.ask(site, mine)
                self._last[site] = message.numbers["question"] = self.register.next_question()
                messages.append(message)
                waiting[site] = mine
                missing -= set(mine)
                self.told.add(site)
        if messages:
            self.transport.send(messages)

    def message(self, round: Round, site: str, mine: list[int]) -> Message:
        """Return the message to a site in a round: w, states, buffers and the round's numbers."""
        message = self._with_model("round", round, site, mine)
        message.numbers["round"] = round.t
        message.numbers |= self.facts
        arrays = message.arrays
        # A site is not told the numbers of samples of other sites' clients.
        message.numbers["total_weight"] = sum(round.weights.values())
        if any(weight != 1 for weight in round.weights.values()):
            arrays["weights"] = np.asarray([round.weights[i] for i in mine], np.float64)
        if self.reads_evaluated:
            self._put_evaluated(message, round.evaluated, round)
        return message

    def _put_evaluated(self, message: Message, evaluated: torch.Tensor, round: Round) -> None:
        """Put the evaluated model into the message, if it is not w."""
        if not torch.equal(evaluated, round.w):
            round_messages.put(message.arrays, "evaluated", evaluated)

    def _with_model(self, what: str, round: Round, site: str, mine: list[int]) -> Message:
        """Return a message with w, or the part of it that the site lacks, and the round's states
        and buffers.

        The message names these clients of the site, and the last round of each that counted.
        """
        whole = site not in self.told or round.parts is None
        message = Message(what, site)
        message.numbers = {"run": self.run, "whole": int(whole), "m": self.loop.cohort.m}
        arrays = message.arrays
        arrays["mine"] = np.asarray(mine, np.int64)
        counted = [round.read(AT_SITES, client) for client in mine]
        arrays["counted"] = np.asarray([-1 if c is None else int(c) for c in counted], np.int64)
        w = round.w
        if not whole:
            assert round.parts is not None
            sent = self._parts_sent(round, mine)
            arrays["parts"] = np.asarray(sent, np.bool_)
            where = ~round.parts.kept
            for mask, there in zip(round.parts.masks, sent, strict=True):
                where = where | mask if there else where
            w = w[where]
        if self.sent is None:
            round_messages.put(arrays, "w", w)
        else:
            self.sent.put(message, round, self._last.get(site) if site in self.told else None)
        if site not in self.told and self.loop.methods.start_from_w0:
            round_messages.put(arrays, "w0", round.initial_model)
        # Send buffers that clients own, too. A client without its own buffers starts from these;
        # each client sends its change, and the server makes the next ones from the changes.
        for name, value in round.buffers.items():
            round_messages.put(arrays, "buffer/" + name, value)
        for key, value in self._states(self.loop.methods).items():
            round_messages.put(arrays, "state/" + key, value)
        if self.base is not None:
            self.base.put(message)
        return message

    def _parts_sent(self, round: Round, mine: list[int]) -> list[bool]:
        """Return for each part of the model whether one of these clients has no valid copy of
        it.
        """
        parts = round.parts
        assert parts is not None
        rows = [round.read(AT_SITES, client) for client in mine]
        oldest = min((-1 if row is None else int(row) for row in rows), default=round.t)
        return [oldest <= last for last in parts.last_averaged(round.t, round.server_states)]

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
            message = self._with_model("evaluate", facts, site, mine)
            message.numbers |= {"round": rounds - 1, "epochs": finetune_epochs}
            message.numbers |= self.facts
            self._put_evaluated(message, vector, facts)
            return message

        tests = self.register.tests

        def read(message: Message, mine: list[int]) -> Evaluated:
            known = {client: tests.get(client) for client in mine}
            tuned = finetune_epochs > 0
            return answers.evaluated(message, self.run, rounds - 1, known, tuned, self.validated)

        values: Values = {}
        inquiry = Inquiry("evaluated", ask, read)
        for site, evaluated in self.answers(inquiry, ids):
            self._note_left(site, evaluated.left)
            tests.update(evaluated.samples)
            values |= evaluated.values
        self.judge(max(rounds - 1, 0), inquiry, {})
        return {client: values[client] for client in ids if client in values}

    def one(self, model: PersonalModel) -> dict[str, float] | None:
        """Return values of one client with test samples; None if no present site has such a client.

        ``model``: as in :meth:`measured`.

        Raises:
            UserError: no site has any test samples, and no more sites will come.
        """
        register = self.register
        for client in sorted(register.holder):
            if register.tests.get(client):
                return self.measured([client], 0, model).get(client, {}).get("")
        data = self.loop.cohort.data
        elsewhere = len(register.holder) < self.loop.cohort.m
        if elsewhere and (isinstance(data, Told) or getattr(data, "tests_clients", False)):
            return None
        raise UserError(
            "PerClientEvaluation: no client has test samples of its own at its site, or as many "
            "as the site's fewest_samples: give client_test_fraction in the sites' data (for "
            "example 0.25: each client holds out this share of its samples), or leave it out."
        )

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
