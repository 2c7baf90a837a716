"""Runs whose sites answer as they once did, for many runs with one wrong answer each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fl_lightning import FederatedModule
from fl_lightning.deploy.at_server import AtServer
from fl_lightning.deploy.transport import MAGIC, InMemoryTransport, Message, opened, packed
from tests.deploy.liars import OPTIONS, SHARES
from tests.deploy.test_in_memory import over_sites, trained

Place = tuple[str, int]  # the kind of an answer, and its round; -1: before round 0
Change = Callable[[bytes], bytes]
OF_QUESTION = {"hello": "here", "round": "trained", "evaluate": "evaluated"}


def place_of(message: Message) -> Place:
    what = OF_QUESTION.get(message.what, message.what)
    return what, -2 if what == "here" else int(message.numbers["round"])


class Recording:
    """The answers of an honest run: of each site, by place."""

    def __init__(self, methods: Callable[[], list[Any]], folder: Path, **options: Any) -> None:
        self.methods = methods
        self.options = {**OPTIONS, "on_nonfinite": "skip", **options}
        self.answers: dict[tuple[str, Place], bytes] = {}
        answers = self.answers

        class Records(InMemoryTransport):
            def receive(self, timeout: float) -> list[Message]:
                came = super().receive(timeout)
                answers.update({(m.site, place_of(m)): packed(m) for m in came})
                return came

        given = {"shares": SHARES, "timeout": 60, "rounds": 2, "carrier": Records}
        self.honest, *_ = over_sites(methods, folder, **given, **self.options)

    def run(self, liar: str = "", place: Place = ("", 0), change: Change = bytes) -> Any:
        """The same run, in which one answer of one site is changed."""
        transport = Replays(self.answers, liar, place, change)
        at = AtServer(transport, run=7, timeout=2, min_sites=2)
        module = trained([*self.methods(), at], 2, [], **self.options)
        assert transport.changed == bool(liar)
        return module


class Replays:
    """A transport whose sites answer at once, as recorded."""

    def __init__(
        self, answers: dict[tuple[str, Place], bytes], liar: str, place: Place, change: Change
    ) -> None:
        self.answers = answers
        self.lie = liar, place
        self.change = change
        self.changed = False
        self.due: list[Message] = []

    def sites(self) -> list[str]:
        return sorted(SHARES)

    def send(self, messages: list[Message]) -> None:
        for message in messages:
            at = message.site, place_of(message)
            answer = opened(self.answers[at], message.site)
            answer.numbers["question"] = message.numbers["question"]
            data = packed(answer)
            if at == self.lie and not self.changed:
                self.changed = True
                data = self.change(data)
            self.due.append(opened(data, message.site))

    def receive(self, timeout: float) -> list[Message]:
        came, self.due = self.due, []
        return came


def parts_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a message, and the bytes of its arrays."""
    start = 16 + int.from_bytes(data[8:16], "little")
    header: dict[str, Any] = json.loads(data[16:start])
    return header, data[start:]


def joined(header: object, payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return b"".join([MAGIC, len(text).to_bytes(8, "little"), text, payload])


def same_model(ours: FederatedModule, theirs: FederatedModule) -> bool:
    """Whether w, buffers and the server's states are the same."""
    pairs = [(ours.global_vector, theirs.global_vector)]
    for name in ("server_states", "buffers"):
        one, other = (_tensors(module, name) for module in (ours, theirs))
        if one.keys() != other.keys():
            return False
        pairs += [(one[key], other[key]) for key in one]
    return all(torch.equal(one, other) for one, other in pairs)


def _tensors(module: FederatedModule, name: str) -> dict[str, torch.Tensor]:
    if name == "buffers":
        return dict(module.learner.named_buffers())
    return dict(module.server_states)
