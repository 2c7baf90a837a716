"""``fl-lightning cite RUN``: BibTeX of a run's methods and data, from its config."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from fl_lightning.introspection.papers import Paper, declared
from fl_lightning.lab.cli.arguments import ArgumentParser
from fl_lightning.lab.cli.compose import as_list, as_node, class_name, config_of_run, read

DESCRIPTION = """Print BibTeX of the methods and the data of a run, and of this program."""

# The same text as CITATION.cff, which an installed package does not have.
_OURS = """\
@software{{fl_lightning,
  author = {{{{The fl-lightning developers}}}},
  title = {{fl-lightning: federated-learning research inside {{PyTorch Lightning}}}},
  version = {{{version}}},
}}"""

# Classes that need no reference.
_PLAIN = ("SGD", "IID")


def main(argv: Sequence[str]) -> int:
    """Print the references of the run that ``argv`` names.

    Raises:
        UserError: it is not a run's folder.
    """
    parser = ArgumentParser("cite", DESCRIPTION)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    run: Path = parser.parse_args(list(argv)).run
    print(cited(read(config_of_run("cite", run))))
    return 0


def cited(config: Mapping[str, Any]) -> str:
    """Return the BibTeX of a run with this config; a comment names each class without a known
    reference.

    >>> print(cited({"data": {"class_path": "mine.Data"}}).splitlines()[0])
    % Data: no reference is known here
    """
    unknown = []
    methods = {class_name(method) for method in as_list(config.get("method"))}
    model = config.get("model") or {}
    keys = ["mcmahan2017fedavg", *_of_server_momentum(model, methods)]
    # FedAvg on adapters is FedIT.
    if not methods and as_node(model.get("learner"))["init_args"].get("lora"):
        keys.append("zhang2024fedit")
    papers = declared("paper")
    for part in _parts(config):
        name, node = class_name(part), as_node(part)
        paper: Paper = papers.get(name, Paper())
        found = paper.cited(node["init_args"], methods)
        keys += found
        # Packaged classes without a paper only measure or simulate.
        others = name in papers or not str(node.get("class_path")).startswith("fl_lightning.")
        if not found and name not in _PLAIN and others:
            unknown.append(f"% {name}: no reference is known here")
    entries = references()
    blocks = [entries[key] for key in dict.fromkeys(keys)]
    blocks.append(_OURS.format(version=version("fl-lightning")))
    return "\n\n".join(filter(None, ["\n".join(dict.fromkeys(unknown)), *blocks]))


def references() -> dict[str, str]:
    """Return every entry of references.bib by its key."""
    text = files("fl_lightning.lab.cli").joinpath("references.bib").read_text("utf-8")
    blocks = text.strip().split("\n\n")
    return {re.sub(r"@\w+\{([^,]+),.*", r"\1", block, flags=re.S): block for block in blocks}


def _parts(config: Mapping[str, Any]) -> Iterator[Any]:
    """Return the classes, with their arguments, that may implement a paper."""
    model = config.get("model") or {}
    if asynchronous := model.get("asynchronous"):
        given = asynchronous.get("init_args") or asynchronous
        yield {"class_path": "Buffered", "init_args": given}
    yield from as_list(config.get("method"))
    data = config.get("data")
    partition = as_node(data)["init_args"].get("partition")
    for part in (model.get("server_optimizer"), data, partition):
        if part:
            yield part


def _of_server_momentum(model: Mapping[str, Any], methods: Collection[str]) -> list[str]:
    """Return the papers about momentum at the server, for which this package has no class.

    It is FedAvgM's. Nesterov's momentum is DiLoCo if clients use AdamW, and MuLoCo if they use
    Muon.
    """
    optimizer = model.get("server_optimizer") or {}
    given = as_node(optimizer)["init_args"]
    if class_name(optimizer) != "SGD" or not given.get("momentum"):
        return []
    if not given.get("nesterov"):
        return ["hsu2019measuring"]
    if "MuonDirection" in methods:
        return ["douillard2023diloco", "therien2025muloco"]
    of_clients = class_name(model.get("client_optimizer") or {})
    return ["douillard2023diloco"] if of_clients == "AdamW" else []
