"""Combine ``-c NAME …`` and ``--method…`` to one configuration, a plain dict, without heavy
imports.

Configs merge from left to right. Dicts are merged key by key, other values are replaced, and
``key+:`` appends to the list ``key``. If a later config sets another ``class_path``, it brings its
own ``init_args``, and the earlier ones are dropped. The small learner of base and of the data/
configs is replaced by that of any other config, in either order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.cli.plugins import config_folders

if TYPE_CHECKING:
    from importlib.abc import Traversable

# The deepest nesting of mappings and lists.
_DEEPEST = 50

TOP_LEVEL = (
    "seed_everything",
    "trainer",
    "model",
    "data",
    "method",
    "ckpt_path",
    "monitor",
    "monitor_mode",
)


# The YAML key <<, which merges another mapping into this one.
_MERGE = "tag:yaml.org,2002:merge"
# What the YAML parser reports → what to do about it.
_MENDED_BY = {
    "'\\t'": "that is a tab: YAML takes spaces",
    "expected <block end>": "indent it as the lines that it belongs to",
    "mapping values are not allowed": "text with a colon needs quotes, keys their indentation",
}


class _Loader(yaml.SafeLoader):
    """Safe YAML in which each key occurs once and 1e-3 is a number (in YAML 1.1 it is text)."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        before = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if (key.tag, key.value) in before:
                    problem = f"the key {key.value!r} stands twice in one mapping"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                before.add((key.tag, key.value))
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$|^[-+]?\.\d+([eE][-+]?\d+)?$"),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    """Read YAML.

    >>> parse_yaml("[1e-3, 2, x]")
    [0.001, 2, 'x']
    """
    return yaml.load(text, Loader=_Loader)


def plain_yaml(text: str, where: str) -> Any:
    """Read YAML that holds only plain data: numbers, text, lists, and mappings with text as keys.

    Raises:
        UserError: for anything else, with ``where`` and the reason.
    """
    try:
        document = parse_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        if mark := getattr(error, "problem_mark", None):
            where += f", line {mark.line + 1}, column {mark.column + 1}"
        hints = [hint for found, hint in _MENDED_BY.items() if found in problem]
        problem = "; ".join([problem, *hints])
        raise UserError(f"{where}: not valid YAML: {problem}.") from None
    except RecursionError:
        raise UserError(f"{where}: not valid YAML: it is nested too deeply.") from None
    except ValueError as error:
        # For example a number of thousands of digits, or the date 2020-99-99.
        raise UserError(f"{where}: not valid YAML: {str(error)[:100]}.") from None
    _check_plain(document, where, ())
    return document


def _check_plain(node: Any, where: str, keys: tuple[str, ...], above: tuple[int, ...] = ()) -> None:
    def refuse(problem: str) -> UserError:
        place = ".".join(keys)[:80]
        return UserError(" ".join(part for part in (f"{where}:", place, f"{problem}.") if part))

    # An anchor may refer to a node that contains it.
    if id(node) in above:
        raise refuse("contains itself")
    if len(above) > _DEEPEST:
        raise refuse(f"is nested more than {_DEEPEST} deep")
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "class_path" and not isinstance(value, str):
                raise refuse(
                    f"has the class_path {str(value)[:60]!r}, which names no class: give text, "
                    "such as Digits"
                )
            if key == "init_args" and value is None:
                node[key] = {}
            elif key == "init_args" and not isinstance(value, dict):
                raise refuse(
                    f"has the init_args {str(value)[:60]!r}: give a mapping, such as "
                    "{batch_size: 20}"
                )
            _check_plain(value, where, (*keys, str(key)), (*above, id(node)))
    elif isinstance(node, list):
        for value in node:
            _check_plain(value, where, keys, (*above, id(node)))
    elif not isinstance(node, str | int | float | None):
        raise refuse(
            f"is {type(node).__name__} {str(node)[:60]!r}, which no option takes; "
            "put text in quotes"
        )


# --------------------------------------------------------------------------- names


def packaged() -> dict[str, Traversable]:
    """Return every packaged config: name without ``.yaml`` → file, in the order in which they are
    used.

    Configs of plugins are included; if names are equal, ours count. A sweep's claims file is not a
    config.
    """

    def walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
        for entry in folder.iterdir():
            if entry.is_dir():
                yield from walk(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith(".yaml") and not entry.name.endswith(".claims.yaml"):
                yield prefix + entry.name.removesuffix(".yaml"), entry

    order = ["base", "demo", "data", "split", "model", "method", "system", "experiment", "trainer"]
    order += ["logger", "debug"]
    entries: dict[str, Traversable] = {}
    for folder in config_folders():
        entries |= walk(folder, "")
    entries |= walk(files("fl_lightning.configs"), "")

    def place(name: str) -> tuple[int, str]:
        folder = name.split("/")[0]
        return order.index(folder) if folder in order else len(order), name

    return {name: entries[name] for name in sorted(entries, key=place)}


def summary(text: str) -> str:
    """Return the first comment line of a config, which describes it."""
    if not text.startswith("#"):
        return ""
    return text.split("\n", 1)[0].lstrip("# ").rstrip()


def is_file(name: str | Path) -> bool:
    """Return whether there is such a file; False for a name that no file can have."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def read(name: str) -> dict[str, Any]:
    """Read the config called ``name``: a file that exists, else a packaged one.

    A directory is never a config.
    """
    if is_file(name):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"-c {name}: this file cannot be read ({error}).") from None
    elif (entry := packaged().get(name.removesuffix(".yaml"))) is not None:
        text = entry.read_text(encoding="utf-8")
    else:
        hint = suggest(name, packaged()) or " `fl-lightning configs` lists them."
        parts = name.split(".")
        is_path = len(parts) > 1 and all(map(str.isidentifier, parts))
        if "/".join(parts) in packaged():
            hint = f" Did you mean {'/'.join(parts)}?"
        elif is_path and parts[-1] not in ("yaml", "yml", "json", "config"):
            hint = (
                f" A method's class is given as --method {name}, in a sweep as "
                f"{{class_path: {name}}}."
            )
        kind = "neither a file nor a packaged config"
        if os.path.isdir(name):
            kind = "a folder, not a config"
        raise UserError(f"-c {name[:200]}: this is {kind}.{hint}")
    document = plain_yaml(text, f"-c {name}")
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UserError(
            f"-c {name}: a config is a mapping with the keys {', '.join(TOP_LEVEL)}; "
            f"this file holds {type(document).__name__} {str(document)[:60]!r}."
        )
    for key in document:
        if str(key).removesuffix("+") not in TOP_LEVEL:
            raise UserError(
                f"-c {name}: the key {key!r} is not known.{suggest(key, TOP_LEVEL)} "
                f"Accepted at the top of a config: {', '.join(TOP_LEVEL)}."
            )
        if key.endswith("+") and key != "method+":
            raise UserError(
                f"-c {name}: {key} adds to a list, which {key[:-1]} is not. Accepted: {key[:-1]}."
            )
        if key in ("trainer", "model") and not isinstance(document[key], dict | None):
            value = f"{type(document[key]).__name__} {str(document[key])[:60]!r}"
            raise UserError(
                f"-c {name}: {key} is {value}: give a mapping of its options, one per line."
            )
    # A section with all its lines commented out counts as missing.
    empty = [key for key in ("trainer", "model") if key in document and document[key] is None]
    return {key: value for key, value in document.items() if key not in empty}


# --------------------------------------------------------------------------- merging


def as_list(value: Any) -> list[Any]:
    """Return a new list: empty for None, and of only ``value`` if it is not a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def merge(base: Any, update: Any) -> Any:
    """Merge ``update`` over ``base``; neither of the two is changed.

    >>> merge({"a": {"x": 1, "y": 2}, "l": [1]}, {"a": {"y": 3}, "l+": [2]})
    {'a': {'x': 1, 'y': 3}, 'l': [1, 2]}
    >>> merge({"class_path": "A", "init_args": {"a": 1}}, {"class_path": "B"})
    {'class_path': 'B'}
    """
    if not isinstance(update, dict):
        return update
    if isinstance(base, str) and "init_args" in update and "class_path" not in update:
        base = {"class_path": base}
    if not isinstance(base, dict):
        base = {}
    # The class changed, so the arguments of the former class do not apply.
    if "class_path" in update and not same_class(update["class_path"], base.get("class_path")):
        base = {}
    merged = dict(base)
    for key, value in update.items():
        if isinstance(key, str) and key.endswith("+"):
            merged[key[:-1]] = as_list(merged.get(key[:-1])) + as_list(value)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def same_class(one: Any, other: Any) -> bool:
    """Return whether two class paths name one class, of which one may be a short name.

    >>> same_class("Digits", "fl_lightning.datamodules.Digits"), same_class("Digits", "my.Digits")
    (True, False)
    """
    if one == other:
        return True
    if not (isinstance(one, str) and isinstance(other, str)):
        return False
    short, long = sorted((one, other), key=lambda path: path.count("."))
    ours = long.split(".")[0] in ("fl_lightning", "torch", "pytorch_lightning", "lightning")
    return "." not in short and ours and long.rpartition(".")[2] == short


def as_loggers(value: Any, events: str) -> Any:
    """Return ``trainer.logger`` in the parser's form, from the loggers that configs added.

    Such a list may hold true, for TensorBoard's events, and false, for no logger. If a class occurs
    again, its arguments are merged over the earlier ones.

    Args:
        value: the value in the merged configs.
        events: the class for TensorBoard's events next to other loggers.

    >>> as_loggers([True, {"class_path": "A"}], "Events")
    [{'class_path': 'Events'}, {'class_path': 'A'}]
    >>> as_loggers([False, True], "Events")
    True
    """
    if not isinstance(value, list):
        return value
    by_class: dict[str, Any] = {}
    for item in value:
        if not isinstance(item, bool):
            item = item if isinstance(item, dict) else {"class_path": item}
            path = str(item.get("class_path"))
            by_class[path] = merge(by_class.get(path), item)
    if True not in value:
        return list(by_class.values()) or False
    by_class.pop(events, None)
    return [{"class_path": events}, *by_class.values()] if by_class else True


def class_name(item: Any) -> str:
    """Return the bare class name of ``Name``, ``package.Name`` or ``{class_path: …}``."""
    if isinstance(item, dict):
        item = item.get("class_path", "?")
    return str(item).rsplit(".", 1)[-1]


# One option of a command line: its keys (data.batch_size), and its value as typed.
Option = tuple[str, str]


@dataclass
class Command:
    """A command line, sorted: ``config`` from every ``-c``, and the options that override it.

    Attributes:
        config: the merged configs.
        options: options that override it, in their order; ``--method…`` is one of them.
        names: names of the configs, as given.
        learners: learners of the configs; True: a fallback, see _is_fallback.
        notes: lines that are printed for the user.
        run: a run's folder, if one was given.
        output: the value of ``-o``.
        print_config: ``--print_config`` as typed; empty: it was not.
        argv: the command line as typed; the command comes first.
        record: what a sweep has the run record: arm, claims_hash, axes (see RunRecord).
    """

    config: dict[str, Any] = field(default_factory=dict)
    options: list[Option] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    learners: list[tuple[bool, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    run: Path | None = None
    output: str | None = None
    print_config: str = ""
    argv: list[str] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)

    def add_config(self, name: str) -> None:
        """Merge the config ``name`` over those before it."""
        document = read(name)
        old = list(map(class_name, as_list(self.config.get("method"))))
        new = list(map(class_name, as_list(document.get("method"))))
        if "method" in document and old and old != new:
            self.notes.append(
                f"{name} replaces the method list ({', '.join(old)}) by ({', '.join(new)})"
            )
        self._tell_of_loggers(name, document)
        model = document.get("model")
        if isinstance(model, dict) and "learner" in model:
            self.learners.append((_is_fallback(name), model["learner"]))
            rest = {key: value for key, value in model.items() if key != "learner"}
            document = {**document, "model": rest}
        self.config = merge(self.config, document)
        # Defaults come first, so that the options that you give override them.
        if self.learners:
            self.config["model"] = dict(self.config.get("model") or {})
            ordered = sorted(self.learners, key=lambda item: not item[0])
            self.config["model"]["learner"] = reduce(merge, (learner for _, learner in ordered))
        self.names.append(name)

    def _tell_of_loggers(self, name: str, document: dict[str, Any]) -> None:
        """Note that the config ``name`` replaces loggers of the configs before it."""
        before = (self.config.get("trainer") or {}).get("logger")
        new = document.get("trainer") or {}
        if before and "logger" in new and new["logger"] != before:
            self.notes.append(
                f"{name} replaces the loggers ({_loggers(before)}) by ({_loggers(new['logger'])})"
            )


def _loggers(value: Any) -> str:
    """Return ``trainer.logger`` as text."""
    if value is False:
        return "only metrics.csv"
    items = [True] if value is None else as_list(value)
    return ", ".join("TensorBoard" if each is True else class_name(each) for each in items)


def _is_fallback(name: str) -> bool:
    """Return whether the learner of the config ``name`` is used only if no other is given.

    The learners of base and of the data/ configs are used so.
    """
    name = name.removesuffix(".yaml")
    return not is_file(name) and (name == "base" or name.startswith("data/")) and name in packaged()


def options_of(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Take a command line apart: yield each option with its value, or None if it has none.

    A word that belongs to no option is yielded by itself.

    >>> list(options_of(["--a.b", "-1", "--c=", "-cbase", "there", "--print_config"]))
    [('--a.b', '-1'), ('--c', ''), ('-c', 'base'), ('there', None), ('--print_config', None)]
    """
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if re.match("-[co][^=]", word):
            yield word[:2], word[2:]
        elif equals or not _is_flag(word):
            yield (flag, value) if _is_flag(word) else (word, None)
        elif words and not _is_flag(words[0]):
            yield flag, words.pop(0)
        else:
            yield flag, None


def _is_flag(word: str) -> bool:
    return re.match("--|-[A-Za-z]", word) is not None


def _from_environment(command: str) -> Iterator[str]:
    """``FL_TRAINER__MAX_EPOCHS=5`` (or ``FL_FIT__TRAINER__…``) as ``--trainer.max_epochs=5``."""
    for name, value in sorted(os.environ.items()):
        key = name.removeprefix("FL_").removeprefix(f"{command.upper()}__").lower().split("__")
        if name.startswith("FL_") and key[0] in (*TOP_LEVEL, "config"):
            yield f"--{'.'.join(key)}={value}"


def prepare(command: str, argv: list[str]) -> Command:
    """Sort the arguments of ``command``: configs, which are read, and the options over them."""
    prepared = Command(argv=[command, *argv])
    if argv and not argv[0].startswith("-"):
        prepared.run = Path(argv[0])
        argv = argv[1:]
        _begin_with_run(command, prepared, prepared.run)
    for flag, value in options_of([*_from_environment(command), *argv]):
        if flag == "--print_config":
            prepared.print_config = flag if value is None else f"{flag}={value}"
        elif not flag.startswith("-"):
            raise UserError(
                f"{flag}: no such option. A config is given by -c {flag}, and a value by the "
                "option before it."
            )
        elif value is None or (not value and flag in ("-c", "--config", "-o", "--output")):
            raise UserError(f"{flag} needs a value.")
        elif flag in ("-c", "--config"):
            prepared.add_config(value)
        elif flag in ("-o", "--output"):
            prepared.output = value
        elif flag.startswith("--"):
            prepared.options.append((flag.removeprefix("--"), value))
        else:
            raise UserError(f"{flag}: no such option. Options begin with two hyphens.")
    _refuse_unknown(command, prepared)
    return prepared


def _begin_with_run(command: str, prepared: Command, run: Path) -> None:
    """Begin with the config and the last checkpoint of a run."""
    if not is_file(run / "config.yaml"):
        raise UserError(
            f"{command} {run}: not a run's folder (it has no config.yaml). "
            "Give the folder of a run, or configs: "
            f"fl-lightning {command} -c base -c data/digits. A run from Python has a folder if "
            "its Trainer has the callback RunFolder."
        )
    prepared.add_config(str(run / "config.yaml"))
    prepared.config["ckpt_path"] = "last"
    trainer = prepared.config.get("trainer") or {}
    prepared.config["trainer"] = {**trainer, "default_root_dir": str(run)}


def _refuse_unknown(command: str, prepared: Command) -> None:
    """Refuse the folder of a run from Python if its config lacks a setting that this command
    needs.
    """
    if prepared.run is None:
        return
    # This imports numpy, which the report of a typing error should not wait for.
    from fl_lightning.metrics import read_record

    unknown = read_record(prepared.run).get("unknown")
    if not isinstance(unknown, list):
        return
    if command == "fit":
        raise UserError(
            f"fit {prepared.run}: this run was made in Python. Go on with it there: "
            f"trainer.fit(module, data, ckpt_path=RunFolder({str(prepared.run)!r}).last)."
        )
    lacking = []
    for path in unknown:
        key = str(path).split(" ")[0]
        needed = key.startswith(("data", "model.learner"))
        typed = [option for option, _ in prepared.options if _names(option, key)]
        if needed and not typed and not _has(prepared.config, key):
            lacking.append(str(path))
    if lacking:
        checkpoint = prepared.run / "checkpoints" / "last.ckpt"
        instead = f"trainer.{command}(module, data, ckpt_path={str(checkpoint)!r})"
        if command == "export":
            # The Trainer has no such method.
            instead = (
                f"load({str(prepared.run)!r}).learner has the global weights, and after "
                "trainer.fit module.export(client=3) has what client 3 uses"
            )
        raise UserError(
            f"{command} {prepared.run}: this run was made in Python, and its config.yaml lacks "
            f"{', '.join(lacking)}, which only your program can give. Give it by options or by a "
            f"config (-c FILE); or, in Python: {instead}."
        )


def _names(option: str, key: str) -> bool:
    """Return whether an option sets the key, or a part that contains it."""
    one, other = f"{option}.", f"{key}."
    return one.startswith(other) or other.startswith(one)


def _has(config: Any, key: str) -> bool:
    """Return whether the config has a value for the key, also below ``init_args``."""
    for part in key.split("."):
        arguments = config.get("init_args", config) if isinstance(config, dict) else {}
        if not isinstance(arguments, dict) or part not in arguments:
            return False
        config = arguments[part]
    return True
