"""Text from outside in what this package writes: on terminals, in Markdown, and in CSV.

Names of clients, classes, metrics and runs, texts of sites, and cells that an error quotes come
from outside. The page of a report escapes them by its templates, and LaTeX by
:func:`fl_lightning.lab.report.report_files.tex`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# Control characters move a terminal's cursor and end lines. The others end lines, too, change the
# direction of the text around them, or are half a character, which no file can hold.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Marks of code, emphasis, links, mathematics and columns.
_MARKS = re.compile(r"[\\`*\[\]$|~]|(?<![^\W_])_|_(?![^\W_])")
_BLOCK = re.compile(r"\d+(?=[.)](\s|$))|(?=[#>+=-])")  # at the beginning of a paragraph
# A spreadsheet computes such a cell. Apostrophes before it may be the escape of another text.
_FORMULA = re.compile(r"'*\s*[=+\-@＝＋－＠]")


def plain(text: str) -> str:
    r"""Return a text as one line without control characters.

    >>> plain("a\x1b[2Jb\nc")
    'a�[2Jb�c'
    """
    return text if text.isprintable() else _CONTROLS.sub("\ufffd", text)


def plain_lines(text: object) -> str:
    r"""Return a text for a terminal or a log; its second line and those that follow are indented.

    An indented line cannot look like another entry of the log.

    >>> plain_lines("cannot read a\x1b[2J\nbecause of b")
    'cannot read a�[2J\n  because of b'
    """
    return "\n  ".join(plain(line.expandtabs(4)) for line in str(text).splitlines())


def markdown(text: str) -> str:
    r"""Return the Markdown of one line, or of a table's cell, that shows a text unchanged.

    >>> print(markdown("<b>2|3</b> [x](javascript:y) of fedinit_0.1"))
    &lt;b>2\|3&lt;/b> \[x\](javascript:y) of fedinit_0.1
    """
    text = plain(" ".join(text.split()))
    # Not all renderers know a backslash before "<" or "&".
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text)
    text = _MARKS.sub(r"\\\g<0>", text)
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", text)


def paragraph(text: str) -> str:
    r"""Return the Markdown of a paragraph that shows a text unchanged.

    >>> print(paragraph("# 1. *a*"), paragraph("1. a"), sep=", ")
    \# 1. \*a\*, 1\. a
    """
    text = markdown(text)
    start = _BLOCK.match(text)
    return text if start is None else rf"{start[0]}\{text[start.end() :]}"


def cells(row: Iterable[Any]) -> list[Any]:
    r"""Return the cells of a row of a CSV file: numbers as they are, and texts as a spreadsheet
    shows them.

    A text that a spreadsheet would compute gets an apostrophe, which :func:`of_cells` removes.

    >>> cells([-0.5, "-0.5", "=1+2", "a\nb", None])
    [-0.5, '-0.5', "'=1+2", 'a�b', None]
    """
    return [_cell(value) for value in row]


def of_cells(row: Iterable[str]) -> list[str]:
    """Return the texts of cells that :func:`cells` wrote, without control characters.

    >>> of_cells(["'=1+2", "'tis", "-0.5"])
    ['=1+2', "'tis", '-0.5']
    """
    return [_of_cell(text) for text in row]


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    text = plain(str(value))
    return f"'{text}" if _FORMULA.match(text) and not is_number(text) else text


def _of_cell(text: str) -> str:
    text = plain(text)
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def is_number(text: str) -> bool:
    """Return whether Python reads a text as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
