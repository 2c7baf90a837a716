"""A site with another config than the server's is refused before the first round."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fl_lightning import UserError
from fl_lightning.callbacks import (
    CommunicationLogger,
    ControlVariates,
    DivergenceLogger,
    ProximalTerm,
)
from fl_lightning.deploy.at_server import AtServer
from fl_lightning.deploy.site import AtSite, Ended
from fl_lightning.deploy.site_data import Everything
from fl_lightning.deploy.transport import InMemoryTransport, Post
from tests.deploy.test_in_memory import Learner, site, trained
from tests.deploy.test_own_data import LISTS, OTHERS, table

pytestmark = pytest.mark.slow


class Frozen(Learner):
    """It has a frozen layer, as a pretrained one."""

    value = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3).requires_grad_(False)
        for parameter in self.first.parameters():
            nn.init.constant_(parameter, self.value)


class OtherFrozen(Frozen):
    value = -3.0


def proximal(mu: float) -> list[Any]:
    return [ProximalTerm(mu)]


@pytest.mark.parametrize(
    "methods, options, told",
    [
        ([], {"local_epochs": 9}, r"settings .* \(local_epochs: 9 there, 2 here\)"),
        ([], {"accumulate": 2}, r"\(accumulate: 2 there, 1 here\)"),
        (
            [],
            {"client_optimizer": partial(torch.optim.SGD, lr=5.0, weight_decay=0.01)},
            r"\(client_optimizer\.lr: 5\.0 there, 0\.1 here\)",
        ),
        (proximal(100.0), {}, r"ProximalTerm\(mu=100\.0\) there, ProximalTerm\(mu=0\.1\) here"),
        ([ControlVariates()], {}, r"method ControlVariates: .* there, absent here"),
        ([DivergenceLogger()], {}, r"method DivergenceLogger: .* there, absent here"),
        ([], {"learner": OtherFrozen}, r"frozen parameter first\.weight and 1 more has other val"),
    ],
)
def test_a_site_with_another_config_is_refused(
    methods: list[Any], options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    here = proximal(0.1) if methods and isinstance(methods[0], ProximalTerm) else []
    given = {"learner": Frozen, **options}

    def serve(name: str, post: Post) -> None:
        site(list(range(9)), tmp_path / name, lambda: methods, given, post)

    transport = InMemoryTransport({"south": partial(serve, "south")})
    try:
        with pytest.raises(UserError, match=f"site south: its .*{told}"):
            trained([*here, AtServer(transport, run=7, timeout=60)], 1, [], learner=Frozen)
    finally:
        transport.close()


def test_the_machine_and_what_only_the_server_measures_may_differ(tmp_path: Path) -> None:
    def serve(name: str, post: Post) -> None:
        by_one = partial(torch.optim.SGD, lr=0.1, weight_decay=0.01, foreach=True)
        given = {"on_nonfinite": "skip", "engine": "concurrent", "client_optimizer": by_one}
        site(list(range(9)), tmp_path / name, list, given, post)

    transport = InMemoryTransport({"south": partial(serve, "south")})
    metrics: list[dict[str, float]] = []
    try:
        at = [CommunicationLogger(), AtServer(transport, run=7, timeout=60)]
        module = trained(at, 1, metrics)
    finally:
        transport.close()
    assert len(metrics) == 1 and not [note for note in module.notes if "dropped" in note]


class Cycle(Learner):
    """Its scheduler depends on the client's number of local steps."""

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps + 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_schedules_may_depend_on_a_site_s_own_data(tmp_path: Path) -> None:
    options: dict[str, Any] = {"learner": Cycle, "participation": "all", "client_optimizer": None}
    options["client_scheduler"] = "local_steps"

    def serve(client: int, post: Post) -> None:
        own = partial(table, LISTS[client], partition=Everything(3))
        at = AtSite(post, [client], tmp_path / str(client), own=True)
        with suppress(Ended):
            trained([at], 1, [], data=own, **options)

    transport = InMemoryTransport({str(i): partial(serve, i) for i in range(3)})
    metrics: list[dict[str, float]] = []
    try:
        trained([AtServer(transport, run=7, timeout=60)], 1, metrics, data=OTHERS, **options)
    finally:
        transport.close()
    assert len(metrics) == 1
