"""The peers of ``python -m benchmarks.speed`` do the work of the bare loop."""

from __future__ import annotations

import importlib.util
import multiprocessing.spawn
import os
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).parents[2])
ROWS = [("pfl", 1), ("pfl", 2), ("fedlab", 1), ("flower", 1), ("fedjax", 1)]
PACKAGES = {"flower": "ray"}  # Flower's simulation


def losses(
    monkeypatch: pytest.MonkeyPatch, module: str, processes: int, workload: str
) -> tuple[list[float], list[float]]:
    """Of two rounds of the peer and of the bare loop; skips where the peer is absent."""
    if importlib.util.find_spec(PACKAGES.get(module, module)) is None:
        pytest.skip(f"{module} is not installed (extra `bench`)")
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import bare, peers, workloads

    work = workloads.WORKLOADS[workload]
    running = peers.Running(module, peers.Peer(module, processes=processes), work)
    try:
        assert running.refusal() == ""
        theirs = [running()[1] for _ in range(2)]
    finally:
        running.close()
    loop = bare.prepared(work, "cpu")
    return theirs, [loop() for _ in range(2)]


@pytest.mark.parametrize(("module", "processes"), ROWS)
def test_peers_train_as_the_bare_loop_does(
    module: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, bare = losses(monkeypatch, module, processes, "W1")
    assert theirs == pytest.approx(bare, rel=0.02)


@pytest.mark.parametrize("module", ["pfl", "fedlab"])
def test_their_scaffold_is_the_bare_loops(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, bare = losses(monkeypatch, module, 1, "W4-scaffold")
    assert theirs == pytest.approx(bare, rel=0.02)


def test_what_cannot_play_is_left_out_with_a_line(
    python: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    resource_tracker.ensure_running()
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(python))
    from benchmarks import peers, workloads

    asked = {"Nobody": peers.Peer("nobody"), "fedlab": peers.Peer("fedlab")}
    assert peers.peers(workloads.WORKLOADS["W4-fedsmoo"], asked) == {}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Nobody is left out: not installed")
    assert lines[1].startswith("fedlab is left out: ")
