"""``python -m studies.decentralised``: kept runs without a server, as folders for ``report``."""

from __future__ import annotations

import shutil
from pathlib import Path

from studies.kept import unpacked

KEPT = Path("studies/decentralised_results")
OUT = Path("runs/decentralised")

if __name__ == "__main__":
    with unpacked(KEPT) as folder:
        shutil.copytree(folder, OUT, dirs_exist_ok=True)
    print(f"→ {OUT} (fl-lightning report {OUT}/digits-dir0.3-100 --no_seconds)")
