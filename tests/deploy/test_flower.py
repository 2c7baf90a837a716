"""Apps run by Flower's own processes on loopback leave the bits of ``fit`` of the same config."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.deploy.flower_processes import Federation
from tests.deploy.flower_runs import Study
from tests.deploy.test_audit import lines_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("flwr") is None,
        reason="flwr is not installed (its pins are narrow): make test-flower runs this",
    ),
]
ROUNDS = 3


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.close()


def test_three_nodes_leave_the_bits_of_the_simulation(
    tmp_path: Path, federation: Federation
) -> None:
    study = Study(tmp_path, federation, ["method/fedavg"], ROUNDS)
    study.write()
    study.open()
    over = study.go_on()
    study.simulate()
    study.finish(over)
    for name in study.sites:
        lines = lines_of(tmp_path / name)
        assert [line["answer"] for line in lines].count("trained") == ROUNDS


def test_an_answer_of_a_message_s_own_process_is_noted_too(
    tmp_path: Path, federation: Federation
) -> None:
    """The site's process does not start."""
    study = Study(tmp_path, federation, ["method/fedavg"], 1)
    study.write()
    federation.link()
    federation.node("north", 'site="away.yaml"')
    over = federation.run(tmp_path / "app", folder="over", rounds=1, min_sites=1)
    federation.wait("the end of the run", lambda: over.poll() is not None, 600)
    assert "this file cannot be read" in federation.log("run")
    (line,) = lines_of(tmp_path / "north")
    assert (line["asked"], line["answer"]) == ("something else", "failed")
    assert line["fields"].startswith("user 1; text ")


@pytest.mark.parametrize("method", ["fedit", "flora", "fedex_lora"])
def test_adapters_and_their_base_leave_the_bits_of_the_simulation(
    method: str, tmp_path: Path, federation: Federation
) -> None:
    """Four of nine clients, so that sites miss additions to the base and get them later."""
    options = {"--model.participation": "4"}
    learner = {"--model.learner": "tests.helpers.low_rank.OfDigits"}
    study = Study(tmp_path, federation, [f"method/{method}"], ROUNDS, options, learner=learner)
    study.write()
    study.open()
    over = study.go_on()
    study.simulate()
    study.finish(over)


def test_site_node_and_server_that_are_killed_leave_them_too(
    tmp_path: Path, federation: Federation
) -> None:
    study = Study(tmp_path, federation, ["method/scaffold"], ROUNDS)
    study.write()
    study.simulate()
    study.gates(["training.1", "update.1"], "north")
    study.open()
    study.go_on()
    training = study.at("training.1")
    federation.kill("site", str(tmp_path / "north"))
    # It comes back with another number while the link takes the one before to be there still.
    federation.end("west")
    training.unlink()
    study.node("west")
    # The sites have staged their rows, and the server commits nothing of this round.
    update = study.at("update.1")
    federation.kill_server()
    update.unlink()
    study.finish(study.go_on("again"), "again")
