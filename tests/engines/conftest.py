"""What tests of engines share."""

from __future__ import annotations

import math

import pytest

from fl_lightning.engines import auto
from fl_lightning.engines.fast import capture


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local steps count as short, however long a busy machine takes for them."""
    monkeypatch.setattr(auto, "PYTHON_SECONDS", math.inf)
    monkeypatch.setattr(capture, "SHORT_SECONDS", math.inf)
