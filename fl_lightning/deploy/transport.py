"""Messages between a server and its sites, which hold only arrays and numbers, and who carries
them.

The bytes of a message are self-describing: 8 bytes with the length of a header in JSON, the header,
and the arrays one after the other. Nothing in a message is ever unpickled.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fl_lightning.machine.escaping import plain

Array = NDArray[Any]
Number = int | float
MAGIC = b"fl-site1"
BFLOAT = np.dtype("V2")  # the bits of a bfloat16 tensor, which NumPy has no type for
# Accept only these types: an object array would hold pointers, text needs no array, and PyTorch has
# no number of more than 8 bytes, or 16 if it is complex.
DTYPES = {
    *("|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8"),
    *("<f2", "<f4", "<f8", "<c8", "<c16", BFLOAT.str),
}
MOST_HEADER = 2**24  # bytes of a header


def words(text: str) -> NDArray[np.uint8]:
    """Return a text for people as numbers."""
    return np.frombuffer(text.encode(), np.uint8)


def said(array: Array) -> str:
    """Return the text of such numbers."""
    return array.astype(np.uint8).tobytes().decode(errors="replace")


def visible(text: object, most: int = 100) -> str:
    """Return the beginning of a text from outside, as one line without control characters.

    >>> visible("a\x1b[2Jb\\nc")
    'a�[2Jb�c'
    """
    return plain(str(text)[:most])


@dataclass
class Message:
    """A message between a server and a site.

    Args:
        what: the kind of message, such as ``"round"``; see
            :mod:`fl_lightning.deploy.round_messages`.
        site: the site's name in the transport: the receiver of a question, the sender of an answer.
    """

    what: str
    site: str = ""
    numbers: dict[str, Number] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)

    @property
    def array_bytes(self) -> int:
        """Return how many bytes its arrays take."""
        return sum(array.nbytes for array in self.arrays.values())


class Transport(Protocol):
    """Carries messages between the server and its sites; this is the server's end."""

    def sites(self) -> list[str]:
        """Return the sites that are present; a restarted site may have another name."""

    def send(self, messages: list[Message]) -> None:
        """Send each message to its site; do not wait for an answer."""

    def receive(self, timeout: float) -> list[Message]:
        """Return the answers since the last call; wait for one at most so many seconds.

        If a message was lost on the way, a message with ``what="lost"`` from its site comes
        instead. If a site does not run the app, ``what="refused"`` with the reason as ``text``. If
        its bytes are not a message, ``what="damaged"``: see :func:`unpacked`.
        """


class Post(Protocol):
    """A site's end of a transport."""

    def take(self) -> Message | None:
        """Return the next message of the server; None: there will be no more."""

    def give(self, answer: Message) -> None:
        """Answer the message that was taken last."""


def packed(message: Message) -> bytes:
    """A message as bytes."""
    payload = []
    for array in message.arrays.values():
        little = np.asarray(array, order="C").astype(array.dtype.newbyteorder("<"), copy=False)
        payload.append(little.tobytes())
    return b"".join([_header(message), *payload])


def bytes_of(message: Message) -> int:
    """Return how many bytes :func:`packed` makes of a message."""
    return len(_header(message)) + message.array_bytes


def _header(message: Message) -> bytes:
    """Return the bytes of a message before its arrays."""
    places = {}
    for name, array in message.arrays.items():
        kind = array.dtype.newbyteorder("<").str
        if kind not in DTYPES:
            raise TypeError(f"{name} has the dtype {array.dtype}; messages can hold only numbers")
        places[name] = [kind, list(array.shape)]
    header = {"what": message.what, "numbers": message.numbers, "arrays": places}
    text = json.dumps(header).encode()
    return b"".join([MAGIC, len(text).to_bytes(8, "little"), text])


def unpacked(data: bytes, site: str) -> Message:
    """Return the message that :func:`packed` made; its arrays are views of the bytes.

    ``damaged``, with the reason as ``text``, if the data are not such a message.
    """
    try:
        if data[:8] != MAGIC:
            raise ValueError("it does not begin like a message")
        length = int.from_bytes(data[8:16], "little")
        if length > MOST_HEADER:
            raise ValueError(f"its header has {length} bytes, and {MOST_HEADER} are accepted")
        start = 16 + length
        header = json.loads(data[16:start])
        numbers = header["numbers"]
        for name, number in numbers.items():
            if type(number) not in (int, float):
                raise ValueError(f"its field {visible(name, 50)} is not a number")
        arrays = {}
        for name, (kind, shape) in header["arrays"].items():
            arrays[name] = _view(data, name, kind, shape, start)
            start += arrays[name].nbytes
        if start != len(data):
            raise ValueError(f"it has {len(data)} bytes, and its header says {start}")
        return Message(str(header["what"]), site, numbers, arrays)
    except Exception as error:
        return damaged(site, error)


def damaged(site: str, error: Exception) -> Message:
    """Return what stands for data that are not a message."""
    text = (
        f"site {site}: the data that arrived are not a message of fl-lightning ({visible(error)}). "
        "Server and site need the same version of fl-lightning, and the app that `fl-lightning "
        "deploy flower` wrote."
    )
    return Message("damaged", site, arrays={"text": words(text)})


def _view(data: bytes, name: str, kind: object, shape: Any, start: int) -> Array:
    """Return an array of a message, which begins at ``start`` in its bytes."""
    whole = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if kind not in DTYPES or not whole:
        raise ValueError(f"its field {visible(name, 50)} is not an array of numbers")
    values: Any = np.frombuffer(data, np.dtype(str(kind)), math.prod(shape), start)
    native: Array = values.astype(values.dtype.newbyteorder("="), copy=False).reshape(shape)
    return native


class InMemoryTransport:
    """Sites in threads of this process, for tests and trials; one computes at a time.

    Messages are converted to bytes, as in other transports.

    Args:
        sites: by name, a function that serves a :class:`Post` until its end.

    A site that raises ``SystemExit`` was killed, and starts again at its next message.
    """

    def __init__(self, sites: Mapping[str, Callable[[Post], None]]) -> None:
        self._serve = dict(sites)
        self._posts: dict[str, _MemoryPost] = {}
        self._waiting: list[tuple[str, bytes]] = []
        self._busy: str | None = None  # the site that computes

    def sites(self) -> list[str]:
        return sorted(self._serve)

    def send(self, messages: list[Message]) -> None:
        self._waiting += [(message.site, packed(message)) for message in messages]

    def receive(self, timeout: float) -> list[Message]:
        # A site gets its next message only after it has answered the last one.
        if self._busy is None and self._waiting:
            site, data = self._waiting.pop(0)
            if site not in self._posts:
                self._posts[site] = _MemoryPost(site, self._serve[site])
            self._posts[site].inbox.put(data)
            self._busy = site
        if self._busy is None:
            time.sleep(max(0.0, min(timeout, 0.01)))
            return []
        site = self._busy
        try:
            answer = self._posts[site].outbox.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return []
        self._busy = None
        if isinstance(answer, BaseException):
            del self._posts[site]
            if isinstance(answer, SystemExit):
                return [Message("lost", site)]
            raise answer
        return [unpacked(answer, site)]

    def close(self) -> None:
        """Let the sites end, and wait for them."""
        for post in self._posts.values():
            post.inbox.put(None)
            post.thread.join()
        self._posts = {}


class _MemoryPost:
    def __init__(self, site: str, serve: Callable[[Post], None]) -> None:
        self.site = site
        self.inbox: queue.Queue[bytes | None] = queue.Queue()
        self.outbox: queue.Queue[bytes | BaseException] = queue.Queue()
        self.thread = threading.Thread(target=self._run, args=(serve,), daemon=True)
        self.thread.start()

    def _run(self, serve: Callable[[Post], None]) -> None:
        try:
            serve(self)
        except BaseException as error:
            self.outbox.put(error)

    def take(self) -> Message | None:
        data = self.inbox.get()
        return None if data is None else unpacked(data, self.site)

    def give(self, answer: Message) -> None:
        self.outbox.put(packed(answer))
