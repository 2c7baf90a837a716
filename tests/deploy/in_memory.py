"""Sites in threads of this process, whose messages are converted to bytes as on a network."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping

from fl_lightning.deploy.transport import Message, Post, packed, unpacked


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
