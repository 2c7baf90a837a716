"""Apple's pfl-research: FederatedAveraging or SCAFFOLD (Option II) on its SimulatedBackend.

pfl 0.6.0's Option II has the difference of the models with the wrong sign (it adds y - x, the paper
x - y), so that its variates are the paper's negated and its losses go to 0. We hand its step the
two variates the other way round: the same work, and the paper's method.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.bridge.pytorch.scaffold import PyTorchSCAFFOLDBridge
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from benchmarks.peers import Missing, Peer, Rounds
from benchmarks.workloads import LR, Workload, loss_of


class Shuffled(Dataset):
    """pfl's own Dataset has the same batches in each epoch."""

    def iter(self, batch_size: int) -> Iterator[list[Tensor]]:
        x, y = self.raw_data
        for chosen in torch.randperm(len(x)).split(batch_size):
            yield [x[chosen], y[chosen]]


class Module(torch.nn.Module):
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network
        self.losses: list[Tensor] = []

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        loss = loss_of(self.network(x), y)
        self.losses.append(loss.detach())
        return loss

    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
        return {"loss": Weighted(float(self.loss(x, y)), 1)}


def play(work: Workload, peer: Peer, rounds: Rounds) -> None:
    if work.pictures:
        raise Missing("its clients' samples are tensors here")
    if work.methods not in ((), ("ControlVariates",)):
        raise Missing(f"it has no {' + '.join(work.methods)}")
    if work.methods and peer.processes > 1:
        raise Missing("the states of its SCAFFOLD's clients are one process's")
    set_framework_module(pytorch_ops)
    torch.manual_seed(0)
    module = Module(work.others())
    own = work.parts()
    turn = iter(int(i) for _ in iter(int, 1) for i in range(work.clients))
    data = FederatedDataset(
        lambda user: Shuffled(list(own[user]), user_id=str(user)), lambda: next(turn)
    )
    model = PyTorchModel(
        module,
        lambda parameters, lr: work.optimizer(parameters),
        torch.optim.SGD(module.parameters(), lr=1.0),
    )
    train = NNTrainHyperParams(
        local_num_epochs=work.epochs, local_learning_rate=LR, local_batch_size=work.batch_size
    )
    settings: dict[str, Any] = {
        "central_num_iterations": 10**6,
        "evaluation_frequency": 10**6,
        "train_cohort_size": work.clients,
        "val_cohort_size": 0,
    }
    if work.methods:
        as_released = PyTorchSCAFFOLDBridge.do_control_variate_sgd
        PyTorchSCAFFOLDBridge.do_control_variate_sgd = staticmethod(
            lambda *given, local_c, server_c: as_released(
                *given, local_c=server_c, server_c=local_c
            )
        )
        algorithm: Any = SCAFFOLD()
        # what its iteration 0 does, which would also evaluate
        algorithm._server_c = model.get_parameters().apply_elementwise(torch.zeros_like)
        parameters: Any = SCAFFOLDParams(
            **settings,
            population=work.registered,
            use_gradient_as_control_variate=False,
            user_state_storage=InMemoryUserStateStorage(),
        )
    else:
        algorithm, parameters = FederatedAveraging(), NNAlgorithmParams(**settings)
    backend = SimulatedBackend(training_data=data, val_data=data)
    iteration = 0

    def round() -> float:
        nonlocal iteration, model
        iteration += 1
        module.losses.clear()
        (context,), model, _ = algorithm.get_next_central_contexts(
            model, iteration, parameters, train, None
        )
        statistics, metrics = backend.gather_results(
            model=model, training_algorithm=algorithm, central_context=context
        )
        model, _ = algorithm.process_aggregated_statistics(context, metrics, model, statistics)
        return float(torch.stack(module.losses).mean())

    rounds(round)
