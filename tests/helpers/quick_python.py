"""What ``python`` of zygote.py starts: it hands its command to the process that forks. The child
gets its files, folder and environment; signals reach it, and this ends as it does. Run as a script
without ``site``: folder of the servers' sockets, which of them, and what follows ``python`` on a
command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
LENGTH = struct.Struct("!I")


def _another_checkout() -> bool:
    """Whether PYTHONPATH leads to another one than that which ``own`` has imported."""
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if entry and Path(entry, "fl_lightning").is_dir():
            return Path(entry).resolve() != ROOT
    return False


def main() -> None:
    folder, server_name, *argv = sys.argv[1:]
    where = f"{folder}/{'bare' if _another_checkout() else server_name}"
    deadline = time.monotonic() + 600
    while not os.path.exists(where) and time.monotonic() < deadline:
        if os.path.exists(f"{folder}/failed"):
            sys.exit(Path(folder, "failed").read_text())
        time.sleep(0.01)  # it still imports
    server = socket.socket(socket.AF_UNIX)
    server.connect(where)
    # The child is forked elsewhere: it follows to the network and the host name of this process.
    namespaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts")]
    open_files = []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with suppress(OSError):  # the listing itself is closed by now
            os.fstat(number)
            if number != server.fileno():
                open_files.append(number)
    command = {"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ), "open": open_files}
    command["namespaces"] = namespaces
    text = json.dumps(command).encode()
    socket.send_fds(server, [LENGTH.pack(len(text))], open_files)
    server.sendall(text)
    pid = LENGTH.unpack(server.recv(LENGTH.size))[0]
    for number in open_files:  # whoever reads them sees when the child has ended, not when this has
        if number > 2:
            os.close(number)

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    answer = server.recv(LENGTH.size)
    status = struct.unpack("!i", answer)[0] if answer else 1
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
