"""The register of sites: who is there, which clients each has, and whom the run does without."""

from __future__ import annotations

import math
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
from fl_lightning.record.description import version_of

ASK_AGAIN = 1.0  # seconds between questions, while a client's site is missing
PAUSE = 0.2  # seconds between two greetings of a site that lost the first one
OTHERS = 30.0  # seconds to wait for other sites' reports of an error
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
    their answers. ``fewest``: by client, the fewest samples whose metrics its site sends.
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
        self.fewest: dict[int, int] = {}
        self.holder: dict[int, str] = {}  # client → its site
        self.known: dict[str, list[int]] = {}  # site → its clients
        self.places: dict[int, str] = {}  # number of a site's folder → name of the site
        self.refused: dict[str, str] = {}  # sites that the run does without → why
        self.clients_of_refused: set[int] = set()
        # (site, kind of answer) → the latest rounds in which these were wrong
        self._wrong: dict[tuple[str, str], list[int]] = {}
        self._asked: set[str] = set()
        self._lost: dict[str, float] = {}  # site → when it last lost a message
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

        Raises:
            UserError: the user has to correct something at sites; the error names each site that
                reported it.
        """
        said = -1
        faults: dict[str, str] = {}  # by site
        until = math.inf
        since = time.monotonic()  # when a site was heard last
        while self.lacks(number) or faults:
            if said != len(self.known):
                said = len(self.known)
                print(f"waiting for sites: {said} of {number} are there{self.away()}", flush=True)
            self.find()
            for message in self.transport.receive(ASK_AGAIN):
                if message.site not in self.refused:
                    since = time.monotonic()
                try:
                    self.heard(message)
                except LeftOut as error:
                    self.leave_out(message.site, str(error))
                except UserError as error:
                    if self.skips:
                        self.leave_out(message.site, str(error))
                        continue
                    faults[message.site] = str(error)
                    until = min(until, time.monotonic() + OTHERS)
            now = time.monotonic()
            waits = bool(self._asked - {*self.known, *faults, *self.refused})
            if faults and (not waits or now > until):
                raise UserError(" ".join(faults.values()))
            if self.refused and self.lacks(number) and not waits and now > since + SETTLED:
                if not self.skips or len(self.known) < number:
                    raise UserError(" ".join(self.refused.values()))
                self.loop.note(
                    f"the run begins without the clients {self.untold()[:10]}: no site has them, "
                    "and a site was left out. They take part once a site comes with them"
                )
                return
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
        # A site that loses each greeting would otherwise be greeted without a pause.
        before = time.monotonic() - PAUSE
        new = [
            site
            for site in there
            if site not in self.known and site not in self._asked
            if self._lost.get(site, before) <= before
        ]
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

    def heard(self, message: Message) -> None:
        """Note a site's clients, or that its process has started again.

        Raises:
            LeftOut: another site has one of them, or the site does not run the app.
            UserError: its data differ from the server's, the site reports an error, or it sends
                something else.
        """
        site = message.site
        if message.what == "lost":
            self._lost[site] = time.monotonic()
            self.forget(site)
            return
        try:
            if message.what == "refused":
                raise LeftOut(f"site {site}: {answers.refusal(message)}")
            if message.what == "damaged":
                raise UserError(answers.refusal(message))
            # A process that ended before it knew the question reports an error without a number.
            unread = message.what == "failed" and "question" not in message.numbers
            if not unread and not self.answers_to(message, self._greeted.get(site)):
                return
            if message.what == "failed":
                raise_failed(site, answers.failed(message))
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
            WrongField: the server has not asked such a question.
        """
        number = message.numbers.get("question")
        if not isinstance(number, int) or not self._first <= number < self._next:
            raise WrongField("question", "is not the number of a question to this site")
        return number == question

    def enter(self, site: str, here: Here) -> None:
        """Enter a site with its clients, if all that it says fits the run.

        Raises:
            LeftOut: another site has one of its clients.
            UserError: its data differ from the server's, or its config.
        """
        ours = version_of("fl-lightning") or "not installed"
        if here.version != ours:
            raise UserError(
                f"site {site}: it has fl-lightning {here.version}, and the server {ours}. Install "
                "the same version at both."
            )
        if here.parameters != self.loop.model.layout.size:
            raise UserError(
                f"site {site}: its model has {here.parameters} parameters, and the server's "
                f"{self.loop.model.layout.size}. The site's data have other shapes or classes than "
                "the server's config says."
            )
        data = self.loop.cohort.data
        round_messages.check_shape(f"site {site}", here.shape, data)
        if here.own and here.classes != (data.num_classes or 0):
            raise UserError(
                f"site {site}: its data have {here.classes} classes, and the server's "
                f"{data.num_classes or 0}: a label would mean another class there. Name them all "
                "in its data (FromTable: classes: [no, yes])."
            )
        self._check_config(site, here)
        # A restarted site may come back under another name while the server still lists the old
        # one.
        if self.places.get(here.place, site) != site:
            self.forget(self.places[here.place])
        for client in here.clients:
            self._check_client(site, client)
        for client, *numbers in zip(here.clients, here.sizes, here.batches, strict=True):
            self._check_samples(site, client, (numbers[0], numbers[1]), here.own)
        self.places[here.place] = site
        if here.own:
            data = self.loop.cohort.data
            if not isinstance(data, Told):
                data = self.loop.cohort.data = Told(data)
            for client, *numbers in zip(here.clients, here.sizes, here.batches, strict=True):
                data.tell(client, numbers[0], numbers[1])
        self.tests |= dict(zip(here.clients, here.tests, strict=False))
        self.fewest |= dict.fromkeys(here.clients, here.fewest_samples)
        self.known[site] = here.clients
        self.holder |= dict.fromkeys(here.clients, site)
        self.clients_of_refused -= set(here.clients)

    def _check_config(self, site: str, here: Here) -> None:
        try:
            check_same(site, self.config, here.config, here.own)
        except UserError as error:
            # The error quotes the site's settings.
            raise UserError(visible(error, answers.MOST_ERROR)) from None
        except Exception as error:
            raise WrongField("config", f"is not a run's ({type(error).__name__})") from error

    def _check_client(self, site: str, client: int) -> None:
        m = self.loop.cohort.m
        if not 0 <= client < m:
            raise UserError(
                f"site {site}: clients has {client}, and the run has {m} clients, 0 to {m - 1}."
            )
        other = self.holder.get(client, site)
        if other != site:
            raise LeftOut(
                f"clients: two sites, {other} and {site}, have client {client}. Give each client "
                "to one site (--node-config 'clients=\"0,3\"')."
            )

    def _check_samples(self, site: str, client: int, there: tuple[int, int], own: bool) -> None:
        cohort = self.loop.cohort
        if own:
            return
        here = cohort.sizes([client])[client], int(cohort.data.batches_per_epoch(client))
        if here != there:
            raise UserError(
                f"site {site}: client {client} has {there[0]} samples in {there[1]} batches there, "
                f"and {here[0]} in {here[1]} by the server's config. Server and site need the same "
                "data."
            )


def raise_failed(site: str, failed: answers.SiteError) -> None:
    """Raise the error that a site reports.

    Raises:
        UserError: always. It says whether the site's code failed.
    """
    of_code = "" if failed.user else " (an error of the code at that site)"
    raise UserError(f"site {site}: {failed.text}{of_code}")
