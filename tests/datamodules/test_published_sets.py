"""Tiny-ImageNet, MedMNIST and GLUE, in small sets of their files' layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import FederatedModule, UserError
from fl_lightning.datamodules import GLUE, IID, FromFolders, MedMNIST
from tests.cli.test_reader_configs import medical, tiny_imagenet
from tests.helpers.learners import trainer
from tests.helpers.texts import opt

TINY: dict[str, Any] = {"image_size": 64, "partition": IID(), "num_clients": 3}


def samples(found: Any) -> tuple[Any, Any]:
    """All samples of a set."""
    ((x, y),) = found.batches(np.arange(len(found)), len(found))
    return x, y


def test_tiny_imagenet_has_classes_and_not_domains(tmp_path: Path) -> None:
    tiny_imagenet(tmp_path)
    data = FromFolders(tmp_path, **TINY)
    data.setup()
    assert data.num_clients == 3 and data.client_sizes().sum() == 120
    assert list(data.class_names) == ["n01443537", "n01629819"]
    assert data.val_set is None, "the test pictures have no labels, so val is the test set"
    ((x, y),) = [batch for batch, _ in zip(data.test_dataloader(), range(9), strict=False)]
    assert x.shape == (6, 3, 64, 64) and y.tolist() == [0, 1, 0, 1, 0, 1]
    assert (x[:, 0].mean((1, 2)) > 0.2).tolist() == [False, True] * 3
    for path, given, says in (
        (tmp_path / "train", {}, r"have the classes \[images\].*For Tiny-ImageNet"),
        (tmp_path, {"partition": None}, r"give data\.partition and data\.num_clients"),
    ):
        with pytest.raises(UserError, match=says):
            FromFolders(path, **{**TINY, **given}).setup()


def test_splits_of_folders_with_all_three_parts(tmp_path: Path) -> None:
    from PIL import Image

    for side, count in (("train", 4), ("val", 2), ("test", 3)):
        for name in ("cat", "dog"):
            (tmp_path / side / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8)).save(tmp_path / side / name / f"{i}.png")
    data = FromFolders(tmp_path, partition=IID(), num_clients=2)
    data.setup()
    assert data.train_set is not None and data.val_set is not None and data.test_set is not None
    assert [len(s) for s in (data.train_set, data.val_set, data.test_set)] == [8, 4, 6]


@pytest.mark.parametrize(("shape", "labels"), [((28, 28), 1), ((64, 64, 3), 1), ((28, 28), 14)])
def test_a_file_of_medmnist(tmp_path: Path, shape: tuple[int, ...], labels: int) -> None:
    path = tmp_path / "x.npz"
    medical(path, shape, labels)
    stored = np.load(path)
    data = MedMNIST(path, num_clients=4)
    data.setup()
    channels = 3 if len(shape) == 3 else 1
    assert MedMNIST.shape_of_samples(path=path) == (channels, *shape[:2])
    assert MedMNIST.classes_of_samples(path=path) == (9 if labels == 1 else None)
    for split, found in (("train", data.train_set), ("val", data.val_set), ("test", data.test_set)):
        x, y = samples(found)
        pictures = torch.tensor(stored[f"{split}_images"]).reshape(-1, *shape[:2], channels)
        torch.testing.assert_close(x, (pictures.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
        expected = stored[f"{split}_labels"]
        assert np.array_equal(y.numpy(), expected[:, 0] if labels == 1 else expected)
    assert not data.validates_on_test


def test_other_files_than_medmnists_are_refused(tmp_path: Path) -> None:
    medical(tmp_path / "solid.npz", (28, 28, 28))
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    for name, says in (("solid", "give a 2-d set"), ("other", "cannot be read as a file of MedM")):
        with pytest.raises(UserError, match=says):
            MedMNIST(tmp_path / f"{name}.npz", num_clients=2).setup()


def tsv(path: Path, header: list[str] | None, rows: list[list[Any]]) -> None:
    lines = [*([header] if header else []), *rows]
    path.write_text("\n".join("\t".join(map(str, line)) for line in lines) + "\n")


MNLI = ["index", "promptID", "pairID", "genre", *"abcd", "sentence1", "sentence2", "label1"]
MNLI.append("gold_label")
NAMES = ("entailment", "neutral", "contradiction")


def glue(path: Path, task: str) -> None:
    """A task's files, of six rows to train on and three to test on."""
    for side, count in (("train", 6), ("dev", 3)):
        if task == "cola":
            rows = [["gj04", i % 2, "*" if i % 2 else "", f'"He ran {i}.'] for i in range(count)]
            tsv(path / f"{side}.tsv", None, rows)
        elif task == "mrpc":
            header = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
            tsv(path / f"{side}.tsv", header, [[i % 2, 1, 2, f"a{i}", "b"] for i in range(count)])
        elif task == "qnli":
            rows = [
                [i, f"q{i}?", "s", ("entailment", "not_entailment")[i % 2]] for i in range(count)
            ]
            tsv(path / f"{side}.tsv", ["index", "question", "sentence", "label"], rows)
        else:
            for name in ("train",) if side == "train" else ("dev_matched", "dev_mismatched"):
                rows = [
                    [i, 1, 2, "slate", *["(x)"] * 4, f"p{i}", f"h {name}", "-", NAMES[i % 3]]
                    for i in range(count)
                ]
                tsv(path / f"{name}.tsv", MNLI, rows)


READ = {
    "cola": ('"He ran 1.|', [0, 1, 0, 1, 0, 1]),
    "mrpc": ("a1|b|", [0, 1, 0, 1, 0, 1]),
    "qnli": ("q1?|s|", [0, 1, 0, 1, 0, 1]),
    "mnli": ("p1|h train|", [0, 1, 2, 0, 1, 2]),
}


def text(tokens: Any) -> str:
    return "".join("|" if t == 1 else chr(t - 3) for t in tokens.tolist() if t != -1)


@pytest.mark.parametrize("task", READ)
def test_a_task_of_glue(tmp_path: Path, task: Any) -> None:
    glue(tmp_path, task)
    data = GLUE(tmp_path, task, length=24, num_clients=2)
    data.setup()
    x, y = samples(data.train_set)
    assert (text(x[1]), y.tolist()) == READ[task]
    assert len(samples(data.test_set)[1]) == 3
    if task == "mnli":
        held = [text(samples(side)[0][0]) for side in (data.val_set, data.test_set)]
        assert held == ["p0|h dev_matched|", "p0|h dev_mismatched|"]
    assert GLUE.classes_of_samples(task=task) == max(y) + 1


def test_glue_in_the_form_of_the_library_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    features = datasets.Features({
        "premise": datasets.Value("string"),
        "hypothesis": datasets.Value("string"),
        "label": datasets.ClassLabel(names=list(NAMES)),
        "idx": datasets.Value("int32"),
    })  # fmt: skip

    def rows(side: str, count: int) -> Any:
        labels = [i % 3 if side[:4] != "test" else -1 for i in range(count)]
        columns = {
            "premise": [f"p{i}" for i in range(count)],
            "hypothesis": [f"h {side}"] * count,
            "label": labels,
            "idx": list(range(count)),
        }
        return datasets.Dataset.from_dict(columns, features=features)

    sides = ("train", *(f"{a}_{b}matched" for a in ("validation", "test") for b in ("", "mis")))
    datasets.DatasetDict({side: rows(side, 6) for side in sides}).save_to_disk(tmp_path / "mnli")
    stored = GLUE(tmp_path / "mnli", "mnli", length=32, num_clients=2)
    stored.setup()
    glue(tmp_path, "mnli")
    files = GLUE(tmp_path, "mnli", length=32, num_clients=2)
    files.setup()
    for here, there in zip(samples(stored.train_set), samples(files.train_set), strict=True):
        assert torch.equal(here, there)
    assert text(samples(stored.val_set)[0][0]) == "p0|h validation_matched|"
    assert text(samples(stored.test_set)[0][0]) == "p0|h validation_mismatched|"


@pytest.mark.parametrize(("task", "metric"), [("cola", "mcc"), ("mrpc", "f1")])
def test_a_tasks_own_metric(tmp_path: Path, task: Any, metric: str) -> None:
    pytest.importorskip("transformers", reason="texts need transformers")
    from sklearn.metrics import f1_score, matthews_corrcoef

    from fl_lightning.models import TextClassifier

    glue(tmp_path, task)
    data = GLUE(tmp_path, task, length=24, num_clients=2, eval_batch_size=2)
    torch.manual_seed(1)
    module = FederatedModule(TextClassifier(2, config=opt()), participation="all", local_steps=1)
    run = trainer(1)
    run.fit(module, data)
    x, y = samples(data.test_set)
    guesses = module.export().eval()(x).argmax(1)
    score = {"mcc": matthews_corrcoef, "f1": f1_score}[metric](y, guesses)
    assert float(run.callback_metrics[f"val/{metric}"]) == pytest.approx(score, abs=1e-6)
    assert {"val/mcc", "val/f1"} & set(run.callback_metrics) == {f"val/{metric}"}
