"""jsonargparse's messages, cut down to one paragraph: which option, which value, what is accepted."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterable
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
        found = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        names += [p.name for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        if all(p.kind != p.VAR_KEYWORD for p in found):
            break
    return list(dict.fromkeys(names))


def subclasses(base: type) -> dict[str, type]:
    """Every imported public subclass of ``base`` by its bare name; of one name, this package's class counts."""
    found: dict[str, type] = {}
    waiting: list[type] = list(base.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        ours = cls.__module__.startswith("fl_lightning.")
        if not cls.__name__.startswith("_") and (ours or cls.__name__ not in found):
            found[cls.__name__] = cls
    return found


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
    found = []
    for path in re.findall(r"<class '([\w.]+)'>", text):
        name = path.rsplit(".", 1)[-1]
        cls = known.get(name)
        found.append(
            _PLAIN.get(name) or (f"a {name} ({listed(_choices(cls))})" if cls is not None else name)
        )
    return " or ".join(dict.fromkeys(found)) or text


def _class_at(
    path: str, config: dict[str, Any], options: list[str], known: dict[str, type]
) -> type | None:
    """The class named at ``path`` in the config or, overriding that, on the command line."""
    node: Any = config
    for key in path.split("."):
        if isinstance(node, dict):
            node = (
                node.get("init_args", node).get(key)
                if isinstance(node.get("init_args", node), dict)
                else None
            )
    name = node.get("class_path") if isinstance(node, dict) else node
    for option, following in zip(options, [*options[1:], ""], strict=False):
        flag, equals, value = option.partition("=")
        if flag == f"--{path}":
            name = value if equals else following
    return known.get(str(name).rsplit(".", 1)[-1])


def one_paragraph(
    message: str,
    parser: ArgumentParser,
    config: dict[str, Any],
    options: list[str],
    bases: dict[str, type],
) -> str:
    """Say ``message`` briefly. ``bases``: the base class of what an option takes, by the last part of its name."""
    known = {name: cls for base in bases.values() for name, cls in subclasses(base).items()}
    known |= {base.__name__: base for base in bases.values()}
    keys = [o.removeprefix("--") for o in parser._option_string_actions if o.startswith("--")]

    if match := re.match(r"[Uu]nrecognized arguments: (\S+)", message):
        flag = match[1].split("=")[0]
        hint = suggest(flag.removeprefix("--"), keys) if flag.startswith("--") else ""
        return f"{flag}: no such option.{hint.replace(chr(39), '`--', 1).replace(chr(39), '`')} --help lists them all."
    if match := re.match(r"Group '([\w.]+)' does not accept option '([^']+)'", message):
        prefix, name = match.groups()
        names = [k.removeprefix(f"{prefix}.") for k in keys if k.startswith(f"{prefix}.")]
        return f"{prefix}.{name}: no such key.{suggest(name, names)} Accepted: {listed(names)}."
    if match := re.match(r"the following arguments are required: (.*)", message):
        return (
            f"{match[1]} is not given. Add a config that sets it, such as -c base or -c data/digits, "
            f"or the option --{match[1].split(',')[0]}."
        )

    path: list[str] = []
    leaves: list[str] = []
    value, innermost, subtypes = None, "", ""
    for line in message.splitlines():
        text = line.strip().removeprefix("- ")
        if match := re.match(r'Parser key "([^"]+)"\s*:?\s*(.*)', text):
            if leaves:  # another subtype's attempt
                continue
            path += [match[1]] if match[1] != "config" else []
            text = match[2]
        while match := re.match(r'Parser key "([^"]+)"\s*:?\s*(.*)', text):
            path += [match[1]]
            text = match[2]
        if text.startswith("Subtypes:") and not leaves:
            subtypes = text
        if text.startswith("Given value:"):
            nested = re.search(r"val='?(.*?)'?\)$", text)
            value = nested[1] if nested else text.removeprefix("Given value:").strip()
            innermost = innermost or value
        elif text and not text.startswith(_NOISE):
            leaves.append(text)
    option = ".".join(path)
    telling = [
        text
        for text in leaves
        if re.match(r"Option '|Expected a dot import|Problem with|the following", text)
    ]
    leaf = (telling or leaves or message.splitlines())[0]

    if match := re.match(r"Option '([^']+)' is not accepted", leaf):
        cls = _class_at(option, config, options, known)
        if cls is None:
            return f"{option}.{match[1]}: no such option; give the class of {option} first."
        names = parameters(cls)
        hint = suggest(match[1], names)
        return f"{option}.{match[1]}: {cls.__name__} has no such argument.{hint} Accepted: {listed(names)}."
    if match := re.match(r"the following arguments are required: (.*)", leaf):
        given = re.match(r"Namespace\(class_path='([\w.]+)'", innermost)
        name = given[1].rsplit(".", 1)[-1] if given else "its class"
        wanted = ", ".join(f"--{option}.{argument}" for argument in match[1].split(", "))
        return f"{option}: {name} needs {match[1]}. Give {wanted}, or init_args in a config."
    if match := re.match(r"Expected a dot import path string: (.*)", leaf):
        if re.search(r"'(float|int)'", subtypes):
            return f"{option}: {match[1]!r} is not accepted; expected {_types(subtypes, known)}."
        base = bases.get(option) or bases.get(option.rsplit(".", 1)[-1])
        names = _choices(base) if base else []
        accepted = (
            f" Accepted: {listed(names)}, or a path such as my_module.MyClass." if names else ""
        )
        return f"{option}: there is no class {match[1]!r}.{suggest(match[1], names or known)}{accepted}"
    if match := re.match(r"Problem with given class_path '([^']+)':", leaf):
        reason = " ".join(leaves[leaves.index(leaf) + 1 :][:1]) or "it cannot be imported"
        return f"{option}: {match[1]!r} cannot be used: {reason}.{suggest(match[1].rsplit('.', 1)[-1], known)}"
    if match := re.match(r"Expected an? <class '[^']+'>\. Got value: (.*)", leaf):
        return f"{option}: {match[1]!r} is not accepted; expected {_types(leaf, known)}."
    if re.match(r"Expected an? <class", leaf) and value is not None:
        return f"{option}: {value!r} is not accepted; expected {_types(subtypes or leaf, known)}."
    if re.match(r"Import path.* does not correspond to a subclass of FederatedDataModule", leaf):
        name = re.sub(r".*'class_path': '([^']+)'.*", r"\1", value or option)
        return (
            f"{option}: {name} is not federated: nothing says who has which sample. Accepted: our data modules, or "
            f"--data FromDataModule --data.datamodule {name} --data.num_clients 100."
        )
    text = re.sub(r"\s+", " ", " ".join(leaves) or message)
    return f"{option}: {text[:450]}" if option else text[:450]


def why_not_built(error: BaseException) -> str | None:
    """The message of a UserError that jsonargparse wrapped in an error of its own; None without one."""
    inner = error.__cause__ or error.__context__
    found = why_not_built(inner) if inner is not None else None
    if found is None and str(error).startswith(
        "Does not validate against any of the Union subtypes"
    ):
        attempts = [line.strip().removeprefix("- ") for line in str(error).splitlines()[2:]]
        telling = [text for text in attempts if not text.startswith(("Expected a", *_NOISE))]
        found = " ".join(telling[: 2 if telling[0].endswith(":") else 1]) if telling else None
    return found or (str(error) if isinstance(error, UserError) else None)


def not_an_optimizer(error: Exception) -> str | None:
    """The paragraph for arguments that one of torch's optimizers refuses; None for other errors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if (
        not frames[-1].f_globals["__name__"].startswith("torch.optim")
        or frames[-1].f_code.co_name != "__init__"
    ):
        return None
    return (
        f"{type(frames[-1].f_locals['self']).__name__}: {error}. Mend the optimizer's arguments in "
        "model.client_optimizer, model.server_optimizer or the learner, wherever they are set."
    )


def _choices(base: type) -> list[str]:
    """What to offer where a ``base`` is wanted; only our own networks and learners, as torch has hundreds."""
    found = subclasses(base)
    if issubclass(base, torch.nn.Module):
        found = {
            name: cls
            for name, cls in found.items()
            if cls.__module__.startswith("fl_lightning.models")
        }
    return sorted(name for name, cls in found.items() if cls.__module__ not in _INTERNAL)
