"""What cannot run over sites is refused by name, and so is a site that does not fit the run, or
whose files are damaged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import Diverged, UserError
from fl_lightning import callbacks as packaged
from fl_lightning.callback import Clients, FederatedCallback, ServerState
from fl_lightning.callbacks import (
    CommunicationLogger,
    ControlVariates,
    DivergenceLogger,
    GlobalLossLogger,
    Gossip,
    ProximalTerm,
    PushSum,
)
from fl_lightning.deploy import same_config
from fl_lightning.deploy.at_server import refuse_methods
from fl_lightning.deploy.site_rows import SiteRows
from fl_lightning.storage.client_store import ClientStore
from tests.deploy.test_in_memory import Learner, over_sites

pytestmark = pytest.mark.slow
SOUTH = {"south": [*range(9)]}


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


class Smaller(Frozen):
    def __init__(self) -> None:
        super().__init__()
        self.net[3] = nn.Linear(6, 3, bias=False)


def proximal(mu: float) -> list[Any]:
    return [ProximalTerm(mu)]


FAST = partial(torch.optim.SGD, lr=5.0, weight_decay=0.01)


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({"local_epochs": 9}, r"settings .* \(local_epochs: 9 there, 2 here\)"),
        ({"accumulate": 2}, r"\(accumulate: 2 there, 1 here\)"),
        ({"client_optimizer": FAST}, r"\(client_optimizer\.lr: 5\.0 there, 0\.1 here\)"),
        ({"methods": partial(proximal, 100.0)}, r"ProximalTerm\(mu=100\.0, .*\) there, .*mu=0\.1"),
        ({"methods": lambda: [ControlVariates()]}, "method ControlVariates: .* there, absent here"),
        ({"methods": lambda: [DivergenceLogger()]}, "method DivergenceLogger: .* there, absent"),
        ({"learner": OtherFrozen}, r"frozen parameter first\.weight and 1 more has other values"),
        ({"learner": Smaller}, "the model's parameters: 54 there, 57 here"),
    ],
)
def test_a_site_with_another_config_is_refused(
    there: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """Only this site is named."""
    here = partial(proximal, 0.1) if "ProximalTerm" in told else list
    options = {"learner": Frozen, "methods": here}
    with pytest.raises(UserError, match=f"site south: its .*{told}") as error:
        at_site = lambda name: {**options, **there} if name == "south" else options  # noqa: E731
        shares = {"north": [0], "south": [1]}
        over_sites(here, tmp_path, shares, at_site=at_site, learner=Frozen)
    assert "north" not in str(error.value) and "\n" not in str(error.value)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(["0.0.8", "0.0.7"])
    monkeypatch.setattr(same_config, "version_of", lambda package: next(versions))
    with pytest.raises(UserError, match=r"\(fl-lightning: 0\.0\.7 there, 0\.0\.8 here"):
        over_sites(list, tmp_path, SOUTH)


def test_the_machine_and_what_only_the_server_measures_may_differ(tmp_path: Path) -> None:
    by_one = partial(torch.optim.SGD, lr=0.1, weight_decay=0.01, foreach=True)
    there = {"on_nonfinite": "skip", "engine": "concurrent", "client_optimizer": by_one}
    there["methods"] = list
    module, metrics, _ = over_sites(
        lambda: [CommunicationLogger()], tmp_path, SOUTH, at_site=lambda name: there, rounds=1
    )
    assert len(metrics) == 1 and not [note for note in module.notes if "dropped" in note]


class Unsent(FederatedCallback):
    pull = ServerState()

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        return gradient + self.pull


class Sent(Unsent):
    pull = ServerState(sent=True)


class Noted(FederatedCallback):
    factor = 1.0

    def on_round_start(self, server: Any) -> None:
        self.factor = 0.5

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        return gradient * self.factor


class Limiting(FederatedCallback):
    limit = 1.0

    def on_round_start(self, server: Any) -> None:
        self.limit = 0.5

    def scale_samples(self, clients: Clients, norms: Tensor) -> Tensor:
        return (self.limit / norms).clamp(max=1.0)


class Watching(FederatedCallback):
    factor = 1.0

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.factor = float(trainer.callback_metrics["val/loss"])

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        return gradient * self.factor


class Lost(FederatedCallback):
    """Loses two clients to infinity."""

    def on_local_end(self, clients: Clients) -> None:
        if clients.client_ids[0] in (1, 5):
            clients.x *= torch.inf


@pytest.mark.parametrize(
    ("method", "error", "told"),
    [
        (Unsent, UserError, r"Unsent\.pull is read in a hook that takes clients.*sent=True"),
        (Noted, UserError, r"Noted sets self\.factor in a hook that only the server.*ServerState"),
        (Limiting, UserError, r"Limiting sets self\.limit in a hook that only the server"),
        (Watching, UserError, r"Watching sets self\.factor in a hook that only the server"),
        (GlobalLossLogger, UserError, "GlobalLossLogger needs the clients' samples"),
        (
            *(Lost, Diverged),
            "update of client 1 at site south, of client 5 at site west in round 0 is not finite",
        ),
    ],
)
def test_methods_that_sites_cannot_run_are_named_and_so_is_who_diverges(
    method: Callable[[], Any], error: type[Exception], told: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=told):
        over_sites(lambda: [method()], tmp_path, rounds=1, participation="all")


@pytest.mark.parametrize("method", [Gossip, PushSum])
def test_a_method_without_a_server_is_refused_before_a_site_trains(
    method: Callable[[], Any], tmp_path: Path
) -> None:
    began: list[Any] = []

    class Began(FederatedCallback):
        def on_local_start(self, clients: Clients) -> None:
            began.append(clients.client_ids)

    with pytest.raises(UserError, match=f"{method.__name__} has no server, and sites send"):
        over_sites(
            lambda: [method(), Began()], tmp_path, rounds=1, participation="all", buffers="own"
        )
    assert not began


def test_a_state_that_is_sent_is_at_the_sites(tmp_path: Path) -> None:
    over_sites(lambda: [Sent()], tmp_path, rounds=1)


def test_all_packaged_methods_pass_or_are_named() -> None:
    refused = {"GlobalLossLogger", "HessianLogger", "ConsensusDistanceLogger", "QuantizedBroadcast"}
    refused.add("AlignedDuals")
    for name in packaged.__all__:
        kind = getattr(packaged, name)
        if not isinstance(kind, type) or not issubclass(kind, FederatedCallback):
            continue
        try:
            method = kind()
        except TypeError:  # it has an argument without a default
            continue
        if name not in refused:
            refuse_methods([method])
            continue
        with pytest.raises(UserError, match=f"method: {name} needs .* at the server"):
            refuse_methods([method])


def test_a_client_of_two_sites_is_refused_and_so_is_a_folder_of_another_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two sites, east and west, have client 3"):
        over_sites(list, tmp_path, shares={"east": [0, 3], "west": [3, 4]}, rounds=1)
    with pytest.raises(UserError, match="there is no client 9; the data have 9, 0 to 8"):
        over_sites(list, tmp_path, shares={"north": [9]}, rounds=1)
    (tmp_path / "other").mkdir()
    journal = '{"run": 9, "committed": {}, "staged": [], "rows": {}}'
    (tmp_path / "other" / "site.json").write_text(journal, "utf-8")
    with pytest.raises(UserError, match="rows of another run") as error:
        over_sites(list, tmp_path, shares={"other": [0]}, rounds=1)
    assert str(tmp_path) not in str(error.value) and "site folder …/other" in str(error.value)


JOURNAL: dict[str, Any] = {"run": 7, "committed": {}, "staged": [], "rows": {}}


def of_row(clients: Any, segments: Any) -> str:
    return json.dumps({**JOURNAL, "rows": {"a": {"clients": clients, "segments": segments}}})


@pytest.mark.parametrize(
    "text",
    [
        of_row([0, 1], [3]),
        of_row([1, 0], [3, 3]),
        "[" * 200_000,
        json.dumps({**JOURNAL, "staged": [[0, [3, ["a"]]]]}),
        json.dumps({**JOURNAL, "run": 7.9}),
    ],
)
def test_a_damaged_journal_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "site.json").write_text(text, "utf-8")
    told = r"site\.json is damaged .* Restore it from a copy"
    with pytest.raises(UserError, match=told) as error:
        SiteRows(tmp_path, ClientStore())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["-5", "9" * 5000, "x"])
def test_a_damaged_number_of_the_folder_is_drawn_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / "site.id").write_text(text, "ascii")
    rows = SiteRows(tmp_path, ClientStore())
    rows.lock.release()
    assert 0 <= rows.place < 2**53
    assert (tmp_path / "site.id").read_text("ascii") == str(rows.place)
