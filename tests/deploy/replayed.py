"""Runs whose sites answer as they once did, for many runs with one wrong answer each.

They are rounds of one fit, which is put back to before its first round: a whole fit takes some five
times as long as its rounds.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
from torch import Tensor

from fl_lightning import FederatedModule
from fl_lightning.deploy import at_server, register, sites_engine
from fl_lightning.deploy.at_server import AtServer
from fl_lightning.deploy.transport import MAGIC, InMemoryTransport, Message, packed, unpacked
from fl_lightning.storage.client_rows import ClientRows
from fl_lightning.storage.client_store import ClientStore
from tests.deploy.liars import OPTIONS, SHARES
from tests.deploy.test_in_memory import over_sites, trained

Place = tuple[str, int]  # the kind of an answer, and its round; -1: before round 0
Change = Callable[[bytes], bytes]
OF_QUESTION = {"hello": "here", "round": "trained", "evaluate": "evaluated"}


def place_of(message: Message) -> Place:
    what = OF_QUESTION.get(message.what, message.what)
    return what, -2 if what == "here" else int(message.numbers["round"])


@dataclass(frozen=True)
class Left:
    """What a run leaves: its model and the server's states by name, and its notes."""

    tensors: dict[str, torch.Tensor]
    notes: list[str]

    @classmethod
    def by(cls, module: FederatedModule) -> Left:
        tensors = {"w": module.global_vector, **dict(module.learner.named_buffers())}
        tensors |= {f"server state {key}": each for key, each in module.server_states.items()}
        return cls({key: each.detach().clone() for key, each in tensors.items()}, [*module.notes])


class Stopped(Exception):
    """The fit is where it has to stop."""


class Stop(pl.Callback):
    """The last callback of a fit, which ends it before its first round."""

    trainer: Any
    module: Any

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trainer, self.module = trainer, pl_module
        raise Stopped


class HeldFit:
    """A fit of two rounds with these callbacks, before the first of them.

    ``trainer``, ``module``, ``loop``: its Trainer, module, and loop of rounds.
    """

    def __init__(self, callbacks: Sequence[Any], **options: Any) -> None:
        stop = Stop()
        with suppress(Stopped):
            trained([*callbacks, stop], 2, [], **options)
        self.trainer, self.module = stop.trainer, stop.module
        self.loop = self.module.run.loop
        self.callbacks = list(self.trainer.callbacks)
        self.put_back = self.put_back_to()

    def put_back_to(self) -> Callable[[], None]:
        """Return a function that puts the fit back to the present place, without clients' rows."""
        run, model = self.module.run, self.loop.model
        objects = [run, self.loop, self.loop.state, self.loop.cohort, self.module.logged]
        kept = [(each, _copied(vars(each))) for each in [*objects, *run.methods.callbacks]]
        start = model.w.detach().clone(), {n: b.clone() for n, b in model.buffers().items()}

        def put_back() -> None:
            for each, values in kept:
                vars(each).clear()
                vars(each).update(_copied(values))
            self.loop.state.rows = ClientRows(ClientStore())
            model.move_to(start[0], None, start[1])
            self.trainer.callbacks = [*self.callbacks]
            self.trainer.callback_metrics.clear()

        return put_back


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Return attributes of an object: its collections and tensors are copied, and the rest not."""
    found = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            value = value.detach().clone()
        elif type(value) in (list, dict, set):
            value = copy.copy(value)
        found[name] = value
    return found


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
        module, *_ = over_sites(methods, folder, **given, **self.options)
        self.honest = Left.by(module)
        self.told: dict[int, tuple[int, int]] = {}
        self.held = HeldFit(methods(), **self.options)
        assert same_model(self.run(), self.honest)

    def own_data(self) -> Recording:
        """From now on the sites say that they brought their data, as they did in an earlier fit.

        Without that fit the run would wait for the numbers of a site whose hello is wrong.
        """
        for key, answer in self.answers.items():
            if key[1][0] == "here":
                message = unpacked(answer, key[0])
                message.numbers["own"] = 1
                numbers = (
                    message.arrays[name].tolist() for name in ("clients", "sizes", "batches")
                )
                self.told |= {i: (size, batches) for i, size, batches in zip(*numbers, strict=True)}
                self.answers[key] = packed(message)
        assert same_model(self.run(), self.honest)
        return self

    def run(self, liar: str = "", place: Place = ("", 0), change: Change = bytes) -> Left:
        """The same run, in which one answer of one site is changed."""
        self.held.put_back()
        trainer, module = self.held.trainer, self.held.module
        transport = Replays(self.answers, liar, place, change)
        at = AtServer(transport, run=7, timeout=20, min_sites=2)
        at.told = {**self.told}
        trainer.callbacks.append(at)
        measuring = [each for each in module.run.methods.callbacks if hasattr(each, "measure")]
        clock = transport.clock
        with (
            redirect_stdout(StringIO()),
            warnings.catch_warnings(),
            patch.object(register, "time", clock),
            patch.object(sites_engine, "time", clock),
            # To read the learner's source takes as long as a round.
            patch.object(at_server, "check_learner"),
        ):
            warnings.simplefilter("ignore")
            at.on_fit_start(trainer, module)
            at.on_train_start(trainer, module)
            for t in range(2):
                module.run.run_round(t)
                for each in measuring:
                    module.run.reporter.log(each.measure(module), t)
        assert transport.changed == bool(liar)
        return Left.by(module)


class Clock:
    """Seconds that pass only while somebody waits, in place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


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
        self.clock = Clock()

    def sites(self) -> list[str]:
        return sorted(SHARES)

    def send(self, messages: list[Message]) -> None:
        for message in messages:
            at = message.site, place_of(message)
            answer = unpacked(self.answers[at], message.site)
            answer.numbers["question"] = message.numbers["question"]
            data = packed(answer)
            if at == self.lie and not self.changed:
                self.changed = True
                data = self.change(data)
            self.due.append(unpacked(data, message.site))

    def receive(self, timeout: float) -> list[Message]:
        came, self.due = self.due, []
        if not came:
            self.clock.sleep(timeout)
        return came


def parts_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a message, and the bytes of its arrays."""
    start = 16 + int.from_bytes(data[8:16], "little")
    header: dict[str, Any] = json.loads(data[16:start])
    return header, data[start:]


def joined(header: object, payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return b"".join([MAGIC, len(text).to_bytes(8, "little"), text, payload])


def same_model(ours: Left, theirs: Left) -> bool:
    """Return whether w, buffers and the server's states are the same."""
    one, other = ours.tensors, theirs.tensors
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
