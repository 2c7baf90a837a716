"""Hostile names and texts in what runs, reports and sites write: files, pages and logs."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import InMemoryDataModule
from fl_lightning.__main__ import main
from fl_lightning.callbacks import PerClientEvaluation, RunCard
from fl_lightning.datamodules import InMemoryDataModule as Data
from fl_lightning.lab.report.runs import read_table
from fl_lightning.metrics import read_rows
from fl_lightning.record.metrics_csv import MetricsCSV
from tests.deploy.test_questions import LiveSite
from tests.helpers.learners import Lit, federated, trainer
from tests.report.folders import make_run

SCRIPT = "<script>alert(1)</script>"
LINK = "[x](javascript:alert(1))"
FORMULA = '=HYPERLINK("http://a.example")'
HOSTILE = f"{FORMULA}|{SCRIPT}{LINK}![i](http://b.example)`c`_d_ &lt;e"
NAMES = [FORMULA, "+1+2", "-1+2", "@SUM(A1)", "\t=1", "\x1b[2Jgone", "two\nlines\r", "'=quoted"]
NAMES.append("$\\no$")
COMPUTED = re.compile(r"\s*[=+\-@]")
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def cells(path: Path) -> list[str]:
    """The cells of a CSV file, as a spreadsheet reads them."""
    rows = csv.reader(io.StringIO(path.read_text("utf-8"), newline=""))
    return [cell for row in rows for cell in row]


def computed(path: Path) -> list[str]:
    """Those cells that a spreadsheet would compute, without numbers."""

    def number(text: str) -> bool:
        return re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?|-?inf", text) is not None

    return [cell for cell in cells(path) if COMPUTED.match(cell) and not number(cell)]


def page(path: Path) -> str:
    """A Markdown file as Python-Markdown, which leaves raw HTML as it is, renders it."""
    markdown = pytest.importorskip("markdown")
    rendered: str = markdown.markdown(path.read_text("utf-8"), extensions=["tables"])
    return rendered


def hostile_sweep(folder: Path) -> Path:
    for seed, values in enumerate(([0.5, 0.6], [0.55, 0.65])):
        columns = {"val/acc": values, "=val/<b>x": [-0.5, 1e-5]}
        make_run(folder / f"a/seed-{seed}", HOSTILE, seed, columns)
        make_run(folder / f"b/seed-{seed}", "b", seed, {"val/acc": values})
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    sweep = hostile_sweep(folder / f"s{SCRIPT.replace('/', '')}")
    assert main(["report", str(sweep), "--figures", "svg", "--out", str(folder / "out")]) == 0
    return folder / "out"


def test_a_report_in_markdown_has_no_html_and_no_link_of_a_name(written: Path) -> None:
    text = (written / "report.md").read_text()
    assert SCRIPT not in text and LINK not in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    found = page(written / "report.md")
    assert not re.search(r"<(script|a|code|em|b)\b", found)
    assert all("b.example" not in image for image in re.findall("<img[^>]*>", found))
    assert SCRIPT in found.replace("&lt;", "<").replace("&gt;", ">")


def test_no_cell_of_a_report_is_a_formula(written: Path) -> None:
    assert not computed(written / "report.csv")
    assert "'" + HOSTILE in cells(written / "report.csv")
    assert HOSTILE in {row["arm"] for row in read_table(written / "report.csv")}


def test_the_page_of_a_report_escapes_names(written: Path) -> None:
    assert SCRIPT not in (written / "report.html").read_text()


def named_data() -> Data:
    rng = np.random.default_rng(0)
    n = 10 * len(NAMES)
    x, y = torch.from_numpy(rng.normal(size=(n, 20))), torch.from_numpy(rng.integers(0, 4, n))
    own = {name: np.arange(10 * i, 10 * (i + 1)) for i, name in enumerate(NAMES)}
    return InMemoryDataModule(
        (x, y), test=(x, y), clients=own, batch_size=5, client_test_fraction=0.25
    )


class Logs(Lit):
    """It logs a metric whose name is a formula."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("=a|<b>", torch.tensor(-0.5))
        self.log("\x1b[2Jc\n", torch.tensor(2.0))
        return super().training_step(batch, batch_idx)


def fitted(folder: Path, rounds: int, checkpoint: Path | None = None) -> Any:
    torch.manual_seed(0)
    module = federated(Logs())
    callbacks = [RunCard(), PerClientEvaluation(1)]
    made = trainer(rounds, callbacks, logger=MetricsCSV(folder), default_root_dir=folder)
    made.fit(module, named_data(), ckpt_path=checkpoint)
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    fitted(folder, 2)
    return folder


def test_the_tables_of_a_run_have_no_formulas_and_one_line_a_row(run: Path) -> None:
    for name, rows in (("metrics.csv", 2), ("clients.csv", 9), ("clients_rounds.csv", 18)):
        assert not computed(run / name), name
        text = (run / name).read_text("utf-8")
        assert not CONTROLS.search(text) and text.count("\n") == 1 + rows, name


def test_the_readers_of_this_package_give_names_and_numbers_back(run: Path) -> None:
    columns, rows = read_rows(run / "metrics.csv")
    assert "=a|<b>" in columns and "\ufffd[2Jc\ufffd" in columns
    assert {row["=a|<b>"] for row in rows} == {"-0.5"}
    names = [row["name"] for row in read_table(run / "clients.csv")]
    shown = ["\ufffd=1", "\ufffd[2Jgone", "two\ufffdlines\ufffd", "'=quoted", "$\\no$"]
    assert names == [*NAMES[:4], *shown]


def test_a_resumed_run_with_hostile_names_leaves_the_same_tables(run: Path, tmp_path: Path) -> None:
    made = fitted(tmp_path, 1)
    made.save_checkpoint(tmp_path / "last.ckpt")
    fitted(tmp_path, 2, tmp_path / "last.ckpt")
    for name in ("clients.csv", "clients_rounds.csv"):
        assert (tmp_path / name).read_bytes() == (run / name).read_bytes()
    ours, theirs = read_rows(run / "metrics.csv"), read_rows(tmp_path / "metrics.csv")
    assert ours[0] == theirs[0] and "=a|<b>" in theirs[0]


def test_the_card_of_a_run_shows_names_as_they_are(tmp_path: Path) -> None:
    class Told(InMemoryDataModule):
        def card(self) -> dict[str, str]:
            return {**super().card(), SCRIPT: f"{LINK} | {SCRIPT}\x1b[2J\n# head"}

    x, y = torch.randn(40, 20, dtype=torch.float64), torch.randint(0, 4, (40,))
    data = Told((x, y), num_clients=2, batch_size=5)
    trainer(1, [RunCard()], default_root_dir=tmp_path).fit(federated(Lit()), data)
    text = (tmp_path / "card.md").read_text("utf-8")
    assert SCRIPT not in text and LINK not in text and "\x1b" not in text and "\n# head" not in text
    assert not re.search(r"<(script|a)\b", page(tmp_path / "card.md"))


@pytest.mark.parametrize("text", ["\x1b[2Jgone", "a\nround: done", "\u202eb\x9b"], ids=ascii)
def test_a_site_s_log_has_no_control_character_of_a_question(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = LiveSite(list, tmp_path)
    try:
        site.refused(site.question(what=text))
        told = site.ask(site.question(**{f"state/{text}": 1}))
    finally:
        site.close()
    assert told.what in ("failed", "lost")
    log = capsys.readouterr().err
    assert log and not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", log)
    assert not any(line.startswith("round: done") for line in log.splitlines())


def test_an_error_that_quotes_a_file_leaves_the_terminal_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "a\x1b[2J", "a", 0, {"\x1b[3Jb": [0.5]})
    assert main(["report", str(folder), "--metric", "c", "--out", str(tmp_path / "out")]) == 2
    assert "\x1b" not in capsys.readouterr().err
    (folder / "run.json").write_text("{")
    assert main(["report", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "\x1b" not in capsys.readouterr().err
