"""Texts and small transformers, made here."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

GENRES = ("fiction", "government", "slate", "telephone", "travel")
CLASSES = ("contradiction", "entailment", "neutral")
WORDS = (
    "the",
    "king",
    "and",
    "his",
    "crown",
    "are",
    "come",
    "to",
    "no",
    "good",
    "end",
    "by",
    "night",
)


def text_file(folder: Path, words: int = 3000) -> Path:
    """Words in an order that can be learned in part, each part of the text with words of its
    own."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "input.txt"
    parts = [rng.choice(WORDS[k * 8 // words : k * 8 // words + 6]) for k in range(words)]
    path.write_text(" ".join(parts) + "\n")
    return path


def sentence_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows as MultiNLI's, of which the hypothesis tells the class. Every eleventh without a
    label."""
    rng, rows = random.Random(seed), []
    for k in range(count):
        label = CLASSES[k % 3]
        rows.append({
            "gold_label": "-" if k % 11 == 10 else label,
            "genre": GENRES[k % 5],
            "sentence1": " ".join(rng.choices(WORDS, k=4)),
            "sentence2": f"{label[0] * 3} {rng.choice(WORDS)}",
        })  # fmt: skip
    return rows


def multinli_files(folder: Path, train: int = 110, test: int = 30) -> Path:
    """``folder`` with files of MultiNLI's names and format."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", sentence_rows(train)), ("dev_matched", sentence_rows(test, 1))):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"multinli_1.0_{name}.jsonl").write_text(lines)
    return folder


def opt(layers: int = 2, width: int = 16, **more: Any) -> dict[str, Any]:
    """The architecture of a small OPT for bytes."""
    tokens = {"vocab_size": 259, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "word_embed_proj_dim": width,
        "ffn_dim": 2 * width,
    }
    rest = {"num_attention_heads": 2, "max_position_embeddings": 64, "dropout": 0.0}
    return {"model_type": "opt", **tokens, **sizes, **rest, **more}


def opt_layer(width: int = 16) -> int:
    """Parameters of one decoder layer. Four projections, two norms, two linear layers of 2 width
    between."""
    h, f = width, 2 * width
    return 4 * (h * h + h) + 2 * 2 * h + (h * f + f) + (f * h + h)


def opt_rest(width: int = 16) -> int:
    """Embeddings, which are the output too, positions (two more than there are), the last norm."""
    return 259 * width + (64 + 2) * width + 2 * width


def bert(**more: Any) -> dict[str, Any]:
    """The architecture of a small BERT for the words of ``bert_folder``."""
    sizes = {"vocab_size": 32, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    rest = {"num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    return {"model_type": "bert", **sizes, **drop, **rest, **more}


def llama(**more: Any) -> dict[str, Any]:
    """The architecture of a small Llama for the words of ``tokenizer_folder``."""
    sizes = {"vocab_size": 32, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    return {"model_type": "llama", **sizes, **heads, **tokens, **more}


def bert_folder(folder: Path) -> Path:
    """BERT's tokenizer of whole words, which marks the second text of a pair."""
    from transformers import BertTokenizer

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *WORDS, *(label[0] * 3 for label in CLASSES)]
    BertTokenizer(vocab={word: k for k, word in enumerate(words)}).save_pretrained(folder)
    return folder


def tokenizer_folder(folder: Path, bos: bool = False) -> Path:
    """A tokenizer of whole words, as transformers keeps one in a folder.

    Args:
        bos: put ``<s>`` before a text, as Llama's does.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = [*WORDS, *(label[0] * 3 for label in CLASSES)]
    numbers = {word: k for k, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *words])}
    made = Tokenizer(WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    if bos:
        made.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    ).save_pretrained(folder)
    return folder
