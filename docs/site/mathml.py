"""Mathematics as MathML, which browsers draw themselves: no script, no fonts, no network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.writers.html5 import HTML5Translator

BARE = re.compile(r'<mo(?P<opens> class="mathopen")?>(?P<fence>[|‖⌊⌋⌈⌉])</mo>')


def low(mathematics: str) -> str:
    """Norms and brackets as high as a letter: browsers stretch each to the highest of its row."""
    opened: list[str] = []

    def fence(found: re.Match[str]) -> str:
        sign = found["fence"]
        if found["opens"] or sign in "⌊⌈":
            opened.append(sign)
            form = "prefix"
        elif sign in "⌋⌉" or sign in opened:
            opened.pop()
            form = "postfix"
        else:
            form = "infix"
        return f'<mo stretchy="false" form="{form}">{sign}</mo>'

    return BARE.sub(fence, mathematics)


def drawn(text: str, block: bool) -> str:
    try:
        return low(str(tex2mathml(text, as_block=block)))
    except Exception as error:
        raise ExtensionError(f"mathematics that cannot be drawn: {text!r}: {error}") from error


def inline(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(drawn(node.astext(), block=False))
    raise nodes.SkipNode


def block(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{drawn(node.astext(), block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
