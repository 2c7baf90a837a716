"""Why the parser refuses a config, in one paragraph: the option, its value and what is accepted.

jsonargparse decides what is refused. Its exceptions carry only text, and of this text only the
option is used: names and types are read from the config and from the classes that it names.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from fl_lightning.callback import FederatedCallback
from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.errors import UserError, suggest
from fl_lightning.introspection.accepted import suggested
from fl_lightning.lab.cli.classes import (
    choices,
    classes_in,
    hint_of,
    listed,
    named,
    needed,
    no_class,
    parameters,
)
from fl_lightning.lab.cli.compose import class_name
from fl_lightning.machine.lightning import pl
from fl_lightning.module import FederatedModule

# The sections of a config, and what each one takes: the arguments of a class, or objects.
_ARGUMENTS = {"trainer": pl.Trainer, "model": FederatedModule}
_OBJECTS = {"data": FederatedDataModule, "method": FederatedCallback}
# Its type says Module, for learners that are no LightningModule are refused in words of their own.
_LEARNER = "model.learner"
# Lines of jsonargparse's messages that stand around the errors.
_FRAME = ("Does not validate", "Subtypes:", "Errors:", "Given value", "Expected a path but")
_IN_A_NODE = ("class_path", "init_args", "dict_kwargs")


class Setting(NamedTuple):
    """An argument in a config: its path, its value and its type; ``slip``: what is wrong with its
    name, or with the class that it names.
    """

    path: str
    value: Any = None
    hint: Any = None
    slip: str = ""


def explained(message: str, config: Mapping[str, Any], options: Iterable[str]) -> str:
    """Return the paragraph for jsonargparse's ``message`` about ``config``.

    Args:
        options: the keys that a config and the command have.
    """
    path, told = place(message)
    settings = list(_settings(config, options))
    near = [each for each in settings if f"{each.path}.".startswith(f"{path}.") or not path]
    others = [each for each in settings if each.path.split(".")[0] == path.split(".")[0]]
    for each in [*near, *others]:
        if each.slip:
            return each.slip
    for each in near:
        if each.path == path and each.hint is not None:
            wanted = suggested(each.value, each.hint)
            return f"{path}: {each.value!r} is not accepted; it has to be {wanted}"
    if missing := re.match("the following arguments are required: (.*)", told):
        names = missing[1]
        return (
            f"{names} is not given. Add a config that sets it, such as -c base or -c data/digits, "
            f"or the option --{names.split(',')[0]}."
        )
    return f"{path}: {told[:450]}" if path else told[:450]


def place(message: str) -> tuple[str, str]:
    """Return the option that jsonargparse's message is about, and its text in one line."""
    keys: list[str] = []
    told: list[str] = []
    for line in message.splitlines():
        text = line.strip().removeprefix("- ")
        if match := re.match(r'Parser key "([^"]+)"\s*:?\s*(.*)', text):
            # Keys after the first error belong to the next type that was tried.
            keys += [] if told else [match[1]]
            text = match[2]
        if text and not text.startswith(_FRAME):
            told.append(text)
    return ".".join(keys), " ".join(" ".join(told).split())


def _settings(config: Mapping[str, Any], options: Iterable[str]) -> Iterator[Setting]:
    """Yield each argument of a config, and each name in it that is wrong."""
    names = list(options)
    for section in filter(names.__contains__, _ARGUMENTS):
        names += [f"{section}.{name}" for name in parameters(_ARGUMENTS[section])]
    for key, node in config.items():
        if key not in names:
            yield Setting(key, slip=_no_option(key, "", names))
        elif key in _ARGUMENTS and isinstance(node, dict):
            yield from _of_arguments(node, _ARGUMENTS[key], key)
        elif key in _OBJECTS:
            yield from _of_value(node, _OBJECTS[key], key)


def _of_arguments(given: Mapping[str, Any], made: Any, path: str) -> Iterator[Setting]:
    """Yield the arguments of a class or function."""
    accepted = parameters(made)
    for name, value in given.items():
        if name not in accepted:
            slip = _no_option(name, path, accepted, made, given)
            yield Setting(f"{path}.{name}", slip=slip)
            continue
        hint = pl.LightningModule if f"{path}.{name}" == _LEARNER else hint_of(made, name)
        yield Setting(f"{path}.{name}", value, hint)
        yield from _of_value(value, hint, f"{path}.{name}")


def _of_value(node: Any, hint: Any, path: str) -> Iterator[Setting]:
    """Yield the arguments of the objects in a value of the type ``hint``."""
    bases = classes_in(hint)
    if isinstance(node, list):
        several = len(node) > 1 and path not in _OBJECTS
        for place, item in enumerate(node):
            yield from _of_value(item, hint, f"{path}[{place}]" if several else path)
    elif isinstance(node, dict) and set(_IN_A_NODE) & set(node):
        yield from _of_object(node, bases, path)
    elif isinstance(node, dict) and bases and is_dataclass(bases[0]):
        yield from _of_arguments(node, bases[0], path)
    elif isinstance(node, dict):
        for name, value in node.items():
            yield from _of_value(value, hint, f"{path}.{name}")
    elif isinstance(node, str) and bases and _names_a_class(node, hint, bases):
        yield from _of_object({"class_path": node}, bases, path)


def _names_a_class(text: str, hint: Any, bases: list[type]) -> bool:
    """Return whether text is, or is meant to be, a class's name, and no value by itself."""
    if any(named(text, base) for base in bases):
        return True
    kinds = r"\b(str|float|int|Path|Literal)\b"
    if not re.fullmatch(r"[A-Za-z_][\w.]*", text):
        kinds = r"[Ll]ist|Sequence"
    return text not in ("true", "false") and re.search(kinds, str(hint)) is None


def _of_object(node: Mapping[str, Any], bases: list[type], path: str) -> Iterator[Setting]:
    """Yield the arguments of a node that names a class."""
    base = bases[0] if bases else object
    arguments = node.get("init_args") or {}
    made = next(filter(None, (named(node, each) for each in bases or [object])), None)
    slip = ""
    if beside := [name for name in node if name not in _IN_A_NODE]:
        slip = (
            f"{path}: {listed(beside)} of {class_name(node)} stands beside class_path, where it is "
            f"not read. Put it under init_args, indented further: init_args: {{{beside[0]}: …}}."
            f"{suggest(beside[0], ['init_args'])}"
        )
    elif "class_path" not in node:
        slip = f"{path}.{listed(arguments)}: no such option; give the class of {path} first."
    elif made is None:
        slip = no_class(str(node["class_path"]), base, path)
    elif bases and not _gives(made, bases):
        slip = _not_a(base, path, str(node["class_path"]))
    if slip:
        yield Setting(path, slip=slip)
        return
    yield from _of_arguments(arguments, made, path)
    lacking = [name for name in needed(made) if name not in arguments]
    if lacking and "dict_kwargs" not in node:
        slip = (
            f"{path}: {class_name(node)} needs {', '.join(lacking)}. Give "
            f"{', '.join(f'--{path}.{name}' for name in lacking)}, or init_args in a config."
        )
        yield Setting(path, slip=slip)


def _gives(made: Any, bases: Iterable[type]) -> bool:
    """Return whether a class, or what a function says that it returns, is of one of the bases."""
    if not isinstance(made, type):
        return any(_gives(each, bases) for each in classes_in(hint_of(made, "return")))
    return any(issubclass(made, base) for base in bases)


def _no_option(
    name: str,
    path: str,
    accepted: Iterable[str],
    made: Any = None,
    given: Mapping[str, Any] | None = None,
) -> str:
    """Return the paragraph for an option that there is not."""
    full = f"{path}.{name}".removeprefix(".")
    names = list(accepted)
    hint = ""
    if close := difflib.get_close_matches(name, names, n=1):
        hint = f" Did you mean `--{path}.{close[0]}`?".replace("--.", "--")
    elif made is not None:
        hint = _further_in(name, path, made, given or {})
    where = f" in {path}" if path else ""
    told = "no such option."
    if path not in ("", *_ARGUMENTS):
        told = f"{made.__name__} has no such argument."
    return f"--{full}: {told}{hint} Accepted{where}: {listed(names)}."


def _further_in(name: str, path: str, made: Any, given: Mapping[str, Any]) -> str:
    """Suggest an argument of a class in an argument: data.partition.alpha for data.alpha."""
    for argument in parameters(made):
        for base in classes_in(hint_of(made, argument))[:1]:
            chosen = named(given[argument], base) if given.get(argument) else None
            owners = [chosen] if chosen else [named(each, base) for each in choices(base)]
            having = [cls.__name__ for cls in owners if cls and name in parameters(cls)]
            if having:
                return f" Did you mean `--{path}.{argument}.{name}`, of {listed(having[:3])}?"
    return ""


def _not_a(base: type, path: str, name: str) -> str:
    if base is FederatedDataModule:
        return (
            f"{path}: {name} is not federated: nothing says who has which sample. Give --data "
            f"FromDataModule --data.datamodule {name} --data.num_clients 100."
        )
    return f"{path}: {name} is no subclass of {base.__name__}, or a function that returns one."


def why_not_built(error: BaseException) -> str | None:
    """Return the message of a UserError that jsonargparse wrapped in an error of its own."""
    inner = error.__cause__ or error.__context__
    message = why_not_built(inner) if inner is not None else None
    if message is None and isinstance(error, UserError):
        return str(error)
    if message is None and str(error).startswith("Does not validate against any of the Union"):
        # An error about one item of a list says more than an error about the whole list.
        attempts = [line.strip().removeprefix("- ") for line in str(error).splitlines()[2:]]
        frame = (*_FRAME, "Expected a", "Not a valid subclass of", "Subclass types expect")
        telling = [text for text in attempts if not text.startswith(frame)]
        # A line that ends with a colon is about the next one.
        message = " ".join(telling[: 2 if telling and telling[0].endswith(":") else 1]) or None
    return message


def not_an_optimizer(error: Exception) -> str | None:
    """The paragraph for arguments that one of torch's optimizers refuses; None for other errors."""
    *_, last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if last.f_code.co_name != "__init__" or "torch.optim" not in last.f_globals["__name__"]:
        return None
    return (
        f"{type(last.f_locals['self']).__name__}: {error}. Mend the optimizer's arguments in "
        "model.client_optimizer, model.server_optimizer or the learner, wherever they are set."
    )
