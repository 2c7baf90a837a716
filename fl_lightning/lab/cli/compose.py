"""Combine ``-c NAME …`` and ``--method…`` to one configuration, a plain dict, without heavy
imports.

Configs merge from left to right. Dicts are merged key by key, other values are replaced, and
``key+:`` appends to the list ``key``. If a later config sets another ``class_path``, it brings its
own ``init_args``, and the earlier ones are dropped. The small learner of base and of the data/
configs is replaced by that of any other config, in either order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fl_lightning.errors import UserError, suggest
from fl_lightning.introspection.accepted import check
from fl_lightning.lab.cli.plugins import config_folders

if TYPE_CHECKING:
    from importlib.abc import Traversable

TOP_LEVEL = (
    *("seed_everything", "trainer", "model", "data", "method"),
    *("ckpt_path", "monitor", "monitor_mode"),
)

# Configs of these folders name a run's method.
OF_METHODS = ("method/", "recipe/")

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
        # Dates, sets, bytes and nodes that contain themselves are YAML, but no option takes them.
        json.dumps(document)
        _check_nodes(document)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        if mark := getattr(error, "problem_mark", None):
            where += f", line {mark.line + 1}, column {mark.column + 1}"
        hints = [hint for found, hint in _MENDED_BY.items() if found in problem]
        problem = "; ".join([problem, *hints])
        raise UserError(f"{where}: not valid YAML: {problem}.") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{where}: {str(error)[:100].rstrip('.')}. Options take numbers, text (in quotes), "
            "lists and mappings."
        ) from None
    return document


def _check_nodes(node: Any) -> None:
    """Refuse a class path that is not text, and arguments that are not a mapping."""
    if isinstance(node, dict):
        if node.get("init_args", {}) is None:
            node["init_args"] = {}
        check("class_path", node.get("class_path", ""), str)
        check("init_args", node.get("init_args", {}), dict)
    inner = list(node.values()) if isinstance(node, dict) else node
    for value in inner if isinstance(inner, list) else ():
        _check_nodes(value)


# --------------------------------------------------------------------------- names


def packaged() -> dict[str, Traversable]:
    """Return every packaged config: name without ``.yaml`` → file, sorted.

    Configs of plugins are included; if names are equal, ours count.
    """

    def walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
        for entry in folder.iterdir():
            if entry.is_dir():
                yield from walk(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith(".yaml") and not entry.name.endswith(".claims.yaml"):
                yield prefix + entry.name.removesuffix(".yaml"), entry

    entries: dict[str, Traversable] = {}
    for folder in config_folders():
        entries |= walk(folder, "")
    entries |= walk(files("fl_lightning.configs"), "")
    # Those that stand in no folder come first.
    return {name: entries[name] for name in sorted(entries, key=lambda name: ("/" in name, name))}


def summary(text: str) -> str:
    """Return the first comment line of a config, which describes it."""
    return text.split("\n", 1)[0].lstrip("# ").rstrip() if text.startswith("#") else ""


def is_file(name: str | Path) -> bool:
    """Return whether there is such a file; False for a name that no file can have."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def find(name: str, option: str) -> Path | Traversable:
    """Return the config called ``name``: a file that exists, else a packaged one.

    A directory is never a config. ``option``: the one that named it.
    """
    entry = Path(name) if is_file(name) else packaged().get(name.removesuffix(".yaml"))
    if entry is None:
        hint = suggest(name, packaged()) or " `fl-lightning configs` lists them."
        if "." in name and option == "-c":
            hint += f" A class is given by an option, such as --method {name}."
        raise UserError(
            f"{option} {name[:200]}: this is neither a file nor a packaged config.{hint}"
        )
    return entry


def text_of(file: Path | Traversable, where: str) -> str:
    """Return the text of a file of the user's, or of a packaged one."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: this file cannot be read ({error}).") from None


def read(name: str) -> dict[str, Any]:
    """Read the config called ``name``."""
    document = plain_yaml(text_of(find(name, "-c"), f"-c {name}"), f"-c {name}") or {}
    check(f"-c {name}: the config", document, dict)
    accepted = (*TOP_LEVEL, "method+")
    for key, value in document.items():
        if key not in accepted:
            raise UserError(
                f"-c {name}: the key {key!r} is not known.{suggest(key, accepted)} "
                f"Accepted at the top of a config: {', '.join(accepted)}."
            )
        if key in ("trainer", "model"):
            check(f"-c {name}: {key}", value, dict | None)
    # A section with all its lines commented out counts as missing.
    return {k: v for k, v in document.items() if v is not None or k not in ("trainer", "model")}


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

    Such a list may hold true, for TensorBoard's events (next to other loggers the class
    ``events``), and false, for no logger.

    >>> as_loggers([True, {"class_path": "A"}], "Events")
    [{'class_path': 'Events'}, {'class_path': 'A'}]
    >>> as_loggers([False, True], "Events")
    True
    """
    if not isinstance(value, list):
        return value
    loggers = [item for item in value if not isinstance(item, bool)]
    if True not in value:
        return loggers or False
    return [{"class_path": events}, *loggers] if loggers else True


def class_name(item: Any) -> str:
    """Return the bare class name of ``Name``, ``package.Name`` or ``{class_path: …}``."""
    if isinstance(item, dict):
        item = item.get("class_path", "?")
    return str(item).rsplit(".", 1)[-1]


def as_node(item: Any) -> dict[str, Any]:
    """Return such an item as a new dict, with its own ``init_args``."""
    node = item if isinstance(item, dict) else {"class_path": item}
    arguments = node.get("init_args")
    return {**node, "init_args": dict(arguments) if isinstance(arguments, dict) else {}}


# An option's keys (data.batch_size), and its value as typed.
Option = tuple[str, str]


@dataclass
class Command:
    """A command line, sorted: ``config`` from every ``-c``, and the options that override it.

    Attributes:
        config: the merged configs.
        options: options that override it, in their order; ``--method…`` is one of them.
        names: names of the configs, as given.
        learners: learners of the configs; False: used only if no other is given.
        notes: lines that are printed for the user.
        run: a run's folder, if one was given.
        output: the value of ``-o``.
        print_config: whether ``--print_config`` was typed.
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
    print_config: bool = False
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
        learner = (document.get("model") or {}).get("learner")
        self.config = merge(self.config, document)
        if learner is not None:
            self.learners.append((not _is_fallback(name), learner))
        # The others come last, so that they override those of base and data/.
        if self.learners:
            ordered = [each for _, each in sorted(self.learners, key=itemgetter(0))]
            self.config["model"]["learner"] = reduce(merge, ordered)
        self.names.append(name)


def _is_fallback(name: str) -> bool:
    """Return whether a packaged config's learner is used only if no other config has one."""
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


def prepare(command: str, argv: list[str]) -> Command:
    """Sort the arguments of ``command``: configs, which are read, and the options over them."""
    prepared = Command(argv=[command, *argv])
    if argv and not argv[0].startswith("-"):
        prepared.run = Path(argv[0])
        argv = argv[1:]
        _begin_with_run(command, prepared, prepared.run)
    for flag, value in options_of(argv):
        if flag == "--print_config":
            prepared.print_config = True
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
    return prepared


def config_of_run(command: str, run: Path) -> str:
    """Return the path of a run's config.yaml."""
    if not is_file(run / "config.yaml"):
        raise UserError(
            f"{command} {run}: not a run's folder (it has no config.yaml). Configs are given by "
            "-c, as in -c base -c data/digits. A run from Python has a folder if its Trainer has "
            "the callback RunFolder."
        )
    return str(run / "config.yaml")


def _begin_with_run(command: str, prepared: Command, run: Path) -> None:
    """Begin with the config and the last checkpoint of a run."""
    config = config_of_run(command, run)
    # This imports numpy, which the report of a typing error should not wait for.
    from fl_lightning.metrics import read_record

    if unknown := read_record(run).get("unknown"):
        prepared.notes.append(
            f"Note: {run} was made in Python, and its config.yaml lacks {', '.join(unknown)}. Give "
            f"this by options or a config (-c FILE); or in Python: load({str(run)!r}, data=…), and "
            f"trainer.fit(…, ckpt_path=RunFolder({str(run)!r}).last) to go on."
        )
    prepared.add_config(config)
    prepared.config["ckpt_path"] = "last"
    trainer = prepared.config.get("trainer") or {}
    prepared.config["trainer"] = {**trainer, "default_root_dir": str(run)}
