"""The recording of the first run on docs/first_run.md: ``python docs/site/terminal.py``.

It runs the page's first command in an empty folder, on a terminal of its own, and keeps what the
terminal shows at the end as docs/first_run.svg. The SVG is rich's export, not drawn by hand.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

KEPT = Path(__file__).parents[1] / "first_run.svg"
ARGUMENTS = [
    "fit",
    "-c",
    "base",
    "-c",
    "data/digits",
    "-c",
    "method/fedinit",
    "--trainer.max_epochs",
    "20",
]
COLUMNS = 96
# Warnings of packages name folders of the machine.
NOISE = re.compile(r"site-packages|LeafSpec|litlogger|litmodels|^\s*warnings?\.|rank_zero")


def shown(command: list[str]) -> str:
    """Run a command on a terminal, and return what it wrote there."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        written = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the terminal's other end is closed
                break
            if not piece:
                break
            written += piece
        if process.wait():
            raise SystemExit(written.decode(errors="replace"))
    return written.decode(errors="replace")


def last_of_each_line(written: str) -> list[str]:
    """Return the lines as the terminal shows them: a carriage return begins its line again."""
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        states = [state for state in line.split("\r") if Text.from_ansi(state).plain.strip()]
        lines.append(states[-1] if states else "")
    return lines


def main() -> None:
    lines = last_of_each_line(shown([sys.executable, "-m", "fl_lightning", *ARGUMENTS]))
    lines = [line for line in lines if not NOISE.search(line)]
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text(f"$ fl-lightning {' '.join(ARGUMENTS)}", style="bold"))
        for line in lines:
            console.print(Text.from_ansi(line))
        drawn = console.export_svg(title="fl-lightning")
    # rich's fonts come from the network, and the site fetches nothing.
    KEPT.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL), "utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
