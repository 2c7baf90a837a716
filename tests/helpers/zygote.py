"""A process that has imported everything forks a child for each command, in milliseconds. Run as a
script it is that process; those that run tests side by side share one. A command of
``fl-lightning`` comes over a socket; ``<name>.pid`` and, when the command has ended,
``<name>.status`` appear beside its output. Two further ones serve ``python``, an executable to be
used in the place of ``sys.executable``: ``python -c …``, ``python -m …`` and ``python FILE`` are
forked from one that has imported this checkout. ``bare_python``, and ``python`` where PYTHONPATH
leads to another checkout, are forked from one that has imported neither it nor Lightning, but what
they depend on."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import logging
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
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
    """A command that runs, the leader of a process group. ``pid``, ``kill``, ``wait``, its output
    so far."""

    def __init__(self, files: Path) -> None:
        self._files = files
        self.pid = int(_appears(files.with_suffix(".pid"), 60).read_text())

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
            status = int(_appears(self._files.with_suffix(".status"), timeout).read_text())
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


def _appears(path: Path, timeout: float, failed: Path | None = None) -> Path:
    """Wait for ``path``; where ``failed`` comes instead, what it says is the error."""
    deadline = time.monotonic() + timeout
    while not path.exists():
        if failed is not None and failed.exists():
            raise RuntimeError(failed.read_text())
        if time.monotonic() > deadline:
            raise TimeoutError(str(path))
        time.sleep(0.005)
    return path


class Zygote:
    """The tests' side of that process, which is in ``folder``, or started."""

    def __init__(self, folder: str | None = None) -> None:
        self.folder = Path(folder or tempfile.mkdtemp(prefix="python-"))
        self.python, self.bare_python = self.folder / "python", self.folder / "bare_python"
        self._process = None if folder else self._started()

    def _started(self) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("FL_", "PL_"))}
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        waiting = Path(__file__).with_name("quick_python.py")
        for program, server in ((self.python, "own"), (self.bare_python, "bare")):
            start = f'exec {sys.executable} -S -E "{waiting}" {self.folder} {server} "$@"'
            program.write_text(f"#!/bin/sh\n{start}\n")
            program.chmod(0o755)
        return subprocess.Popen(
            [sys.executable, __file__, str(self.folder)],
            stdin=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def start(self, argv: list[str], cwd: Path, env: Mapping[str, str], files: Path) -> Process:
        command = {"argv": argv, "cwd": str(cwd), "env": dict(env), "files": str(files)}
        _appears(self.folder / "commands", 600, self.folder / "failed")
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(str(self.folder / "commands"))
            server.sendall(json.dumps(command).encode())
        return Process(files)

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)  # it may still import
        shutil.rmtree(self.folder)


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
    import torch

    from fl_lightning import __main__ as program

    # A forked process makes torch's pool of threads anew at its first use, and fails if two of its
    # threads do at once, as those of transformers that read weights.
    torch.set_num_threads(torch.get_num_threads())
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
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    import torchmetrics  # noqa: F401
    import torchvision  # noqa: F401

    del sys.path[0]  # the folder of this file
    folder = Path(sys.argv[1])
    servers = [_serve_python(folder, "bare")]
    import fl_lightning.lab.cli.lightning_commands

    remember_packages()
    # before the first command, which looks once for plugins
    servers.append(_serve_python(folder, "own"))
    _warm_up(fl_lightning.machine.lightning.LOGGERS)
    gc.freeze()  # what is here is no garbage, and children share its memory until they look
    listening = _listening(folder, "commands")
    # Its input is closed by those that started it, as they end.
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        asked, _ = listening.accept()
        with asked:
            command = json.loads(asked.makefile("rb").read())
        pid = os.fork()
        if pid:
            threading.Thread(
                target=_report, args=(pid, Path(command["files"])), daemon=True
            ).start()
            continue
        listening.close()
        _leave(_child, command)
    for server in servers:  # waited for, so that what they took counts as taken by the tests
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    os._exit(0)  # without the seconds that taking torch down costs


def remember_packages() -> None:
    """Look once for what installed packages offer, which does not change here. Every Trainer asks
    them for callbacks, and torch six times for backends as it joins processes; the hooks of
    gradients are imported there too. What is forked afterwards has it all."""
    import importlib.metadata

    import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook  # noqa: F401
    from lightning_fabric.utilities import registry

    look = importlib.metadata.entry_points
    groups = ("torch.distributed.backends", "pytorch_lightning.callbacks_factory")
    found = {group: look(group=group) for group in groups}

    def entry_points(**asked: Any) -> Any:
        # What else is asked for, such as our plugins, a test may have changed.
        known = list(asked) == ["group"] and asked["group"] in found
        return found[asked["group"]] if known else look(**asked)

    importlib.metadata.entry_points = entry_points
    registry.entry_points = entry_points


def _warm_up(loggers: Sequence[str]) -> None:
    """Train for a round, and parse another command. Parsers read signatures and docstrings, figures
    read fonts, and classes are asked for the first time what they are instances of: a sixth of what
    a short run costs. What they found stays in the process; what they set does not."""
    import torch
    from pytorch_lightning.utilities.seed import isolate_rng

    from fl_lightning.__main__ import main

    path = sys.path[:]
    here = os.getcwd()
    environment = dict(os.environ)
    threads = torch.get_num_threads()
    levels = {name: logging.getLogger(name).level for name in loggers}
    common = "-c base -c data/digits -c trainer/cpu -c method/scaffold --trainer.max_epochs 1"
    said = io.StringIO()
    with contextlib.ExitStack() as within:
        within.enter_context(isolate_rng(include_cuda=False))
        os.chdir(within.enter_context(tempfile.TemporaryDirectory()))
        within.enter_context(contextlib.redirect_stdout(io.StringIO()))
        within.enter_context(contextlib.redirect_stderr(said))
        within.enter_context(warnings.catch_warnings())
        within.callback(os.chdir, here)
        assert main(["fit", *common.split()]) == 0, said.getvalue()
        other = "-c experiment/fedinit/table1-cifar10-dir0.1-200"
        assert main(["fit", *other.split(), "--print_config"]) == 0, said.getvalue()
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    assert threading.active_count() == 1, "a fork takes no other thread along"


def _leave(work: Callable[[dict[str, Any]], int], command: dict[str, Any]) -> None:
    """End this forked process as an interpreter does that was started for ``work``."""
    status = 1
    try:
        status = work(command)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            status = error.code or 0
        else:
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# --------------------------------------------------------------------------- python


def _serve_python(folder: Path, name: str) -> int:
    """Serve ``python`` over a socket from a forked process, which ends with this one. Gives its
    number."""
    listening = _listening(folder, name)
    parent = os.getpid()
    if server := os.fork():
        listening.close()
        return server
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    while True:
        asked, _ = listening.accept()
        head, descriptors, _, _ = socket.recv_fds(asked, 4, 250)
        text = _received(asked, int.from_bytes(head, "big"))
        pid = os.fork()
        if pid:
            for descriptor in descriptors:
                os.close(descriptor)
            asked.sendall(pid.to_bytes(4, "big"))
            threading.Thread(target=_watch, args=(pid, asked), daemon=True).start()
            continue
        listening.close()
        asked.close()
        command = json.loads(text)
        command["descriptors"] = dict(zip(command["open"], descriptors, strict=True))
        _leave(_python, {**command, "executable": str(folder / "python")})


def _listening(folder: Path, name: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(folder / f"{name}.new"))
    made.listen(64)
    (folder / f"{name}.new").rename(folder / name)
    return made


def _received(asked: socket.socket, length: int) -> bytes:
    text = b""
    while len(text) < length:
        text += asked.recv(length - len(text))
    return text


def _watch(pid: int, asked: socket.socket) -> None:
    """Tell the one that waits how its process ended; kill the process where that one is killed."""
    ended = threading.Event()

    def kill() -> None:
        if not asked.recv(1) and not ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    _, status = os.waitpid(pid, 0)
    ended.set()
    with contextlib.suppress(OSError):
        asked.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
        asked.shutdown(socket.SHUT_RDWR)  # which ends `kill`, too
    asked.close()


def _python(command: dict[str, Any]) -> int:
    """In the forked process: become ``python`` with these arguments."""
    _take_over(command["descriptors"])
    for number in command["namespaces"]:
        _enter(number)
    os.chdir(command["cwd"])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(command["env"])
    paths = [path for path in sys.path if path not in before]
    given = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [*filter(None, given.split(os.pathsep)), *paths]
    sys.executable = command["executable"]
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    sys.modules["__main__"] = types.ModuleType("__main__")
    option, *rest = command["argv"]
    while option in ("-B", "-u"):
        option, *rest = rest
    if option == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif option == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    else:
        sys.path.insert(0, str(Path(option).resolve().parent))
        sys.argv = [option, *rest]
        main = sys.modules["__main__"].__dict__
        main["__file__"] = option
        exec(compile(Path(option).read_bytes(), option, "exec"), main)
    return 0


def _enter(namespace: int) -> None:
    """Go to the network, or to the host name, that the open file stands for."""
    kind = os.readlink(f"/proc/self/fd/{namespace}").partition(":")[0]
    if not os.path.samestat(os.fstat(namespace), os.stat(f"/proc/self/ns/{kind}")):
        assert ctypes.CDLL(None).setns(namespace, 0) == 0
    os.close(namespace)


def _take_over(descriptors: dict[int, int]) -> None:
    """Give each open file the number that it has with the one that asked."""
    above = max([*descriptors, *descriptors.values()]) + 1
    for number, descriptor in enumerate(list(descriptors.values()), above):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, wanted in enumerate(descriptors, above):
        os.dup2(number, wanted)
        os.close(number)


if __name__ == "__main__":
    try:
        _serve()
    except BaseException:
        # Whoever waits for it learns why it does not come.
        _write(Path(sys.argv[1], "failed"), traceback.format_exc())
        raise
