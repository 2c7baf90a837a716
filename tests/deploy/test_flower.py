"""Apps run by Flower's own processes on loopback leave the bits of ``fit`` of the same config."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from fl_lightning.__main__ import main
from tests.deploy.flower_runs import NGINX, THREE, Federation, KeyedFederation, Study
from tests.deploy.test_what_leaves import lines_of

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


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[KeyedFederation]:
    made = KeyedFederation(tmp_path, THREE)
    yield made
    made.close()


def test_three_nodes_with_keys_leave_the_bits_of_the_simulation_and_no_other_takes_part(
    tmp_path: Path, keyed: KeyedFederation
) -> None:
    """By the commands that ``fl-lightning deploy keys`` writes, through its proxy."""
    study = Study(tmp_path, keyed, ["method/fedavg"], ROUNDS)
    study.write()
    study.open()
    # These would be a second site of client 0: the run would name it, or take it for north.
    other = tmp_path / "other"
    assert main(["deploy", "keys", "--sites", "1", "--address", "::1", "--out", str(other)]) == 0
    key = other / "site-1" / "node-key"
    refused = {
        "keyless": ("[code: 2001]", {"auth_supernode_private_key": None}),
        "unregistered": ("[code: 2004]", {"auth_supernode_private_key": key}),
        "deceived": ("CERTIFICATE_VERIFY", {"root_certificates": other / "site-1" / "ca.pem"}),
    }
    for name, (_, options) in refused.items():
        keyed.node_with(name, 'clients="0"', **options)
    over = study.go_on()
    study.simulate()
    for name, (why, _) in refused.items():
        assert keyed.ended(name) != 0
        assert why in keyed.log(name)
    keyed.wait("the end of the run", lambda: over.poll() is not None, 600)
    assert set(keyed.nodes()) == set(keyed.numbers.values())
    # Taken back, a key ends its node, and starts none again.
    assert keyed.flwr("supernode", "unregister", keyed.numbers["site-3"], "sites").returncode == 0
    keyed.ended("west")
    study.node("west")
    assert keyed.ended("west") != 0
    assert "[code: 2004]" in keyed.log("west")
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
    assert "UserError in compose.py" in federation.log("run")
    (line,) = lines_of(tmp_path / "north")
    assert (line["asked"], line["answer"]) == ("something else", "failed")
    assert line["fields"].startswith("user 1; text ")


# Ways to write a path that begins as a site's call and might end at another one.
CLOSED = [
    "/v1/control/start-run",
    "/v1/runtime/acquire-task",
    "//v1/control/start-run",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet/..%2fcontrol/start-run",
    "/v1/fleet/..;/control/start-run",
    "/v1/control/start-run/../../fleet/x",
    "/v1/control/start-run%3f/../../fleet/x",
    "/v1/control/start-run%23/../../fleet/x",
]


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: nginx-light)")
def test_through_the_proxy_a_stranger_registers_no_key_and_starts_no_app(tmp_path: Path) -> None:
    """He has the address and the authority's certificate. At the server the commands work."""
    app, key = str(tmp_path / "app"), tmp_path / "own.pub"
    assert main(["deploy", "flower", "base", "data/digits", "--out", app]) == 0
    other = KeyedFederation(tmp_path / "other").keys / "server" / "site-1.pub"
    key.write_bytes(other.read_bytes())
    keyed = KeyedFederation(tmp_path)
    try:
        keyed.link()
        register, start = ["supernode", "register", str(key)], ["run", app]
        assert keyed.flwr(*register, "stranger").returncode == 1
        assert keyed.flwr(*start, "stranger").returncode == 1
        assert (set(keyed.nodes()), keyed.runs()) == (set(keyed.numbers.values()), 0)
        assert keyed.flwr(*register, "sites").returncode == 0
        assert keyed.flwr(*start, "sites").returncode == 0
        for path in CLOSED:
            assert keyed.post(keyed.door, path) == 404, path
        assert keyed.post(keyed.port, "/v1/control/start-run") != 404
    finally:
        keyed.close()


@pytest.mark.parametrize("method", ["fedit", "flora"])
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
