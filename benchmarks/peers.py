"""Other systems' round of the same FedAvg work, where they are installed (extra ``bench``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.workloads import LR, Workload

Round = Callable[[], tuple[float, float]]


def peers(work: Workload) -> dict[str, Round]:
    """The installed ones by name."""
    found = {}
    for name, make in {"pfl": pfl, "FedLab": fedlab}.items():
        try:
            found[name] = make(work)
        except ImportError:
            print(f"{name} is not installed, so it is left out")
    return found


def timed(run: Callable[[], Any], losses: list[Tensor]) -> Round:
    def round() -> tuple[float, float]:
        losses.clear()
        torch.set_num_threads(1)
        began = time.perf_counter()
        run()
        took = time.perf_counter() - began
        return took, float(torch.stack(losses).mean()) if losses else float("nan")

    return round


def pfl(work: Workload) -> Round:
    """Apple's pfl-research: its FederatedAveraging on a SimulatedBackend, one process."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops
    from pfl.internal.ops.selector import set_framework_module
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    set_framework_module(pytorch_ops)
    losses: list[Tensor] = []

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = work.network()

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)  # type: ignore[no-any-return]

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            loss = cross_entropy(self.network(x), y)
            losses.append(loss.detach())
            return loss

        def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(x, y)), 1)}

    torch.manual_seed(0)
    x, y = work.arrays()
    users = dict(enumerate(zip(x.split(work.samples), y.split(work.samples), strict=True)))

    def sampler() -> Any:
        sampler.next = (sampler.next + 1) % work.clients  # type: ignore[attr-defined]
        return sampler.next  # type: ignore[attr-defined]

    sampler.next = -1  # type: ignore[attr-defined]
    data = FederatedDataset(lambda user: Dataset(raw_data=list(users[user]), user_id=str(user)), sampler)
    module = Module()
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    model = PyTorchModel(
        module,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, weight_decay=work.weight_decay),
        central,
    )
    train = NNTrainHyperParams(local_num_epochs=work.epochs, local_learning_rate=LR, local_batch_size=work.batch_size)
    parameters = NNAlgorithmParams(
        central_num_iterations=10**6, evaluation_frequency=10**6, train_cohort_size=work.clients, val_cohort_size=0
    )
    algorithm = FederatedAveraging()
    backend = SimulatedBackend(training_data=data, val_data=data)
    state = {"iteration": 1, "model": model}

    def run() -> None:
        contexts, state["model"], _ = algorithm.get_next_central_contexts(
            state["model"], state["iteration"], parameters, train, None
        )
        (context,) = contexts
        statistics, metrics = backend.gather_results(
            model=state["model"], training_algorithm=algorithm, central_context=context
        )
        state["model"], _ = algorithm.process_aggregated_statistics(context, metrics, state["model"], statistics)
        state["iteration"] += 1

    return timed(run, losses)


def fedlab(work: Workload) -> Round:
    """FedLab's serial trainer: SGDSerialClientTrainer with FedAvg at the server."""
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.utils.aggregator import Aggregators
    from torch.utils.data import DataLoader, TensorDataset

    losses: list[Tensor] = []
    torch.manual_seed(0)
    x, y = work.arrays()
    own = list(zip(x.split(work.samples), y.split(work.samples), strict=True))

    class Data:
        def get_dataloader(self, client: int, batch_size: int) -> Any:
            return DataLoader(TensorDataset(*own[client]), batch_size=batch_size, shuffle=True)

    trainer = SGDSerialClientTrainer(work.network(), work.clients, cuda=False)
    trainer.setup_dataset(Data())
    trainer.setup_optim(work.epochs, work.batch_size, LR)
    trainer.optimizer = torch.optim.SGD(trainer._model.parameters(), LR, weight_decay=work.weight_decay)

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        loss = cross_entropy(output, target)
        losses.append(loss.detach())
        return loss

    trainer.criterion = criterion
    state = {"model": trainer.model_parameters}

    def run() -> None:
        trainer.local_process([state["model"]], list(range(work.clients)))
        state["model"] = Aggregators.fedavg_aggregate([package[0] for package in trainer.uplink_package])

    return timed(run, losses)
