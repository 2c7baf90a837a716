"""A site that lies about sizes, or loses every message, costs the others nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import UserError
from fl_lightning.callbacks import CommunicationLogger, ControlVariates
from fl_lightning.deploy import register
from fl_lightning.deploy.site import AtSite
from fl_lightning.deploy.sites_engine import MOST_LOST
from fl_lightning.deploy.transport import InMemoryTransport, Message, words
from fl_lightning.round.client_schedule import ClientSchedule
from tests.deploy import test_own_data as own_data
from tests.deploy.liars import OPTIONS, SHARES, Liar, Without, with_liar
from tests.deploy.test_in_memory import Learner, over_sites, trained

pytestmark = pytest.mark.slow
SKIP = {"on_nonfinite": "skip"}


class Scheduled(Learner):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)]


def told(samples: int, batches: int) -> Callable[[Message], None]:
    """A lie: its client has so many samples of its own, in so many batches."""

    def lie(answer: Message) -> None:
        if answer.what == "here":
            answer.numbers["own"] = 1
            answer.arrays["sizes"] = np.asarray([samples])
            answer.arrays["batches"] = np.asarray([batches])

    return lie


@pytest.mark.parametrize(("samples", "batches"), [(2**40, 1), (10, 11)])
def test_samples_and_batches_have_bounds(samples: int, batches: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="site south: its answer to the server's hello is wrong"):
        with_liar(told(samples, batches), tmp_path)


def test_the_server_makes_no_table_of_the_steps_that_a_site_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only sites step their clients' schedules."""
    reached: list[int] = []
    reach = ClientSchedule.reach

    def noted(self: ClientSchedule, entries: int) -> None:
        reached.append(entries)
        if entries < 2**20:
            reach(self, entries)

    monkeypatch.setattr(ClientSchedule, "reach", noted)
    given = {"learner": Scheduled, "client_optimizer": None, "client_scheduler": "local_steps"}
    simulated = trained([], 1, [], **OPTIONS, **given)
    honest, _ = with_liar(lambda answer: None, tmp_path / "honest", rounds=1, **given)
    assert torch.equal(honest.global_vector, simulated.global_vector)
    with_liar(told(2**31, 2**30), tmp_path / "lies", rounds=1, **given)
    assert max(reached) < 2**20


def test_a_hello_has_a_bound_before_it_is_read(tmp_path: Path) -> None:
    def lie(answer: Message) -> None:
        if answer.what == "here":
            answer.arrays["clients"] = np.zeros(2**20, np.int64)

    with pytest.raises(UserError, match="the field clients has 8388608 bytes, and this whole"):
        with_liar(lie, tmp_path)


def test_a_client_keeps_no_more_than_methods_declare(tmp_path: Path) -> None:
    def methods() -> list[Any]:
        return [ControlVariates(), CommunicationLogger()]

    def lie(answer: Message) -> None:
        if answer.what == "trained" and answer.numbers["round"] == 0:
            answer.numbers["1/kept"] = 2**53

    over, _ = with_liar(lie, tmp_path, methods, **SKIP)
    (note,) = [note for note in over.notes if "answer of site" in note]
    assert note.startswith("round 0: the answer of site south: the field 1/kept is 900719925474099")


def test_a_site_that_loses_every_message_is_wrong_in_the_end(tmp_path: Path) -> None:
    """Each time it would draw the whole model again."""
    models = []

    class Loses(InMemoryTransport):
        def send(self, messages: list[Message]) -> None:
            models.extend(m.site for m in messages if m.what == "round")
            super().send(messages)

        def receive(self, timeout: float) -> list[Message]:
            came = super().receive(timeout)
            return [
                Message("lost", m.site, {"question": m.numbers["question"]})
                if m.site == "south" and m.what == "trained"
                else m
                for m in came
            ]

    given = {**OPTIONS, **SKIP, "rounds": 1, "timeout": 60, "shares": SHARES}
    over, _, _ = over_sites(list, tmp_path, carrier=Loses, **given)
    expected = trained([Without([0])], 1, [], **OPTIONS, **SKIP)
    assert torch.equal(over.global_vector, expected.global_vector)
    assert models.count("south") == MOST_LOST + 1
    (note,) = [note for note in over.notes if "answer of site" in note]
    assert note.startswith("round 0: the answer of site south: the field what is lost for")


def negative(answer: Message) -> None:
    answer.numbers["place"] = -1


def failed(user: int) -> Callable[[Message], Message]:
    def lie(answer: Message) -> Message:
        numbers = {"user": user, "question": answer.numbers["question"]}
        return Message("failed", "", numbers, {"text": words("cannot")})

    return lie


def refused(answer: Message) -> Message:
    return Message("refused", "", {}, {"text": words("no app there")})


@pytest.mark.parametrize("lie", [negative, failed(1), failed(0), refused])
def test_sites_with_their_own_data_begin_without_one_that_is_left_out(
    lie: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lies(AtSite):
        def __init__(self, post: Any, clients: list[int], *rest: Any, **given: Any) -> None:
            def of_hello(answer: Message) -> Any:
                return lie(answer) if answer.what == "here" else None

            post = Liar(post, of_hello) if clients == [1] else post
            super().__init__(post, clients, *rest, **given)

    monkeypatch.setattr(own_data, "AtSite", Lies)
    monkeypatch.setattr(own_data, "OWN", {**own_data.OWN, **SKIP})
    monkeypatch.setattr(register, "SETTLED", 0.2)
    over = own_data.over_own(list, tmp_path, min_sites=2)
    left = [note for note in over.notes if "The run goes on without this site" in note]
    assert len(left) == 1 and left[0].startswith("site 1: ")
    assert any("the run begins without the clients [1]" in note for note in over.notes)
    lists = own_data.LISTS
    expected = trained(
        [Without((0, 1, 2))],
        3,
        [],
        data=lambda: own_data.table(slice(36), clients=lists),
        **own_data.OWN,
    )
    assert torch.equal(over.global_vector, expected.global_vector)
