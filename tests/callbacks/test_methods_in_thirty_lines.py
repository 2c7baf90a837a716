"""The method that an example writes out: what makes it other than FedAvg."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import FederatedCallback
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


def sent(module: Any, way: str) -> float:
    """What participants were sent or sent in all rounds, in numbers."""
    return float(module.trainer.callback_metrics[f"communication/{way}_parameters"])


@pytest.mark.parametrize("node", CLASSES, ids=lambda node: node.name)
def test_it_has_about_thirty_lines(node: ast.ClassDef) -> None:
    assert node.end_lineno is not None and node.end_lineno - node.lineno < 40


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
