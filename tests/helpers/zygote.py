"""A process that imports the command line once and forks a child per command: real processes in
milliseconds.

Run as a script it is that process: one line of JSON in per command; ``<name>.pid`` and, when the
command has ended, ``<name>.status`` appear beside the command's output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Result:
    """What a command came to; ``returncode`` is minus the signal's number where one killed it."""

    returncode: int
    stdout: str
    stderr: str


class Process:
    """A command that runs, the leader of a process group.

    ``pid``, ``kill``, ``wait``, its output so far.
    """

    def __init__(self, files: Path) -> None:
        self._files = files
        self.pid = int(_appears(files.with_suffix(".pid"), 60))

    @property
    def stdout(self) -> str:
        return self._files.with_suffix(".out").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._files.with_suffix(".err").read_text(errors="replace")

    def ended(self) -> bool:
        return self._files.with_suffix(".status").exists()

    def kill(self, number: int = signal.SIGKILL, group: bool = False) -> None:
        """Send a signal to the process, or to all it has started as well."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def wait(self, timeout: float = 100) -> Result:
        try:
            status = int(_appears(self._files.with_suffix(".status"), timeout))
        except TimeoutError:
            self.kill(group=True)
            raise TimeoutError(
                f"still runs after {timeout} s:\n{self.stdout[-2000:]}{self.stderr[-2000:]}"
            ) from None
        return Result(status, self.stdout, self.stderr)

    def wait_for(self, path: Path, timeout: float = 100) -> None:
        """Until ``path`` exists, which the command has to bring about before it ends."""
        deadline = time.monotonic() + timeout
        while not path.exists():
            if self.ended() or time.monotonic() > deadline:
                raise AssertionError(
                    f"{path} did not come:\n{self.stdout[-2000:]}{self.stderr[-2000:]}"
                )
            time.sleep(0.005)


def _appears(path: Path, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(str(path))
        time.sleep(0.005)
    return path.read_text()


class Zygote:
    """The tests' side of that process."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("FL_", "PL_"))}
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def start(self, argv: list[str], cwd: Path, env: Mapping[str, str], files: Path) -> Process:
        assert self._process.stdin is not None
        command = {"argv": argv, "cwd": str(cwd), "env": dict(env), "files": str(files)}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return Process(files)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class Cli:
    """Runs commands of fl-lightning in one folder."""

    def __init__(self, zygote: Zygote, folder: Path, files: Path) -> None:
        self._zygote, self.folder, self._files = zygote, folder, files
        self._processes: list[Process] = []

    def start(
        self, *argv: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start a command; the process is killed at the end of the test if it still runs."""
        files = self._files / f"command-{len(self._processes)}"
        process = self._zygote.start([str(a) for a in argv], cwd or self.folder, env or {}, files)
        self._processes.append(process)
        return process

    def __call__(
        self,
        *argv: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 100,
    ) -> Result:
        """Run a command to its end."""
        return self.start(*argv, cwd=cwd, env=env).wait(timeout)

    def kill_all(self) -> None:
        for process in self._processes:
            if not process.ended():
                process.kill(group=True)


def _child(command: dict[str, Any]) -> int:
    """In the forked process: become ``fl-lightning``."""
    from fl_lightning import __main__ as program

    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # in the background these come ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    files = Path(command["files"])
    for descriptor, suffix in ((1, ".out"), (2, ".err")):
        target = os.open(files.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(target, descriptor)
    sys.stdout.reconfigure(line_buffering=True)
    _write(files.with_suffix(".pid"), str(os.getpid()))
    os.chdir(command["cwd"])
    os.environ.update(command["env"])
    # Lightning's launcher starts further processes by it
    sys.argv = [str(program.__file__), *command["argv"]]
    return program.main(command["argv"])


def _write(path: Path, text: str) -> None:
    aside = path.with_suffix(path.suffix + ".new")
    aside.write_text(text)
    aside.replace(path)


def _report(pid: int, files: Path) -> None:
    _, status = os.waitpid(pid, 0)
    _write(files.with_suffix(".status"), str(os.waitstatus_to_exitcode(status)))


def _serve() -> None:
    import atexit
    import traceback

    import fl_lightning.cli.commands  # noqa: F401  (what every command needs: imported once)

    for line in sys.stdin:
        command = json.loads(line)
        pid = os.fork()
        if pid:
            threading.Thread(
                target=_report, args=(pid, Path(command["files"])), daemon=True
            ).start()
            continue
        status = 1
        try:
            status = _child(command)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os._exit(0)  # without the seconds that taking torch down costs


if __name__ == "__main__":
    _serve()
