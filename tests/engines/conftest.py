"""What these tests share is imported as `agreement`; small federations and the oracle's cases, as beside them."""

from __future__ import annotations

import sys
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(path) for path in (here, here.parent / "callbacks") if str(path) not in sys.path]
