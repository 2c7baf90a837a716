"""``fl-lightning deploy flower CONFIG…`` writes an app's folder, for ``flwr run``.

``fl-lightning deploy keys`` writes what TLS needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fl_lightning.deploy import what_leaves
from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.cli.compose import Command, is_file, prepare

USAGE = """usage: fl-lightning deploy flower CONFIG [CONFIG ...] [--out DIR] [--key value ...]
       fl-lightning deploy keys --sites N --address ADDRESS [--out DIR]

Write a Flower app: the run of these configs over sites that keep their data. Its README.md says how
to start it and what leaves a site. `deploy keys` writes certificates and keys for the server and
the sites; `fl-lightning deploy keys --help` shows what it takes.

  CONFIG       packaged configs, YAML files, or a run's folder; several merge, left to right
  --out DIR    the app's folder (default: flower-app), which is not there yet
  --key value  over the configs, as of `fl-lightning fit`: --trainer.max_epochs 100

Example: fl-lightning deploy flower base data/digits method/scaffold --out app"""

PACKAGE = "sites_app"
# These files are in the app's folder, with config.yaml.
_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "site.yaml": "site.yaml",
    "server_app.py": f"{PACKAGE}/server_app.py",
    "client_app.py": f"{PACKAGE}/client_app.py",
}


def main(argv: Sequence[str]) -> int:
    """Write the app that ``argv`` asks for."""
    if argv and argv[0] == "keys":
        from fl_lightning.deploy.flower.keys_command import main as write_keys

        return write_keys(argv[1:])
    if not argv or argv[0] in ("-h", "--help") or "--help" in argv:
        print(USAGE)
        return 0
    if argv[0] != "flower":
        raise UserError(
            f"deploy {argv[0][:100]}: not a command.{suggest(argv[0], ['flower', 'keys'])} "
            "Accepted: flower, keys."
        )
    folder, rest = _out(list(argv[1:]))
    arguments: list[str] = []
    while rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        run = Path(name) / "config.yaml"
        arguments += ["-c", str(run) if is_file(run) else name]
    if not arguments and "-c" not in rest:
        raise UserError(
            "deploy flower: which configs? Such as fl-lightning deploy flower base data/digits."
        )
    prepared = prepare("deploy", [*arguments, *rest])
    _of_a_run(prepared)
    write(folder, prepared)
    return 0


def _out(argv: list[str]) -> tuple[Path, list[str]]:
    """Return the app's folder, and the other arguments."""
    folder = Path("flower-app")
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag != "--out":
            rest.append(argument)
            continue
        folder = Path(value if equals else next(arguments, ""))
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*", folder.name):
        raise UserError(
            f"deploy flower --out {str(folder)[:100]!r}: an app's name is letters and digits, with "
            "single hyphens between them, such as app or heart-study."
        )
    if folder.exists():
        raise UserError(
            f"deploy flower --out {folder}: this folder exists already, and was not changed. Give "
            "another "
            "folder, or remove it."
        )
    return folder, rest


def _of_a_run(prepared: Command) -> None:
    """Leave out the settings of a config that name the run's own place."""
    prepared.config.pop("ckpt_path", None)
    if isinstance(prepared.config.get("trainer"), dict):
        prepared.config["trainer"] = {**prepared.config["trainer"], "default_root_dir": None}


def write(folder: Path, prepared: Command) -> None:
    """Write the app's files, once its config is known to be valid."""
    # These import torch, which the report of a mistyped name should not wait for.
    from fl_lightning.deploy.at_server import refuse_methods
    from fl_lightning.lab.cli.cli import CommandCLI
    from fl_lightning.lab.cli.lightning_commands import quiet

    quiet()
    cli = CommandCLI("deploy", prepared)
    trainer: Any = cli.trainer
    refuse_methods(trainer.callbacks)
    config = cli.config_text()
    words = {
        "NAME": folder.name.lower().replace("_", "-"),
        "PACKAGE": PACKAGE,
        "APP": str(folder),
        "ROUNDS": str(trainer.max_epochs),
        "CLIENTS": str(cli.datamodule.num_clients),
        "TABLE": _as_in_the_study(cli.datamodule),
        "LEAVES": what_leaves.listed(),
    }
    templates = files("fl_lightning.deploy.flower") / "templates"
    _put(folder / "config.yaml", config)
    _put(folder / PACKAGE / "__init__.py", '"""The two ends of the app."""\n')
    for name, place in _FILES.items():
        text = (templates / f"{name}.txt").read_text("utf-8")
        _put(folder / place, re.sub(r"@([A-Z]+)@", lambda match: words[match[1]], text))
    print(f"→ {folder}: {folder / 'README.md'} says how to start it, and what leaves a site")


def _as_in_the_study(data: Any) -> str:
    """Return lines of site.yaml that give columns and classes the same numbers as at the server."""
    target = getattr(data, "target", None)
    lines = [f"    target: {json.dumps(target if isinstance(target, str) else 'outcome')}"]
    for name in ("features", "classes"):
        if given := getattr(data, name, None):
            lines.append(f"    {name}: {json.dumps(list(given), ensure_ascii=False)}")
    if getattr(data, "regression", False):
        lines.append("    regression: true")
    return "\n".join(lines)


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"  {path}")
