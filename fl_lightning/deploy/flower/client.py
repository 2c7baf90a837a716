"""The process of a message at a site: it passes the message on to the site's resident process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.deploy import what_leaves
from fl_lightning.deploy.flower import app, resident
from fl_lightning.deploy.flower.app import AppSettings, NodeSettings
from fl_lightning.deploy.transport import Message, packed, words
from fl_lightning.deploy.what_leaves import LOG, TOLD, told
from fl_lightning.errors import UserError
from fl_lightning.machine.escaping import plain_lines

_PAUSE = 0.05
_STARTS = 4
# All that leaves a site that cannot note its answers.
UNNOTED = (
    "the site sends no answer, because it cannot note it in left.csv: its --node-config, its "
    "folder or its disk has to be corrected; the site's node prints the reason"
)


def answer(message: Any, context: Any, file: str) -> Any:
    """Return the site's answer to a message of the server.

    Args:
        file: ``__file__`` of the app's client_app.py.
    """
    from flwr.app import Message as FlowerMessage

    site: Resident | None = None
    try:
        settings = NodeSettings(context.node_config)
        rounds = AppSettings(context.run_config).rounds
        site = Resident(Path(file).resolve().parents[1], settings, rounds)
        data = site.ask(app.bytes_in(message.content))
    except Exception as error:
        data = packed(failure(site, error))
    return FlowerMessage(app.content(data), reply_to=message)


def failure(site: Resident | None, error: Exception) -> Message:
    """Return the answer after an error: the error, or a fixed text if it cannot be noted.

    Args:
        site: None if its settings or its folder are wrong.
    """
    if site is not None:
        failed = failed_with(told(error))
        try:
            what_leaves.note(site.folder, Message(""), failed)
            return failed
        except UserError as unnoted:
            error = unnoted
    print(plain_lines(error), file=sys.stderr, flush=True)
    return failed_with(UNNOTED)


def failed_with(text: str) -> Message:
    return Message("failed", "", {"user": 1}, {"text": np.array(words(text))})


class Resident:
    """The process that holds a site's learner, data and rows; it is started if it does not run.

    Args:
        app: the app's folder.
        rounds: of the run, as the server counts them; the learner may read them.
    """

    def __init__(self, app: Path, settings: NodeSettings, rounds: int) -> None:
        self.folder = Path(settings.folder).absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--node-config folder={settings.folder!r}: this folder cannot be written to "
                f"({error.strerror or error}). Give another folder."
            ) from error
        self.command = [sys.executable, "-m", "fl_lightning", "site", str(app)]
        self.command += ["--folder", str(self.folder), "--parent", str(os.getppid())]
        self.command += ["--rounds", str(rounds)]
        if settings.site:
            self.command += ["--site", str(Path(settings.site).absolute())]
        else:
            self.command += ["--clients", settings.clients]
        self.key = self._key(app, settings)

    def _key(self, app: Path, settings: NodeSettings) -> bytes:
        """Return the key of a resident with this app and these settings."""
        digest = hashlib.sha256(repr(self.command).encode())
        paths = sorted(path for path in app.rglob("*") if path.suffix in (".py", ".yaml"))
        if settings.site:
            paths.append(Path(settings.site).absolute())
        for path in paths:
            if path.is_file():
                digest.update(path.read_bytes())
        return digest.digest()

    def ask(self, data: bytes) -> bytes:
        """Return the answer of the resident process, which is started if necessary.

        Raises:
            UserError: it does not start, or ends before it answers.
        """
        # Two messages to a site must not both start its process.
        with open(self.folder / "site.start", "w") as alone:
            fcntl.flock(alone, fcntl.LOCK_EX)
            starts = 0
            status: int | None = -1
            while not (answered := self._asked(data)):
                # A process that was killed is started again. A process that gave up is not.
                if status is not None and (status >= 0 or starts == _STARTS):
                    raise UserError(self._why())
                if status is not None:
                    process = self._start()
                    starts += 1
                time.sleep(_PAUSE)
                status = process.poll()
            return answered

    def _asked(self, data: bytes) -> bytes:
        """Return the answer; nothing if there is no resident with this key."""
        try:
            with resident.connect(self.folder, self.key) as connection:
                connection.send_bytes(data)
                return connection.recv_bytes()
        except (OSError, EOFError, AuthenticationError):
            return b""

    def _start(self) -> subprocess.Popen[bytes]:
        (self.folder / TOLD).unlink(missing_ok=True)
        # It may quote cells, so only its owner may read it.
        writing = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(self.folder / LOG, writing, 0o600), "wb") as log:
            return subprocess.Popen(
                self.command,
                # Others on this machine see a command, but not an environment.
                env={**os.environ, resident.KEY: self.key.hex()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A signal that ends the message's process must not end this one.
                start_new_session=True,
            )

    def _why(self) -> str:
        """Return what the server may know of why the process has ended."""
        why = "it said nothing"
        with suppress(OSError):
            why = (self.folder / TOLD).read_text("utf-8", errors="replace").strip()
        return f"{why[:1000]} (the site's process has ended; {self.folder / LOG})"
