"""What is released: a tag that can be stood by, and files that an index takes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
TOOLS = [name for name in ("git", "make") if shutil.which(name) is None]
# What the target reads.
FILES = ("Makefile", "setup.cfg", "CITATION.cff", "fl_lightning/__init__.py")


class Repository:
    """A repository of one's own, with what a release is decided by."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = str(yaml.safe_load((folder / "CITATION.cff").read_text())["version"])

    @classmethod
    def new(cls, folder: Path) -> Repository:
        """Make one with the files that the target reads."""
        for name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        (folder / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
        made = cls(folder)
        made.git("init", "--quiet")
        made.commit()
        return made

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
        command = ["make", "release", f"BIN={Path(sys.executable).parent}", "TOOLS="]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True)

    @property
    def tags(self) -> list[str]:
        return self.git("tag").split()


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    if TOOLS:
        pytest.skip(f"not installed: {', '.join(TOOLS)}; with them this test runs by itself")
    return Repository.new(tmp_path)


@pytest.mark.slow
def test_a_release_is_checked_files_and_a_tag_that_nothing_pushes(tmp_path: Path) -> None:
    for tool in ("build", "twine"):
        pytest.importorskip(tool, reason=f"{tool} is not installed: pip install -e '.[dev]'")
    if TOOLS or not (ROOT / ".git").exists():
        pytest.skip("this is no clone, or git and make are not installed")
    clone = ["git", "clone", "--quiet", "--no-tags", str(ROOT), str(tmp_path / "clone")]
    subprocess.run(clone, check=True)
    repository = Repository(tmp_path / "clone")
    done = repository.release()
    assert done.returncode == 0, done.stdout + done.stderr
    tag = f"v{repository.version}"
    assert repository.tags == [tag]
    assert repository.git("cat-file", "-t", tag) == "tag\n"
    assert repository.git("rev-parse", f"{tag}^{{}}") == repository.git("rev-parse", "HEAD")
    assert f"git push origin {tag}" in done.stdout and "twine upload" in done.stdout
    assert done.stdout.count("PASSED") == 2  # twine's word for the wheel and the sdist
    again = repository.release()
    assert again.returncode and "there is such a tag" in again.stderr


def test_what_is_not_committed_is_not_released(repository: Repository) -> None:
    repository.note_version()
    done = repository.release()
    assert done.returncode and "not committed" in done.stderr and not repository.tags


@pytest.mark.parametrize("line", ["", "## [{}1] - 2026-01-31"])
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
