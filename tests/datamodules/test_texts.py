"""Texts, instructions and conversations: which tokens each client has and learns."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning import UserError
from fl_lightning.datamodules import (
    IID,
    Grouped,
    InstructionTuning,
    LanguageModelling,
    TextClassification,
)
from fl_lightning.evaluation.instruction_records import ALPACA, ALPACA_INPUT
from tests.helpers.texts import CLASSES, GENRES, multinli_files, sentence_rows, text_file


def decoded(tokens: Tensor) -> str:
    """By ByT5's numbers: bytes from 3, 1 the end of a text, here "|"; -1 is nothing."""
    return "".join("|" if t == 1 else chr(t - 3) for t in tokens.tolist() if t != -1)


def test_windows_are_each_clients_part_of_the_text_and_the_end_is_tested_on(tmp_path: Path) -> None:
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
    assert text[cut:].startswith("".join(decoded(window[:-1]) for window in x))
    assert len(x) == (len(text) - cut - 1) // 20


def test_bytes_of_other_letters(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("αβγ" * 20, encoding="utf-8")
    data = LanguageModelling(tmp_path, length=5, test_fraction=0.0, num_clients=1, seed=0)
    batch, _ = next(data.client_batches(0, 0, 1))
    assert data.test_set is None and data.vocabulary == 259 and int(batch.max()) < 259
    whole = sorted(set((np.frombuffer("αβγ".encode(), np.uint8) + 3).tolist()))
    assert sorted(set(batch.flatten().tolist())) == whole


def test_genres_are_clients_and_texts_without_a_label_are_left_out(tmp_path: Path) -> None:
    data = TextClassification(multinli_files(tmp_path), length=64, seed=0)
    data.setup()
    rows = [row for row in sentence_rows(110) if row["gold_label"] != "-"]
    assert data.num_clients == 5 and data.num_classes == 3 and data.client_names == list(GENRES)
    assert data.card()["clients' names"] == ", ".join(GENRES)
    for client, genre in enumerate(GENRES):
        own = [row for row in rows if row["genre"] == genre]
        ((x, y),) = data._train.batches(data.client_indices(client), 10**6)
        expected = [f"{row['sentence1']}|{row['sentence2']}|" for row in own]
        assert [decoded(text) for text in x] == expected
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
    of: Any = {"text": "review", "label": "kind", "group": None, "num_clients": 3, "seed": 0}
    data = TextClassification(
        tmp_path, "a.csv", "b.tsv", classes=["neutral", *CLASSES[:2]], length=8, **of
    )
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
    assert x.shape == (1, 6) and (x >= 0).all() and pairs.vocabulary is not None
    assert int(x.max()) < pairs.vocabulary
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
        ("t.csv", CSV, {"train": "other.csv"}, "other.csv', which cannot be read"),
        ("t.csv", CSV, {"label": "gold"}, "row 1, has no value in the column 'gold'.* s, y, g"),
        ("t.csv", CSV, {"classes": ["x", "w"]}, "has the class 'z', which is not one of x, w"),
        ("t.csv", CSV, {"classes": ["x", "x"]}, "classes names 'x' twice"),
        ("t.csv", CSV, {"text": ["a", "b", "c"]}, "give one column, or two"),
        ("t.csv", CSV, {"augment": True}, "augment=True is not accepted"),
        ("t.csv", CSV, {"tokenizer": "nowhere"}, "tokenizer is 'nowhere', where no tokenizer"),
        ("t.csv", CSV, {"length": 1}, "length 1: .* at least 2 tokens"),
        ("t.csv", "s,y,g\na,x,p\nb,,p\n", {}, "row 2, has no value in the column 'y'"),
        ("t.csv", "s,y,g\na,0,p\n\nb,1,2,3\n", {}, "after line 2: the row has another number of"),
        ("t.tsv", "s\ty\tg\na\t0\tp\nb\n", {}, "after line 2: the row has another number of"),
        ("t.csv", "s,s,y,g\na,b,x,p\n", {}, "line 1, names 's' twice"),
        ("t.csv", 's,y,g\na,0,p\n"b,1,p\nc,0,p\n', {}, "after line 2: .* quote has to be closed"),
        ("t.jsonl", '{"s": "a", "y": 2.0, "g": "p"}', {}, "row 1, has 2.0 in the column 'y'"),
        ("t.jsonl", '{"s": "a", "y": "-", "g": "p"}', {}, "data have no samples"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_place(
    name: str, text: str, given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    options = {"train": name, "test": None, "text": "s", "label": "y", "group": "g", **given}
    with pytest.raises(UserError, match=words):
        TextClassification(tmp_path, seed=0, **options).setup()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"length": 10**6}, r"fewer than a window of data\.length 1000000"),
        ({"file": "other.txt"}, r"other\.txt', which cannot be read"),
        ({"file": "latin.txt"}, "cannot be read as UTF-8"),
    ],
)
def test_a_text_that_cannot_be_cut_is_named(
    tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    text_file(tmp_path)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 100)
    with pytest.raises(UserError, match=says):
        LanguageModelling(tmp_path, seed=0, **arguments).setup()


def test_another_seed_bunches_groups_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    multinli_files(tmp_path)
    data = TextClassification(tmp_path, partition=Grouped(2))
    names = []
    for seed in ("0", "1"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        data.setup()
        names.append(list(data.client_names))
    assert names[0] == names[1] and "+" in names[0][0]


def rows_of(path: Path, **given: Any) -> list[tuple[str, int]]:
    options: dict[str, Any] = {"text": "sentence", "label": "label", "group": None, **given}
    data = TextClassification(path.parent, path.name, None, num_clients=1, **options)
    data.setup()
    own: Any = data.train_set
    return [(decoded(x).rstrip("|"), int(y)) for x, y in zip(own.x, own.y, strict=True)]


def test_a_quote_is_text_in_a_tab_separated_file(tmp_path: Path) -> None:
    """As in GLUE's files, in which a line is a sample."""
    (tmp_path / "t.tsv").write_text('sentence\tlabel\n"a\t0\nb\t1\nc "d\t1\n"e"\t0\n')
    assert rows_of(tmp_path / "t.tsv") == [('"a', 0), ("b", 1), ('c "d', 1), ('"e"', 0)]
    (tmp_path / "u.tsv").write_text('sentence\tlabel\n"a\tb"\t0\nb\t1\n')
    assert rows_of(tmp_path / "u.tsv", quotes=True) == [("a\tb", 0), ("b", 1)]


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


RECORDS: list[dict[str, Any]] = [
    {"instruction": "Add 1 to {x}.", "input": "41", "output": "42", "who": "a"},
    {"instruction": "Say hello.", "response": "héllo", "who": "b"},
    {"instruction": "Name it.", "context": "", "answer": "it", "who": "a"},
]


def loaded(folder: Path, records: Any, lines: bool = True, **given: Any) -> InstructionTuning:
    text = "\n".join(map(json.dumps, records)) if lines else json.dumps(records)
    (folder / "train.json").write_text(text)
    data = InstructionTuning(folder, "train.json", **{"num_clients": 1, "batch_size": 8, **given})
    data.setup("fit")
    return data


def learned(data: InstructionTuning, row: int) -> tuple[str, str, bool]:
    """The text of a record, what of it is learned, and whether the last of that is an end."""
    x, y = data.train_set.x[row], data.train_set.y[row]
    assert x.shape == y.shape and bool(((y == x) | (y == -1)).all())
    asked = bytes(int(t) - 3 for t in x[x >= 3]).decode()
    answer = bytes(int(t) - 3 for t in y[y >= 3]).decode()
    return asked, answer, int(y[y >= 0][-1]) == 1


@pytest.mark.parametrize("lines", [True, False])
def test_answers_alone_are_learned(tmp_path: Path, lines: bool) -> None:
    data = loaded(tmp_path, RECORDS, lines)
    prompt = ALPACA_INPUT.replace("{instruction}", "Add 1 to {x}.").replace("{input}", "41")
    assert learned(data, 0) == (prompt + "42", "42", True)
    expected = (ALPACA.replace("{instruction}", "Say hello.") + "héllo", "héllo", True)
    assert learned(data, 1) == expected
    assert learned(data, 2)[1] == "it"


def test_all_tokens_but_the_first(tmp_path: Path) -> None:
    data = loaded(tmp_path, RECORDS, template="Q: {instruction} A: ", response_only=False)
    assert learned(data, 2) == ("Q: Name it. A: it", ": Name it. A: it", True)


def test_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="1 of 3 records have no answer within data.length 12"):
        data = loaded(tmp_path, RECORDS, template="{instruction}{input}", length=12)
    assert len(data.train_set.x) == 2 and data.train_set.x.shape[1] <= 12
    with pytest.raises(UserError, match="has no record with an answer"):
        loaded(tmp_path, RECORDS, length=3)


def test_conversations(tmp_path: Path) -> None:
    said = (("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "Ciao"))
    messages = [{"role": role, "content": content} for role, content in said]
    data = loaded(tmp_path, [{"messages": messages}])
    text = "<|user|>\nHi<|assistant|>\nHello<|user|>\nBye<|assistant|>\nCiao"
    assert learned(data, 0) == (text, "HelloCiao", True)
    assert int((data.train_set.y[0] == 1).sum()) == 2 and int((data.train_set.x[0] == 1).sum()) == 4


def test_a_field_names_the_client(tmp_path: Path) -> None:
    data = loaded(tmp_path, RECORDS, group="who", num_clients=None)
    assert data.client_names == ["a", "b"] and data.client_sizes().tolist() == [2, 1]


@pytest.mark.parametrize(
    ("records", "given", "says"),
    [
        (
            [{"instruction": "x", "output": "a", "response": "b"}],
            {},
            "record 1, has output and response, which are names for the same text, but differ",
        ),
        ([{"instruction": "x"}], {}, "record 1, has instruction; accepted are"),
        ([{"messages": "x"}], {}, "messages that are not a list"),
        (["x"], {}, "has no records"),
        (RECORDS, {"template": "x"}, "needs {instruction}"),
        (RECORDS, {"group": "whom", "num_clients": None}, "has no 'whom'"),
    ],
)
def test_other_records_are_refused(tmp_path: Path, records: Any, given: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        loaded(tmp_path, records, **given)


def test_records_may_be_given_themselves(tmp_path: Path) -> None:
    """A list of dicts, or a Dataset of the library datasets, whose rows are dicts."""
    from_file = loaded(tmp_path, RECORDS)
    given = InstructionTuning(None, RECORDS, num_clients=1, batch_size=8)
    given.setup("fit")
    assert torch.equal(given.train_set.x, from_file.train_set.x)
    assert torch.equal(given.train_set.y, from_file.train_set.y)
    for wrong in ([], [1, 2]):
        with pytest.raises(UserError, match="a list of dicts"):
            InstructionTuning(None, wrong, num_clients=1).setup("fit")  # type: ignore[arg-type]


def test_packed_rows_hold_a_clients_records_once(tmp_path: Path) -> None:
    records = [{"instruction": f"say {k}", "output": "x" * k, "who": k % 2} for k in range(1, 9)]
    given: dict[str, Any] = {"template": "{instruction}:", "group": "who"}
    plain = loaded(tmp_path, records, num_clients=None, **given)
    data = loaded(tmp_path, records, num_clients=None, length=16, pack=True, **given)
    assert data.num_clients == 2
    assert data.partition_hash == plain.partition_hash
    for client in range(2):
        own = plain.client_indices(client)
        rows = data.client_indices(client)
        text = torch.cat([row[row >= 0] for row in map(plain.train_set.x.__getitem__, own)])
        packed = [row[row >= 0] for row in map(data.train_set.x.__getitem__, rows)]
        assert torch.equal(torch.cat(packed), text)
        assert [len(row) for row in packed[:-1]] == [16] * (len(packed) - 1)
        targets = torch.cat([plain.train_set.y[i][plain.train_set.x[i] >= 0] for i in own])
        wanted = [data.train_set.y[i][data.train_set.x[i] >= 0] for i in rows]
        # A row's first token is predicted from nothing.
        for number in range(len(wanted)):
            targets[16 * number] = -1
        assert torch.equal(torch.cat(wanted), targets)
    assert data.client_sizes().tolist() == [len(data.client_indices(i)) for i in range(2)]


def test_another_seed_packs_another_split(tmp_path: Path) -> None:
    records = [{"instruction": f"say {k}", "output": "x" * k} for k in range(1, 9)]
    sets = []
    for seed in (0, 1):
        data = loaded(tmp_path, records, num_clients=2, seed=seed, length=16, pack=True)
        sets.append(data)
    first, second = sets
    assert first.partition_hash != second.partition_hash
    # The same data module in a run of another seed.
    first.seed = 1
    first.setup("fit")
    assert first.partition_hash == second.partition_hash
    assert torch.equal(first.train_set.x, second.train_set.x)


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pack is true.*val_fraction"):
        loaded(tmp_path, RECORDS, pack=True, val_fraction=0.3)


def test_a_batch_is_as_long_as_its_longest_text(tmp_path: Path) -> None:
    records = [{"instruction": "x" * k, "output": "y"} for k in (3, 40, 5, 20, 8)]
    data = loaded(tmp_path, records, template="{instruction}", batch_size=2)
    texts = {int((row >= 0).sum()): row[row >= 0] for row in data.train_set.x}
    for batches in (data.client_batches(0, 0, 3), (b for b, _ in data.full_batches(0))):
        seen = 0
        for x, y in batches:
            assert x.shape == y.shape
            assert bool((x >= 0).any(0).all()), "no column of padding alone"
            for row in x:
                assert torch.equal(row[row >= 0], texts[int((row >= 0).sum())])
                seen += 1
        assert seen == len(records)


def test_the_types_of_a_pair_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="a tokenizer needs transformers")
    from tests.helpers.texts import bert_folder

    folder = bert_folder(tmp_path / "words")
    data = TextClassification(multinli_files(tmp_path), tokenizer=folder, length=8, seed=0)
    data.setup()
    row = next(row for row in sentence_rows(110) if row["genre"] == GENRES[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    given = tokenizer(row["sentence1"], row["sentence2"], truncation=True, max_length=8)
    x, _ = data.one_batch(0, 1)
    assert x.shape == (1, 2, 8)
    assert x[0].tolist() == [given["input_ids"], given["token_type_ids"]]
    assert set(given["token_type_ids"]) == {0, 1}
    single = TextClassification(tmp_path, text="sentence1", tokenizer=folder, length=8, seed=0)
    single.setup()
    assert single.one_batch(0, 1)[0].shape == (1, 8)


CHAT = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} </s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


@pytest.mark.parametrize("puts_bos", [False, True])
def test_records_begin_as_the_tokenizer_begins_a_text(tmp_path: Path, puts_bos: bool) -> None:
    pytest.importorskip("transformers", reason="a tokenizer needs transformers")
    from tests.helpers.texts import tokenizer_folder

    folder = tokenizer_folder(tmp_path / "words", bos=puts_bos)
    talk = [{"role": "user", "content": "king"}, {"role": "assistant", "content": "crown"}]
    records = [{"instruction": "the king", "output": "good"}, {"messages": talk}]
    given: dict[str, Any] = {"template": "{instruction}", "tokenizer": folder}
    for bos, begins in ((None, puts_bos), (True, True), (False, False)):
        data = loaded(tmp_path, records, bos=bos, **given)
        for x, y in zip(data.train_set.x, data.train_set.y, strict=True):
            assert (int(x[0]) == 0) == begins, "<s> is token 0"
            assert 0 not in x[1:].tolist() + y.tolist()
            assert int(y[y >= 0][-1]) == 2
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHAT}))
    data = loaded(tmp_path, records, **given)
    assert int(data.train_set.x[1][0]) != 0, "the chat template writes no <s>"
    assert data.encoder is not None
    assert data.train_set.x[1][data.train_set.x[1] >= 0].tolist() == data.encoder.chat(talk)


def test_a_beginning_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"data\.bos is true, and data\.tokenizer=None has no token"
    ):
        loaded(tmp_path, RECORDS, bos=True)
