"""``fl-lightning cite RUN``: BibTeX of what a run is made of, from its config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from yaml import YAMLError

from fl_lightning.cli.arguments import ArgumentParser
from fl_lightning.cli.compose import as_list, class_name, is_file, parse_yaml
from fl_lightning.errors import UserError

DESCRIPTION = """Print BibTeX of the methods and the data of a run, and of this program."""

# The same as CITATION.cff, which is not installed.
_OURS = """\
@software{{fl_lightning,
  author = {{{{The fl-lightning developers}}}},
  title = {{fl-lightning: federated-learning research inside {{PyTorch Lightning}}}},
  version = {{{version}}},
}}"""

# Class → the papers' keys in references.bib.
PAPERS: dict[str, tuple[str, ...]] = {
    "AlternatingHead": ("collins2021fedrep",),
    "ClientMomentum": ("xu2021fedcm",),
    "ClusteredModels": ("ghosh2020ifca",),
    "ControlVariates": ("karimireddy2020scaffold",),
    "DifferentialPrivacy": ("mcmahan2018dp",),
    "DynamicRegularization": ("acar2021feddyn",),
    "ErrorFeedback21": ("richtarik2021ef21",),
    "ExtrapolatedStep": ("jhunjhunwala2023fedexp",),
    "GlobalSharpnessAwareMinimization": ("sun2023fedsmoo",),
    "LocallyEstimatedPerturbation": ("fan2024fedlesam",),
    "LogitCalibration": ("zhang2022fedlc",),
    "LowRankUpdate": ("vogels2019powersgd",),
    "MixedAscent": ("sun2023fedspeed",),
    "ModelContrast": ("li2021moon",),
    "MoreauEnvelope": ("dinh2020pfedme",),
    "NormalizedAveraging": ("wang2020fednova",),
    "NotTrueDistillation": ("lee2022fedntd",),
    "PowerOfChoice": ("cho2022power",),
    "ProximalPersonalModel": ("li2021ditto",),
    "ProximalTerm": ("li2020fedprox",),
    "QuantizedBroadcast": ("alistarh2017qsgd",),
    "QuantizedUpdate": ("alistarh2017qsgd", "reisizadeh2020fedpaq"),
    "RandomK": ("stich2018sparsified",),
    "RandomEpochs": ("wang2020fednova",),
    "RandomSkips": ("mishchenko2022proxskip",),
    "RelaxedInitialization": ("sun2023fedinit",),
    "SharpnessAwareMinimization": ("qu2022fedsam",),
    "SignUpdate": ("karimireddy2019error",),
    "TopKCompression": ("stich2018sparsified",),
    "FedAdam": ("reddi2021adaptive",),
    "FedYogi": ("reddi2021adaptive",),
    "FedAdagrad": ("reddi2021adaptive",),
    "Digits": ("alpaydin1998digits",),
    "MNIST": ("lecun1998mnist",),
    "FashionMNIST": ("xiao2017fashion",),
    "CIFAR10": ("krizhevsky2009cifar",),
    "CIFAR100": ("krizhevsky2009cifar",),
    "SVHN": ("netzer2011svhn",),
    "HumanActivity": ("anguita2013har",),
    "TextClassification": ("williams2018multinli",),
    "Dirichlet": ("hsu2019measuring",),
}
# Classes that are a method of its own together → its paper.
TOGETHER: dict[tuple[str, str], str] = {
    ("ControlVariates", "DynamicRegularization"): "gao2022feddc",
    ("ControlVariates", "SharpnessAwareMinimization"): "dai2023fedgamma",
}
# Class → an argument, whose value says which.
BY_ARGUMENT: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "RobustAggregation": (
        "rule",
        {
            "median": ("yin2018byzantine",),
            "trimmed_mean": ("yin2018byzantine",),
            "krum": ("blanchard2017krum",),
            "multi_krum": ("blanchard2017krum",),
            "geometric_median": ("pillutla2022rfa",),
        },
    ),
    "ByzantineClients": (
        "attack",
        {
            "sign_flip": ("blanchard2017krum",),
            "noise": ("blanchard2017krum",),
            "label_flip": ("tolpegin2020poisoning",),
            "alie": ("baruch2019alie",),
        },
    ),
}
# What needs no reference.
_PLAIN = ("SGD", "IID")


def main(argv: Sequence[str]) -> int:
    """Print the references of the run that ``argv`` names.

    Raises:
        UserError: it is no run's folder.
    """
    parser = ArgumentParser("cite", DESCRIPTION)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    run: Path = parser.parse_args(list(argv)).run
    if not is_file(run / "config.yaml"):
        raise UserError(f"cite {run}: not a run's folder (it has no config.yaml).")
    try:
        config = parse_yaml((run / "config.yaml").read_text(encoding="utf-8"))
        text = cited(config if isinstance(config, dict) else {})
    # A file that is no config fails in ways of its own: as text, as YAML, or in what it holds.
    except (YAMLError, UnicodeDecodeError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"cite {run}: config.yaml is not that of a run ({reason}).") from None
    print(text)
    return 0


def cited(config: Mapping[str, Any]) -> str:
    """The BibTeX of a run with this config; a line says for what none is known.

    >>> print(cited({"data": {"class_path": "mine.Data"}}).splitlines()[0])
    % Data: no reference is known here
    """
    keys = ["mcmahan2017fedavg", *_of_the_whole(config)]
    unknown = []
    for part in _parts(config):
        found = _keys(part)
        keys += found
        if not found and class_name(part) not in _PLAIN:
            unknown.append(f"% {class_name(part)}: no reference is known here")
    entries = references()
    blocks = [entries[key] for key in dict.fromkeys(keys)]
    lines = "\n".join(dict.fromkeys(unknown))
    return "\n\n".join(
        filter(None, [lines, *blocks, _OURS.format(version=version("fl-lightning"))])
    )


def _of_the_whole(config: Mapping[str, Any]) -> list[str]:
    """The papers of what several parts are together, and of how the server waits for clients."""
    methods = {class_name(method) for method in as_list(config.get("method"))}
    keys = [paper for classes, paper in TOGETHER.items() if methods.issuperset(classes)]
    asynchronous = (config.get("model") or {}).get("asynchronous")
    if asynchronous:
        mixing = (asynchronous.get("init_args") or asynchronous).get("mixing")
        keys.append("nguyen2022fedbuff" if mixing is None else "xie2019fedasync")
    return keys


def references() -> dict[str, str]:
    """Every entry of references.bib by its key."""
    text = files("fl_lightning.cli").joinpath("references.bib").read_text("utf-8")
    blocks = text.strip().split("\n\n")
    return {re.sub(r"@\w+\{([^,]+),.*", r"\1", block, flags=re.S): block for block in blocks}


def _parts(config: Mapping[str, Any]) -> Iterator[Any]:
    """The classes, with their arguments, that a paper may have been written about."""
    for method in as_list(config.get("method")):
        if _keys(method) or _is_method(method):
            yield method
    model = config.get("model") or {}
    data = config.get("data") or {}
    arguments = data.get("init_args") or {} if isinstance(data, dict) else {}
    for part in (model.get("server_optimizer"), data, arguments.get("partition")):
        if part:
            yield part


def _is_method(method: Any) -> bool:
    """Whether a run is named after a callback, which its class says."""
    # It imports torch, so only what has no reference is asked.
    from fl_lightning.cli.method_options import method_class

    try:
        return method_class(method).is_method()
    except UserError:
        return True


def _keys(part: Any) -> tuple[str, ...]:
    name = class_name(part)
    arguments = part.get("init_args") or {} if isinstance(part, dict) else {}
    if name == "PartialAveraging":
        periods = arguments.get("periods") or {"": arguments.get("period")}
        if "never" not in periods.values():
            return ("gholami2024fedals",)
        # Of parts that are never averaged, these two have a paper.
        known = {"norms": "li2021fedbn", "last": "arivazhagan2019fedper"}
        return tuple(known[group] for group in periods if len(periods) == 1 and group in known)
    if name in BY_ARGUMENT:
        argument, papers = BY_ARGUMENT[name]
        found = papers.get(arguments.get(argument) or next(iter(papers)), ())
        return (*found, "allouah2023mixing") if arguments.get("mixing") else found
    return PAPERS.get(name, ())
