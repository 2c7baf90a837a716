"""Texts as federated data: no token is lost, no client sees another's part, what cannot be read is
named."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning.datamodules import IID, Grouped, LanguageModelling, TextClassification
from fl_lightning.datamodules.batches.biases import ClientBias
from fl_lightning.errors import UserError
from tests.helpers.texts import CLASSES, GENRES, multinli_files, sentence_rows, text_file


def decoded(tokens: Tensor) -> str:
    """By ByT5's numbers: bytes from 3, 1 the end of a text, here "|"; -1 is nothing."""
    return "".join("|" if t == 1 else chr(t - 3) for t in tokens.tolist() if t != -1)


def test_windows_are_the_text_each_client_a_part_of_it_and_the_end_is_the_test_set(
    tmp_path: Path,
) -> None:
    text = text_file(tmp_path).read_text()
    data = LanguageModelling(tmp_path, length=20, test_fraction=0.25, num_clients=3, seed=0)
    data.setup()
    cut = len(text) - round(0.25 * len(text))
    parts, start = [], 0
    for client in range(3):
        ((x, y),) = data._train.batches(data.client_indices(client), 10**6)
        assert x.shape[1] == 21 and (y == -1).all()
        parts.append("".join(decoded(window[:-1]) for window in x) + decoded(x[-1, -1:]))
        assert text[start : start + len(parts[-1])] == parts[-1], (
            "contiguous, from where the last client's part ended"
        )
        start += len(parts[-1]) - 1
    assert cut - 20 <= start + 1 <= cut and max(data.client_sizes()) - min(data.client_sizes()) <= 1
    assert data.test_set is not None
    ((x, _),) = data.test_set.batches(np.arange(len(data.test_set)), 10**6)
    assert (
        text[cut:].startswith("".join(decoded(window[:-1]) for window in x))
        and len(x) == (len(text) - cut - 1) // 20
    )


def test_bytes_of_other_letters(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("αβγ" * 20, encoding="utf-8")
    data = LanguageModelling(tmp_path, length=5, test_fraction=0.0, num_clients=1, seed=0)
    batch, _ = next(data.client_batches(0, 0, 1))
    assert data.test_set is None and data.vocabulary == 259 and int(batch.max()) < 259
    whole = sorted(set((np.frombuffer("αβγ".encode(), np.uint8) + 3).tolist()))
    assert sorted(set(batch.flatten().tolist())) == whole


def test_tinyshakespeare(real_data: Path) -> None:
    if not (real_data / "tinyshakespeare/input.txt").is_file():
        pytest.skip(f"no tinyshakespeare/input.txt in {real_data}; FL_LIGHTNING_DATA says where")
    data = LanguageModelling(real_data / "tinyshakespeare", seed=0)
    x, _ = next(iter(data.full_batches(0)))[0]
    assert decoded(x[0]).startswith("First Citizen:\nBefore we proceed any further")
    assert data.client_sizes().tolist() == [3137] * 5, (
        "of 1,115,394 bytes nine tenths, in windows of 64"
    )


def test_genres_are_clients_and_texts_without_a_label_are_left_out(tmp_path: Path) -> None:
    data = TextClassification(multinli_files(tmp_path), length=64, seed=0)
    data.setup()
    rows = [row for row in sentence_rows(110) if row["gold_label"] != "-"]
    assert data.num_clients == 5 and data.num_classes == 3 and data.client_names == list(GENRES)
    assert data.card()["clients' names"] == ", ".join(GENRES)
    for client, genre in enumerate(GENRES):
        own = [row for row in rows if row["genre"] == genre]
        ((x, y),) = data._train.batches(data.client_indices(client), 10**6)
        assert [decoded(text) for text in x] == [
            f"{row['sentence1']}|{row['sentence2']}|" for row in own
        ]
        assert [CLASSES[k] for k in y] == [row["gold_label"] for row in own]
    assert len(data.val_dataloader()) == 1


def test_other_columns_a_table_and_an_order_of_classes(tmp_path: Path) -> None:
    rows = sentence_rows(30)
    plain: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}
    for name, form in (("a.csv", {}), ("b.tsv", plain)):
        with open(tmp_path / name, "w", newline="") as file:
            table = csv.DictWriter(file, ["kind", "review"], **form)
            table.writeheader()
            table.writerows(
                {"kind": row["gold_label"], "review": row["sentence1"] + ', "so" he said'}
                for row in rows
            )
    of: Any = {
        "text": "review",
        "label": "kind",
        "group": None,
        "num_clients": 3,
        "length": 8,
        "seed": 0,
    }
    data = TextClassification(tmp_path, "a.csv", "b.tsv", classes=["neutral", *CLASSES[:2]], **of)
    data.setup()
    assert isinstance(data.partition, IID) and data.client_sizes().tolist() == [10, 9, 9]
    x, y = data.one_batch(0, 1)
    assert x.shape == (1, 8) and data.test_set is not None
    ((x, y), (x_test, y_test)) = (
        next(iter(s.batches(np.arange(28), 28))) for s in (data._train, data.test_set)
    )
    assert torch.equal(x, x_test) and torch.equal(y, y_test), "a comma or a tab: the same"
    assert decoded(x[0]) == rows[0]["sentence1"][:7] + "|" and y[:3].tolist() == [1, 2, 0]


def test_of_a_pair_the_longer_text_is_cut(tmp_path: Path) -> None:
    from fl_lightning.datamodules.formats.tokens import Bytes

    texts = [("a" * 20, "bcd"), ("ab", "c" * 20), ("a" * 20, "b" * 20), ("a", "b")]
    cut = [decoded(torch.tensor(ids)) for ids in Bytes().pairs(texts, 10)]
    assert cut == ["aaaaa|bcd|", "ab|cccccc|", "aaaa|bbbb|", "a|b|"]


def test_a_tokenizer_in_a_local_folder(tmp_path: Path) -> None:
    pytest.importorskip(
        "transformers", reason="a tokenizer needs transformers: pip install 'fl-lightning[text]'"
    )
    from tests.helpers.texts import tokenizer_folder

    folder = tokenizer_folder(tmp_path / "words")
    multinli_files(tmp_path)
    pairs = TextClassification(tmp_path, tokenizer=folder, length=6, seed=0)
    pairs.setup()
    x, _ = pairs.one_batch(0, 1)
    assert (
        x.shape == (1, 6)
        and (x >= 0).all()
        and pairs.vocabulary is not None
        and int(x.max()) < pairs.vocabulary
    )
    text = text_file(tmp_path).read_text().split()
    words = LanguageModelling(
        tmp_path, tokenizer=folder, length=8, num_clients=1, test_fraction=0.0, seed=0
    )
    (x, _), *_ = [batch for batch, _ in words.full_batches(0)]
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    assert made.convert_ids_to_tokens(x[0].tolist()) == text[:9]


CSV = "s,y,g\na,x,p\nb,z,q\n"


@pytest.mark.parametrize(
    ("name", "text", "given", "words"),
    [
        ("t.csv", CSV, {"train": "other.csv"}, "other.csv', which does not exist"),
        ("t.csv", CSV, {"label": "gold"}, "row 1, has no value in the column 'gold'.* s, y, g"),
        ("t.csv", CSV, {"classes": ["x", "w"]}, "has the class 'z', which is not one of x, w"),
        ("t.csv", CSV, {"classes": ["x", "x"]}, "classes names 'x' twice"),
        ("t.csv", CSV, {"text": ["a", "b", "c"]}, "give one column, or two"),
        ("t.csv", CSV, {"tokenizer": "nowhere"}, "tokenizer is 'nowhere', which is no folder"),
        ("t.csv", CSV, {"download": True}, "you have to bring the texts yourself"),
        ("t.csv", CSV, {"augment": True}, "augment is True, which is for images"),
        ("t.csv", CSV, {"biases": [ClientBias(0.1)]}, "biases is .ClientBias.*for images"),
        ("t.csv", CSV, {"length": 1}, "length is 1: give at least 2 tokens"),
        ("t.csv", "s,y,g\na,x,p\nb,,p\n", {}, "row 2, has no value in the column 'y'"),
        ("t.csv", "s,y,g\na,x,p\nb,x,\n", {}, "row 2, has no value in the column 'g'"),
        ("t.csv", "s,y,g\na,x,p\nb,x ,p\n", {}, "column 'y', has one name in two ways: 'x'"),
        ("t.csv", "s,y,g\na,x,p\nb,x, p\n", {}, "column 'g', has one name in two ways"),
        ("t.csv", "s,s,y,g\na,b,x,p\n", {}, "two columns 's'"),
        ("t.csv", "s,y,g\na,0,p\n\nb,1,2,3\n", {}, "line 4, has another number of cells"),
        (
            "t.csv",
            's,y,g\na,0,p\n"b,1,p\nc,0,p\n',
            {},
            "about line 2, cannot be read .*close each quote",
        ),
        ("t.tsv", "s\ty\tg\na\t0\tp\nb\n", {}, "line 3, has another number of cells than the he"),
        ("t.jsonl", '{"s": "a", "y": "x", "g": "p"}\n{', {}, "line 2, is not JSON"),
        ("t.jsonl", "[1]", {}, "has no records: one JSON object per line"),
        ("t.jsonl", '{"s": "a", "y": 2.0, "g": "p"}', {}, "row 1, has 2.0 in the column 'y'"),
        ("t.jsonl", '{"s": "a", "y": null, "g": "p"}', {}, "row 1, has no value in the column 'y'"),
        ("t.jsonl", '{"s": "a", "y": "-", "g": "p"}', {}, "has no labelled texts"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_place(
    name: str, text: str, given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    options = {"train": name, "test": None, "text": "s", "label": "y", "group": "g", **given}
    with pytest.raises(UserError, match=words) as error:
        TextClassification(tmp_path, seed=0, **options).setup()
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"length": 10**6}, r"fewer than a window of data\.length 1000000"),
        ({"length": 0}, "length=0"),
        ({"test_fraction": 1.0}, "test_fraction=1.0"),
        ({"file": "other.txt"}, r"other\.txt', which does not exist"),
        ({"file": "latin.txt"}, "cannot be read as UTF-8"),
        ({"download": True}, "you have to bring the texts yourself"),
    ],
)
def test_a_text_that_cannot_be_cut_is_named(
    tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    text_file(tmp_path)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 100)
    with pytest.raises(UserError, match=says):
        LanguageModelling(tmp_path, seed=0, **arguments).setup()


def test_another_seed_bunches_the_same_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multinli_files(tmp_path)
    data = TextClassification(tmp_path, partition=Grouped(2))
    names = []
    for seed in ("0", "1"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        data.setup()
        names.append(list(data.client_names))
    assert names[0] == names[1] and "+" in names[0][0]


def rows_of(path: Path) -> list[tuple[str, int]]:
    options: dict[str, Any] = {"text": "sentence", "label": "label", "group": None}
    data = TextClassification(path.parent, path.name, None, num_clients=1, **options)
    data.setup()
    own: Any = data.train_set
    return [(decoded(x).rstrip("|"), int(y)) for x, y in zip(own.x, own.y, strict=True)]


def test_a_quote_is_text_in_a_tab_separated_file(tmp_path: Path) -> None:
    """As in GLUE's files, in which a line is a sample."""
    (tmp_path / "t.tsv").write_text('sentence\tlabel\n"a\t0\nb\t1\nc "d\t1\n"e"\t0\n')
    assert rows_of(tmp_path / "t.tsv") == [('"a', 0), ("b", 1), ('c "d', 1), ('"e"', 0)]


def test_long_cells_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    long = "a" * 200_000
    (tmp_path / "t.csv").write_bytes(f'\ufeffsentence,label\n{long},0\n"b, c",1\n'.encode())
    (first, second) = rows_of(tmp_path / "t.csv")
    assert first[0].startswith("aaa") and second == ("b, c", 1)


@pytest.mark.parametrize("name", ["t.csv", "T.CSV"])
def test_classes_and_clients_that_are_numbers_are_in_their_order(name: str, tmp_path: Path) -> None:
    rows = [f"text,{label},{who}" for label, who in ((10, 11), (9, 2), (2, 11), (10, 2))]
    (tmp_path / name).write_text("\n".join(["s,y,who", *rows]) + "\n")
    data = TextClassification(tmp_path, name, None, text="s", label="y", group="who")
    data.setup()
    assert data.class_names == ["2", "9", "10"] and list(data.client_names) == ["2", "11"]
    train: Any = data.train_set
    assert train.y.tolist() == [2, 1, 0, 2]
    assert [data.client_indices(i).tolist() for i in (0, 1)] == [[1, 3], [0, 2]]


def test_half_a_character_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"s": "a\\ud800", "y": "x"}\n')
    options: dict[str, Any] = {"text": "s", "label": "y", "group": None, "num_clients": 1}
    data = TextClassification(tmp_path, "t.jsonl", None, **options)
    data.setup()
    train: Any = data.train_set
    assert decoded(train.x[0]) == "a?|"
