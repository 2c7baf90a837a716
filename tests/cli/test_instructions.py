"""Instructions by the command line: the small config, FlowerTune's recipes, and QLoRA."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from fl_lightning.evaluation.instruction_records import prompt_of
from fl_lightning.lab.cli.compose import prepare
from tests.helpers.commands import done, table
from tests.helpers.texts import llama, tokenizer_folder
from tests.helpers.zygote import Cli

pytest.importorskip("transformers", reason="texts need transformers")
pytest.importorskip("peft", reason="low-rank matrices need peft")

TWO = ("--trainer.max_epochs", 2, "-c", "trainer/cpu", "--trainer.default_root_dir", "run")


def last_row(cli: Cli) -> dict[str, str]:
    return table(cli.folder / "run/metrics.csv")[-1]


def test_the_small_config_runs_from_nothing(cli: Cli) -> None:
    steps = ("--model.local_steps", 1, "--model.accumulate", 2, "--data.batch_size", 2)
    done(cli("fit", "-c", "base", "-c", "data/instructions", *TWO, *steps))
    last = last_row(cli)
    assert float(last["val/perplexity"]) > 1
    assert int(float(last["cost/gradients"])) == 5 * 2


def mistral(folder: Path) -> None:
    """A small random Mistral, with a tokenizer that puts a BOS before a text."""
    import transformers

    tokenizer_folder(folder, bos=True)
    sizes = {name: value for name, value in llama().items() if name != "model_type"}
    config = transformers.MistralConfig(**{**sizes, "max_position_embeddings": 512})
    transformers.MistralForCausalLM(config).save_pretrained(folder)


RECORD = {"instruction": "the king", "input": "no end", "output": "by night"}


@pytest.mark.parametrize(
    ("task", "clients", "share", "prompt"),
    [
        ("general", 20, 0.1, "the king"),
        ("medical", 20, 0.1, "no end"),
        ("finance", 50, 0.1, "the king no end"),
        ("code", 10, 0.2, "the king no end"),
    ],
)
def test_flowertunes_tasks(task: str, clients: int, share: float, prompt: str) -> None:
    names = ["general", *([task] if task != "general" else [])]
    argv = [word for name in names for word in ("-c", f"recipe/flowertune/{name}")]
    config = prepare("fit", argv).config
    data = config["data"]["init_args"]
    assert (data["num_clients"], config["model"]["participation"]) == (clients, share)
    assert config["model"]["learner"]["init_args"]["lora"]["r"] == 32
    shown, answer = prompt_of(RECORD, data["template"], "")
    assert shown.endswith(f"### Instruction:\n{prompt}\n### Response: ") and answer == "by night"


def test_a_task_of_flowertune_runs_and_its_budget_ends_it(cli: Cli) -> None:
    """On a small random network of the same architecture."""
    mistral(cli.folder / "tiny")
    (cli.folder / "train.jsonl").write_text("\n".join([json.dumps(RECORD)] * 100))
    recipe = ["-c", "recipe/flowertune/general"]
    own = ("--model.learner.path", "tiny", "--data.tokenizer", "tiny")
    asked = ("--model.learner.quantize", "null", "--model.local_steps", 1, "--data.batch_size", 2)
    done(cli("fit", *recipe, *own, *TWO, *asked))
    # Of two layers, adapters of rank 32 from width 16: q to 16, v to 8; both ways.
    d = 2 * 32 * ((16 + 16) + (16 + 8))
    sent = float(last_row(cli)["communication/total_parameters"])
    assert sent == 2 * 2 * 2 * d
    card = (cli.folder / "run/card.md").read_text()
    assert "209,715,200,000 bytes" in card
    assert f"{d:,} trained parameters" in card
    assert "32-true: trained weights in float32, frozen ones in bfloat16" in card

    # A budget of one round ends the run, as done; asked again it stays so.
    budget = 2 * 2 * d * 4
    limited = {"class_path": "CommunicationLogger", "init_args": {"budget": budget}}
    short = yaml.safe_dump({"trainer": {"callbacks": [limited]}})
    (cli.folder / "short.yaml").write_text(short)
    again = ("--trainer.default_root_dir", "short", "--trainer.max_epochs", 3)
    ended = cli("fit", *recipe, "-c", "short.yaml", *own, *asked, *again, "-c", "trainer/cpu")
    done(ended, "reach the budget")
    assert json.loads((cli.folder / "short/run.json").read_text())["status"] == "done"
    assert len(table(cli.folder / "short/metrics.csv")) == 1
    done(cli("fit", "short"))
    assert len(table(cli.folder / "short/metrics.csv")) == 1


def test_qlora_says_what_it_needs(cli: Cli) -> None:
    if torch.cuda.is_available():
        pytest.skip("the refusal is of machines without a GPU")
    mistral(cli.folder / "tiny")
    own = ("--model.learner.path", "tiny", "--data.tokenizer", "tiny", "--data.train", "x.jsonl")
    (cli.folder / "x.jsonl").write_text(json.dumps({"instruction": "the king", "output": "no"}))
    run = ("fit", "-c", "base", "-c", "data/instructions", "-c", "model/qlora", *own, *TWO)
    refused = cli(*run)
    assert refused.returncode == 2
    assert re.search(r"quantize='nf4' needs a CUDA GPU and bitsandbytes", refused.stderr)
    few = ("--data.num_clients", 1, "--model.local_steps", 1)
    done(cli(*run, "--model.learner.quantize", "null", *few))
