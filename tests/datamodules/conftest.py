"""Real data for the tests that want them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of FL_LIGHTNING_DATA, else one unpacked once from ../shared/data beside the
    checkout."""
    if "FL_LIGHTNING_DATA" in os.environ:
        return Path(os.environ["FL_LIGHTNING_DATA"])
    unpack = Path(__file__).parents[3] / "shared" / "data" / "unpack.py"
    if not unpack.is_file():
        pytest.skip(
            "no real data: set FL_LIGHTNING_DATA to a folder of MNIST, CIFAR-10, … to run this"
        )
    folder = Path(tempfile.gettempdir()) / "fl-lightning-data"
    subprocess.run([sys.executable, str(unpack), str(folder)], check=True, capture_output=True)
    return folder
