"""jsonargparse's messages as one paragraph: which option, which value, what is accepted."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from jsonargparse import ArgumentParser

from fl_lightning.accepted import PLAIN, declared, suggested
from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.cli.compose import class_name, plain_yaml
from fl_lightning.lab.cli.dataset_errors import fault_of_datasets

_INTERNAL = (
    "fl_lightning.callback",
    "fl_lightning.lab.cli.run_folder",
    "fl_lightning.lab.cli.signals",
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


def _class_at(path: str, config: dict[str, Any], options: list[str]) -> str:
    """The class named at ``path`` in the config or, overriding that, on the command line."""
    node: Any = config
    for key in path.split("."):
        if isinstance(node, dict):
            arguments = node.get("init_args", node)
            node = arguments.get(key) if isinstance(arguments, dict) else None
    name = node.get("class_path") if isinstance(node, dict) else node
    for key, value in _given(options):
        if key == path:
            name = value
    return class_name(str(name))


def _given(options: list[str]) -> Iterator[tuple[str, str]]:
    """(path of keys, value) of what the command line sets."""
    for option, following in zip(options, [*options[1:], ""], strict=False):
        flag, equals, value = option.partition("=")
        if flag.startswith("--"):
            yield flag.removeprefix("--").removesuffix("+"), value if equals else following


def _beside_class_path(node: Any, path: str) -> Iterator[tuple[str, str, list[str]]]:
    """(path, class, keys) wherever in ``node``, found at ``path``, keys stand by a class_path."""
    if isinstance(node, list):
        for item in node:
            yield from _beside_class_path(item, path)
    if not isinstance(node, dict):
        return
    if "class_path" in node:
        names = [key for key in node if key not in ("class_path", "init_args", "dict_kwargs")]
        if names:
            yield path, class_name(node), names
    for key, value in node.items():
        yield from _beside_class_path(value, path if key == "init_args" else f"{path}.{key}")


_KEY = r'Parser key "([^"]+)"\s*:?\s*(.*)'
_TELLING = r"Option '|unrecognized|Expected a dot import|Problem with|the following"


class ParserRefusal:
    """A message of jsonargparse, taken apart; :meth:`paragraph` says it briefly.

    Its exceptions carry nothing but this text. ``option`` is the path of keys that it is about,
    ``leaf`` the line that tells most of all ``leaves``; ``value`` and ``innermost`` are the
    outermost and innermost value that was refused, ``subtypes`` is the line that lists what is
    accepted.

    Args:
        message: jsonargparse's.
        parser: that refused.
        config: of the configs.
        options: of the command line.
        bases: the base class of what an option takes, by the last part of its name.
    """

    def __init__(
        self,
        message: str,
        parser: ArgumentParser,
        config: dict[str, Any],
        options: list[str],
        bases: dict[str, type],
    ) -> None:
        self.message = message
        self.config = config
        self.options = options
        self.bases = bases
        flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
        self.keys = [flag.removeprefix("--") for flag in flags]
        # The bare name of every class that an option may name → the class.
        self.known: dict[str, type] = {}
        for base in bases.values():
            self.known |= subclasses(base)
        self.known |= {base.__name__: base for base in bases.values()}
        self._take_apart()

    def _take_apart(self) -> None:
        path: list[str] = []
        self.leaves: list[str] = []
        self.value: str | None = None
        self.innermost = ""
        self.subtypes = ""
        for line in self.message.splitlines():
            text = line.strip().removeprefix("- ")
            # Keys after the first error text belong to the next subtype that jsonargparse tried.
            # Skip them.
            if self.leaves and re.match(_KEY, text):
                continue
            while match := re.match(_KEY, text):
                path.append(match[1])
                text = match[2]
            if text.startswith("Subtypes:") and not self.leaves:
                self.subtypes = text
            if text.startswith("Given value:"):
                self.value = text.removeprefix("Given value:").strip()
                if nested := re.search(r"val='?(.*?)'?\)$", text):
                    self.value = nested[1]
                self.innermost = self.innermost or self.value
            elif text and not text.startswith(_NOISE):
                self.leaves.append(text)
        telling = [text for text in self.leaves if re.match(_TELLING, text)]
        self.leaf = (telling or self.leaves or self.message.splitlines())[0]
        self.option = ".".join(key for place, key in enumerate(path) if place or key != "config")

    def paragraph(self) -> str:
        of_options: dict[str, Callable[..., str]] = {
            r"[Uu]nrecognized arguments: (\S+)": self._no_option,
            r"Group '([\w.]+)' does not accept option '([^']+)'": self._no_key,
            r"the following arguments are required: (.*)": self._not_given,
        }
        of_values: dict[str, Callable[..., str]] = {
            r"Not a valid subclass of|Option 'class_path' is not": self._not_in_init_args,
            r"Option '([^']+)' is not accepted": self._no_argument,
            r"unrecognized arguments: --([\w.]+)": self._no_inner,
            r"the following arguments are required: (.*)": self._argument_missing,
            r"Expected a dot import path string: (.*)": self._no_class,
            r"Problem with given class_path '([^']+)':": self._unusable_class,
            r"Expected an? <class '[^']+'>\. Got value: (.*)": self._wrong_value,
            r"Expected an? <class": self._wrong_type,
            r"Import path.* not correspond to a subclass of FederatedD": self._not_federated,
            r"Import path.* not correspond to a subclass of (\w+)": self._no_subclass,
        }
        # The first pattern that matches and gives a text decides. Without one, the message is shown
        # as it is.
        for pattern, say in of_options.items():
            if match := re.match(pattern, self.message):
                return say(*match.groups())
        if text := fault_of_datasets(self.option, self.config) or self._not_as_declared():
            return text
        for pattern, say in of_values.items():
            match = re.match(pattern, self.leaf)
            if match and (text := say(*match.groups())):
                return self.option + text
        rest = re.sub(r"\s+", " ", " ".join(self.leaves) or self.message)[:450]
        return f"{self.option}: {rest}" if self.option else rest

    # --------------------------------------------------------------- of options themselves

    def _no_option(self, typed: str) -> str:
        flag = typed.split("=")[0]
        hint = ""
        if flag.startswith("--"):
            # The hint quotes a key; quote the option as you would type it.
            hint = suggest(flag.removeprefix("--"), self.keys)
            hint = hint.replace("'", "`--", 1).replace("'", "`")
            hint = self._meant(flag.removeprefix("--")) or hint
        return f"{flag}: no such option.{hint} --help all lists every one."

    def _meant(self, option: str) -> str:
        """Suggest for the first part of an option that there is not, or say what further in has it.

        It is empty where nothing is near.
        """
        parts = option.split(".")
        for place, part in enumerate(parts):
            above = "".join(f"{each}." for each in parts[:place])
            names = self._names_below(above)
            if part in names:
                continue
            rest = "".join(f".{each}" for each in parts[place + 1 :])
            if close := difflib.get_close_matches(part, names, n=1):
                return f" Did you mean `--{above}{close[0]}{rest}`?"
            for name in names:
                if owners := self._owners(f"{above}{name}", part):
                    return f" Did you mean `--{above}{name}.{part}{rest}`, of {listed(owners)}?"
            break
        return ""

    def _names_below(self, above: str) -> list[str]:
        """The names that may follow the part ``above`` of an option, which ends in a dot."""
        inside = [key.removeprefix(above) for key in self.keys if key.startswith(above)]
        names = [name.split(".")[0] for name in inside if name != "help"]
        cls = self.known.get(_class_at(above.removesuffix("."), self.config, self.options))
        return list(dict.fromkeys([*names, *(parameters(cls) if cls is not None else [])]))

    def _owners(self, path: str, argument: str) -> list[str]:
        """Classes for ``path`` with this argument: the one that is chosen, else those of ours."""
        # FromHuggingFace's own argument `data` is no data module.
        base = None if path == "data.data" else self.bases.get(path.rpartition(".")[2])
        chosen = self.known.get(_class_at(path, self.config, self.options))
        names: list[str] = []
        if chosen is not None:
            names = [chosen.__name__]
        elif base is not None:
            names = [n for n in _choices(base) if self.known[n].__module__.startswith("fl_l")]
        return [name for name in names if argument in parameters(self.known[name])]

    def _no_key(self, prefix: str, name: str) -> str:
        inside = [key for key in self.keys if key.startswith(f"{prefix}.")]
        names = [key.removeprefix(f"{prefix}.") for key in inside]
        return f"{prefix}.{name}: no such key.{suggest(name, names)} Accepted: {listed(names)}."

    def _not_given(self, names: str) -> str:
        return (
            f"{names} is not given. Add a config that sets it, such as -c base or -c data/digits, "
            f"or the option --{names.split(',')[0]}."
        )

    # --------------------------------------------------------------------- of their values

    def _not_as_declared(self) -> str:
        """The paragraph for an argument whose class declares what it accepts."""
        owner, _, name = self.option.rpartition(".")
        given = re.search(r"Got value: (.*)", self.leaf)
        value = given[1] if given else self.innermost
        listed_there = self.config.get(owner)
        names = [_class_at(owner, self.config, self.options)]
        if owner == "model":
            names = ["FederatedModule"]
        elif isinstance(listed_there, list):
            names = [class_name(item) for item in listed_there]
        for cls in [self.known[each] for each in names if each in self.known]:
            for init in [vars(base).get("__init__") for base in cls.__mro__]:
                hint = declared(init).get(name) if inspect.isfunction(init) else None
                if hint is not None and value and "class_path" not in value:
                    accepted = suggested(value, hint)
                    return f"{self.option}: {value!r} is not accepted; it has to be {accepted}"
        return ""

    def _not_in_init_args(self) -> str:
        """Report keys on the same level as a class_path, at the option or below it."""
        nodes = list(self.config.items())
        nodes += [(k, plain_yaml(v, f"--{k}")) for k, v in _given(self.options) if v[:1] in "[{"]
        for key, node in nodes:
            for path, cls, names in _beside_class_path(node, key):
                if not f"{path}.".startswith(f"{self.option}."):
                    continue
                where = path.removeprefix(self.option)
                if hint := suggest(names[0], ["init_args"]):
                    return f"{where}: {names[0]!r} stands beside class_path.{hint}"
                shown = ", ".join(f"{name}: …" for name in names)
                return (
                    f"{where}: {listed(names)} of {cls} stands beside class_path, where it is not "
                    "read. Put it under init_args, indented further than that word: "
                    f"init_args: {{{shown[:100]}}}."
                )
        return ""

    def _no_argument(self, name: str) -> str:
        cls = self.known.get(_class_at(self.option, self.config, self.options))
        if cls is None:
            return f".{name}: no such option; give the class of {self.option} first."
        names = parameters(cls)
        hint = suggest(name, names) or self._meant(f"{self.option}.{name}")
        return f".{name}: {cls.__name__} has no such argument.{hint} Accepted: {listed(names)}."

    def _no_inner(self, typed: str) -> str:
        """Of an option such as ``--data.partition.alpha``, of which ``data`` is right."""
        hint = self._meant(f"{self.option}.{typed}")
        names = listed(self._names_below(f"{self.option}."))
        return f".{typed}: no such option.{hint} Accepted in {self.option}: {names}."

    def _argument_missing(self, names: str) -> str:
        owner = "its class"
        if named := re.match(r"Namespace\(class_path='([\w.]+)'", self.innermost):
            owner = class_name(named[1])
        wanted = ", ".join(f"--{self.option}.{name}" for name in names.split(", "))
        return f": {owner} needs {names}. Give {wanted}, or init_args in a config."

    def _no_class(self, name: str) -> str:
        # The option expects a schedule or a number, and the text given is neither.
        if re.search(r"'(float|int)'", self.subtypes):
            return self._wrong_value(name, self.subtypes)
        base = self.bases.get(self.option) or self.bases.get(class_name(self.option))
        names = _choices(base) if base is not None else []
        hint = suggest(name, names or self.known)
        if names:
            hint += f" Accepted: {listed(names)}, or a path such as my_module.MyClass."
        return f": there is no class {name!r}.{hint}"

    def _unusable_class(self, path: str) -> str:
        place = self.leaves.index(self.leaf)
        reason = [*self.leaves[place + 1 :], "it cannot be imported"][0]
        hint = suggest(class_name(path), self.known)
        return f": {path!r} cannot be used: {reason}.{hint}"

    def _wrong_type(self) -> str:
        if self.value is None:
            return ""
        return self._wrong_value(self.value, self.subtypes or self.leaf)

    def _wrong_value(self, value: str, line: str = "") -> str:
        """``line``: names the types that are accepted; of a class with subclasses, their names."""
        types = []
        for path in re.findall(r"<class '([\w.]+)'>", line or self.leaf):
            name = class_name(path)
            words = PLAIN.get(name, name)
            if name in self.known and name not in PLAIN:
                words = f"a {name} ({listed(_choices(self.known[name]))})"
            types.append(words)
        if re.search(r"\b(Sequence|[Ll]ist)\[", line):
            types.insert(0, PLAIN["list"])
        for option, typed in _given(self.options):
            spaced = re.sub(r"([{,]\s*\w+):(?=[^\s/])", r"\1: ", typed)
            if option == self.option and typed.startswith("{") and spaced != typed:
                return f": {typed!r} lacks a blank after each colon. Give {spaced!r}."
        # For an argument of a class, jsonargparse may give the whole class as the value.
        name = re.escape(self.option.rpartition(".")[2])
        inner = re.search(rf"'{name}': '([^']*)'", value)
        if inner is not None and value.startswith("{'class_path': "):
            value = inner[1]
        if self.option == "data.clients" and re.fullmatch(r"[\w.]+", value):
            return (
                f": {value!r} is not accepted: data.clients is a list, one data set per client. "
                f"Write clients: [{{class_path: {value}, init_args: {{…}}}}, …]. A function that "
                "makes all of them is called in a program: FromDatasets(clients=make()). To split "
                "one data set, give data.train and data.partition."
            )
        expected = " or ".join(dict.fromkeys(types)) or line or self.leaf
        return f": {value!r} is not accepted; expected {expected}."

    def _no_subclass(self, base: str) -> str:
        path = r"(?:.*'class_path': ')?([\w.]+)(?:'.*)?"
        # If the value is longer, the whole message tells which class is meant.
        found = re.fullmatch(path, self.innermost)
        if found is None:
            return ""
        return (
            f": {found[1]} is no subclass of {base}. Give one, or a function that says what it "
            f"returns: def make(…) -> {base}."
        )

    def _not_federated(self) -> str:
        name = re.sub(r".*'class_path': '([^']+)'.*", r"\1", self.value or self.option)
        return (
            f": {name} is not federated: nothing says who has which sample. Accepted: our data "
            f"modules, or --data FromDataModule --data.datamodule {name} --data.num_clients 100."
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
        # An error about one item of a list says more than an error about the whole list.
        noise = ("Expected a", "Not a valid subclass of", "Subclass types expect", *_NOISE)
        attempts = [line.strip().removeprefix("- ") for line in str(error).splitlines()[2:]]
        telling = [text for text in attempts if not text.startswith(noise)]
        if telling:
            # A line that ends in a colon only introduces the next line.
            message = telling[0]
            if message.endswith(":"):
                message = " ".join(telling[:2])
    if not message and isinstance(error, UserError):
        message = str(error)
    return message or None


def not_found(error: BaseException, config: dict[str, Any]) -> str | None:
    """The paragraph for a file or folder that a class did not find; None for other errors.

    It names the option whose value leads there.
    """
    found = re.search(r"No such file or directory: '([^']+)'", str(error))
    if found is None or isinstance(error, UserError):
        return None
    path = found[1]
    for option, value in _texts(config, ""):
        if value and (path == value or path.startswith(f"{value.rstrip('/')}/")):
            what = "" if path == value else f" ({path!r} is missing)"
            return (
                f"{option}: there is no file or folder {value!r}{what}. Give the path of one that "
                f"exists; a relative one begins at {os.getcwd()}."
            )
    return None


def _texts(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """(option, value) of all texts in a config, by the names that the command line has."""
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, list):
        for place, item in enumerate(node):
            yield from _texts(item, f"{path}[{place}]")
    elif isinstance(node, dict):
        for key, value in node.items():
            inner = path if key == "init_args" else f"{path}.{key}".removeprefix(".")
            yield from _texts(value, inner)


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
        # Torch has hundreds of networks, so the message offers only those of this package.
        hidden = issubclass(base, torch.nn.Module) and not cls.__module__.startswith(
            "fl_lightning.models"
        )
        if not hidden and cls.__module__ not in _INTERNAL:
            names.append(name)
    return sorted(names)
