"""Where a command writes: `-o` on what is no file, `~` and `$NAME` in the run's folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.helpers.commands import typed
from tests.helpers.zygote import Cli

FIT = typed("fit -c base -c trainer/cpu -c debug/tiny --trainer.enable_progress_bar false")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("given", ["~/run", "$HOME/run", "${PLACE}/run"])
def test_the_folder_is_expanded_once_for_all(cli: Cli, given: str) -> None:
    environment = {"HOME": str(cli.folder / "home"), "PLACE": str(cli.folder / "home")}
    (cli.folder / "home").mkdir()
    ended = cli(
        *FIT, "--trainer.max_epochs", 1, "--trainer.default_root_dir", given, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    run = cli.folder / "home" / "run"
    assert os.listdir(cli.folder) == ["home"] and os.listdir(cli.folder / "home") == ["run"]
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert {"config", "metrics", "run", "checkpoints", "events"} <= names
    assert f"default_root_dir: {run}" in (run / "config.yaml").read_text()


def test_an_output_that_is_no_file_is_refused_and_stays(cli: Cli) -> None:
    assert cli(*FIT, "--trainer.max_epochs", 1, "--trainer.default_root_dir", "x").returncode == 0
    os.mkfifo(cli.folder / "pipe")
    (cli.folder / "folder").mkdir()
    (cli.folder / "file").write_text("before")
    (cli.folder / "link").symlink_to("target.pt")
    before = {path: stat.S_IFMT(path.lstat().st_mode) for path in cli.folder.iterdir()}
    for command in ("export", "predict"):
        for name, kind in (
            ("pipe", "a pipe"),
            ("folder", "a folder"),
            ("file/below", "is not a folder"),
        ):
            ended = cli(command, "x", "-o", name)
            assert (
                ended.returncode == 2 and kind in ended.stderr and "Traceback" not in ended.stderr
            )
        ended = cli(command, "x", "-o", "link")
        assert ended.returncode == 0 and Path(cli.folder / "target.pt").stat().st_size > 100, (
            ended.stderr
        )
        (cli.folder / "target.pt").unlink()
    assert {path: stat.S_IFMT(path.lstat().st_mode) for path in cli.folder.iterdir()} == before
    assert (cli.folder / "file").read_text() == "before"
    (cli.folder / "s.yaml").write_text(
        "configs: [base, trainer/cpu, debug/tiny]\ngrid: {seed_everything: [0]}\n"
    )
    writing = (
        ("partition", *FIT[1:-2], "-o"),
        ("report", "x", "--out"),
        ("analyse", "hessian", "x", "--out"),
        ("sweep", "s.yaml", "--out"),
        (*FIT, "--trainer.default_root_dir"),
    )
    for command in writing:
        ended = cli(*command, "file")
        assert ended.returncode == 2 and "Traceback" not in ended.stderr, (
            command,
            ended.stderr[-2000:],
        )
        assert "file" in ended.stderr
