"""Instructions and conversations: which tokens are learned, and the loss over these alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning import UserError
from fl_lightning.datamodules import InstructionTuning
from fl_lightning.evaluation.instruction_records import ALPACA, ALPACA_INPUT

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
    assert learned(data, 1) == (
        ALPACA.replace("{instruction}", "Say hello.") + "héllo",
        "héllo",
        True,
    )
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
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Ciao"},
    ]
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


def test_the_loss_is_the_mean_over_targets(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install 'fl-lightning[text]'")
    from fl_lightning.models import CausalLanguageModel
    from tests.helpers.texts import opt

    learner = CausalLanguageModel(config={**opt(), "max_position_embeddings": 256})
    learner.log = lambda *given, **more: None  # type: ignore[method-assign]
    data = loaded(tmp_path, RECORDS[1:], template="{instruction} ")
    x, y = data.train_set.x, data.train_set.y
    loss = learner.training_step((x, y), 0)["loss"]
    total, count = torch.zeros(()), 0
    for tokens, targets in zip(x, y, strict=True):
        row = tokens[tokens >= 0].long()[None]
        logits = learner.network(input_ids=row).logits[0].log_softmax(-1)
        for j, target in enumerate(targets.tolist()):
            if j and target >= 0:
                total, count = total - logits[j - 1, target], count + 1
    torch.testing.assert_close(loss, total / count)
    nothing = learner.training_step((x, torch.full_like(y, -1)), 0)["loss"]
    nothing.backward()
    assert float(nothing) == 0


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


def test_a_folder_of_the_library_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    data = InstructionTuning(tmp_path, "saved", num_clients=1)
    try:
        import datasets
    except ImportError:
        with pytest.raises(UserError, match="pip install"):
            data.setup("fit")
        return
    records = [RECORDS[0], {"instruction": "Say it.", "input": None, "output": "it", "who": "b"}]
    datasets.Dataset.from_list(records).save_to_disk(str(folder))
    data.setup("fit")
    assert len(data.train_set) == len(records)


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


def test_a_client_without_records_is_named(tmp_path: Path) -> None:
    long = {"instruction": "x" * 50, "output": "y", "who": "zoe"}
    with pytest.raises(UserError, match="who='zoe'"):
        loaded(
            tmp_path,
            [*RECORDS, long],
            template="{instruction}{input}",
            length=30,
            group="who",
            num_clients=None,
        )


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
