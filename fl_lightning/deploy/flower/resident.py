"""``fl-lightning site``: a site's process, which holds its learner, its data and its rows.

A Flower message's process starts it. The resident process ends together with the parent of that
process, which is the SuperNode, or when a message of another app arrives.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fl_lightning.deploy.flower import link
from fl_lightning.deploy.flower.parent import end_with
from fl_lightning.deploy.told_errors import LOGGED, TOLD, told
from fl_lightning.deploy.transport import Message, packed, unpacked
from fl_lightning.errors import UserError
from fl_lightning.lab.cli.arguments import ArgumentParser
from fl_lightning.machine.escaping import plain_lines

DESCRIPTION = """Train a site's clients as messages of a server ask for it.

A Flower app starts it where it is needed; there is no need to type it."""


def main(argv: Sequence[str]) -> int:
    """Serve until the parent ends.

    Raises:
        UserError: the user has to correct the site's data or settings.
    """
    parser = ArgumentParser("site", DESCRIPTION)
    parser.add_argument("app", metavar="APP", type=Path, help="the app's folder")
    parser.add_argument("--folder", type=Path, required=True, help="of the site's rows")
    parser.add_argument("--parent", type=int, required=True, help="the process it ends with")
    parser.add_argument("--key", required=True, help="by which its messages' processes know it")
    parser.add_argument("--rounds", type=int, required=True, help="of the server's run")
    parser.add_argument("--clients", default="", help="of the config's partition, such as 0,3")
    parser.add_argument("--site", type=Path, help="a site.yaml with the site's own data")
    options = parser.parse_args(list(argv))
    end_with(options.parent)
    from fl_lightning.deploy.flower.serve_site import serve

    post = SocketPost(options.folder, bytes.fromhex(options.key))
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
        self._listening: socket.socket | None = None
        self._open: socket.socket | None = None

    def take(self) -> Message | None:
        if self._listening is None:
            self._listening = link.listen(self.folder)
        while True:
            connection, _ = self._listening.accept()
            # If the process that asked has ended, take the next connection.
            with suppress(ConnectionError):
                if link.read_bytes(connection, link.KEY_BYTES) != self.key:
                    connection.close()
                    return None
                data = link.read(connection)
                self._open = connection
                return self._message(data)
            connection.close()

    def _message(self, data: bytes) -> Message:
        try:
            return unpacked(data, "")
        except UserError as error:
            print(plain_lines(str(error)[:LOGGED]), file=sys.stderr, flush=True)
            return Message("damaged")

    def give(self, answer: Message) -> None:
        assert self._open is not None
        with suppress(ConnectionError), self._open as connection:
            link.write(connection, packed(answer))
        self._open = None
