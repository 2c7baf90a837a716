"""The site, which ``make docs`` builds into build/site: readable without a network."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "site"), str(DOCS.parent)]

import fl_lightning  # noqa: E402

project = "fl-lightning"
copyright = "the fl-lightning authors"
release = fl_lightning.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "mathml",
    "catalogue",
    "gallery",
    "llms",
]
exclude_patterns = ["gallery", "site", "generated/gallery/sg_execution_times.rst"]
exclude_patterns += ["sg_execution_times.rst"]
# sphinx-gallery keeps what it made an example from beside the page.
exclude_patterns += ["generated/gallery/*.ipynb", "generated/gallery/*.py"]
templates_path = []
highlight_language = "none"
nitpicky = False

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

autodoc_typehints = "none"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "__init__"}
napoleon_use_rtype = False

html_theme = "furo"
html_title = "fl-lightning"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = True
# Shell lines are copied without what they print.
copybutton_exclude = ".linenos, .gp, .go"

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "generated/gallery",
    # Nothing is run: `python docs/site/gallery.py` runs the examples and keeps their pictures.
    "plot_gallery": False,
    "within_subsection_order": "gallery.Order",
    "download_all_examples": False,
    "write_computation_times": False,
    "show_signature": False,
}
