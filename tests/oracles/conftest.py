"""The oracle is imported as `oracles.oracle`, from any folder of tests."""

from __future__ import annotations

import sys
from pathlib import Path

tests = str(Path(__file__).parents[1])
if tests not in sys.path:
    sys.path.insert(0, tests)
