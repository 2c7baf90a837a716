"""What an author of methods finds on ``clients``."""

from __future__ import annotations

from pathlib import Path

from fl_lightning.round.clients import Clients


def quoted(line: str) -> list[str]:
    """What stands in backticks in the first cell of a table's line."""
    return line.split("|")[1].split("`")[1::2]


def test_what_an_author_finds_on_clients_is_what_the_page_of_methods_names() -> None:
    page = (Path(__file__).parents[2] / "docs/hooks.md").read_text("utf-8")
    table = page.split("A hook reads these attributes of `clients`")[1].split("\n\n")[1]
    named = {name.split("(")[0] for cell in table.split("\n")[2:] for name in quoted(cell)}
    assert named == {name for name in dir(Clients) if name[0] != "_"}
