"""The four methods that an example writes out: what makes each other than FedAvg."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from fl_lightning import FederatedCallback, ServerState
from fl_lightning.callbacks import CommunicationLogger
from fl_lightning.testing import tiny_run

EXAMPLE = Path(__file__).parents[2] / "examples/methods_in_thirty_lines.py"
TREE = ast.parse(EXAMPLE.read_text("utf-8"))
CLASSES = [node for node in TREE.body if isinstance(node, ast.ClassDef)]


def methods() -> dict[str, Any]:
    """The example's classes, without the runs that it makes of them."""
    imports = [node for node in TREE.body if isinstance(node, ast.Import | ast.ImportFrom)]
    found: dict[str, Any] = {"__name__": "methods_in_thirty_lines"}
    exec(compile(ast.Module([*imports, *CLASSES], []), str(EXAMPLE), "exec"), found)
    return found


METHODS = methods()
HEAD = {"head.weight", "head.bias"}


def moved(a: Any, b: Any) -> set[str]:
    """The parameters in which two servers' models differ."""
    differ = a.global_vector != b.global_vector
    return {name for name, (where, _) in a.layout.items() if bool(differ[where].any())}


def own(module: Any, client: int) -> Tensor:
    """The weights of a client's personal model."""
    return parameters_to_vector(module.export(client=client).parameters()).detach()


def sent(module: Any, way: str) -> float:
    """What participants were sent or sent in all rounds, in numbers."""
    return float(module.trainer.callback_metrics[f"communication/{way}_parameters"])


@pytest.mark.parametrize("node", CLASSES, ids=lambda node: node.name)
def test_each_has_about_thirty_lines(node: ast.ClassDef) -> None:
    assert node.end_lineno is not None and node.end_lineno - node.lineno < 40


def test_of_fedbabu_the_body_moves_and_the_head_rests_at_every_client() -> None:
    class Watch(FederatedCallback):
        first = ServerState(initial="initial_model", synchronised=False)
        apart: list[float] = []

        def on_local_end(self, clients: Any) -> None:
            head = clients.layout.mask(sorted(HEAD))
            self.apart.append(float((clients.x - clients.initial_model)[:, head].abs().max()))

    watch = Watch()
    given = {"participation": "all", "local_epochs": 2}
    one, three = (
        tiny_run(METHODS["FedBABU"](), watch, rounds=rounds, **given) for rounds in (1, 3)
    )
    assert moved(one, three) == {"first.weight", "first.bias"}
    assert len(watch.apart) == 24 and max(watch.apart) == 0


def test_apfl_mixes_within_0_and_1_and_leaves_the_server_to_fedavg() -> None:
    first = tiny_run(METHODS["APFL"](), rounds=3, participation="all")
    assert torch.equal(first.global_vector, tiny_run(rounds=3, participation="all").global_vector)
    name = "APFL.alpha"
    alphas = torch.stack([first.client_rows.read(name, i) for i in range(6)])
    assert float(alphas.min()) >= 0 and float(alphas.max()) <= 1
    assert len(set(alphas.tolist())) > 3, "each client has its own"
    for i in range(6):
        mix = (
            alphas[i] * first.client_rows.read("APFL.v", i) + (1 - alphas[i]) * first.global_vector
        )
        assert torch.allclose(own(first, i), mix, rtol=0, atol=1e-12)


def test_fedgmt_sends_the_average_of_its_models_and_distils_from_it() -> None:
    class Watch(FederatedCallback):
        w: list[Tensor] = []
        ends: dict[tuple[int, int], Tensor] = {}

        def on_local_end(self, clients: Any) -> None:
            for row, client in enumerate(clients.client_ids):
                self.ends[clients.round, client] = (clients.x[row] - clients.w).clone()

        def on_round_end(self, server: Any) -> None:
            self.w.append(server.w.detach().clone())
            if server.round == 0:
                self.w.insert(0, server.w_before.clone())

    watch = Watch()
    given = {"participation": "all", "rounds": 3}
    made = tiny_run(METHODS["FedGMT"](average=0.8), watch, CommunicationLogger(), **given)
    e = watch.w[0]
    for w in watch.w[1:]:
        e = 0.8 * e + 0.2 * w
    assert torch.allclose(made.server_states["FedGMT.e"], e, rtol=0, atol=1e-12)
    # x_K - dual/a, the dual being -a times all that the client has moved so far.
    for t in range(3):
        moves = [watch.ends[t, i] + sum(watch.ends[s, i] for s in range(t + 1)) for i in range(6)]
        after = watch.w[t] + torch.stack(moves).mean(0)
        assert torch.allclose(watch.w[t + 1], after, rtol=0, atol=1e-12)
    # In the first round e is w, and travels once.
    assert (sent(made, "down"), sent(made, "up")) == (5 * 6 * 31, 3 * 6 * 31)

    def apart(rounds: int) -> float:
        """What the distillation changes in so many rounds of one step."""
        with_it, without = (
            tiny_run(METHODS["FedGMT"](strength=s), rounds=rounds, local_steps=1) for s in (1, 0)
        )
        return float((with_it.global_vector - without.global_vector).detach().abs().max())

    assert apart(1) < 1e-12, "the first step begins at the teacher"
    assert apart(2) > 1e-5


def test_fedproto_averages_means_of_classes_and_no_weights() -> None:
    given: list[tuple[Tensor, Tensor]] = []

    class Watch(FederatedCallback):
        taps = {"z": "last:in"}

        def on_round_start(self, server: Any) -> None:
            given.clear()

        def local_loss(self, clients: Any, loss: Tensor, seen: Any, batch: Any) -> Tensor:
            given.append((seen["z"].detach().clone(), batch[1]))
            return loss

    def run(strength: float, rounds: int, *more: Any) -> Any:
        method = METHODS["FedProto"](classes=3, features=4, strength=strength)
        return tiny_run(method, *more, rounds=rounds, participation="all")

    made = run(0.5, 3, Watch(), CommunicationLogger())
    z, y = (torch.cat(parts) for parts in zip(*given, strict=True))
    means = torch.stack([z[y == label].mean(0) for label in range(3)])
    assert torch.allclose(made.server_states["FedProto.prototypes"], means, rtol=0, atol=1e-12)
    assert sent(made, "up") == 3 * 6 * (3 * 4 + 3), "sums and counts, and no weights"
    one = run(0.5, 1)
    assert moved(one, made) == set()
    assert torch.equal(own(one, 4), own(run(0, 1), 4)), "nothing is known in the first round"
    assert not torch.allclose(own(made, 4), own(run(0, 3), 4), rtol=0, atol=1e-4)
    assert not torch.allclose(own(made, 4), own(made, 3), rtol=0, atol=1e-2)
