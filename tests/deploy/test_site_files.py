"""Damaged files in a site's folder: one paragraph says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fl_lightning import UserError
from fl_lightning.deploy.site_rows import SiteRows
from fl_lightning.storage.client_store import ClientStore

JOURNAL: dict[str, Any] = {"run": 7, "committed": {}, "staged": [], "rows": {}}


def of_row(clients: Any, segments: Any) -> str:
    return json.dumps({**JOURNAL, "rows": {"a": {"clients": clients, "segments": segments}}})


@pytest.mark.parametrize(
    "text",
    [
        of_row([0, 1], [3]),
        of_row([[0]], [[1]]),
        of_row([0], [2**70]),
        of_row([], [3]),
        of_row(0, 3),
        "[" * 200_000,
        "[]",
        json.dumps({**JOURNAL, "staged": [[0, [3]]]}),
        json.dumps({**JOURNAL, "staged": [[0, [3, ["a"]]]]}),
        json.dumps({**JOURNAL, "run": 1e400}),
        json.dumps({**JOURNAL, "run": 7.9}),
        of_row([1, 0], [3, 3]),
        of_row([-1], [3]),
    ],
)
def test_a_damaged_journal_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "site.json").write_text(text, "utf-8")
    with pytest.raises(
        UserError, match=r"site\.json is damaged .* Restore it from a copy"
    ) as error:
        SiteRows(tmp_path, ClientStore())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["-5", "9" * 400, "9" * 5000, str(2**53), "x", ""])
def test_a_damaged_number_of_the_folder_is_drawn_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / "site.id").write_text(text, "ascii")
    rows = SiteRows(tmp_path, ClientStore())
    rows.lock.release()
    assert 0 <= rows.place < 2**53
    assert (tmp_path / "site.id").read_text("ascii") == str(rows.place)
