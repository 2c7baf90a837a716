"""Runs over sites whose data are their own: weights are those of the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import FederatedModule, InMemoryDataModule, UserError
from fl_lightning.deploy.at_server import AtServer
from fl_lightning.deploy.site import AtSite, Ended
from fl_lightning.deploy.site_data import Everything
from fl_lightning.deploy.transport import InMemoryTransport, Message, Post
from tests.deploy.test_in_memory import METHODS, check_same, trained

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
    carrier: type[InMemoryTransport] = InMemoryTransport,
    rounds: int = 3,
    min_sites: int = 1,
    rows: Callable[[int], InMemoryDataModule] | None = None,
    others: Callable[[], InMemoryDataModule] = OTHERS,
    **options: Any,
) -> FederatedModule:
    """A run over sites with data of their own.

    The server's own samples, ``others``, are trained on by no client.
    """

    def serve(client: int, post: Post) -> None:
        def own() -> InMemoryDataModule:
            return table(lists[client], partition=Everything(3)) if rows is None else rows(client)

        with suppress(Ended):
            at = AtSite(post, [client], folder / str(client), own=True)
            trained([*methods(), at], 1, [], data=own, **OWN)

    transport = carrier({str(i): partial(serve, i) for i in range(3)})
    at = AtServer(transport, run=7, min_sites=min_sites)
    try:
        return trained([*methods(), at], rounds, [], data=others, **OWN, **options)
    finally:
        transport.close()


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


def test_a_client_whose_table_is_another_after_a_round_began_is_left_out_of_it(
    tmp_path: Path,
) -> None:
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
        over_own(lambda: [], tmp_path, carrier=again, rows=named, others=of_server)


def test_data_of_other_classes_are_refused(tmp_path: Path) -> None:
    def serve(post: Post) -> None:
        def own() -> InMemoryDataModule:
            samples = (torch.zeros(20, 3), torch.arange(20) % 2)
            return InMemoryDataModule(samples, batch_size=4, partition=Everything(9))

        with suppress(Ended):
            trained([AtSite(post, [0], tmp_path / "odd", own=True)], 1, [], data=own)

    transport = InMemoryTransport({"odd": serve})
    with pytest.raises(UserError, match="site odd: its data have 2 classes, and the server's 3"):
        trained([AtServer(transport, run=7)], 1, [])
    transport.close()


@pytest.mark.parametrize("kind, what", [("column_names", "columns"), ("class_names", "classes")])
def test_a_site_whose_names_are_in_another_order_is_refused(
    kind: str, what: str, tmp_path: Path
) -> None:
    """Its numbers would be taken for other columns or classes, without a word."""

    def named(names: list[str], **given: Any) -> InMemoryDataModule:
        samples = (torch.zeros(20, 3), torch.arange(20) % 3)
        made = InMemoryDataModule(samples, batch_size=4, **given)
        setattr(made, kind, names)
        return made

    def serve(post: Post) -> None:
        with suppress(Ended):
            at = AtSite(post, [0], tmp_path / "odd", own=True)
            own = partial(named, list("bac"), partition=Everything(1))
            trained([at], 1, [], data=own, participation="all")

    transport = InMemoryTransport({"odd": serve})
    told = f"site odd: client 0: this site's {what} are b, a, c, and the server's a, b, c"
    with pytest.raises(UserError, match=told):
        at = AtServer(transport, run=7)
        one = partial(named, list("abc"), num_clients=1)
        trained([at], 1, [], data=one, participation="all")
    transport.close()


def test_damaged_sizes_in_a_checkpoint_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    over_own(lambda: [], tmp_path / "sites", rounds=1, save=path)
    saved = torch.load(path, weights_only=True)
    saved["told by sites"] = {0: 10}
    torch.save(saved, path)
    with pytest.raises(UserError, match="ckpt_path: told by sites in the checkpoint is damaged"):
        over_own(lambda: [], tmp_path / "sites", resume=path)
