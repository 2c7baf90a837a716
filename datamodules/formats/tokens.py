"""Texts as whole numbers: by a tokenizer in a local folder, or one number per byte without a
tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.errors import UserError

# Marks the end of a text. The mark is not a tokenizer's number, so that each network may fill in
# its own.
NO_TOKEN = -1
# ByT5's numbers (Xue et al., 2022): padding, end, unknown, and then the 256 bytes.
END = 1
FIRST_BYTE = 3


class Bytes:
    """One token per byte of UTF-8, and one for the end of a text: 259 numbers, as in ByT5.

    >>> Bytes().pairs([("ab", "c")], 8), Bytes().pairs([("abcdef", "xyz")], 6)
    ([[100, 101, 1, 102, 1]], [[100, 101, 1, 123, 124, 1]])
    """

    size = FIRST_BYTE + 256
    end: int | None = END

    def chat(self, messages: list[dict[str, str]], asks: bool = False) -> list[int] | None:
        """Return None: there is no chat template."""
        return None

    def whole(self, text: str) -> NDArray[np.int32]:
        """Return a long text ``(tokens,)``, without an end."""
        # JSON may escape half a character, which UTF-8 does not have.
        return np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int32) + FIRST_BYTE

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens; bytes that are not UTF-8 are
        replaced.
        """
        numbers = [t - FIRST_BYTE for t in tokens if FIRST_BYTE <= t < self.size]
        return bytes(numbers).decode(errors="replace")

    def pairs(self, texts: Sequence[Sequence[str]], length: int) -> list[list[int]]:
        """Return at most ``length`` tokens of each text, or pair of texts; longer texts lose
        their end.
        """
        rows = []
        for parts in texts:
            tokens = [self.whole(part).tolist() for part in parts]
            rows.append(self._pair(tokens, length))
        return rows

    def _pair(self, parts: list[list[int]], length: int) -> list[int]:
        # Shorten the longer part to the length of the shorter one, and then both equally.
        room = max(0, length - len(parts))
        while (over := sum(map(len, parts)) - room) > 0:
            sizes = sorted(map(len, parts))
            longest = next(part for part in parts if len(part) == sizes[-1])
            cut = over if len(parts) == 1 else min(over, max(1, sizes[-1] - sizes[0]))
            del longest[len(longest) - cut :]
        tokens: list[int] = []
        for part in parts:
            tokens += [*part, END]
        return tokens[:length]


class Folder:
    """A tokenizer of transformers from a local folder; nothing is downloaded.

    Raises:
        UserError: transformers is missing, or the folder holds no tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_dir():
            raise UserError(
                f"data.tokenizer is {str(path)!r}, which is no folder. Give a local folder with a "
                "tokenizer (tokenizer.json, or vocab.json and merges.txt); nothing is "
                "downloaded. null: bytes are the tokens."
            )
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise UserError(
                f"data.tokenizer is {str(path)!r}, which needs transformers ({error}). Install it: "
                "pip install 'fl-lightning[text]'; or give null: bytes are the tokens."
            ) from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # the library and its file formats raise many kinds of errors
            raise UserError(
                f"data.tokenizer is {str(path)!r}, where no tokenizer can be read "
                f"({type(error).__name__}: {' '.join(str(error).split())[:160]})."
            ) from error
        self.size = len(self._tokenizer)
        self.end: int | None = self._tokenizer.eos_token_id

    def chat(self, messages: list[dict[str, str]], asks: bool = False) -> list[int] | None:
        """Return messages rendered by the chat template, with ``asks`` up to the answer; None:
        there is no template.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=asks
        )
        return [int(token) for token in self.whole(text)]

    def whole(self, text: str) -> NDArray[np.int32]:
        return np.asarray(
            self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32
        )

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def pairs(self, texts: Sequence[Sequence[str]], length: int) -> list[list[int]]:
        columns = [list(column) for column in zip(*texts, strict=True)]
        encoded = self._tokenizer(*columns, truncation=True, max_length=length)
        rows: list[list[int]] = encoded["input_ids"]
        return rows


def tokenizer_of(path: str | Path | None) -> Bytes | Folder:
    """Return the tokenizer in a folder; None: bytes."""
    return Bytes() if path is None else Folder(path)


def padded(texts: Sequence[Sequence[int]], length: int) -> NDArray[np.int32]:
    """Return ``(N, length)``, -1 after the end of a text."""
    table = np.full((len(texts), length), NO_TOKEN, np.int32)
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = text
    return table


def read_text(path: Path, what: str) -> str:
    """A file in UTF-8.

    Raises:
        UserError: the file does not exist, or is not such a text.
    """
    try:
        # Drop a byte order mark.
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(
            f"{what} is expected in {str(path)!r}, which does not exist. Give the right "
            "--data.root."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{what} in {str(path)!r} cannot be read as UTF-8 text ({error})."
        ) from None
