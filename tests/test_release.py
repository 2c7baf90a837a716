"""What is released: a tag that can be stood by, and files that an index takes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
ABSENT = [name for name in ("build", "twine") if find_spec(name) is None]
TOOLS = [name for name in ("git", "make") if shutil.which(name) is None]
# What the target reads.
FILES = ("Makefile", "setup.cfg", "CITATION.cff", "fl_lightning/__init__.py")


class Repository:
    """A repository of one's own, with what a release is decided by."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        (folder / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
        self.version = str(yaml.safe_load((folder / "CITATION.cff").read_text())["version"])
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "tag.gpgSign=false"]
        command = ["git", *who, "-c", "commit.gpgSign=false", *arguments]
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=True
        ).stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "x")

    def note_version(self) -> None:
        with open(self.folder / "CHANGELOG.md", "a") as file:
            file.write(f"\n## [{self.version}] - 2026-01-31\n")

    def release(self) -> subprocess.CompletedProcess[str]:
        # The tag is annotated, so it needs someone who made it.
        self.git("config", "user.name", "a")
        self.git("config", "user.email", "a@b.c")
        return subprocess.run(["make", "release"], cwd=self.folder, capture_output=True, text=True)

    @property
    def tags(self) -> list[str]:
        return self.git("tag").split()


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    if TOOLS:
        pytest.skip(f"not installed: {', '.join(TOOLS)}; with them this test runs by itself")
    return Repository(tmp_path)


def test_a_release_is_a_tag_that_nothing_pushes(repository: Repository) -> None:
    repository.note_version()
    repository.commit()
    done = repository.release()
    assert done.returncode == 0, done.stderr
    tag = f"v{repository.version}"
    assert repository.tags == [tag]
    assert repository.git("cat-file", "-t", tag) == "tag\n"
    assert repository.git("rev-parse", f"{tag}^{{}}") == repository.git("rev-parse", "HEAD")
    assert f"git push origin {tag}" in done.stdout and "twine upload" in done.stdout


def test_a_second_release_of_one_version_is_refused(repository: Repository) -> None:
    repository.note_version()
    repository.commit()
    assert repository.release().returncode == 0
    again = repository.release()
    assert again.returncode and "there is such a tag" in again.stderr


def test_what_is_not_committed_is_not_released(repository: Repository) -> None:
    repository.note_version()
    done = repository.release()
    assert done.returncode and "not committed" in done.stderr and not repository.tags


@pytest.mark.parametrize("line", ["", "## [{}]", "## {} - 2026-01-31", "## [{}1] - 2026-01-31"])
def test_the_changelog_has_to_have_the_version(repository: Repository, line: str) -> None:
    with open(repository.folder / "CHANGELOG.md", "a") as file:
        file.write(line.format(repository.version) + "\n")
    repository.commit()
    done = repository.release()
    assert done.returncode and "CHANGELOG.md has no line" in done.stderr and not repository.tags


@pytest.mark.parametrize("name", ["CITATION.cff", "fl_lightning/__init__.py"])
def test_one_version_stands_everywhere(repository: Repository, name: str) -> None:
    path = repository.folder / name
    path.write_text(path.read_text().replace(repository.version, "9.9.9"))
    repository.note_version()
    repository.commit()
    done = repository.release()
    assert done.returncode and "does not" in done.stderr and not repository.tags


def test_the_workflows_try_every_python_that_is_promised() -> None:
    folder = ROOT / ".github/workflows"
    tests = yaml.safe_load((folder / "tests.yml").read_text())["jobs"]["tests"]
    tried = tests["strategy"]["matrix"]["python"]
    prefix = "    Programming Language :: Python :: 3."
    lines = (ROOT / "setup.cfg").read_text().splitlines()
    assert tried == [f"3.{line[len(prefix) :]}" for line in lines if line.startswith(prefix)]
    # Each step is a target or a script that is there.
    for path in folder.glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                words = step.get("run", "").split()
                if words[:1] == ["make"]:
                    assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
                elif words:
                    assert (ROOT / words[0]).is_file()


@pytest.mark.slow
@pytest.mark.skipif(bool(ABSENT), reason=f"{ABSENT} not installed: pip install -e '.[dev]'")
def test_an_index_would_take_wheel_and_sdist(tmp_path: Path) -> None:
    source = tmp_path / "source"
    manifest = (ROOT / "MANIFEST.in").read_text().split()
    # What is pruned lies in what is grafted.
    lines = (ROOT / "MANIFEST.in").read_text().splitlines()
    grafted = {line.split()[1] for line in lines if line.startswith("graft ")}
    kept = {name for name in manifest if (ROOT / name).is_file()}
    kept |= {"setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"}
    source.mkdir()
    for name in kept:
        shutil.copy(ROOT / name, source)
    passed = shutil.ignore_patterns("__pycache__", "generated")
    for name in grafted | {"fl_lightning", "callbacks", "datamodules"}:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=passed)
    dist = tmp_path / "dist"
    # The wheel is built from the sdist, which has to hold all that it is made of.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    made = sorted(dist.iterdir())
    assert [path.suffix for path in made] == [".whl", ".gz"]
    check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, made)]
    checked = subprocess.run(check, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    with tarfile.open(made[1]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert kept | {"tests/test_release.py", "configs/base.yaml", "callbacks/__init__.py"} <= inside
