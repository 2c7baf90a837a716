"""Whatever is typed: the config that would run, or one paragraph and status 2; no traceback.

Each line is run in this process, up to where training would start: ``--print_config`` stops it.
"""

from __future__ import annotations

import random
import sys
import traceback
import warnings
from pathlib import Path

import pytest

from fl_lightning.__main__ import main
from tests.helpers.commands import typed

LINES = [
    typed(line)
    for line in (
        "fit -c base -c data/digits -c method/fedinit --trainer.max_epochs 20",
        "fit -c base --data.partition Dirichlet --data.partition.alpha 0.1 --data.num_clients 5",
        "fit -c base -c data/cifar10 -c model/vgg11 --model.learner.lr 0.05 --data.root files",
        "fit -c base --method ProximalTerm --method+ SystemHeterogeneity --method.mu 0.1",
        "fit -c base -c method/fedbuff --model.asynchronous.size 4 --model.seed 3",
        "fit -c base --trainer.callbacks+ EarlyStopping --trainer.callbacks.monitor val/acc",
        "fit -c base -c logger/csv --trainer.logger+ CSVLogger --trainer.logger.save_dir x",
        "fit -c base --model.client_optimizer SGD --model.client_optimizer.lr=0.1",
        "fit -c base --model.lr_decay Exponential --model.lr_decay.gamma 0.9 --monitor val/loss",
        "fit -c base --data FromTable --data.path t.csv --data.target y --data.features=[a,b]",
        "fit -c base --model.learner.network MLP --model.learner.network.sizes [null,16,null]",
        "fit -c base -c system/flaky --trainer.strategy federated --trainer.devices 2",
        "fit -c base -c mine.yaml --model.participation 0.5 --seed_everything 7",
        "fit -c mine.yaml -c base --model.buffers keep --model.server_optimizer FedAdam",
        "partition -c base --data.partition Pathological --data.partition.classes 2 -o here",
        "test -c base -c data/digits --ckpt_path last.ckpt",
        "export -c base --ckpt_path last.ckpt --client 3",
    )
]
VALUES = [
    *typed("null true -1 0 1e400 .nan 3.5 [ ] { [] {} {a:1} 2020-01-01 *a ' % é - -- = / ~ a=b"),
    *typed(".. a..b .a a. os.path math.pi builtins.dict builtins.print collections.OrderedDict"),
    *typed("json.JSONDecoder Digits SGD MLP IID Exponential"),
    *("", " ", "\t", "a b", "9" * 30, "a" * 300, "x: y", "{a: 1}", "[[1], {}]", "&a [*a]"),
    *("!!binary aa", "!!set {a}"),
    *("{class_path: Digits}", "{class_path: 3}", "{init_args: {lr: x}}"),
]
PIECES = [
    "model: {learner: {init_args: {lr: fast}}}",
    "model: {learner: {class_path: Classifier, lr: 1}}",
    "model: {learner: [1]}",
    "model: {client_optimizer: {class_path: SGD, init_args: {lrr: 1}}}",
    "model: {asynchronous: {size: 3}}",
    "model: {buffers: {a: keep}, lr_decay: {init_args: {gamma: 1}}}",
    "data: {init_args: {partition: {class_path: Dirichlet}}}",
    "data: {class_path: Digits, init_args: {biases: [ClientBias], seed: x}}",
    "data: [Digits]",
    "data: Digits",
    "method: [{class_path: ProximalTerm, init_args: {mu: [1]}}]",
    "method+: SharpnessAwareMinimization",
    "method: {ProximalTerm: 3}",
    "trainer: {callbacks: {class_path: Timer}, logger: [true, CSVLogger]}",
    "trainer: {callbacks: 5, logger: x, strategy: {class_path: federated}}",
    "trainer: {max_epochs: [1], devices: {}}",
    "seed_everything: x",
    "trainer: {max_epochs: 1",
    "- a",
    "",
]


def misspelt(chance: random.Random, word: str) -> str:
    place = chance.randrange(len(word) + 1)
    typed_in = word[:place] + chance.choice("aX._-=+[ ") + word[place:]
    return chance.choice([word[:place] + word[place + 1 :], typed_in, word.upper(), word * 2])


def changed(chance: random.Random, words: list[str], kind: str) -> None:
    """Change a command line in one of the ways that ``MUTATIONS`` names."""
    place, other = chance.randrange(len(words)), chance.randrange(len(words))
    of_others = chance.choice(LINES)[1:]
    if kind == "dropped":
        del words[place]
    elif kind == "doubled":
        words[place:place] = words[place : place + chance.choice([1, 2])]
    elif kind == "misspelt":
        words[place] = misspelt(chance, words[place])
    elif kind == "reordered":
        words[place], words[other] = words[other], words[place]
    elif kind == "odd":
        words[place] = chance.choice(VALUES)
    elif kind == "of another":
        begin = chance.randrange(len(of_others))
        words[len(words) :] = of_others[begin : begin + 2]
    else:
        words[place : place + 2] = ["=".join(words[place : place + 2])]


MUTATIONS = ("dropped", "doubled", "misspelt", "reordered", "odd", "odd", "of another", "joined")


def mutated(chance: random.Random) -> list[str]:
    """A real command line after one to three changes; the command stays."""
    command, *words = chance.choice(LINES)
    for _ in range(chance.choice([1, 1, 2, 3])):
        if words:
            changed(chance, words, chance.choice(MUTATIONS))
    return [command, *words, "--print_config"]


def fault(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command line; tell what is wrong with how it ends, or nothing."""
    try:
        status: object = main(argv)
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        return traceback.format_exc()
    said = capsys.readouterr().err
    paragraphs = [line for line in said.splitlines() if line.startswith("fl-lightning: ")]
    if status not in (0, 2) or "Traceback" in said or len(paragraphs) != (status == 2):
        return f"status {status}: {said}"
    return f"too long: {said}" if paragraphs and len(paragraphs[0]) > 900 else ""


@pytest.mark.parametrize("seed", range(4))
def test_each_of_fifty_command_lines_ends_well(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("FL_DEBUG", raising=False)
    chance = random.Random(seed)
    (tmp_path / "t.csv").write_text("a,b,y\n1,2,0\n2,1,1\n")
    faults = []
    for _ in range(50):
        argv = mutated(chance)
        (tmp_path / "mine.yaml").write_text(chance.choice(PIECES))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if wrong := fault(argv, capsys):
                faults.append(f"{argv}, {(tmp_path / 'mine.yaml').read_text()}\n{wrong}")
    assert not faults, f"{len(faults)} of 50\n" + "\n\n".join(faults)
