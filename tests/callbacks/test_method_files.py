"""A method's file is its paper: it says what travels, and shows something true (the doctests run
with the suite). That it imports fl_lightning.callback alone is held by tests/lint.py."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import callbacks
from fl_lightning.callback import FederatedCallback
from fl_lightning.callbacks import CommunicationLogger
from fl_lightning.testing import check_method, tiny_run
from tests.helpers import clipped_median

METHODS = [
    c for c in vars(callbacks).values() if isinstance(c, type) and issubclass(c, FederatedCallback)
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_a_method_says_what_travels_and_shows_something_true(
    method: type[FederatedCallback],
) -> None:
    text = method.__doc__ or ""
    assert ("Sent:" in text and "Kept" in text) or "Sent and kept:" in text
    assert any(example.want for example in doctest.DocTestParser().get_examples(text))


def test_the_method_that_the_docs_name_is_short_and_keeps_the_contracts() -> None:
    assert len(Path(clipped_median.__file__).read_text(encoding="utf-8").splitlines()) <= 50
    report = check_method(clipped_median.ClippedMedian)
    assert report.ok, f"{report}"


EXAMPLE = Path(__file__).parents[2] / "examples/methods_in_thirty_lines.py"
TREE = ast.parse(EXAMPLE.read_text("utf-8"))
CLASSES = [node for node in TREE.body if isinstance(node, ast.ClassDef)]


def methods() -> dict[str, Any]:
    """The example's classes, without the runs that it makes of them."""
    imports = [node for node in TREE.body if isinstance(node, ast.Import | ast.ImportFrom)]
    found: dict[str, Any] = {"__name__": "methods_in_thirty_lines"}
    exec(compile(ast.Module([*imports, *CLASSES], []), str(EXAMPLE), "exec"), found)
    return found


WRITTEN = methods()


def sent(module: Any, way: str) -> float:
    """What participants were sent or sent in all rounds, in numbers."""
    return float(module.trainer.callback_metrics[f"communication/{way}_parameters"])


@pytest.mark.parametrize("node", CLASSES, ids=lambda node: node.name)
def test_it_has_about_thirty_lines(node: ast.ClassDef) -> None:
    assert node.end_lineno is not None and node.end_lineno - node.lineno < 40


def test_fedgkd_sends_the_mean_of_its_last_models_and_distils_from_it() -> None:
    class Watch(FederatedCallback):
        role = "measurement"
        w: list[Tensor] = []

        def on_round_start(self, server: Any) -> None:
            self.w.append(server.w.detach().clone())

    watch = Watch()
    given = {"participation": "all", "rounds": 3}
    made = tiny_run(WRITTEN["FedGKD"](memory=2), watch, CommunicationLogger(), **given)
    teacher = (watch.w[1] + watch.w[2]) / 2
    assert torch.allclose(made.server_states["FedGKD.teacher"], teacher, rtol=0, atol=1e-12)
    assert (sent(made, "down"), sent(made, "up")) == (6 * 6 * 31, 3 * 6 * 31)

    def apart(rounds: int) -> float:
        """What the distillation changes in so many rounds of one step."""
        with_it, without = (
            tiny_run(WRITTEN["FedGKD"](strength=s), rounds=rounds, local_steps=1) for s in (1, 0)
        )
        return float((with_it.global_vector - without.global_vector).detach().abs().max())

    assert apart(1) < 1e-12, "the first step begins at the teacher"
    assert apart(2) > 1e-5
