"""Flower's FedAvg in its simulation on Ray, with two workers of one thread."""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from benchmarks.bare import Bare
from benchmarks.peers import Missing, Peer, Rounds
from benchmarks.workloads import WORKLOADS, Workload

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

WORKERS = 2


@functools.cache
def prepared(workload: str) -> tuple[Bare, list[tuple[Tensor, Tensor]]]:
    """Once in each worker: network and loop (Flower leaves that to its users), and the clients."""
    work = WORKLOADS[workload]
    return Bare(work), work.parts()


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    loop, clients = prepared(message.content["config"]["workload"])
    loop.network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    losses: list[Tensor] = []
    x, y = clients[int(context.node_config["partition-id"])]
    loop.train(loop.network, (x, y), [], losses)
    metrics = MetricRecord({"loss": float(torch.stack(losses).mean()), "num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(loop.network.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


def play(work: Workload, peer: Peer, rounds: Rounds) -> None:
    if work.pictures:
        raise Missing("its clients' samples are tensors here")
    if work.methods:
        raise Missing(f"it has no {' + '.join(work.methods)}")
    # Of Flower's extra `simulation`; without it the run would end the process.
    import ray  # noqa: F401

    server_app = ServerApp()
    config = ConfigRecord(
        {"workload": next(name for name, known in WORKLOADS.items() if known is work)}
    )

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.manual_seed(0)
        arrays = ArrayRecord(work.others().state_dict())
        strategy = FedAvg(
            fraction_evaluate=0.0, min_train_nodes=work.clients, min_available_nodes=work.clients
        )

        def round() -> float:
            nonlocal arrays
            result = strategy.start(grid, arrays, num_rounds=1, train_config=config)
            arrays = result.arrays
            return float(result.train_metrics_clientapp[1]["loss"])

        rounds(round)

    workers = {
        "init_args": {"num_cpus": WORKERS, "log_to_driver": False},
        "client_resources": {"num_cpus": 1},
    }
    run_simulation(server_app, client_app, num_supernodes=work.clients, backend_config=workers)
