"""``--help`` lists the options of a federated run, one line each; also ``--data.help`` and similar
ones.

The short help needs no import, so it appears at once.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from importlib.resources import files

from fl_lightning.accepted import declared, words_of
from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.cli.compose import options_of

_MORE = {
    "predict": "\n  -o FILE               not given: predictions.pt in the run's folder",
    "export": (
        "\n  --client 3            its personal model, in place of the global one"
        "\n  -o FILE               not given: model.pt in the run's folder"
    ),
}

# Option → the class whose arguments it takes, or the base class of its values.
_FIXED = {
    "model": "fl_lightning.module.FederatedModule",
    "trainer": "fl_lightning.machine.lightning.pl.Trainer",
}
_BASES = {
    "data": ("fl_lightning.datamodules.FederatedDataModule",),
    "data.partition": ("fl_lightning.datamodules.Partition",),
    "data.biases": ("fl_lightning.datamodules.Bias",),
    "method": ("fl_lightning.callback.FederatedCallback",),
    "model.learner": ("fl_lightning.machine.lightning.pl.LightningModule", "torch.nn.Module"),
    "model.server_optimizer": ("torch.optim.Optimizer",),
    "model.client_optimizer": ("torch.optim.Optimizer",),
    "model.lr_decay": ("fl_lightning.schedules.Schedule",),
    "model.server_lr_decay": ("fl_lightning.schedules.Schedule",),
}


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
        if option == f"--{key}.help" and key in (*_FIXED, *_BASES):
            return _of_option(key, value)
    return None


def _short(command: str, summary: str) -> str:
    name = command if command in ("fit", "partition") else "evaluate"
    text = (files("fl_lightning.lab.cli") / "templates" / "help" / f"{name}.txt").read_text("utf-8")
    words = {"command": command, "summary": summary[0].upper() + summary[1:]}
    return text.rstrip("\n").format(**words, more=_MORE.get(command, ""))


def _everything(command: str) -> str:
    keys = [*_FIXED, *_BASES]
    if command == "partition":
        keys = [key for key in _BASES if key.startswith("data")]
    return "\n\n\n".join(_of_option(key, None) for key in keys)


def _of_option(key: str, name: str | None) -> str:
    """Return the text of ``--key.help name``."""
    if key in _FIXED and name is None:
        return _of_class(_imported(_FIXED[key]), key)
    choices = _choices(key)
    if name is None:
        return _of_choices(key, choices)
    cls = choices.get(name)
    if cls is None and "." in name:
        try:
            cls = _imported(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"--{key}.help {name}: it cannot be imported: {error}.") from None
    if not isinstance(cls, type):
        raise UserError(
            f"--{key}.help {name}: no such class.{suggest(name, choices)} "
            f"Accepted: {', '.join(sorted(choices)) or 'none'}, or a path as my_module.MyClass."
        )
    return _of_class(cls, key)


def _choices(key: str) -> dict[str, type]:
    """Return our classes, and torch's optimizers, that an option accepts, by short name."""
    # The following lines import torch, which the short help should not wait for.
    import torch

    from fl_lightning.lab.cli.classes import names_of_ours

    bases = tuple(map(_imported, _BASES.get(key, ())))
    named = {name: _imported(path) for name, path in names_of_ours().items()}
    if torch.optim.Optimizer in bases:
        found = {name: value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
        named = {**found, **named}
    return {
        name: cls
        for name, cls in sorted(named.items())
        if issubclass(cls, bases) and cls not in bases
    }


def _imported(path: str) -> type:
    module, _, name = path.rpartition(".")
    if module == "fl_lightning.machine.lightning.pl":
        # This module knows which of the two Lightning packages is in use.
        from fl_lightning.machine.lightning import pl

        found: type = getattr(pl, name)
    else:
        found = getattr(importlib.import_module(module), name)
    return found


def _of_choices(key: str, choices: dict[str, type]) -> str:
    """Return one line per class, with the title that a method has in tables."""
    width = max(map(len, choices), default=0)
    lines = [f"--{key} CLASS, and its arguments: --{key}.help CLASS", ""]
    for name, cls in choices.items():
        title = vars(cls).get("title")
        first = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
        text = f"{title}: {first}" if isinstance(title, str) else first
        lines.append(textwrap.shorten(text, 96 - width, placeholder=" …"))
        lines[-1] = f"  {name:<{width}}  {lines[-1]}"
    return "\n".join(lines)


def _of_class(cls: type, key: str) -> str:
    """Return a class's summary, and its arguments as options."""
    # jsonargparse requires this package, and importing it is slow.
    from docstring_parser import parse

    from fl_lightning.lab.cli.classes import parameters

    # The arguments of Lightning's Trainer are described in the docstring of `__init__`.
    text = cls.__doc__ or getattr(vars(cls).get("__init__"), "__doc__", None)
    described = parse(inspect.cleandoc(text or ""))
    option = f"--{key}" if key in _FIXED else f"--{key} {cls.__name__}"
    lines = textwrap.wrap(f"{option}: {described.short_description or ''}", 100)
    if described.long_description:
        lines += ["", described.long_description]
    notes = dict(_notes(cls))
    kinds = dict(_kinds(cls))
    lines.append("")
    # You do not give an optimizer's first argument, its parameters.
    for name in [name for name in parameters(cls) if name != "params"]:
        lines.append(f"  --{key}.{name}  {kinds.get(name, '')}".rstrip())
        text = " ".join(notes.get(name, "").split())
        lines += textwrap.wrap(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def _notes(cls: type) -> Iterator[tuple[str, str]]:
    """Return the docstrings' text about each argument; the class itself comes last."""
    from docstring_parser import parse

    for base in reversed(cls.__mro__):
        for text in (base.__doc__, getattr(vars(base).get("__init__"), "__doc__", None)):
            if base is not object and text:
                for item in parse(text).params:
                    yield item.arg_name, item.description or ""


def _kinds(cls: type) -> Iterator[tuple[str, str]]:
    """Return the type and the default of each argument, as a config would write them."""
    for base in reversed(cls.__mro__):
        if base is object or "__init__" not in vars(base):
            continue
        accepted = declared(vars(base)["__init__"])
        for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items():
            kind = parameter.annotation
            words = [kind] if isinstance(kind, str) else []
            if isinstance(kind, type):
                words = [kind.__name__]
            if name in accepted:
                words = [words_of(accepted[name])]
            if parameter.default is parameter.empty:
                words.append("to be given")
            else:
                words.append(f"default {_as_yaml(parameter.default)}")
            yield name, ", ".join(words).replace("None", "null")


def _as_yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "[]" if value == () else str(value)
