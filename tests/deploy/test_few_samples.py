"""Metrics of few samples stay at their site, and all else is as before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning import UserError
from fl_lightning.__main__ import main
from fl_lightning.callbacks import FairAggregation, PowerOfChoice
from fl_lightning.deploy.flower.app import AppSettings
from fl_lightning.deploy.flower.grid_server import fit
from fl_lightning.deploy.flower.serve_site import serve
from fl_lightning.deploy.transport import InMemoryTransport, Message
from fl_lightning.deploy.what_leaves import FILE
from tests.deploy.test_evaluation import OPTIONS as TESTED
from tests.deploy.test_evaluation import evaluation_of, measured_by
from tests.deploy.test_in_memory import SIZES, check_same, over_sites, trained
from tests.deploy.test_what_leaves import Spy

pytestmark = pytest.mark.slow
LARGE = [i for i, size in enumerate(SIZES) if size >= 10]
FIGURES = ("log", "metrics", "updates", "state", "name", "alone")


@pytest.fixture
def spy() -> type[Spy]:
    return type("Listens", (Spy,), {"down": [], "up": []})


def senders(answers: list[Message], fields: tuple[str, ...] = FIGURES) -> set[int]:
    """The clients of which any of these fields left a site."""
    found = set()
    for answer in answers:
        for name in (*answer.numbers, *answer.arrays):
            client, _, rest = name.partition("/")
            if rest.partition("/")[0] in fields:
                found.add(int(client))
    return found


def test_only_clients_with_enough_samples_send_metrics(spy: type[Spy], tmp_path: Path) -> None:
    """The model has the bits of the simulation, and metrics are means over the other clients."""
    simulated = trained([], 1, [], participation="all")
    _, before, _ = over_sites(list, tmp_path / "all", rounds=1, carrier=spy, participation="all")
    sent = [answer for answer in spy.up if answer.what == "trained"]
    assert senders(sent) == {*range(len(SIZES))}
    losses, right, seen = [], 0, 0
    for answer in sent:
        for client in LARGE:
            if f"{client}/log/train/loss" in answer.numbers:
                losses.append(answer.numbers[f"{client}/log/train/loss"])
                right += int(answer.arrays[f"{client}/state/0/tp"].sum())
                seen += 2 * SIZES[client]  # two local epochs
    spy.up.clear()
    over, metrics, _ = over_sites(
        list, tmp_path / "few", rounds=1, carrier=spy, fewest_samples=10, participation="all"
    )
    check_same(simulated, over, tmp_path / "few")
    sent = [answer for answer in spy.up if answer.what == "trained"]
    assert senders(sent) == {*LARGE}
    assert senders(sent, ("withheld",)) == {*range(len(SIZES))} - {*LARGE}
    assert metrics[0]["train/loss"] == pytest.approx(np.mean(losses))
    assert metrics[0]["train/acc"] == pytest.approx(right / seen)
    assert metrics[0].keys() == before[0].keys()
    (note,) = [note for note in over.notes if "fewest_samples" in note]
    assert "training metrics of some clients of a round stay at their sites" in note


@pytest.mark.parametrize(
    ("number", "options"), [(100, {}), (10, {"local_epochs": None, "local_steps": 2})]
)
def test_without_any_metric_of_clients_a_run_logs_none_and_says_why(
    number: int, options: dict[str, Any], spy: type[Spy], tmp_path: Path
) -> None:
    """Of clients with up to 20 samples; also of two steps of four samples each."""
    simulated = trained([], 2, [], **options)
    given = {"rounds": 2, "carrier": spy, "fewest_samples": number}
    over, metrics, _ = over_sites(list, tmp_path, **given, **options)
    check_same(simulated, over, tmp_path)
    assert not senders(spy.up)
    assert not [name for row in metrics for name in row if name.startswith("train/")]
    (note,) = [note for note in over.notes if "fewest_samples" in note]
    assert "training metrics of all clients of a round stay at their sites" in note


@pytest.mark.parametrize("method", [PowerOfChoice, FairAggregation])
def test_a_state_that_a_method_needs_is_sent_all_the_same(
    method: Callable[[], Any], tmp_path: Path
) -> None:
    """Both choose or weight clients by their losses."""
    simulated = trained([method()], 3, [], participation=4)
    over, _, _ = over_sites(
        lambda: [method()], tmp_path, rounds=3, fewest_samples=100, participation=4
    )
    check_same(simulated, over, tmp_path)


def test_a_client_with_few_test_samples_is_one_without_any(spy: type[Spy], tmp_path: Path) -> None:
    """Clients 0 to 3 have five test samples, and all others four or none."""
    methods = measured_by(list, finetune_epochs=1)
    simulated = evaluation_of(trained(methods(), 1, [], **TESTED))
    options = {"carrier": spy, "fewest_samples": 5, **TESTED}
    over, _, _ = over_sites(methods, tmp_path, rounds=1, **options)
    found = evaluation_of(over)
    kept = {i: n for i, n in simulated.samples.items() if n >= 5}
    assert {*kept} == {0, 1, 2, 3}
    assert found.samples == {i: kept.get(i, 0) for i in range(9)}
    for name, column in simulated.table.items():
        assert found.table[name] == {i: value for i, value in column.items() if i in kept}, name
    assert senders(spy.up, ("before", "after")) == {*kept}
    counts = [answer.arrays["tests"] for answer in spy.up if "tests" in answer.arrays]
    assert {int(n) for each in counts for n in each} == {0, 5}
    told = "5 of 9 clients hold no test sample, or fewer than their sites' fewest_samples"
    assert any(told in note for note in over.notes)


def test_a_run_whose_test_samples_are_all_too_few_is_refused_before_round_0(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="or as many as the site's fewest_samples"):
        over_sites(measured_by(list), tmp_path, rounds=1, fewest_samples=6, **TESTED)


def table(path: Path, rows: int) -> str:
    lines = [f"{i % 7},{i % 5},{i % 2}" for i in range(rows)]
    path.write_text("\n".join(["age,dose,outcome", *lines]) + "\n", "utf-8")
    given = f"path: {path}, target: outcome, classes: [0, 1], batch_size: 4"
    return f"data:\n  class_path: FromTable\n  init_args: {{{given}}}\n"


def over_an_app(folder: Path, *options: str, **of_sites: str) -> dict[str, Any]:
    """Two sites, of 8 and 12 rows, run an app that ``fl-lightning deploy flower`` wrote."""
    (folder / "study.yaml").write_text(table(folder / "server.csv", 10), "utf-8")
    study = ["base", str(folder / "study.yaml"), "--data.num_clients", "2"]
    assert main(["deploy", "flower", *study, *options, "--out", str(folder / "app")]) == 0
    sites = {}
    for client, (name, rows) in enumerate({"small": 8, "large": 12}.items()):
        own = f"client: {client}\n{of_sites.get(name, '')}\n" + table(folder / f"{name}.csv", rows)
        path = folder / f"{name}.yaml"
        path.write_text(own, "utf-8")
        sites[name] = partial(serve, folder / "app", folder / name, "", path, 1)
    transport = InMemoryTransport(sites)
    settings = AppSettings({"folder": str(folder / "run"), "rounds": 1, "min-sites": 2})
    try:
        assert fit(folder / "app", transport, settings) == 0
    finally:
        transport.close()
    header, *_, last = (folder / "run" / "metrics.csv").read_text("utf-8").split("\n")[:-1]
    return dict(zip(header.split(","), last.split(","), strict=True))


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


ALL = ["--model.participation", "all"]


def test_a_site_yaml_decides_and_its_default_is_ten_samples(alone: Path) -> None:
    metrics = over_an_app(alone, *ALL)
    assert float(metrics["train/loss"]) > 0
    left = {name: (alone / name / FILE).read_text("utf-8") for name in ("small", "large")}
    assert "; withheld 1" in left["small"] and "log/train/loss" not in left["small"]
    assert "withheld" not in left["large"] and "; log/train/loss " in left["large"]


def test_an_early_stopping_by_a_metric_that_no_client_sends_is_one_paragraph(alone: Path) -> None:
    monitor = ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "train/loss"]
    with pytest.raises(UserError, match="conditioned on metric `train/loss` which is not") as error:
        over_an_app(alone, *ALL, *monitor, large="fewest_samples: 13")
    assert "\n" not in str(error.value)


def test_a_run_without_any_metric_of_clients_ends_as_others_do(alone: Path) -> None:
    given = [*ALL, "--monitor", "train/loss"]
    assert "train/loss" not in over_an_app(alone, *given, large="fewest_samples: 13")
    checkpoints = {path.name for path in (alone / "run" / "checkpoints").iterdir()}
    assert "last.ckpt" in checkpoints and "best.ckpt" not in checkpoints
