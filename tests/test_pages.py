"""What README and site print runs as printed, page by page, in the order in which it stands there.

A Python block that begins with ``# name.py`` is that file, another is a program; a YAML block that
begins with ``# name.yaml`` is that file. Of ``sh`` each command is run. A comment ``<!-- not run:
why -->`` before a block says what is missing here: of its commands the options are parsed alone,
unless it installs what they name. A fence without a language right after a block is what the block
prints: each of its lines has to come, with other numbers; ``…`` leaves lines out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.helpers.zygote import Cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

FENCE = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?"
    r"^```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```$"
    r"(?:\n\n(?:```\n(?P<printed>.*?)^```$|(?P<pictured>!\[)))?",
    re.DOTALL | re.MULTILINE,
)

# Other files: frozen, or generated, or with outputs between their programs.
APART = {"results.md", "results_tables.md", "protocol.md", "report.md", "sweep.md"}
PAGES = [
    path
    for path in [
        ROOT / "README.md",
        *sorted(DOCS.glob("*.md")),
        *sorted(DOCS.glob("methods/*.md")),
        *sorted((ROOT / "studies").glob("*.md")),
    ]
    if path.name not in APART
]


# Programs that come with what is installed, as modules; others are not started by a test.
AS_INSTALLED = {"fl-lightning": "fl_lightning", "torchrun": "torch.distributed.run"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, why it is not run (None: it is), what it prints."""

    language: str
    text: str
    why: str | None
    printed: str | None = None
    pictured: bool = False

    @property
    def file(self) -> str | None:
        """The file that the block is, by its first line."""
        found = re.match(r"# ([\w.]+\.(?:py|yaml))\n", self.text)
        return None if found is None else found[1]

    @property
    def commands(self) -> list[list[str]]:
        """Of a shell block: its commands as lists of words, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        return [command for command in words if command]


def blocks_of(page: Path) -> Iterator[Block]:
    for found in FENCE.finditer(page.read_text("utf-8")):
        if found["language"] in ("python", "yaml", "sh", "bash"):
            shown = found["printed"], found["pictured"] is not None
            yield Block(found["language"], found["text"], found["why"], *shown)


def shape(line: str) -> str:
    """A printed line with each number as 0, and without what differs from machine to machine."""
    line = re.sub(r" · (sequential|stacked|concurrent).*", " · ENGINE", line)
    line = re.sub(r"\d[\d.]*(e[-+]?\d+)?", "0", line)
    return re.sub(r"0 [kM]?B?\b", "0 ", " ".join(line.split()))


def missing(printed: str, output: str) -> list[str]:
    """The lines of ``printed`` that ``output`` does not have, also not with other numbers."""
    coming = set(map(shape, output.splitlines()))
    return [
        line
        for line in printed.splitlines()
        if line.strip() not in ("", "…") and shape(line) not in coming
    ]


def runs(block: Block) -> bool:
    return block.why is None and block.language in ("python", "sh") and block.file is None


WITH_PROGRAMS = [page for page in PAGES if any(runs(block) for block in blocks_of(page))]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def installed(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of these programs, each by ``python``, which need not import what they start."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "python").symlink_to(python)
    for name, module in AS_INSTALLED.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {python} -m {module} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def run(installed: Path, cli: Cli) -> object:
    """Run one command in the test's folder; it has to succeed."""

    def one(words: list[str]) -> str:
        words = list(words)
        given = {}
        while "=" in words[0]:
            name, _, given[name] = words.pop(0).partition("=")
        program, *arguments = words
        if program == "fl-lightning":
            done = cli(*arguments, env=given, timeout=280)
            output, status = done.stdout + done.stderr, done.returncode
        else:
            known = (installed / program).exists()
            assert known, f"{program}: say `not run` and why, or teach this test"
            environment = {
                **os.environ,
                "MPLBACKEND": "Agg",
                "PYTHONPATH": str(ROOT),
                "PATH": f"{installed}{os.pathsep}{os.environ['PATH']}",
                **given,
            }
            command = [installed / program, *arguments]
            other = subprocess.run(
                command, cwd=cli.folder, env=environment, capture_output=True, text=True
            )
            output, status = other.stdout + other.stderr, other.returncode
        assert status == 0, f"{shlex.join(words)}\n{output[-3000:]}"
        return output

    return one


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=named)
def test_what_a_page_prints_runs(page: Path, run, cli: Cli) -> None:  # type: ignore[no-untyped-def]
    for number, block in enumerate(blocks_of(page)):
        if block.file is not None:
            (cli.folder / block.file).write_text(block.text, "utf-8")
        elif runs(block) and block.language == "python":
            (cli.folder / f"program_{number}.py").write_text(block.text, "utf-8")
            output = run(["python", f"program_{number}.py"])
            assert not missing(block.printed or "", output), output
        elif runs(block):
            output = "\n".join(run(command) for command in block.commands)
            assert not missing(block.printed or "", output), output


def test_what_a_page_shows_is_compared_but_for_its_numbers() -> None:
    output = "a 1.5 kB · concurrent × 2\nround 1/20\nround 2/20\nb  3\n"
    assert not missing("a 3 B · sequential\n…\nround 7/9\nb 4", output)
    assert missing("c 4\nb 4\nround one", output) == ["c 4", "round one"]


def test_every_command_of_a_page_that_runs_shows_what_it_prints() -> None:
    silent = [
        f"{named(page)}: {block.text.splitlines()[0]}"
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "sh" and runs(block)
        if block.printed is None and not block.pictured
    ]
    assert not silent


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_and_yaml_are_whole(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.text, named(page), "exec")
            assert "..." not in block.text, "a program without placeholders"
        if block.language == "yaml":
            yaml.safe_load(block.text)


NOT_RUN = [
    pytest.param(command[1:], id=f"{named(page)}-{number}-{place}")
    for page in PAGES
    for number, block in enumerate(blocks_of(page))
    if block.why is not None and "installs" not in block.why and block.language == "sh"
    for place, command in enumerate(block.commands)
    if command[:2] == ["fl-lightning", "fit"] and "-c" in command
]


@pytest.mark.slow
@pytest.mark.parametrize("command", NOT_RUN)
def test_options_of_what_is_not_run_here_are_accepted(command: list[str], cli: Cli) -> None:
    done = cli(*command, "--print_config")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_scripts_are_scripts(page: Path) -> None:
    for block in blocks_of(page):
        if block.language in ("sh", "bash"):
            read = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
            assert read.returncode == 0 and not read.stderr, read.stderr


@pytest.mark.slow
def test_the_array_on_the_page_is_what_a_sweep_writes(cli: Cli) -> None:
    blocks = list(blocks_of(DOCS / "processes.md"))
    (grid,) = (block.text for block in blocks if block.file == "grid.yaml")
    (script,) = (block.text for block in blocks if "--array=0-14\n" in block.text)
    # The data and the GPUs of the page are not here.
    there = grid.replace("data/cifar10, trainer/ddp", "data/digits, trainer/cpu")
    (cli.folder / "grid.yaml").write_text(there.replace("devices: 2", "devices: 1"))
    written = cli("sweep", "grid.yaml", "--slurm", "-")
    assert written.stdout == script, written.stderr


@pytest.mark.parametrize("page", [*PAGES, DOCS / "report.md", DOCS / "sweep.md"], ids=named)
def test_lines_are_short_enough_to_be_compared(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in prose.splitlines() if len(line) > 100 and not line.startswith("|")]
    assert not long
    # A line that begins so is a comment to the site's reader of Markdown, and is left out.
    assert not [line for line in prose.splitlines() if line.lstrip().startswith("%")]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_programs_fit_beside_the_contents(page: Path) -> None:
    assert not [
        line for block in blocks_of(page) for line in block.text.splitlines() if len(line) > 100
    ]


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120
