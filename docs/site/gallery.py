"""The gallery's pictures and sentences, which are kept in docs/gallery.

``python docs/site/gallery.py [NAME …]`` runs examples and keeps what they leave. The site shows
that beside each example's code, so that building it trains nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parents[1] / "gallery"
EXAMPLES = Path(__file__).parents[2] / "examples"
WIDTH = 1000

# In the order of the page: to begin with, data, understanding, trust, work.
NAMES = [
    "first_run",
    "own_learner",
    "own_method",
    "methods_in_thirty_lines",
    "scaffold_by_hand",
    "splits_pictured",
    "clients_from_csv",
    "text_with_lora",
    "submodels",
    "drift_pictured",
    "graphs_pictured",
    "landscape",
    "personal_models",
    "attack_and_defence",
    "privacy_budget",
    "kill_and_resume",
    "sweep_with_a_claim",
    "search_with_optuna",
    "own_cli",
]


NOTEBOOK = "notebook"


class Order:
    """The key by which sphinx-gallery sorts."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, name: str) -> int:
        return NAMES.index(name.removesuffix(".py"))


def keep(name: str) -> None:
    """Run an example in an empty folder; keep its picture, smaller, and its last sentence."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(EXAMPLES / f"{name}.py")]
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        (path,) = Path(folder, "runs/examples", name).glob("*.png")
        with Image.open(path) as picture:
            height = round(picture.height * WIDTH / picture.width)
            small = picture.convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS)
            small.quantize(256, Image.Quantize.MAXCOVERAGE).save(
                KEPT / f"{name}.png", optimize=True
            )
    sentence = done.stdout.splitlines()[-1]
    (KEPT / f"{name}.txt").write_text(sentence + "\n", "utf-8")
    print(f"{name}: {sentence}")


def keep_notebook() -> None:
    """Run docs/notebook.ipynb in an empty folder, and keep it with what its cells show."""
    import nbformat
    from nbclient import NotebookClient

    path = KEPT.parent / f"{NOTEBOOK}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, resources=resources).execute()
    for cell in notebook.cells:
        # When a cell was run says nothing, and would differ each time.
        cell.metadata.pop("execution", None)
        # Lightning's hints and warnings name folders of the machine.
        outputs = [each for each in cell.get("outputs", []) if each.get("name") != "stderr"]
        if cell.cell_type == "code":
            cell.outputs = outputs
    nbformat.write(notebook, path)
    print(f"{NOTEBOOK}: {len(notebook.cells)} cells")


def put_pictures_in_place(app: Any) -> None:
    """After sphinx-gallery: its thumbnails are the kept pictures."""
    thumbs = Path(app.srcdir, "generated/gallery/images/thumb")
    for name in NAMES:
        shutil.copy(KEPT / f"{name}.png", thumbs / f"sphx_glr_{name}_thumb.png")


def link_to_pages(app: Any, page: str, source: list[str]) -> None:
    """What is a link to an example's file in the repository leads to its page on the site."""
    source[0] = re.sub(
        r"\]\((?:\.\./)+examples/(\w+)\.py\)", r"](/generated/gallery/\1.rst)", source[0]
    )


def show_what_it_leaves(app: Any, page: str, source: list[str]) -> None:
    """An example's page ends with its picture and its sentence."""
    folder, _, name = page.rpartition("/")
    if folder != "generated/gallery" or name not in NAMES:
        return
    sentence = (KEPT / f"{name}.txt").read_text("utf-8").strip()
    shown = (
        f"It says\n\n.. code-block:: none\n   :class: wraps\n\n   {sentence}\n\n"
        f"and leaves this picture in ``runs/examples/{name}/``.\n\n"
        f".. image:: /gallery/{name}.png\n   :class: leaves\n\n"
    )
    end = f".. _sphx_glr_download_generated_gallery_{name}.py:"
    before, found, after = source[0].partition(end)
    assert found, page
    source[0] = f"{before}{shown}{found}{after}"


def setup(app: Any) -> dict[str, Any]:
    app.connect("builder-inited", put_pictures_in_place, priority=900)
    app.connect("source-read", show_what_it_leaves)
    app.connect("source-read", link_to_pages)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    KEPT.mkdir(exist_ok=True)
    for chosen in sys.argv[1:] or [*NAMES, NOTEBOOK]:
        if chosen == NOTEBOOK:
            keep_notebook()
        else:
            keep(chosen)
