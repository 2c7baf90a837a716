"""``fl-lightning site``: a site's process, which holds its learner, its data and its rows.

A Flower message's process starts it, and asks it through a socket in the site's folder. Both have
the same key: that of the app and of the site's settings. The resident process ends together with
the parent of that process, which is the SuperNode, or when a message of another app arrives.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from fl_lightning.deploy.transport import Message, packed, unpacked
from fl_lightning.deploy.what_leaves import TOLD, told
from fl_lightning.lab.cli.arguments import ArgumentParser

NAME = "site.sock"
KEY = "FL_LIGHTNING_SITE_KEY"  # variable of the environment by which a resident is given its key
DESCRIPTION = """Train a site's clients as messages of a server ask for it.

A Flower app starts it where it is needed; there is no need to type it."""


def main(argv: Sequence[str]) -> int:
    """Serve until the parent ends."""
    parser = ArgumentParser("site", DESCRIPTION)
    parser.add_argument("app", metavar="APP", type=Path, help="the app's folder")
    parser.add_argument("--folder", type=Path, required=True, help="of the site's rows")
    parser.add_argument("--parent", type=int, required=True, help="the process it ends with")
    parser.add_argument("--rounds", type=int, required=True, help="of the server's run")
    parser.add_argument("--clients", default="", help="of the config's partition, such as 0,3")
    parser.add_argument("--site", type=Path, help="a site.yaml with the site's own data")
    options = parser.parse_args(list(argv))
    end_with(options.parent)
    from fl_lightning.deploy.flower.serve_site import serve

    post = SocketPost(options.folder, bytes.fromhex(os.environ[KEY]))
    try:
        serve(options.app, options.folder, options.clients, options.site, options.rounds, post)
    except Exception as error:
        # The text of the error goes to the log, which stays at the site.
        (options.folder / TOLD).write_text(told(error), "utf-8")
        raise
    return 0


class SocketPost:
    """A site's end of the link, which starts to listen when it first waits for a message."""

    def __init__(self, folder: Path, key: bytes) -> None:
        self.folder = folder
        self.key = key
        self._listening: Listener | None = None
        self._open: Connection | None = None

    def take(self) -> Message | None:
        if self._listening is None:
            self._listening = listen(self.folder, self.key)
        while True:
            # If the process that asked has ended, take the next connection.
            with suppress(ConnectionError, EOFError):
                try:
                    self._open = self._listening.accept()
                except AuthenticationError:
                    # Another app has come. Its resident makes its own socket.
                    self._listening.close()
                    return None
                return unpacked(self._open.recv_bytes(), "")

    def give(self, answer: Message) -> None:
        assert self._open is not None
        with suppress(ConnectionError), self._open as connection:
            connection.send_bytes(packed(answer))


def connect(folder: Path, key: bytes) -> Connection:
    """Return a connection to the folder's resident.

    Raises:
        OSError, EOFError: there is none.
        AuthenticationError: it has another key.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return Client(_address(descriptor), "AF_UNIX", authkey=key)
    finally:
        os.close(descriptor)


def listen(folder: Path, key: bytes) -> Listener:
    """Return the resident's socket, which replaces that of an earlier resident that has ended."""
    # It stays open, because its number is part of the socket's name.
    name = _address(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    with suppress(FileNotFoundError):
        os.unlink(name)
    listener = Listener(name, "AF_UNIX", backlog=16, authkey=key)
    os.chmod(name, 0o600)
    return listener


def _address(descriptor: int) -> str:
    """Return the socket's name, short enough for the system however long the folder's name is."""
    return f"/proc/self/fd/{descriptor}/{NAME}"


def end_with(parent: int) -> None:
    """End this process at once when its parent has ended; everything that counts is on disk at
    any time.
    """
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(0)

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
