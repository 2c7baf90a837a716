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


@pytest.mark.parametrize(
    ("name", "papers"),
    [
        ("fedavg", []),
        ("fedsmoo", ["sun2023fedsmoo", "acar2021feddyn"]),
        ("fedadam", ["reddi2021adaptive"]),
        ("muloco", ["douillard2023diloco", "jordan2024muon", "therien2025muloco"]),
        ("fedper", ["arivazhagan2019fedper"]),
        ("fedbn", ["li2021fedbn"]),
        ("rolora", ["chen2025rolora"]),
        ("feddc", ["karimireddy2020scaffold", "acar2021feddyn", "gao2022feddc"]),
        ("fedgamma", ["karimireddy2020scaffold", "qu2022fedsam", "dai2023fedgamma"]),
        ("fedlesam_s", ["karimireddy2020scaffold", "fan2024fedlesam"]),
        ("fedbuff", ["nguyen2022fedbuff"]),
        ("fedasync", ["li2020fedprox", "xie2019fedasync"]),
        ("multi_krum", ["blanchard2017krum"]),
    ],
)
def test_what_a_packaged_method_cites(name: str, papers: list[str]) -> None:
    assert sorted(of_method(name)) == sorted(papers)


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
                number = re.search(r"eprint = \{([\d.]+)\}", entries[key])
                assert number and number[1] in sources, key


def test_what_classes_declare_is_read_from_their_source_as_python_has_it() -> None:
    with_test = declared("has_test_set")
    for name in fl_lightning.datamodules.__all__:
        cls = getattr(fl_lightning.datamodules, name)
        assert with_test.get(name, False) == getattr(cls, "has_test_set", False), name
    assert {"CIFAR100", "FashionMNIST", "Digits"} <= with_test.keys()
    assert declared("paper")["CIFAR100"].keys == ("krizhevsky2009cifar",)


@pytest.mark.parametrize("rule", ["krum", "geometric_median", None, "unheard of"])
def test_a_rule_cites_its_own_paper(rule: str | None) -> None:
    arguments = {"mixing": True} if rule is None else {"rule": rule}
    method = {"class_path": "RobustAggregation", "init_args": arguments}
    found = keys(cited({"method": [method]}))[1:-1]
    expected = {
        "krum": ["blanchard2017krum"],
        "geometric_median": ["pillutla2022rfa"],
        "unheard of": [],
    }
    assert found == expected.get(str(rule), ["yin2018byzantine", "allouah2023mixing"])


def test_a_data_config_cites_its_data() -> None:
    for name in packaged():
        # These read files of a user's own.
        of_users = (
            "FromTable",
            "FromLEAF",
            "FromHDF5",
            "FromFolders",
            "FromPFLlib",
            "FromHuggingFace",
            "InstructionTuning",
        )
        if not name.startswith("data/") or name == "data/text":
            continue
        if not read(name)["data"]["class_path"].endswith(of_users):
            assert "no reference" not in cited(read(name)), name


@pytest.mark.parametrize(
    "name",
    ["callbacks.DivergenceLogger", "callbacks.PerClientEvaluation", "systems.SystemHeterogeneity"],
)
def test_what_only_measures_or_simulates_needs_no_reference(name: str) -> None:
    assert "no reference" not in cited({"method": [{"class_path": f"fl_lightning.{name}"}]})


def test_a_method_is_one_whatever_its_name_ends_in() -> None:
    assert "% MyLogger: no reference" in cited({"method": [{"class_path": "mine.MyLogger"}]})


@pytest.mark.parametrize(
    "arguments, paper",
    [
        ({"periods": {"*lora_B*": "never"}}, "guo2025fedsalora"),
        ({"period": "never"}, None),
        ({"periods": {"last": "never", "norms": "never"}}, None),
        ({"periods": {"last": "never"}}, "arivazhagan2019fedper"),
        ({"period": 5}, "gholami2024fedals"),
    ],
)
def test_partial_averaging_is_the_method_that_its_settings_are(
    arguments: dict[str, Any], paper: str | None
) -> None:
    text = cited({"method": [{"class_path": "PartialAveraging", "init_args": arguments}]})
    assert ("% PartialAveraging: no reference" in text) == (paper is None)
    assert paper is None or paper in text


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


@pytest.mark.parametrize(
    "content",
    [
        b"method: [",
        b"\xff\xfe",
        b"model: x\n",
        b"method: [{class_path: x.RobustAggregation, init_args: {rule: [1]}}]\n",
    ],
)
def test_a_config_that_is_none_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    assert main(["cite", str(tmp_path)]) == 2
    assert "this config.yaml does not belong to a run (" in capsys.readouterr().err
