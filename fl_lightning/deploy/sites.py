"""An engine whose clients train at sites: the server's side of the messages."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

from fl_lightning.aggregation import traffic
from fl_lightning.aggregation.contributions import AT_SITES, Brought
from fl_lightning.aggregation.server_update import diverged_text
from fl_lightning.deploy import evaluation, travel
from fl_lightning.deploy.progress import ServerProgress
from fl_lightning.deploy.resent import SentModel
from fl_lightning.deploy.same_config import check_same
from fl_lightning.deploy.sent_base import SentBase
from fl_lightning.deploy.site_hooks import reads_of_clients
from fl_lightning.deploy.told import Told
from fl_lightning.deploy.transport import Array, Message, Number, Transport, said, words
from fl_lightning.description import version_of
from fl_lightning.errors import Diverged, UserError
from fl_lightning.evaluation.personal import PersonalModel
from fl_lightning.learner.layout import all_finite
from fl_lightning.loop import FederatedLoop
from fl_lightning.methods import Methods
from fl_lightning.round.context import Round
from fl_lightning.round.ledger import Ledger
from fl_lightning.round.partial import AVERAGED

ASK_AGAIN = 1.0  # seconds between questions, while a client's site is missing
OTHERS = 30.0  # seconds to wait for other sites' reports of an error


class Sites:
    """An engine whose clients train at sites.

    ``config``: settings, methods and frozen weights, which sites need to have alike.
    ``counts_tests``: whether to ask sites how many test samples their clients have; ``tests``:
    their answers. ``modes``: whether greater or less is better, by metric, from learners.
    ``progress``: the values that learners read of the run's progress. ``reads_evaluated``: whether
    a hook at sites reads the evaluated model.
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
        self.config = config
        self.counts_tests = False
        self.tests: dict[int, int] = {}
        self.modes: dict[str, str] = {}
        self.holder: dict[int, str] = {}  # client → its site
        self.known: dict[str, list[int]] = {}  # site → its clients
        self.places: dict[int, str] = {}  # number of a site's folder → name of the site
        self.told: set[str] = set()  # sites that have the whole model
        self.base = None if loop.state.base is None else SentBase(loop.state.base)
        base = () if loop.state.base is None else loop.state.base.values
        progress.sent = {*base, *loop.buffers.as_buffers}
        self.reads_evaluated = reads_of_clients("evaluated", loop.methods.callbacks)
        # Otherwise all of w changes in each round.
        foresees = any(callback.has("foreseen") for callback in loop.methods.callbacks)
        partly = loop.methods.resting is not None or foresees
        self.sent = SentModel(loop.methods) if partly else None
        self._asked: set[str] = set()
        # The number of each site's last question. Another server process starts at another number.
        self._questions = count(secrets.randbelow(2**50))
        self._last: dict[str, int] = {}
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

    def wait_for(self, number: int) -> None:
        """Wait until there are so many sites, and print how many.

        If they have their own data, also wait until each client's numbers were sent once, because
        the server has no others for its weights.

        Raises:
            UserError: the user has to correct something at sites; the error names each site that
                reported it.
        """
        said = -1
        faults: dict[str, str] = {}  # by site
        until = math.inf
        while self.lacks(number) or faults:
            if said != len(self.known):
                said = len(self.known)
                print(f"waiting for sites: {said} of {number} are there{self.away()}", flush=True)
            self.find()
            for answer in self.transport.receive(ASK_AGAIN):
                try:
                    self.heard(answer)
                except UserError as error:
                    faults[answer.site] = str(error)
                    until = min(until, time.monotonic() + OTHERS)
            if faults and (self._asked <= {*self.known, *faults} or time.monotonic() > until):
                raise UserError(" ".join(faults.values()))
            if self.lacks(number):
                time.sleep(0.01)

    def lacks(self, number: int) -> bool:
        """Return whether the first round waits for more sites than there are."""
        own = isinstance(self.loop.cohort.data, Told)
        return len(self.known) < number or (own and bool(self.untold()))

    def untold(self) -> list[int]:
        """Return the clients whose numbers of samples no site has sent."""
        data = self.loop.cohort.data
        known = {*self.holder, *(data.told() if isinstance(data, Told) else ())}
        return [i for i in range(self.loop.cohort.m) if i not in known]

    def away(self) -> str:
        """Return the clients whose numbers of samples are still missing."""
        away = [str(i) for i in self.untold()]
        more = ", …" if len(away) > 10 else ""
        return f"; not yet clients {', '.join(away[:10])}{more}" if away else ""

    def find(self) -> None:
        """Ask new sites for their clients; forget sites that have gone."""
        there = self.transport.sites()
        for site in set(self.known) - set(there):
            self.forget(site)
        new = [site for site in there if site not in self.known and site not in self._asked]
        self._asked |= set(new)
        if not new:
            return
        numbers = {"run": self.run, "m": self.loop.cohort.m, "tests": int(self.counts_tests)}
        data = self.loop.cohort.data
        facts: dict[str, Array] = {"shape": np.asarray(travel.shape_of(data, 0), np.int64)}
        facts |= travel.names_of(data)
        hello = [Message("hello", site, dict(numbers), dict(facts)) for site in new]
        self.transport.send(hello)

    def forget(self, site: str) -> None:
        for client in self.known.pop(site, []):
            self.holder.pop(client, None)
        self.told.discard(site)
        self._asked.discard(site)
        if self.base is not None:
            self.base.forget(site)

    def heard(self, answer: Message) -> None:
        """Note a site's clients.

        Raises:
            UserError: another site has one of them, its data differ from the server's, or the site
                reports an error.
        """
        site = answer.site
        if answer.what == "lost":
            self.forget(site)
            return
        if answer.what == "failed":
            self.failed(answer)
        if answer.what != "here" or answer.numbers.get("run") != self.run:
            return
        ours = version_of("fl-lightning") or "not installed"
        theirs = said(answer.arrays.get("version", words("older")))
        if theirs != ours:
            raise UserError(
                f"site {site}: it has fl-lightning {theirs}, and the server {ours}. Install the "
                "same version at both."
            )
        parameters = int(answer.arrays["parameters"][0])
        if parameters != self.loop.model.layout.size:
            raise UserError(
                f"site {site}: its model has {parameters} parameters, and the server's "
                f"{self.loop.model.layout.size}. The site's data have other shapes or classes than "
                "the server's config says."
            )
        self._check_shapes(site, answer)
        if "config" in answer.arrays:  # an older site does not send it
            config = json.loads(said(answer.arrays["config"]))
            check_same(site, self.config, config, bool(answer.numbers["own"]))
        clients = [int(i) for i in answer.arrays["clients"]]
        # A restarted site may come back under another name while the server still lists the old
        # one.
        folder = int(answer.numbers["place"])
        if self.places.get(folder, site) != site:
            self.forget(self.places[folder])
        self.places[folder] = site
        for place, client in enumerate(clients):
            other = self.holder.get(client, site)
            if other != site:
                raise UserError(
                    f"clients: two sites, {other} and {site}, have client {client}. Give "
                    "each client to one site (--node-config 'clients=\"0,3\"')."
                )
            self._check_samples(site, client, place, answer)
            if "tests" in answer.arrays:
                self.tests[client] = int(answer.arrays["tests"][place])
        self.known[site] = clients
        self.holder |= dict.fromkeys(clients, site)

    def _check_shapes(self, site: str, answer: Message) -> None:
        data = self.loop.cohort.data
        travel.check_shape(f"site {site}", answer.arrays["shape"], data)
        classes = int(answer.arrays["classes"][0])
        if answer.numbers["own"] and classes != (data.num_classes or 0):
            raise UserError(
                f"site {site}: its data have {classes} classes, and the server's "
                f"{data.num_classes or 0}: a label would mean another class there. Name them all "
                "in its data (FromTable: classes: [no, yes])."
            )

    def _check_samples(self, site: str, client: int, place: int, answer: Message) -> None:
        cohort = self.loop.cohort
        if not 0 <= client < cohort.m:
            raise UserError(
                f"site {site}: clients has {client}, and the run has {cohort.m} clients, 0 to "
                f"{cohort.m - 1}."
            )
        there = int(answer.arrays["sizes"][place]), int(answer.arrays["batches"][place])
        if answer.numbers["own"]:
            if not isinstance(cohort.data, Told):
                cohort.data = Told(cohort.data)
            cohort.data.tell(client, *there)
            return
        here = cohort.sizes([client])[client], int(cohort.data.batches_per_epoch(client))
        if here != there:
            raise UserError(
                f"site {site}: client {client} has {there[0]} samples in {there[1]} batches there, "
                f"and {here[0]} in {here[1]} by the server's config. Server and site need the same "
                "data."
            )

    def failed(self, answer: Message) -> None:
        """Raise the error that a site reports.

        Raises:
            UserError: the user has to correct something.
            RuntimeError: it is an error of the site's code.
        """
        text = f"site {answer.site}: {said(answer.arrays['text'])}"
        raise UserError(text) if answer.numbers.get("user") else RuntimeError(text)

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
        faulty: dict[int, str] = {}  # clients whose update is not finite → their site
        sizes = self.loop.cohort.sizes

        def fits(client: int) -> bool:
            # The round's weights were computed from the sizes that were known when it began.
            return sizes([client])[client] == round.sizes[client]

        asked: set[int] = set()

        def ask(site: str, mine: list[int]) -> Message:
            asked.update(mine)
            return self.message(round, site, mine)

        for answer, clients in self.answers("trained", leaf_of, ask, fits):
            for client in clients:
                home = self._brought(answer, client, round)
                if not home.finished:
                    faulty[client] = answer.site
                collect(leaf_of.pop(client), home)
                tell()
        if faulty and self.loop.settings.on_nonfinite == "stop":
            each = [f"client {i} at site {site}" for i, site in sorted(faulty.items())]
            raise Diverged(diverged_text(round.t, f"the update of {', of '.join(each)}"))
        if leaf_of:
            self.loop.note(
                f"round {round.t}: clients {sorted(leaf_of)} dropped: their sites did not answer "
                f"within timeout={self.timeout:g} s, or now report another number of samples than "
                "when the round began"
            )
        for client, leaf in leaf_of.items():
            counts = None
            if client in asked:
                counts = traffic.sent_down(round, client, self.loop.methods)
            collect(leaf, Brought(client, counts, answered=False))
            tell()

    def answers(
        self,
        word: str,
        clients: Collection[int],
        ask: Callable[[str, list[int]], Message],
        fits: Callable[[int], bool] = lambda client: True,
    ) -> Iterator[tuple[Message, list[int]]]:
        """Ask the sites of these clients, again if necessary, until the time is over.

        Args:
            word: the kind of their answers.
            ask: function that returns the message for a site, about some of its clients.
            fits: function that returns whether a client may be asked for now, in view of its site.

        Yields:
            Each answer to a site's last question, with the clients that it was asked for.
        """
        until = time.monotonic() + self.timeout
        waiting: dict[str, list[int]] = {}  # site → clients asked for
        missing = set(clients)  # clients that no site has been asked for
        while (waiting or missing) and time.monotonic() < until:
            self.find()
            for site in set(waiting) - set(self.known):
                missing |= set(waiting.pop(site))
            self._ask(ask, fits, waiting, missing)
            left = until - time.monotonic()
            for answer in self.transport.receive(min(left, ASK_AGAIN)):
                site = answer.site
                if not self._in_time(answer, waiting):
                    continue
                if answer.what == "failed":
                    self.failed(answer)
                if answer.what in ("lost", "whole"):
                    missing |= set(waiting.pop(site, []))
                    self.told.discard(site)
                    if self.base is not None:
                        self.base.heard(answer)
                if answer.what == word:
                    yield answer, waiting.pop(site)
                if answer.what in ("lost", "here"):
                    self.heard(answer)

    def _in_time(self, answer: Message, waiting: Collection[str]) -> bool:
        """Return whether the answer is to the last question to its site, or to a question that
        is not about clients.
        """
        question = answer.numbers.get("question")
        if question is None:
            return answer.what in ("lost", "here", "failed")
        return answer.site in waiting and question == self._last[answer.site]

    def _ask(
        self,
        ask: Callable[[str, list[int]], Message],
        fits: Callable[[int], bool],
        waiting: dict[str, list[int]],
        missing: set[int],
    ) -> None:
        """Send messages to the sites of missing clients that are present and not busy."""
        messages = []
        for site, clients in self.known.items():
            missing -= {i for i in missing & set(clients) if not fits(i)}
            mine = sorted(missing & set(clients))
            if mine and site not in waiting:
                message = ask(site, mine)
                self._last[site] = message.numbers["question"] = next(self._questions)
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
            travel.put(message.arrays, "evaluated", evaluated)

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
            travel.put(arrays, "w", w)
        else:
            self.sent.put(message, round, self._last.get(site) if site in self.told else None)
        if site not in self.told and self.loop.methods.start_from_w0:
            travel.put(arrays, "w0", round.initial_model)
        # Send buffers that clients own, too. A client without its own buffers starts from these;
        # each client sends its change, and the server makes the next ones from the changes.
        for name, value in round.buffers.items():
            travel.put(arrays, "buffer/" + name, value)
        for key, value in self._states(self.loop.methods).items():
            travel.put(arrays, "state/" + key, value)
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

    def _states(self, methods: Methods) -> dict[str, torch.Tensor]:
        """Return the server states that clients are sent, after this round's hooks."""
        states = {}
        for callback in methods.callbacks:
            for declaration in callback.declarations().values():
                key = declaration.key(callback)
                declared = methods.sent_to_clients().get(key)
                if declared is not None:
                    states[key] = callback._ledger.server_state(key, declared)
        if AVERAGED in self.loop.state.server:
            states[AVERAGED] = self.loop.state.server[AVERAGED]
        return states

    def measured(
        self, ids: Collection[int], finetune_epochs: float, model: PersonalModel
    ) -> evaluation.Values:
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
        self.loop.methods.bind(Ledger(facts))

        def ask(site: str, mine: list[int]) -> Message:
            message = self._with_model("evaluate", facts, site, mine)
            message.numbers |= {"round": rounds - 1, "epochs": finetune_epochs}
            message.numbers |= self.facts
            self._put_evaluated(message, vector, facts)
            return message

        values: evaluation.Values = {}
        for answer, clients in self.answers("evaluated", ids, ask):
            there, modes = evaluation.unpacked(answer, clients)
            self.modes |= modes
            for client, (samples, kinds) in there.items():
                self.tests[client] = samples
                values[client] = kinds
        return {client: values[client] for client in ids if client in values}

    def one(self, model: PersonalModel) -> dict[str, float] | None:
        """Return values of one client with test samples; None if no present site has such a client.

        ``model``: as in :meth:`measured`.

        Raises:
            UserError: no site has any test samples, and no more sites will come.
        """
        for client in sorted(self.holder):
            if self.tests.get(client):
                return self.measured([client], 0, model).get(client, {}).get("")
        data = self.loop.cohort.data
        elsewhere = len(self.holder) < self.loop.cohort.m
        if elsewhere and (isinstance(data, Told) or getattr(data, "tests_clients", False)):
            return None
        raise UserError(
            "PerClientEvaluation: no client has test samples of its own at its site: give "
            "client_test_fraction in the sites' data (for example 0.25: each client holds out this "
            "share of its samples), or leave it out."
        )

    def _brought(self, answer: Message, client: int, round: Round) -> Brought:
        """Return the results of a client at a site.

        Raises:
            UserError: they do not match the server's model and methods.
        """
        try:
            whole = partial(self._whole_upload, round)
            home = travel.unpacked_client(answer, client, round, whole, self.decode)
        except (KeyError, ValueError, RuntimeError, IndexError) as error:
            raise UserError(
                f"site {answer.site}: its results of client {client} in round {round.t} do not fit "
                f"the server's config ({type(error).__name__}: {str(error)[:100]}). Server and "
                "site need the same config and version."
            ) from error
        # Do not rely on the site's report: check the update here.
        if home.update is not None and not all_finite(home.update):
            home.finished = False
            home.rows = {}
        if home.counts is not None:
            # Only the server knows when it last sent the model to a client.
            traffic.count_down(home.counts, round, client, self.loop.methods)
        if home.finished:
            home.rows[AT_SITES] = torch.tensor(round.t)
        for name in answer.numbers:
            if name.startswith("changed/"):
                self.loop.buffers.name_kept([name.removeprefix("changed/")], self.loop.note)
        return home

    def _whole_upload(self, round: Round, key: str) -> tuple[tuple[int, ...], torch.dtype]:
        declared = self.loop.methods.declared[key]
        return declared.sized(round.layout.size), declared.dtype or round.w.dtype

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
