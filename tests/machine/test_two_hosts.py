"""A run over two hosts, by the commands that a user types on each."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.hosts import ADDRESSES, TwoHosts
from tests.helpers.zygote import Cli

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# Seven participants of eleven, whose samples, and so their steps, differ.
SETTINGS = """
seed_everything: 3
trainer: {enable_progress_bar: false}
data: {init_args: {num_clients: 11, partition: {class_path: Dirichlet, init_args: {alpha: 0.3}}}}
model: {participation: 0.64, local_epochs: 1}
"""
METHODS = ["-c", "method/scaffold", "-c", "method/ri"]

# Rank 1 or 0 stays in round 2's validation, where the other waits for its share.
STAYS = """
import os, time
import pytorch_lightning as pl

class Stays(pl.Callback):
    def on_validation_batch_end(self, trainer, *args):
        if trainer.current_epoch == 2 and str(trainer.global_rank) == os.environ["STAYS"]:
            open("stays", "w").close()
            time.sleep(600)
"""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    made = TwoHosts()
    try:
        made.set_up()
        yield made
    finally:
        made.close()


@pytest.fixture
def programs(python: str, cli: Cli) -> Path:
    """A folder with ``fl-lightning``; and the settings' file where the commands run."""
    (cli.folder / "settings.yaml").write_text(SETTINGS)
    (cli.folder / "stays.py").write_text(STAYS)
    program = cli.folder / "fl-lightning"
    program.write_text(f'#!/bin/sh\nexec {python} -m fl_lightning "$@"\n')
    program.chmod(0o755)
    return cli.folder


def begun(
    hosts: TwoHosts, python: str, folder: Path, each: int, *words: object, **given: str
) -> list[subprocess.Popen[str]]:
    """``fl-lightning fit`` with these words by torchrun on both hosts, ``each`` processes there."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    torchrun = [python, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node"]
    torchrun += [str(each), "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{ADDRESSES[0]}:{port}"]
    command = ["--no-python", str(folder / "fl-lightning"), "fit", *map(str, words)]
    processes = "-c trainer/ddp --trainer.accelerator cpu --trainer.num_nodes 2 --trainer.devices"
    environment = {"PYTHONPATH": str(ROOT), **given}
    started = []
    for host, address in enumerate(ADDRESSES):
        # Hosts of a cluster know their names; these are told which of them is the first.
        place = ["--local_addr", address, "--rdzv_conf", f"is_host={host == 0}"]
        whole = [*torchrun, *place, *command, *processes.split(), str(each)]
        started.append(hosts.start(host, whole, environment, folder))
    return started


def final(folder: Path) -> dict[str, Any]:
    """Everything that the run's checkpoint holds as numbers: model, w, server's states."""
    held = torch.load(folder / "checkpoints/last.ckpt", weights_only=False)
    ours = held["federated"]
    return {"epoch": held["epoch"], **held["state_dict"], "w": ours["w"], **ours["server"]}


def test_two_hosts_then_one_process_then_four_leave_the_bits_of_one(
    hosts: TwoHosts, python: str, cli: Cli, programs: Path
) -> None:
    configs = ["-c", "base", "-c", "data/digits", "-c", "settings.yaml", *METHODS]
    whole = ["fit", *configs, "--trainer.max_epochs", 6, "--trainer.default_root_dir", "whole"]
    one = cli.start(*whole)
    first = ["--trainer.max_epochs", 2, "--trainer.default_root_dir", "parts"]
    for process in begun(hosts, python, programs, 1, *configs, *first):
        said = process.communicate(timeout=100)[0]
        assert process.returncode == 0, said
    alone = ["--trainer.strategy", "auto", "--trainer.num_nodes", 1, "--trainer.devices", 1]
    second = cli("fit", "parts", "--trainer.max_epochs", 4, *alone)
    assert second.returncode == 0, second.stderr
    for process in begun(hosts, python, programs, 2, "parts", "--trainer.max_epochs", 6):
        said = process.communicate(timeout=100)[0]
        assert process.returncode == 0, said
    assert one.wait().returncode == 0
    expected, found = final(cli.folder / "whole"), final(cli.folder / "parts")
    assert expected.keys() == found.keys() and expected["epoch"] == 5
    for name, value in expected.items():
        same = torch.equal(value, found[name]) if torch.is_tensor(value) else value == found[name]
        assert same, name


@pytest.mark.skipif(
    not hasattr(torch.distributed, "set_timeout"),
    reason="before torch 2.14 a group keeps its first timeout, half an hour",
)
@pytest.mark.parametrize("lost, how", [(0, "killed"), (1, "cut")])
def test_a_lost_host_ends_the_run(
    lost: int, how: str, hosts: TwoHosts, python: str, cli: Cli, programs: Path
) -> None:
    words = ["-c", "base", "-c", "data/digits", "-c", "settings.yaml", "-c", "method/scaffold"]
    words += ["--trainer.max_epochs", "5", "--trainer.default_root_dir", "lost"]
    words += ["--trainer.callbacks+=stays.Stays"]
    timeout = ["--trainer.strategy.timeout", "4"]
    both = begun(hosts, python, programs, 1, *words, *timeout, STAYS=str(lost))
    while not (programs / "stays").exists():
        assert both[1 - lost].poll() is None, both[1 - lost].communicate()[0]
    if how == "killed":
        hosts.kill(lost)
    else:
        hosts.cut()
    said = both[1 - lost].communicate(timeout=60)[0]
    paragraph = next((line for line in said.splitlines() if "lost another process" in line), said)
    assert paragraph.startswith(f"fl-lightning: rank {1 - lost} (process "), said
    assert f"on host-{1 - lost})" in paragraph and "4 s" in paragraph
    # The traceback is that of torchrun alone, which wants to have the last word.
    assert "RuntimeError" not in said
    if lost == 1:
        assert json.loads((programs / "lost/run.json").read_text())["status"] == "failed"


def test_processes_that_do_not_reach_each_other_say_what_to_set(
    hosts: TwoHosts, python: str, programs: Path
) -> None:
    words = ["-c", "base", "-c", "data/digits", "--trainer.default_root_dir", "apart"]
    both = begun(hosts, python, programs, 1, *words, GLOO_SOCKET_IFNAME="lo")
    # The host that finds out first says it; its torchrun may end the other before that one has,
    # or the other goes on waiting.
    deadline = time.monotonic() + 400
    while all(process.poll() is None for process in both) and time.monotonic() < deadline:
        time.sleep(0.05)
    said = [process.communicate()[0] for process in both if process.poll() is not None]
    lines = [line for text in said for line in text.splitlines() if line.startswith("fl-light")]
    assert lines, said
    for line in lines:
        assert re.search(r"on host-[01]\) does not reach another process at 127\.0\.0\.1", line)
        assert "GLOO_SOCKET_IFNAME" in line
    assert not any("RuntimeError" in text for text in said)
