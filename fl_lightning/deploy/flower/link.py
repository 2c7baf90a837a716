"""The link between a message's process and the process of its site: a socket in the site's folder.

A question is the resident's key, a length and that many bytes; an answer is a length and the bytes.
An answer without bytes means that this resident belongs to another app, and ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "site.sock"
KEY_BYTES = 32


@contextmanager
def address(folder: Path) -> Iterator[str]:
    """Return the socket's name, short enough for the system however long the folder's name is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)


def connect(folder: Path) -> socket.socket:
    """Return a connection to the folder's resident.

    Raises:
        OSError: there is none.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with address(folder) as name:
            connection.connect(name)
    except OSError:
        connection.close()
        raise
    return connection


def listen(folder: Path) -> socket.socket:
    """Return the resident's socket, which replaces that of an earlier resident that has ended."""
    (folder / NAME).unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with address(folder) as name:
        listening.bind(name)
    os.chmod(folder / NAME, 0o600)
    listening.listen(16)
    return listening


def write(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(8, "little"))
    connection.sendall(data)


def read(connection: socket.socket) -> bytes:
    """Read a message that :func:`write` sent.

    Raises:
        ConnectionError: the other end closed the connection before all was sent.
    """
    return read_bytes(connection, int.from_bytes(read_bytes(connection, 8), "little"))


def read_bytes(connection: socket.socket, number: int) -> bytes:
    """So many bytes.

    Raises:
        ConnectionError: the other end closed the connection before.
    """
    data = bytearray(number)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view, min(len(view), 1 << 20))
        if not got:
            raise ConnectionError("the other end has gone")
        view = view[got:]
    return bytes(data)
