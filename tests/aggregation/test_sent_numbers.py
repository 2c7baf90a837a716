"""How much clients say that they send, as numbers or as tensors."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from fl_lightning import FederatedCallback
from fl_lightning.callbacks import CommunicationLogger
from tests.helpers.learners import blobs, federated, trainer


class Large(FederatedCallback):
    """Sends the entries of an update that are above a threshold, and says how many these are."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def transmit(self, clients: Any, update: Tensor) -> Tensor:
        kept = update.abs() > 0.01
        number: Any = kept.sum(1, keepdim=True)
        if self.form == "vector":
            number = number[:, 0]
        if self.form == "number":
            number = int(number)
        if self.form == "matrix":
            number = kept.float()
        clients.sent(parameters=number, bytes=number * 8)
        return update * kept


def sent(form: str, engine: str = "sequential") -> tuple[float, float]:
    run = trainer(2, [Large(form), CommunicationLogger()])
    run.fit(federated(engine=engine), blobs())
    logged = run.callback_metrics
    parameters, number = (logged[f"communication/up_{unit}"] for unit in ("parameters", "bytes"))
    return float(parameters), float(number)


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
@pytest.mark.parametrize("form", ["column", "vector"])
def test_a_tensor_says_as_much_as_a_number(form: str, engine: str) -> None:
    expected = sent("number", engine)
    assert sent(form, engine) == expected and 0 < 8 * expected[0] == expected[1]


def test_another_shape_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"clients.sent\(parameters=…\) takes one number.*\(1, 1\)"
    ):
        sent("matrix")
