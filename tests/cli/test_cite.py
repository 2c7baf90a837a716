"""``fl-lightning cite RUN``: references of what ran."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import fl_lightning.callbacks
import fl_lightning.datamodules
from fl_lightning import FederatedCallback
from fl_lightning.__main__ import main
from fl_lightning.introspection.papers import declared
from fl_lightning.lab.cli.cite_command import cited, references
from fl_lightning.lab.cli.compose import packaged, read

ROOT = Path(__file__).parents[2]


def keys(text: str) -> list[str]:
    return re.findall(r"^@\w+\{([^,]+),", text, re.M)


def of_method(name: str) -> list[str]:
    """The papers of the packaged method ``name``, on the digits, without FedAvg's and ours."""
    text = cited({**read("data/digits"), **read(f"method/{name}")})
    assert "no reference" not in text
    first, *middle, last = keys(text)
    assert (first, last) == ("mcmahan2017fedavg", "fl_lightning")
    assert middle.pop() == "alpaydin1998digits"
    return middle


PACKAGED = {
    "fedavg": "",
    "fedsmoo": "acar2021feddyn sun2023fedsmoo",
    "fedadam": "reddi2021adaptive",
    "muloco": "douillard2023diloco jordan2024muon therien2025muloco",
    "fedper": "arivazhagan2019fedper",
    "rolora": "chen2025rolora",
    "feddc": "acar2021feddyn gao2022feddc karimireddy2020scaffold",
    "fedgamma": "dai2023fedgamma karimireddy2020scaffold qu2022fedsam",
    "fedbuff": "nguyen2022fedbuff",
    "fedasync": "li2020fedprox xie2019fedasync",
    "multi_krum": "blanchard2017krum",
}


@pytest.mark.parametrize("name", PACKAGED)
def test_what_a_packaged_method_cites(name: str) -> None:
    assert sorted(of_method(name)) == PACKAGED[name].split()


def test_fedavg_on_adapters_cites_fedit() -> None:
    learner = {"class_path": "CausalLanguageModel", "init_args": {"lora": {"r": 8}}}
    assert "zhang2024fedit" in keys(cited({"model": {"learner": learner}}))
    with_method = {"model": {"learner": learner}, "method": [{"class_path": "StackedAdapters"}]}
    assert "zhang2024fedit" not in keys(cited(with_method))


def test_every_method_and_data_set_of_ours_has_a_reference_that_its_file_names() -> None:
    # As read from the source, and as Python has it.
    known = declared("paper")
    for name in fl_lightning.callbacks.__all__:
        cls = getattr(fl_lightning.callbacks, name)
        if issubclass(cls, FederatedCallback) and cls.title and cls.is_method():
            assert vars(known[name]).keys() == vars(cls.paper).keys(), name
            assert known[name].keys == cls.paper.keys and (cls.paper.keys or cls.paper.by), name
    entries = references()
    assert all(entry.endswith("\n}") for entry in entries.values())
    # The number of each preprint stands in the file of its method, where it has one.
    sources = " ".join(path.read_text() for path in (ROOT / "callbacks").rglob("*.py"))
    for name, paper in known.items():
        assert {*paper.keys, *paper.beside.values()} <= entries.keys(), name
        if name in fl_lightning.callbacks.__all__:
            for key in paper.keys:
                number = re.search(r"(?:eprint|url) = \{([^}]+)\}", entries[key])
                assert number and number[1] in sources, key


def test_what_classes_declare_is_read_from_their_source_as_python_has_it() -> None:
    with_test = declared("has_test_set")
    for name in fl_lightning.datamodules.__all__:
        cls = getattr(fl_lightning.datamodules, name)
        assert with_test.get(name, False) == getattr(cls, "has_test_set", False), name
    assert {"CIFAR100", "FashionMNIST", "Digits"} <= with_test.keys()
    assert declared("paper")["CIFAR100"].keys == ("krizhevsky2009cifar",)


def robust(**given: Any) -> dict[str, Any]:
    return {"class_path": "RobustAggregation", "init_args": given}


def partial(**given: Any) -> dict[str, Any]:
    return {"class_path": "PartialAveraging", "init_args": given}


CITED: list[tuple[dict[str, Any], str]] = [  # a method → its papers, or what is said
    (robust(rule="krum"), "blanchard2017krum"),
    (robust(mixing=True), "yin2018byzantine allouah2023mixing"),
    (robust(rule="unheard of"), "% RobustAggregation: no reference"),
    (partial(periods={"*lora_B*": "never"}), "guo2025fedsalora"),
    (partial(periods={"last": "never"}), "arivazhagan2019fedper"),
    (partial(period=5), "gholami2024fedals"),
    (partial(period="never"), "% PartialAveraging: no reference"),
    # What only measures or simulates needs none; a method is one whatever its name ends in.
    ({"class_path": "fl_lightning.callbacks.DivergenceLogger"}, ""),
    ({"class_path": "fl_lightning.systems.SystemHeterogeneity"}, ""),
    ({"class_path": "mine.MyLogger"}, "% MyLogger: no reference"),
]


@pytest.mark.parametrize(("method", "papers"), CITED)
def test_what_a_method_cites_by_its_settings(method: dict[str, Any], papers: str) -> None:
    text = cited({"method": [method]})
    if papers.startswith("%"):
        assert papers in text
    else:
        assert keys(text)[1:-1] == papers.split() and "no reference" not in text


def test_a_data_config_cites_its_data() -> None:
    of_users = ("FromTable", "FromLEAF", "FromHDF5", "FromFolders", "FromPFLlib")
    of_users += ("FromHuggingFace", "InstructionTuning")  # files of a user's own
    for name in packaged():
        if name.startswith("data/") and name != "data/text":
            config = read(name)
            if not config["data"]["class_path"].endswith(of_users):
                assert "no reference" not in cited(config), name


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**read("data/cifar10"), "method": [{"class_path": "mine.MyMethod"}]}
    config["data"]["init_args"]["partition"] = {"class_path": "x.Dirichlet", "init_args": {}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["cite", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("% MyMethod: no reference is known here\n")
    expected = ["mcmahan2017fedavg", "krizhevsky2009cifar", "hsu2019measuring", "fl_lightning"]
    assert keys(said) == expected
    ours = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    plain = said.replace("{", "").replace("}", "")
    assert ours["title"] in plain and ours["authors"][0]["name"] in plain
    assert f"version = {ours['version']}" in plain
    assert main(["cite", str(tmp_path / "none")]) == 2
    assert "not a run's folder" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"method: [", b"\xff\xfe", b"- x\n"])
def test_a_config_that_is_none_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    assert main(["cite", str(tmp_path)]) == 2
    assert "config.yaml" in capsys.readouterr().err
