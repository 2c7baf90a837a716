"""``--help`` lists the options of a federated run, one line each; also ``--data.help`` and similar
ones, whose text is jsonargparse's.

The short help needs no import, so it appears at once.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence
from importlib.resources import files

from fl_lightning.errors import UserError
from fl_lightning.lab.cli.compose import options_of

_MORE = {
    "predict": "\n  -o FILE               not given: predictions.pt in the run's folder",
    "export": (
        "\n  --client 3            its personal model, in place of the global one"
        "\n  -o FILE               not given: model.pt in the run's folder"
    ),
}
# Options with a help of their own, and the class whose arguments one takes.
_KEYS = (
    *("model", "trainer", "data", "data.partition", "data.biases", "method", "method.topology"),
    "model.learner",
    *("model.server_optimizer", "model.client_optimizer", "model.lr_decay"),
    "model.server_lr_decay",
)


def asked(command: str, summary: str, argv: Sequence[str]) -> str | None:
    """Return the help that a command line asks for; None: it asks for none.

    Args:
        command: fit, validate, test, predict, export or partition.
        summary: one sentence about what the command does.
        argv: the arguments after the command.

    Raises:
        UserError: ``--data.help CLASS`` does not name a class of data, and so on.
    """
    for option, value in options_of(argv):
        if option in ("-h", "--help"):
            short = _short(command, summary)
            return f"{short}\n\n{_everything(command)}" if value == "all" else short
        key = option.removeprefix("--").removesuffix(".help")
        if option == f"--{key}.help" and key in _KEYS:
            return _of_option(key, value)
    return None


def _short(command: str, summary: str) -> str:
    name = command if command in ("fit", "partition") else "evaluate"
    text = (files("fl_lightning.lab.cli") / "templates" / "help" / f"{name}.txt").read_text("utf-8")
    words = {"command": command, "summary": summary[0].upper() + summary[1:]}
    return text.rstrip("\n").format(**words, more=_MORE.get(command, ""))


def _everything(command: str) -> str:
    begins = "data" if command == "partition" else ""
    return "\n\n\n".join(_of_option(key, None) for key in _KEYS if key.startswith(begins))


def _of_option(key: str, name: str | None) -> str:
    """Return the text of ``--key.help name``."""
    # These import torch, which the short help should not wait for.
    import torch

    from fl_lightning.callback import FederatedCallback
    from fl_lightning.callbacks import Gossip
    from fl_lightning.datamodules import FederatedDataModule
    from fl_lightning.lab.cli.classes import (
        class_of,
        classes_in,
        hint_of,
        names_of_ours,
        no_class,
        subclasses,
    )
    from fl_lightning.machine.lightning import pl
    from fl_lightning.module import FederatedModule

    section, _, argument = key.partition(".")
    owners = {"model": FederatedModule, "trainer": pl.Trainer, "data": FederatedDataModule}
    base = owners.get(section, FederatedCallback)
    if section != "data" and key in owners and name is None:
        return _of_class(base, key)
    named = {**vars(torch.optim), **{own: class_of(path) for own, path in names_of_ours().items()}}
    if key == "method.topology":
        base = classes_in(hint_of(Gossip, argument))[0]
        named = subclasses(base)
    elif argument:
        base = classes_in(hint_of(base, argument))[0]
    choices = {}
    for own, cls in sorted(named.items()):
        if inspect.isclass(cls) and issubclass(cls, base) and cls is not base:
            choices[own] = cls
    if name is None:
        return _of_choices(key, choices)
    cls = choices.get(name) or (class_of(name) if "." in name else None)
    if not isinstance(cls, type):
        raise UserError(no_class(name, base, f"--{key}.help {name}"))
    return _of_class(cls, key)


def _of_choices(key: str, choices: dict[str, type]) -> str:
    """Return one line per class, with the title that a method has in tables."""
    width = max(map(len, choices), default=0)
    lines = [f"--{key} CLASS, and its arguments: --{key}.help CLASS", ""]
    for name, cls in choices.items():
        title = vars(cls).get("title")
        first = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
        text = f"{title}: {first}" if isinstance(title, str) else first
        shown = textwrap.shorten(text, 96 - width, placeholder=" …")
        lines.append(f"  {name:<{width}}  {shown}")
    return "\n".join(lines)


def _of_class(cls: type, key: str) -> str:
    """Return a class's description, and its arguments as options."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(usage=f"--{key} {cls.__name__}", add_help=False)
    # You do not give an optimizer's first argument, its parameters.
    positional = {"params"} & set(inspect.signature(cls).parameters)
    parser.add_class_arguments(cls, key, skip=positional, fail_untyped=False)
    # Of torch's modules it would list hundreds of subclasses.
    text = re.sub(r",\s+known\s+subclasses:[^)]*\)", ")", parser.format_help().strip())
    return f"{text}\n\n{inspect.cleandoc(cls.__doc__ or '').partition('Args:')[0].rstrip()}"
