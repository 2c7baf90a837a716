"""Pages that are written at each build: every public name, every packaged config, and what
leaves a site.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from sphinx.util.inspect import signature as signature_of
from sphinx.util.inspect import stringify_signature

from fl_lightning import FederatedCallback, systems
from fl_lightning.deploy import what_leaves

ROOT = Path(__file__).parents[2]

# Classes whose methods an author calls or writes; of the others the docstring says it all.
WITH_MEMBERS = [
    "fl_lightning.FederatedModule",
    "fl_lightning.FederatedCallback",
    "fl_lightning.Schedule",
    "fl_lightning.datamodules.FederatedDataModule",
    "fl_lightning.deploy.transport.Transport",
    "fl_lightning.deploy.transport.Post",
    "fl_lightning.datamodules.Partition",
    "fl_lightning.datamodules.Bias",
    "fl_lightning.round.clients.Clients",
    "fl_lightning.round.server.Server",
    "fl_lightning.lab.analysis.results.Run",
    "fl_lightning.evaluation.evaluator.Evaluator",
    "fl_lightning.evaluation.measurement.Measurement",
]

# A page each: its title, and the public names, or the module whose `__all__` they are.
PAGES = {
    "core": ("fl_lightning", "fl_lightning"),
    "hooks": (
        "What hooks see",
        [
            "fl_lightning.round.clients.Clients",
            "fl_lightning.round.server.Server",
            "fl_lightning.learner.layout.Layout",
            "fl_lightning.learner.adapters.Adapter",
        ],
    ),
    "callbacks": ("fl_lightning.callbacks", "fl_lightning.callbacks"),
    "datamodules": ("fl_lightning.datamodules", "fl_lightning.datamodules"),
    "models": ("fl_lightning.models", "fl_lightning.models"),
    "optim": (
        "fl_lightning.optim",
        [f"fl_lightning.optim.{name}" for name in ("FedAdam", "FedYogi", "FedAdagrad")],
    ),
    "systems": (
        "fl_lightning.systems",
        [f"fl_lightning.systems.{name}" for name in systems.__all__],
    ),
    "deploy": (
        "fl_lightning.deploy",
        [
            "fl_lightning.deploy.transport.Transport",
            "fl_lightning.deploy.transport.Post",
            "fl_lightning.deploy.transport.Message",
            "fl_lightning.deploy.transport.InMemoryTransport",
            "fl_lightning.deploy.at_server.AtServer",
            "fl_lightning.deploy.site.AtSite",
        ],
    ),
    "tools": (
        "Finished runs, tests, measuring",
        [
            "fl_lightning.lab.analysis.results.Run",
            "fl_lightning.testing.check_method",
            "fl_lightning.testing.tiny_run",
            "fl_lightning.sampling.generator",
            "fl_lightning.metrics.higher_is_better",
            "fl_lightning.evaluation.evaluator.Evaluator",
            "fl_lightning.evaluation.evaluator.samples_of",
            "fl_lightning.evaluation.measurement.Measurement",
        ],
    ),
}

GROUPS = {
    "": "What a run or a sweep begins with.",
    "system": "Simulated devices: after a method.",
    "method": "Methods: after a data config; each sets every key that belongs to methods.",
    "data": "Data, each with a small network that fits.",
    "recipe/flsimulator": "FL-Simulator's runs, each whole. `ri` is an addition to one.",
    "recipe/pfllib": "PFLlib's run; a method after it replaces FedAvg.",
    "recipe/flowertune": "FlowerTune's four tasks; three of them are additions to `general`.",
    "split": "Other tools' splits: after a data config.",
    "model": "Networks, for any data.",
    "trainer": "Machines.",
    "logger": "Trackers.",
    "debug": "Runs of seconds, to look at what goes on.",
}


def entry(name: str) -> str:
    """The directive that documents one public name."""
    module, _, last = name.rpartition(".")
    kind = "autoclass" if isinstance(getattr(importlib.import_module(module), last), type) else ""
    members = "\n   :members:" if name in WITH_MEMBERS else ""
    return f".. {kind or 'autofunction'}:: {name}{members}\n"


def reference(title: str, names: str | list[str]) -> str:
    """A page of the reference, in reStructuredText."""
    if isinstance(names, str):
        module = importlib.import_module(names)
        core = [] if names == "fl_lightning" else importlib.import_module("fl_lightning").__all__
        names = [f"{names}.{name}" for name in module.__all__ if name not in core]
    sections = [f"{title}\n{'=' * len(title)}\n"]
    for name in names:
        last = name.rpartition(".")[2]
        sections.append(f"{last}\n{'-' * len(last)}\n\n{entry(name)}")
    return "\n".join(sections)


def first_comment(path: Path) -> str:
    line = path.read_text("utf-8").splitlines()[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""


def configs_of(group: str, says: str) -> str:
    """A page of one group of configs, each with its whole text; "": those without a group."""
    prefix = f"{group}/" if group else ""
    title = prefix or "base, central, …"
    parts = [f"# {title}\n\n{says} Each is given by its name: `-c {prefix}NAME`.\n"]
    for path in sorted((ROOT / "configs" / group).glob("*.yaml")):
        if not path.name.endswith(".claims.yaml"):
            text = path.read_text("utf-8").rstrip()
            parts.append(f"## {prefix}{path.stem}\n\n```yaml\n{text}\n```\n")
    return "\n".join(parts)


def experiments() -> str:
    """The names of the experiments, and what each says of itself."""
    parts = [
        "# experiment/\n\nThe settings of three papers; [what they are](../studies/experiments.md)."
    ]
    for paper in sorted((ROOT / "configs/experiment").iterdir()):
        parts.append(f"\n## {paper.name}\n\n| config | |\n|---|---|")
        for path in sorted(paper.rglob("*.yaml")):
            if not path.name.endswith(".claims.yaml"):
                name = path.relative_to(ROOT / "configs").with_suffix("").as_posix()
                said = first_comment(path).replace("|", "\\|").replace("*", "\\*")
                parts.append(f"| `{name}` | {said} |")
    return "\n".join(parts) + "\n"


def study(path: Path) -> str:
    """A page of studies/, which the site has in generated/studies/."""
    text = path.read_text("utf-8").replace("](../docs/", "](../../")
    return re.sub(r"(!\[[^]]*\]\()(?!https?:)", r"\1../../../studies/", text)


# A source that pages link to, and the page that the site makes of it. Without the site the link
# leads to the source.
MADE_FROM = {
    "examples/README.rst": "gallery/index.rst",
    "fl_lightning/callback.py": "api/core.rst",
    "fl_lightning/deploy/what_leaves.py": "what_leaves.md",
    "studies/": "studies/",
}


def link_generated(app: Any, page: str, source: list[str]) -> None:
    """Lead links to sources to the pages that the site makes of them."""
    if not page.startswith("generated/"):
        for path, made in MADE_FROM.items():
            to_it = rf"\]\(((?:\.\./)*)\.\./{re.escape(path)}"
            source[0] = re.sub(to_it, rf"](\1generated/{made}", source[0])


def write(path: Path, text: str) -> None:
    """Write what changed alone, so that a second build reads little."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def write_pages(app: Any) -> None:
    folder = Path(app.srcdir, "generated")
    for page, (title, names) in PAGES.items():
        write(folder / "api" / f"{page}.rst", reference(title, names))
    for group, says in GROUPS.items():
        write(folder / "configs" / f"{group or 'base'}.md", configs_of(group, says))
    write(folder / "configs" / "experiment.md", experiments())
    write(folder / "what_leaves.md", f"# What leaves a site\n\n{what_leaves.listed()}\n")
    for path in sorted((ROOT / "studies").glob("*.md")):
        write(folder / "studies" / path.name, study(path))


def keep_colons(app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """After napoleon, which takes what stands before an attribute's colon for its type."""
    types = [line for line in lines if line.startswith(":type: ")]
    if what in ("attribute", "property") and types:
        lines.remove(types[0])
        lines[0] = f"{types[0].removeprefix(':type: ')}: {lines[0]}"


def own_signature(
    app: Any, what: str, name: str, of: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str, Any] | None:
    """What a callback's ``__init__`` takes; autodoc looks at the base class's ``__new__`` first."""
    if what != "class" or not issubclass(of, FederatedCallback):
        return None
    if of.__init__ is object.__init__:
        return "()", returns
    return stringify_signature(signature_of(of.__init__, bound_method=True), False), returns


def setup(app: Any) -> dict[str, Any]:
    app.connect("builder-inited", write_pages)
    app.connect("source-read", link_generated)
    app.connect("autodoc-process-signature", own_signature)
    app.connect("autodoc-process-docstring", keep_colons, priority=900)
    return {"parallel_read_safe": True}
