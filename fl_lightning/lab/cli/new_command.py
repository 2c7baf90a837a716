"""``fl-lightning new NAME`` writes a package with an example method, which you then change."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from fl_lightning.errors import UserError
from fl_lightning.lab.cli.arguments import ArgumentParser
from fl_lightning.lab.cli.compose import packaged

DESCRIPTION = """Write a package with a method of your own: callback, config, test and README.

Once it is installed, `fl-lightning configs` lists its config, and its classes have short names."""

# Each file of the package, and its template.
_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "{module}/__init__.py": "__init__.py",
    "{module}/method.py": "method.py",
    "{module}/configs/method/{module}.yaml": "method.yaml",
    "tests/test_{module}.py": "test_method.py",
}


def main(argv: Sequence[str]) -> int:
    """Write the package that ``argv`` names, and print the next steps.

    Raises:
        UserError: the name is not allowed for a package, or is taken.
    """
    parser = ArgumentParser("new", DESCRIPTION)
    parser.add_argument("name", metavar="NAME", help="such as own-anchor; its class: OwnAnchor")
    name: str = parser.parse_args(list(argv)).name
    module = name.replace("-", "_")
    folder = Path(name)
    title = "".join(part.capitalize() for part in module.split("_"))
    _check(name, module, title, folder)
    words = {"name": name, "module": module, "title": title}
    templates = files("fl_lightning.lab.cli") / "templates" / "new"
    for place, name_there in _FILES.items():
        path = folder / place.format(**words)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (templates / f"{name_there}.txt").read_text("utf-8")
        path.write_text(Template(text).substitute(words), encoding="utf-8")
        print(f"  {path}")
    print(
        f"→ {folder}/: change {folder / module / 'method.py'}. Then\n"
        f"  pip install -e {folder}\n  fl-lightning check {title}\n"
        f"  fl-lightning fit -c base -c data/digits -c method/{module}"
    )
    return 0


def _check(name: str, module: str, title: str, folder: Path) -> None:
    problem = ""
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) or keyword.iskeyword(module):
        problem = (
            "a package's name is small letters, digits and single hyphens or underscores between "
            "them, such as own-anchor, and not a keyword of Python"
        )
    elif folder.exists():
        problem = f"{folder.resolve()} exists already, and was not changed"
    elif f"method/{module}" in packaged() or find_spec(module) is not None:
        problem = "a config or a module of Python has this name already. Give another name"
    else:
        # This import is slow, and a typing error should be reported before it.
        from fl_lightning.lab.cli.classes import names_of_ours

        if title in names_of_ours():
            problem = f"its class would be {title}, which exists already. Give another name"
    if problem:
        raise UserError(f"new {name[:100]}: {problem}.")
