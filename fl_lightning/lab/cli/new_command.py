"""``fl-lightning new NAME`` writes a package with an example method, which you then change."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from fl_lightning.errors import UserError
from fl_lightning.lab.cli.arguments import ArgumentParser
from fl_lightning.lab.cli.compose import packaged

DESCRIPTION = """Write a package with a method of your own: callback, config, test and README.

Once it is installed, `fl-lightning configs` lists its config, and its classes have short names."""

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
description = "{title}: a method for fl-lightning"
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["fl-lightning"]

[project.optional-dependencies]
test = ["pytest"]

# By this fl-lightning finds the package: its classes, and what lies in its folder configs.
[project.entry-points."fl_lightning.plugins"]
{module} = "{module}"

[tool.setuptools]
packages = ["{module}"]

[tool.setuptools.package-data]
{module} = ["configs/**/*.yaml"]
"""

_INIT = """\
\"\"\"{title}: a method for fl-lightning.\"\"\"

from {module}.method import {title}

__all__ = ["{title}"]
"""

_METHOD = """\
\"\"\"{title}: say here what it is, and which paper it is from.

To begin with it is a pull to where a client itself ended when it last took part.
\"\"\"

from __future__ import annotations

from fl_lightning import ClientState, Coefficient, FederatedCallback, Schedule


class {title}(FederatedCallback):
    \"\"\"g ← g + μ (x - last_i); then last_i ← x_{{i,K}}.

    Args:
        mu: μ; 0 is FedAvg.
    \"\"\"

    title = "{title}"
    neutral = {{"mu": 0.0}}
    mu = Coefficient()
    last = ClientState(initial="current_model", synchronised=False)

    def __init__(self, mu: float | Schedule = 0.01) -> None:
        super().__init__()
        self.mu = mu

    def on_local_gradient(self, clients, gradient):
        return gradient + self.mu * (clients.x - self.last[clients])

    def on_local_end(self, clients):
        self.last[clients] = clients.x
"""

_CONFIG = """\
# {title}: each client is pulled to where it ended itself
method:
  - class_path: {module}.{title}
    init_args:
      mu: 0.01
model:
  client_optimizer: null
  server_optimizer: null
  keep_optimizer_state: false
  buffers: average
"""

_TEST = """\
\"\"\"{title} keeps what every method has to keep.\"\"\"

from fl_lightning.testing import check_method
from {module} import {title}


def test_it_keeps_the_contracts():
    report = check_method({title})
    assert report.ok, report
"""

_README = """\
# {name}

{title}, a method for fl-lightning.

```
pip install -e .
fl-lightning check {title}   # the contracts of a method
fl-lightning fit -c base -c data/digits -c method/{module}
fl-lightning fit -c base -c data/digits -c method/{module} --method.mu 0.1
fl-lightning fit -c base -c data/digits --method {title}   # by its short name
```

- `{module}/method.py`: the method, written as its algorithm is.
- `{module}/configs/`: a YAML file `method/x.yaml` there is `-c method/x`.
- `tests/`: run by `pytest`, which `pip install -e '.[test]'` brings.
"""

_FILES = {
    "pyproject.toml": _PYPROJECT,
    "README.md": _README,
    "{module}/__init__.py": _INIT,
    "{module}/method.py": _METHOD,
    "{module}/configs/method/{module}.yaml": _CONFIG,
    "tests/test_{module}.py": _TEST,
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
    for place, text in _FILES.items():
        path = folder / place.format(**words)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(**words), encoding="utf-8")
        print(f"  {path}")
    print(f"→ {folder}/: change {folder / module / 'method.py'}. Then")
    print(f"  pip install -e {folder}")
    print(f"  fl-lightning check {title}")
    print(f"  fl-lightning fit -c base -c data/digits -c method/{module}")
    return 0


def _check(name: str, module: str, title: str, folder: Path) -> None:
    def refuse(reason: str) -> UserError:
        return UserError(f"new {name[:100]}: {reason}.")

    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise refuse(
            "a package's name is small letters, digits and single hyphens or underscores between "
            "them, such as own-anchor, and not a keyword of Python"
        )
    if f"method/{module}" in packaged():
        raise refuse(f"there is a config method/{module} already. Give another name")
    if folder.exists():
        raise refuse(f"{folder.resolve()} exists already, and was not changed")
    if find_spec(module) is not None:
        raise refuse(f"Python has a module {module} here already. Give another name")
    # This import is slow, and a typing error should be reported before it.
    from fl_lightning.lab.cli.classes import names_of_ours

    if title in names_of_ours():
        raise refuse(
            f"its class would be {title}, but a class of this name exists already, and the short "
            "name would mean that class. Give another name"
        )
