"""The register of sites: who is there, which clients each has, and whom the run does without."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fl_lightning.deploy import answers, round_messages
from fl_lightning.deploy.answers import Here
from fl_lightning.deploy.fields import WrongField
from fl_lightning.deploy.same_config import check_same
from fl_lightning.deploy.site_data import Told
from fl_lightning.deploy.transport import Array, Message, Transport, visible
from fl_lightning.errors import UserError
from fl_lightning.loop import FederatedLoop

ASK_AGAIN = 1.0  # seconds between questions, while a client's site is missing
SETTLED = 5.0  # seconds in which no other site comes, before the run gives up with those there are
IN_A_ROW = 3  # rounds with wrong answers, after which the run does without a site


class LeftOut(UserError):
    """A site that the run goes on without: it refuses the app, or has a client of another site."""


class Register:
    """The sites of a run.

    Args:
        config: settings, methods and frozen weights, which sites need to have alike.
        gone: function that is called with a site that has gone, or that will be started again.

    ``counts_tests``: whether to ask sites how many test samples their clients have; ``tests``:
    their answers.
    """

    def __init__(
        self,
        transport: Transport,
        loop: FederatedLoop,
        run: int,
        config: Mapping[str, Any],
        gone: Callable[[str], None],
    ) -> None:
        self.transport = transport
        self.loop = loop
        self.run = run
        self.config = config
        self.gone = gone
        self.counts_tests = False
        self.tests: dict[int, int] = {}
        self.holder: dict[int, str] = {}  # client → its site
        self.known: dict[str, list[int]] = {}  # site → its clients
        self.places: dict[int, str] = {}  # number of a site's folder → name of the site
        self.refused: dict[str, str] = {}  # sites that the run does without → why
        self.clients_of_refused: set[int] = set()
        # (site, kind of answer) → the latest rounds in which these were wrong
        self._wrong: dict[tuple[str, str], list[int]] = {}
        self._asked: set[str] = set()
        # The number of each site's last question. Another server process starts at another number.
        self._first = self._next = secrets.randbelow(2**50)
        self._greeted: dict[str, int] = {}  # site → number of its hello that is not yet answered

    @property
    def skips(self) -> bool:
        """Return whether the run goes on without sites whose answers are wrong."""
        return self.loop.settings.on_nonfinite == "skip"

    def wait_for(self, number: int) -> None:
        """Wait until there are so many sites, and print how many.

        If they have their own data, also wait until each client's numbers were sent once, because
        the server has no others for its weights. If a site was left out, its clients' numbers may
        never come: then wait for those of the sites that are there.
        """
        said = -1
        since = time.monotonic()  # when a site was heard last
        while self.lacks(number):
            if said != len(self.known):
                said = len(self.known)
                away = self.untold()[:10]
                text = f"waiting for sites: {said} of {number} are there; not yet clients {away}"
                print(text, flush=True)
            self.find()
            for message in self.transport.receive(ASK_AGAIN):
                if message.site not in self.refused:
                    since = time.monotonic()
                self.take(message)
            waits = bool(self._asked - {*self.known, *self.refused})
            settled = self.refused and not waits and time.monotonic() > since + SETTLED
            if self.lacks(number) and settled:
                if not self.skips or len(self.known) < number:
                    raise UserError(" ".join(self.refused.values()))
                self.loop.note(
                    f"the run begins without the clients {self.untold()[:10]}: no site has them, "
                    "and a site was left out. They take part once a site comes with them"
                )
                return

    def lacks(self, number: int) -> bool:
        """Return whether the first round waits for more sites than there are."""
        own = isinstance(self.loop.cohort.data, Told)
        return len(self.known) < number or (own and bool(self.untold()))

    def untold(self) -> list[int]:
        """Return the clients whose numbers of samples no site has sent."""
        data = self.loop.cohort.data
        known = {*self.holder, *(data.told() if isinstance(data, Told) else ())}
        return [i for i in range(self.loop.cohort.m) if i not in known]

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
        facts: dict[str, Array] = {"shape": np.asarray(round_messages.shape_of(data, 0), np.int64)}
        facts |= round_messages.names_of(data)
        hello = [Message("hello", site, dict(numbers), dict(facts)) for site in new]
        for message in hello:
            self._greeted[message.site] = message.numbers["question"] = self.next_question()
        self.transport.send(hello)

    def next_question(self) -> int:
        """Return the number of another question."""
        self._next += 1
        return self._next - 1

    def forget(self, site: str) -> None:
        """Note that a site's process has gone: the site is asked for its clients again."""
        for client in self.known.pop(site, []):
            self.holder.pop(client, None)
        self._greeted.pop(site, None)
        if site not in self.refused:
            self._asked.discard(site)
        self.gone(site)

    def leave_out(self, site: str, why: str) -> None:
        """Go on without a site, and say so."""
        # Whose clients a site has that was never entered is not known: those that no site has.
        away = [i for i in range(self.loop.cohort.m) if i not in self.holder]
        self.clients_of_refused |= set(self.known.get(site, away))
        self.refused[site] = why
        self._asked.add(site)
        self.forget(site)
        self.loop.note(f"{why} The run goes on without this site")

    def was_wrong(self, site: str, kind: str, t: int, why: str) -> None:
        """Note that a site's answer in round t was wrong; the third of a kind in a row is its
        last.
        """
        rounds = self._wrong.setdefault((site, kind), [])
        rounds += [t] * (t not in rounds)
        if len(rounds) >= IN_A_ROW:
            of = ", ".join(map(str, rounds))
            self.leave_out(site, f"site {site}: its answers were wrong in rounds {of} ({why}).")

    def was_right(self, site: str, kind: str) -> None:
        self._wrong.pop((site, kind), None)

    def take(self, message: Message) -> None:
        """Note what a site says of itself, or go on without the site."""
        try:
            self._heard(message)
        except UserError as error:
            if not self.skips and not isinstance(error, LeftOut):
                raise
            self.leave_out(message.site, str(error))

    def _heard(self, message: Message) -> None:
        """Note a site's clients, or that its process has started again."""
        site = message.site
        if message.what == "lost":
            self.forget(site)
            return
        try:
            if message.what == "refused":
                raise LeftOut(f"site {site}: {answers.refusal(message)}")
            if not self.answers_to(message, self._greeted.get(site)):
                return
            if message.what == "failed":
                raise UserError(f"site {site}: {answers.failed(message)}")
            del self._greeted[site]
            if message.what != "here":
                raise WrongField("what", "is not here")
            self.enter(site, answers.here(message, self.run, self.loop.cohort.m, self.counts_tests))
        except WrongField as error:
            raise UserError(
                f"site {site}: its answer to the server's hello is wrong: {error}."
            ) from error

    def answers_to(self, message: Message, question: int | None) -> bool:
        """Return whether a message answers this question; otherwise it answers an earlier one.

        Raises:
            WrongField: the server has not asked such a question, or it is not a message.
        """
        if message.what in ("damaged", "refused"):
            raise WrongField("…", f"is missing: {answers.refusal(message)}")
        number = message.numbers.get("question")
        # A process that ended before it knew the question reports an error without a number.
        if message.what == "failed" and number is None:
            return True
        if not isinstance(number, int) or not self._first <= number < self._next:
            raise WrongField("question", "is not the number of a question to this site")
        return number == question

    def enter(self, site: str, here: Here) -> None:
        """Enter a site with its clients, if all that it says fits the run.

        Raises:
            LeftOut: another site has one of its clients.
            UserError: its data differ from the server's, or its config.
        """
        try:
            check_same(site, self.config, here.config, here.own)
        except UserError as error:
            # The error quotes the site's settings.
            raise UserError(visible(error, answers.MOST_ERROR)) from None
        except Exception as error:
            raise WrongField("config", f"is not a run's ({type(error).__name__})") from error
        # A restarted site may come back under another name while the server still lists the old
        # one.
        if self.places.get(here.place, site) != site:
            self.forget(self.places[here.place])
        for client in here.clients:
            other = self.holder.get(client, site)
            if other != site:
                raise LeftOut(
                    f"clients: two sites, {other} and {site}, have client {client}. Give each "
                    "client to one site (--node-config 'clients=\"0,3\"')."
                )
        data = self.loop.cohort.data
        numbers = dict(zip(here.clients, zip(here.sizes, here.batches, strict=True), strict=True))
        cohort = self.loop.cohort
        for client, there in numbers.items() if not here.own else ():
            ours = cohort.sizes([client])[client], int(data.batches_per_epoch(client))
            if there != ours:
                raise UserError(
                    f"site {site}: client {client} has {there[0]} samples in {there[1]} batches "
                    f"there, and {ours[0]} in {ours[1]} by the server's config. Server and site "
                    "need the same data."
                )
        self.places[here.place] = site
        if here.own:
            if not isinstance(data, Told):
                data = cohort.data = Told(data)
            for client, (size, batches) in numbers.items():
                data.tell(client, size, batches)
        self.tests |= dict(zip(here.clients, here.tests, strict=False))
        self.known[site] = here.clients
        self.holder |= dict.fromkeys(here.clients, site)
        self.clients_of_refused -= set(here.clients)
