"""llms.txt: each page's title and first sentence, with the way to its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes

HEAD = """# fl-lightning

> Federated learning research inside PyTorch Lightning: one Trainer.fit is one federated run, one
> epoch is one round. A method is a callback, a run is a command with YAML configs, and it resumes
> to the same bits.

## Pages
"""


def line_of(app: Any, page: str) -> str:
    """One page: where its text is, and what it says first."""
    title = app.env.titles[page].astext()
    said = next(iter(app.env.get_doctree(page).findall(nodes.paragraph)), None)
    sentence = "" if said is None else " ".join(said.astext().split()).split(". ")[0]
    text = f": {sentence.rstrip('.:')}" if sentence else ""
    suffix = Path(app.env.doc2path(page)).suffix
    return f"- [{title}](_sources/{page}{suffix}.txt){text}"


def below(children: dict[str, list[str]], page: str) -> list[str]:
    pages = [page]
    for child in children.get(page, []):
        pages += below(children, child)
    return pages


def write(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        root = app.config.root_doc
        # In the order of the contents, children after their page.
        pages = below(app.env.toctree_includes, root)
        lines = [line_of(app, page) for page in pages]
        Path(app.outdir, "llms.txt").write_text("\n".join([HEAD, *lines, ""]), "utf-8")


def setup(app: Any) -> dict[str, Any]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
