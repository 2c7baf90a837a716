"""Runs over sites whose data are their own: weights are those of the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import FederatedModule, InMemoryDataModule, UserError
from fl_lightning.deploy import register
from fl_lightning.deploy.site_data import Everything
from fl_lightning.deploy.transport import InMemoryTransport, Message, Post, words
from fl_lightning.round.client_schedule import ClientSchedule
from tests.deploy.liars import SKIP, Liar, Without, with_liar
from tests.deploy.test_in_memory import METHODS, Learner, check_same, over_sites, trained

pytestmark = pytest.mark.slow
LISTS = [np.arange(10), np.arange(10, 16), np.arange(16, 36)]
OWN: dict[str, Any] = {"participation": "all", "weighting": "samples"}


def table(samples: Any, **given: Any) -> InMemoryDataModule:
    rng = np.random.default_rng(4)
    x = torch.from_numpy(rng.normal(size=(60, 3))).float()
    y = torch.from_numpy(rng.integers(0, 3, 60))
    return InMemoryDataModule((x[samples], y[samples]), val=(x[:20], y[:20]), batch_size=4, **given)


OTHERS = partial(table, slice(30, 60), num_clients=3)


def over_own(
    methods: Callable[[], list[Any]],
    folder: Path,
    lists: Sequence[Any] = LISTS,
    rows: Callable[[int], InMemoryDataModule] | None = None,
    **options: Any,
) -> FederatedModule:
    """A run over sites with data of their own."""

    def at_site(name: str) -> dict[str, Any]:
        i = int(name)
        data = partial(table, lists[i], partition=Everything(3)) if rows is None else None
        return {"own": True, "data": data or partial(rows, i)}

    given = {"rounds": 3, "min_sites": 1, "data": OTHERS, "at_site": at_site, **OWN, **options}
    module, _, _ = over_sites(methods, folder, {str(i): [i] for i in range(3)}, **given)
    return module


@pytest.mark.parametrize("min_sites", [1, 3])
def test_sites_with_data_of_their_own_train_on_them(min_sites: int, tmp_path: Path) -> None:
    """The simulation has the same samples as clients of one table; weights wait for all sizes."""
    methods, _ = METHODS["scaffold"]
    simulated = trained(methods(), 3, [], data=lambda: table(slice(36), clients=LISTS), **OWN)
    over = over_own(methods, tmp_path, min_sites=min_sites)
    check_same(simulated, over, tmp_path)


class Late(InMemoryTransport):
    """Site 1 is not there before another is asked to train."""

    asked = False

    def sites(self) -> list[str]:
        return [site for site in super().sites() if self.asked or site != "1"]

    def send(self, messages: list[Message]) -> None:
        self.asked |= any(message.what == "round" for message in messages)
        super().send(messages)


def test_a_resumed_run_weights_its_clients_as_their_sites_told_before(tmp_path: Path) -> None:
    methods, _ = METHODS["scaffold"]
    simulated = trained(methods(), 3, [], data=lambda: table(slice(36), clients=LISTS), **OWN)
    path = tmp_path / "last.ckpt"
    sites = tmp_path / "sites"
    over_own(methods, sites, rounds=1, save=path)
    over = over_own(methods, sites, carrier=Late, resume=path)
    check_same(simulated, over, sites)


def test_a_client_with_another_table_after_a_round_began_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    over_own(lambda: [], tmp_path / "sites", rounds=1, save=path)
    lists = [LISTS[0], np.arange(10, 20), LISTS[2]]
    over = over_own(lambda: [], tmp_path / "sites", lists=lists, carrier=Late, resume=path)
    dropped = [note for note in over.notes if "clients [1] dropped" in note]
    assert len(dropped) == 1 and dropped[0].startswith("round 1: ")


class Again(InMemoryTransport):
    """The sites' processes start again before round 1, under the same names."""

    def send(self, messages: list[Message]) -> None:
        if not self.again and any(message.numbers.get("round") == 1 for message in messages):
            type(self).again = True
            self.close()
        super().send(messages)

    again = False


@pytest.fixture
def again() -> type[Again]:
    return type("Anew", (Again,), {})


def test_a_process_that_starts_again_with_another_table_is_asked_for_its_numbers(
    again: type[Again], tmp_path: Path
) -> None:
    def other(client: int) -> InMemoryDataModule:
        rows = np.arange(10, 20) if again.again and client == 1 else LISTS[client]
        return table(rows, partition=Everything(3))

    over = over_own(lambda: [], tmp_path, carrier=again, rows=other)
    assert over.run.loop.cohort.data.told()[1] == (10, 3)


def test_a_process_that_starts_again_with_other_columns_is_refused(
    again: type[Again], tmp_path: Path
) -> None:
    def named(client: int) -> InMemoryDataModule:
        made = table(LISTS[client], partition=Everything(3))
        made.column_names = list("cba" if again.again and client == 1 else "abc")
        return made

    def of_server() -> InMemoryDataModule:
        made = table(slice(30, 60), num_clients=3)
        made.column_names = list("abc")
        return made

    told = "site 1: client 1: this site's columns are c, b, a, and the server's a, b, c"
    with pytest.raises(UserError, match=told):
        over_own(lambda: [], tmp_path, carrier=again, rows=named, data=of_server)


def named(own: bool, names: str, kind: str = "class_names") -> InMemoryDataModule:
    """Samples of so many classes, with names of their columns or classes."""
    partition: dict[str, Any] = {"partition": Everything(1)} if own else {"num_clients": 1}
    samples = (torch.zeros(20, 3), torch.arange(20) % len(names))
    made = InMemoryDataModule(samples, batch_size=4, **partition)
    setattr(made, kind, list(names))
    return made


@pytest.mark.parametrize(
    ("names", "kind", "told"),
    [
        ("ab", "other_names", "classes: 2 there, 3 here"),
        ("bac", "column_names", "this site's columns are b, a, c, and the server's a, b, c"),
        ("bac", "class_names", "this site's classes are b, a, c, and the server's a, b, c"),
    ],
)
def test_other_classes_and_names_in_another_order_are_refused(
    names: str, kind: str, told: str, tmp_path: Path
) -> None:
    """Numbers would be taken for other columns or classes, without a word."""
    own = {"own": True, "data": partial(named, True, names, kind)}
    given = {"data": partial(named, False, "abc", kind), "participation": "all"}
    with pytest.raises(UserError, match=f"site odd: .*{told}"):
        over_sites(list, tmp_path, {"odd": [0]}, at_site=lambda name: own, **given)


class Scheduled(Learner):
    """Its scheduler depends on the client's number of local steps."""

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps + 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


SCHEDULED: dict[str, Any] = {"learner": Scheduled, "client_optimizer": None}
SCHEDULED |= {"client_scheduler": "local_steps"}


def test_schedules_may_depend_on_a_site_s_own_data(tmp_path: Path) -> None:
    over = over_own(list, tmp_path, rounds=1, **SCHEDULED)
    assert not [note for note in over.notes if "dropped" in note]


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

    def lie(answer: Message) -> None:
        if answer.what == "here":
            answer.numbers["own"] = 1
            answer.arrays["sizes"] = np.asarray([2**31])
            answer.arrays["batches"] = np.asarray([2**30])

    monkeypatch.setattr(ClientSchedule, "reach", noted)
    with_liar(lie, tmp_path, rounds=1, **SCHEDULED)
    assert max(reached) < 2**20


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
    def wrap(name: str, post: Post) -> Post:
        only = lambda answer: lie(answer) if answer.what == "here" else None  # noqa: E731
        return Liar(post, only) if name == "1" else post

    monkeypatch.setattr(register, "SETTLED", 0.2)
    over = over_own(list, tmp_path, min_sites=2, wrap=wrap, **SKIP)
    left = [note for note in over.notes if "The run goes on without this site" in note]
    assert len(left) == 1 and left[0].startswith("site 1: ")
    assert any("the run begins without the clients [1]" in note for note in over.notes)
    own = {"data": lambda: table(slice(36), clients=LISTS), **OWN, **SKIP}
    expected = trained([Without((0, 1, 2))], 3, [], **own)
    assert torch.equal(over.global_vector, expected.global_vector)
