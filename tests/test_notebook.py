"""docs/notebook.ipynb: its cells run, one after the other, and it was kept with what they show."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"


def test_cells_run_and_show_something(python: str, tmp_path: Path) -> None:
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    shown = json.dumps([cell["outputs"] for cell in cells])
    assert "round 12/12" in shown and "image/png" in shown and "report.html" in shown
    sources = ["".join(cell["source"]) for cell in cells]
    # A line of the shell is IPython's alone, and the command has tests of its own.
    program = "\n".join(source for source in sources if not source.startswith("!"))
    command = [python, "-c", "import matplotlib; matplotlib.use('Agg')\n" + program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "going on with round 9" in done.stdout and "interrupted" in done.stdout
