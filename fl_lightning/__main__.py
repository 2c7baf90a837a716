"""``fl-lightning``: this file gives help and quick answers, and imports all else when needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from fl_lightning.errors import (
    FULL,
    UserError,
    cannot_write,
    debugging,
    in_own_code,
    out_of_memory,
    suggest,
)
from fl_lightning.lab.cli.commands import COMMANDS, MODULES
from fl_lightning.machine.escaping import plain_lines

# If one of these variables is set, OpenMP, which PyTorch loads, binds the whole process to one
# core.
_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")


def _keep_cores() -> None:
    """Before PyTorch is imported, make sure that OpenMP does not bind this process to one core.

    Otherwise parallel clients, and the runs of a sweep, would all share that core.
    """
    bound = [name for name in _BINDING if os.environ.get(name, "false").lower() != "false"]
    for name in bound:
        del os.environ[name]
    if bound:
        print(
            f"fl-lightning: note: {' and '.join(bound)} would bind this process, and with it all "
            "its workers, to one core. It is not used here; `taskset` chooses the cores of a run.",
            file=sys.stderr,
        )


def _say_what_takes_seconds(command: str) -> None:
    """Print in a terminal that the command has begun, because importing PyTorch takes seconds."""
    if sys.stderr.isatty():
        print(f"fl-lightning {command}: loading PyTorch …", file=sys.stderr, flush=True)


def usage() -> str:
    """Return the help of the whole command line."""
    lines = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fl-lightning COMMAND [RUN] [-c CONFIG ...] [--trainer.max_epochs 500 ...]",
            "",
            "Federated learning on PyTorch Lightning: one fit is one run, one epoch is one round.",
            "",
            *lines,
            "",
            "  -c NAME     a YAML file, or a packaged config (`fl-lightning configs`); several "
            "merge, left to right",
            "  RUN         a run's folder: stands for its config and its last checkpoint",
            "  --help      after a command: what it takes (--help all: every option)",
            "  --debug     show the traceback of an error (also FL_DEBUG=1)",
            "  --version   this program's version",
            "",
            "Example: fl-lightning fit -c base -c data/digits -c method/fedinit "
            "--trainer.max_epochs 20",
        ]
    )


def _configs(names: Sequence[str]) -> str:
    from fl_lightning.lab.cli.compose import find, packaged, summary, text_of

    if names:
        return text_of(find(names[0], "configs"), f"configs {names[0]}").rstrip("\n")
    available = packaged()
    width = max(map(len, available), default=0)
    return "\n".join(f"{n:<{width}}  {summary(f.read_text('utf-8'))}" for n, f in available.items())


def _show(text: str, end: str = "\n") -> None:
    """Print a text of many lines; its reader may stop early, as ``| head`` does."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        _fall_silent()


def _fall_silent() -> None:
    """Discard the output that is still to be printed, because its reader has gone."""
    # The interpreter flushes stdout once more at its end; this keeps it from raising an error then.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _has_reader() -> bool:
    """Return whether the output still has a reader; if so, an empty line was printed."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return False
    return True


def _run(command: str, rest: list[str], debug: bool) -> int:
    """Run one command; each imports only what it needs."""
    if command == "--version":
        from importlib.metadata import version

        print(f"fl-lightning {version('fl-lightning')}")
        return 0
    if command not in COMMANDS:
        raise UserError(
            f"{command}: not a command.{suggest(command, COMMANDS)} Accepted: "
            f"{', '.join(COMMANDS)}."
        )
    if command == "configs":
        if "-h" in rest or "--help" in rest:
            print(
                "usage: fl-lightning configs [NAME]\n\nList the packaged configs, or print "
                "the one called NAME."
            )
        else:
            _show(_configs(rest))
        return 0
    if command == "resume":
        if not {"-h", "--help"} & set(rest) and (not rest or rest[0].startswith("-")):
            raise UserError(
                "resume: give the folder of a run, fl-lightning resume runs/digits-fedinit-1. "
                "Options come after it."
            )
        command = "fit"
    _keep_cores()
    if command in MODULES:
        if command in ("sweep", "check") and not {"-h", "--help"} & set(rest):
            _say_what_takes_seconds(command)
        if command == "sweep" and "OMP_WAIT_POLICY" not in os.environ:
            # Worker processes get their cores after OpenMP has started, so OpenMP does not know
            # that they have only a few. A run that kept its first number of threads would wait in a
            # busy loop on its one core.
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        if command in ("analyse", "deploy"):
            sys.path.insert(0, os.getcwd())
        return int(import_module(MODULES[command]).main(rest))
    from fl_lightning.lab.cli.compose import prepare
    from fl_lightning.lab.cli.help import asked

    text = asked(command, COMMANDS[command], rest)
    if text is not None:
        _show(text)
        return 0
    # Check names and YAML before importing torch, so that a typing error is reported at once.
    prepared = prepare(command, rest)
    _say_what_takes_seconds(command)
    # Python has to find the user's `my_learner.Lit` in the current directory.
    sys.path.insert(0, os.getcwd())
    from fl_lightning.lab.cli.lightning_commands import run

    return run(command, prepared, debug=debug)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's) and give its exit status.

    0 done · 1 an error in the user's own code, in one paragraph with its line · 2 something for the
    user to correct, in one paragraph · 3 diverged · 128 + n stopped by signal n after its round,
    141 if the output has no reader. Any other exception is raised unchanged (status 1), and with
    --debug all are.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or debugging()
    arguments = [a for a in arguments if a != "--debug"]
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            _show(usage())
            return 0
        status = _run(arguments[0], arguments[1:], debug)
        # Flush here: at the interpreter's end we could no longer handle a reader that has closed
        # the pipe.
        print(end="", flush=True)
        return status
    except SystemExit:
        # The parser has printed its help and exits.
        _show("", end="")
        raise
    except BrokenPipeError:
        # The broken pipe may be one between processes, and not stdout's.
        if _has_reader():
            raise
        _fall_silent()
        return 128 + 13
    except UserError as error:
        if debug:
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print(plain_lines(f"fl-lightning: {error}{notes}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        why = out_of_memory(error)
        # A disk may be full for a writer of others, such as TensorBoard's thread.
        if isinstance(error, OSError) and error.errno in FULL:
            why = str(cannot_write(error.filename or "a file of the run", error))
        said = why or in_own_code(error)
        if debug or not said:
            raise
        print(plain_lines(f"fl-lightning: {said}"), file=sys.stderr)
        return 2 if why else 1


if __name__ == "__main__":
    sys.exit(main())
