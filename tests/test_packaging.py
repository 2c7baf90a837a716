"""What is installed is what is on the disk, and it runs outside the checkout."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.commands import typed

ROOT = Path(__file__).parent.parent


OURS = ("callbacks", "datamodules", "configs")
TOPS = {"fl_lightning": "", **dict.fromkeys(OURS, "fl_lightning/")}


def on_disk(*endings: str) -> list[str]:
    """Files of the package by their installed path; links are not followed."""
    return [
        prefix + str((Path(folder) / name).relative_to(ROOT))
        for top, prefix in TOPS.items()
        for folder, _, names in os.walk(ROOT / top)
        for name in names
        if name.endswith(endings)
    ]


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    return parser


def test_package_list_is_the_disk() -> None:
    found = {name.removesuffix("/__init__.py").replace("/", ".") for name in on_disk("__init__.py")}
    assert set(setup()["options"]["packages"].split()) == found


def test_every_dependency_has_its_reason() -> None:
    required = [setup()["options"]["install_requires"], *setup()["options.extras_require"].values()]
    lines = [
        line for text in required for line in text.strip().splitlines() if not line.startswith("%")
    ]
    names = {re.split("[<>=;]", line)[0].strip() for line in lines}
    table = [
        line.split("|")[1]
        for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines()
        if line[:1] == "|"
    ]
    assert names <= set(re.findall(r"[\w.\[\]-]+", " ".join(table)))


@pytest.mark.parametrize("top", OURS)
def test_links_and_mapping(top: str) -> None:
    assert os.readlink(ROOT / "fl_lightning" / top) == f"../{top}"
    result = subprocess.run(
        [sys.executable, "-c", f"import {top}"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 1 and f"this is fl_lightning.{top}" in result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source)
    for top in TOPS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / top, source / top, symlinks=True, ignore=ignore)
    pip = typed("-m pip wheel --quiet --no-deps --no-build-isolation -w")
    build = [sys.executable, *pip, str(folder), str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_everything(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    endings = typed(".py .yaml .css .js .html .md .tex .bib py.typed")
    assert set(on_disk(*endings)) <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fl_lightning"}


@pytest.mark.slow
def test_wheel_runs_outside_the_checkout(wheel: Path, bare_python: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = typed("-m pip install --quiet --no-deps --target")
    install = [sys.executable, *pip, str(site), str(wheel)]
    assert subprocess.run(install, capture_output=True).returncode == 0
    work = tmp_path / "work"
    work.mkdir()
    code = f"import fl_lightning.__main__ as m; assert m.__file__.startswith({str(site)!r}); "
    code += "raise SystemExit(m.main('fit -c base -c method/fedinit -c debug/tiny'.split()))"
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [bare_python, "-c", code], cwd=work, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert len((work / "runs/digits-fedinit-1/metrics.csv").read_text().splitlines()) == 3
