"""jsonargparse's messages as one paragraph: which option, which value, what is accepted."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jsonargparse import ArgumentParser

from fl_lightning.errors import UserError, suggest

_INTERNAL = (
    "fl_lightning.callback",
    "fl_lightning.cli.run_folder",
    "fl_lightning.cli.signals",
    "fl_lightning.evaluation.measurement",
)
_NOISE = (
    "Does not validate",
    "Subtypes:",
    "Errors:",
    "Given value",
    "- Expected a path but",
    "Expected a path but",
)


def parameters(cls: type) -> list[str]:
    """Names of what ``cls(...)`` accepts, through ``**kwargs`` to the classes it inherits from."""
    names: list[str] = []
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        accepted = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        names += [p.name for p in accepted if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        if all(p.kind != p.VAR_KEYWORD for p in accepted):
            break
    return list(dict.fromkeys(names))


def subclasses(base: type) -> dict[str, type]:
    """Every imported public subclass of ``base`` by its bare name.

    Of several classes with one name, this package's counts.
    """
    by_name: dict[str, type] = {}
    waiting: list[type] = list(base.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        ours = cls.__module__.startswith("fl_lightning.")
        if not cls.__name__.startswith("_") and (ours or cls.__name__ not in by_name):
            by_name[cls.__name__] = cls
    return by_name


def listed(names: Iterable[str]) -> str:
    """The names in one line, as many as a paragraph can take."""
    line = ", ".join(names)
    return line if len(line) <= 300 else line[:300].rsplit(", ", 1)[0] + ", …"


_PLAIN = {
    "NoneType": "null",
    "str": "text",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "list": "a list",
}


def _types(text: str, known: dict[str, type]) -> str:
    """The types in a line of jsonargparse's, in words; for a class with subclasses, their names."""
    types = []
    for path in re.findall(r"<class '([\w.]+)'>", text):
        name = path.rsplit(".", 1)[-1]
        words = _PLAIN.get(name, name)
        if name in known and name not in _PLAIN:
            words = f"a {name} ({listed(_choices(known[name]))})"
        types.append(words)
    return " or ".join(dict.fromkeys(types)) or text


def _class_at(
    path: str, config: dict[str, Any], options: list[str], known: dict[str, type]
) -> type | None:
    """The class named at ``path`` in the config or, overriding that, on the command line."""
    node: Any = config
    for key in path.split("."):
        if isinstance(node, dict):
            arguments = node.get("init_args", node)
            node = arguments.get(key) if isinstance(arguments, dict) else None
    name = node.get("class_path") if isinstance(node, dict) else node
    for option, following in zip(options, [*options[1:], ""], strict=False):
        flag, equals, value = option.partition("=")
        if flag == f"--{path}":
            name = value if equals else following
    return known.get(str(name).rsplit(".", 1)[-1])


@dataclass
class _Asked:
    """What the parser was asked for: the config and the options over it.

    ``keys`` are all options of the parser; ``bases`` the base class of what an option takes, by
    the last part of its name; ``known`` their subclasses by bare name.
    """

    keys: list[str]
    config: dict[str, Any]
    options: list[str]
    bases: dict[str, type]
    known: dict[str, type]


@dataclass
class _Trace:
    """A message about a value, taken apart.

    ``option`` is the path of keys that it is about, ``leaf`` the line that tells most of all
    ``leaves``; ``value`` and ``innermost`` the outermost and innermost value that was refused,
    ``subtypes`` the line that lists what is accepted.
    """

    option: str
    leaf: str
    leaves: list[str]
    value: str | None
    innermost: str
    subtypes: str


def one_paragraph(
    message: str,
    parser: ArgumentParser,
    config: dict[str, Any],
    options: list[str],
    bases: dict[str, type],
) -> str:
    """Say ``message`` briefly.

    Args:
        message: jsonargparse's.
        parser: that refused.
        config: of the configs.
        options: of the command line.
        bases: the base class of what an option takes, by the last part of its name.
    """
    known: dict[str, type] = {}
    for base in bases.values():
        known |= subclasses(base)
    known |= {base.__name__: base for base in bases.values()}
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    keys = [flag.removeprefix("--") for flag in flags]
    asked = _Asked(keys, config, options, bases, known)
    for pattern, say in _OF_OPTIONS:
        if match := re.match(pattern, message):
            return say(match, asked)
    trace = _taken_apart(message)
    for pattern, say_of_value in _OF_VALUES:
        match = re.match(pattern, trace.leaf)
        if match and (text := say_of_value(match, trace, asked)) is not None:
            return f"{trace.option}{text}"
    rest = re.sub(r"\s+", " ", " ".join(trace.leaves) or message)[:450]
    return f"{trace.option}: {rest}" if trace.option else rest


# ------------------------------------------------------------------- of options themselves


def _no_option(match: re.Match[str], asked: _Asked) -> str:
    flag = match[1].split("=")[0]
    hint = ""
    if flag.startswith("--"):
        # The hint quotes a key; an option is quoted as it is typed.
        hint = suggest(flag.removeprefix("--"), asked.keys)
        hint = hint.replace("'", "`--", 1).replace("'", "`")
    return f"{flag}: no such option.{hint} --help lists them all."


def _no_key(match: re.Match[str], asked: _Asked) -> str:
    prefix, name = match.groups()
    inside = [key for key in asked.keys if key.startswith(f"{prefix}.")]
    names = [key.removeprefix(f"{prefix}.") for key in inside]
    return f"{prefix}.{name}: no such key.{suggest(name, names)} Accepted: {listed(names)}."


def _not_given(match: re.Match[str], asked: _Asked) -> str:
    return (
        f"{match[1]} is not given. Add a config that sets it, such as -c base or -c data/digits, "
        f"or the option --{match[1].split(',')[0]}."
    )


_OF_OPTIONS: Sequence[tuple[str, Callable[[re.Match[str], _Asked], str]]] = (
    (r"[Uu]nrecognized arguments: (\S+)", _no_option),
    (r"Group '([\w.]+)' does not accept option '([^']+)'", _no_key),
    (r"the following arguments are required: (.*)", _not_given),
)


# ------------------------------------------------------------------------- of their values


_KEY = r'Parser key "([^"]+)"\s*:?\s*(.*)'
_TELLING = r"Option '|Expected a dot import|Problem with|the following"


def _taken_apart(message: str) -> _Trace:
    """Find the option, the values and the line that tells most in a message of many lines."""
    path: list[str] = []
    leaves: list[str] = []
    value = None
    innermost = ""
    subtypes = ""
    for line in message.splitlines():
        text = line.strip().removeprefix("- ")
        if match := re.match(_KEY, text):
            # What follows is about another subtype's attempt: the first one tells.
            if leaves:
                continue
            if match[1] != "config":
                path.append(match[1])
            text = match[2]
        while match := re.match(_KEY, text):
            path.append(match[1])
            text = match[2]
        if text.startswith("Subtypes:") and not leaves:
            subtypes = text
        if text.startswith("Given value:"):
            value = text.removeprefix("Given value:").strip()
            if nested := re.search(r"val='?(.*?)'?\)$", text):
                value = nested[1]
            innermost = innermost or value
        elif text and not text.startswith(_NOISE):
            leaves.append(text)
    telling = [text for text in leaves if re.match(_TELLING, text)]
    leaf = (telling or leaves or message.splitlines())[0]
    return _Trace(".".join(path), leaf, leaves, value, innermost, subtypes)


def _no_argument(match: re.Match[str], trace: _Trace, asked: _Asked) -> str:
    cls = _class_at(trace.option, asked.config, asked.options, asked.known)
    if cls is None:
        return f".{match[1]}: no such option; give the class of {trace.option} first."
    names = parameters(cls)
    hint = suggest(match[1], names)
    return f".{match[1]}: {cls.__name__} has no such argument.{hint} Accepted: {listed(names)}."


def _argument_missing(match: re.Match[str], trace: _Trace, asked: _Asked) -> str:
    name = "its class"
    if named := re.match(r"Namespace\(class_path='([\w.]+)'", trace.innermost):
        name = named[1].rsplit(".", 1)[-1]
    wanted = ", ".join(f"--{trace.option}.{argument}" for argument in match[1].split(", "))
    return f": {name} needs {match[1]}. Give {wanted}, or init_args in a config."


def _no_class(match: re.Match[str], trace: _Trace, asked: _Asked) -> str:
    # A schedule or a number is wanted, and text that is neither was given.
    if re.search(r"'(float|int)'", trace.subtypes):
        return _expected(match[1], trace.subtypes, asked)
    base = asked.bases.get(trace.option) or asked.bases.get(trace.option.rsplit(".", 1)[-1])
    names: list[str] = []
    if base is not None:
        names = _choices(base)
    hint = suggest(match[1], names or asked.known)
    if names:
        hint += f" Accepted: {listed(names)}, or a path such as my_module.MyClass."
    return f": there is no class {match[1]!r}.{hint}"


def _unusable_class(match: re.Match[str], trace: _Trace, asked: _Asked) -> str:
    place = trace.leaves.index(trace.leaf)
    reason = [*trace.leaves[place + 1 :], "it cannot be imported"][0]
    hint = suggest(match[1].rsplit(".", 1)[-1], asked.known)
    return f": {match[1]!r} cannot be used: {reason}.{hint}"


def _wrong_value(match: re.Match[str], trace: _Trace, asked: _Asked) -> str:
    return _expected(match[1], trace.leaf, asked)


def _wrong_type(match: re.Match[str], trace: _Trace, asked: _Asked) -> str | None:
    if trace.value is None:
        return None
    return _expected(trace.value, trace.subtypes or trace.leaf, asked)


def _expected(value: str, types: str, asked: _Asked) -> str:
    return f": {value!r} is not accepted; expected {_types(types, asked.known)}."


def _not_federated(match: re.Match[str], trace: _Trace, asked: _Asked) -> str:
    name = re.sub(r".*'class_path': '([^']+)'.*", r"\1", trace.value or trace.option)
    return (
        f": {name} is not federated: nothing says who has which sample. Accepted: our data "
        f"modules, or --data FromDataModule --data.datamodule {name} --data.num_clients 100."
    )


# The first that matches and has something to say does; all else is shown as it is.
_OF_VALUES: Sequence[tuple[str, Callable[[re.Match[str], _Trace, _Asked], str | None]]] = (
    (r"Option '([^']+)' is not accepted", _no_argument),
    (r"the following arguments are required: (.*)", _argument_missing),
    (r"Expected a dot import path string: (.*)", _no_class),
    (r"Problem with given class_path '([^']+)':", _unusable_class),
    (r"Expected an? <class '[^']+'>\. Got value: (.*)", _wrong_value),
    (r"Expected an? <class", _wrong_type),
    (r"Import path.* does not correspond to a subclass of FederatedDataModule", _not_federated),
)


# ------------------------------------------------------------- of what could not be built


def why_not_built(error: BaseException) -> str | None:
    """The message of a UserError that jsonargparse wrapped in an error of its own, or None."""
    inner = error.__cause__ or error.__context__
    message = None
    if inner is not None:
        message = why_not_built(inner)
    union = "Does not validate against any of the Union subtypes"
    if message is None and str(error).startswith(union):
        attempts = [line.strip().removeprefix("- ") for line in str(error).splitlines()[2:]]
        telling = [text for text in attempts if not text.startswith(("Expected a", *_NOISE))]
        if telling:
            # A line that ends in a colon announces the next one.
            message = telling[0]
            if message.endswith(":"):
                message = " ".join(telling[:2])
    if not message and isinstance(error, UserError):
        message = str(error)
    return message or None


def not_an_optimizer(error: Exception) -> str | None:
    """The paragraph for arguments that one of torch's optimizers refuses; None for other errors."""
    *_, last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    in_torch = last.f_globals["__name__"].startswith("torch.optim")
    if not in_torch or last.f_code.co_name != "__init__":
        return None
    return (
        f"{type(last.f_locals['self']).__name__}: {error}. Mend the optimizer's arguments in "
        "model.client_optimizer, model.server_optimizer or the learner, wherever they are set."
    )


def _choices(base: type) -> list[str]:
    """The names to offer where a ``base`` is wanted."""
    names = []
    for name, cls in subclasses(base).items():
        # Torch has hundreds of networks, so only ours are offered.
        hidden = issubclass(base, torch.nn.Module) and not cls.__module__.startswith(
            "fl_lightning.models"
        )
        if not hidden and cls.__module__ not in _INTERNAL:
            names.append(name)
    return sorted(names)
