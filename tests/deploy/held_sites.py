"""Sites that are put back to before a question of a run, for many wrong questions in turn."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.deploy.site import AtSite
from fl_lightning.deploy.site_rows import SiteRows
from fl_lightning.deploy.transport import InMemoryTransport, Message, packed, unpacked
from fl_lightning.errors import UserError
from tests.deploy.held_fits import HeldFit
from tests.deploy.liars import CLIENT, LIAR, OPTIONS, SHARES
from tests.deploy.test_in_memory import over_sites


class NoPost:
    """A site that is asked directly needs no post."""

    def take(self) -> None:
        return None

    def give(self, answer: Message) -> None:
        return None


@dataclass(frozen=True)
class Reply:
    """A site's answer to a question, what it wrote to its log, and its files afterwards."""

    data: bytes
    log: str
    files: dict[str, bytes]

    @property
    def message(self) -> Message:
        return unpacked(self.data, "")


@dataclass(frozen=True)
class Before:
    """A site before a question: the question, its files, and what puts its fit back."""

    question: bytes
    files: dict[str, bytes]
    fit: Callable[[], None]


class HeldSite:
    """The site ``south`` of an honest run of two rounds, at each question of the server in turn."""

    def __init__(self, methods: Callable[[], list[Any]], folder: Path, **options: Any) -> None:
        questions: dict[str, list[bytes]] = {}

        class Records(InMemoryTransport):
            def send(self, messages: list[Message]) -> None:
                for message in messages:
                    questions.setdefault(message.site, []).append(packed(message))
                super().send(messages)

        options = {**OPTIONS, **options}
        given = {"shares": SHARES, "timeout": 60, "rounds": 2, "carrier": Records}
        over_sites(methods, folder / "run", **given, **options)
        self.questions = questions  # by site, in order
        self.folder = folder / "site"
        self.held = HeldFit([*methods(), AtSite(NoPost(), [CLIENT], self.folder)], **options)
        self.site: Any = self.held.loop
        self.places: list[Before] = []
        for question in questions[LIAR]:
            self.places.append(Before(question, self.files(), self.held.put_back_to()))
            self.ask(question)

    def files(self) -> dict[str, bytes]:
        """The files in the site's folder, without that of its lock."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        found = {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in paths}
        return {name: data for name, data in found.items() if not name.endswith("lock")}

    def put_back(self, place: Before) -> None:
        """Put the site back to before a question: its process, and its files."""
        self.site.rows.lock.release()
        if self.files() != place.files:
            shutil.rmtree(self.folder)
            for name, data in place.files.items():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).write_bytes(data)
        place.fit()
        rows = self.site.state.rows.store
        self.site.rows = SiteRows(self.folder, rows)

    def ask(self, data: bytes) -> Reply:
        """Ask the site, as its process does."""
        log = io.StringIO()
        with redirect_stderr(log):
            try:
                question = unpacked(data, "")
            except UserError:
                question = Message("damaged")
            answer = packed(self.site.answer(question))
        return Reply(answer, log.getvalue(), self.files())
