"""The oracle is imported as `oracles.oracle`, our side of comparisons as `federation`."""

from __future__ import annotations

import sys
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(path) for path in (here, here.parent) if str(path) not in sys.path]
