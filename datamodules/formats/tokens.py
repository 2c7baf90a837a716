"""Texts as whole numbers: by a tokenizer in a local folder, or one number per byte."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.errors import UserError, optional

# Marks the end of a text. The mark is not a tokenizer's number, so that each network may fill in
# its own.
NO_TOKEN = -1
# ByT5's numbers (Xue et al., 2022): padding, end, unknown, and then the 256 bytes.
END = 1
FIRST_BYTE = 3


class Tokens(ABC):
    """Base class of tokenizers.

    ``start`` and ``end``: the tokens that begin a text to be continued, and the one that ends it;
    ``bos``: the token for the beginning of a text; None: the tokenizer lacks one.
    """

    start: Sequence[int] = ()
    bos: int | None = None
    end: int | None

    @abstractmethod
    def whole(self, text: str) -> NDArray[np.int32]:
        """Return a long text ``(tokens,)``, without a beginning and an end."""

    def rendered(self, messages: list[dict[str, str]], asks: bool) -> list[int] | None:
        """Return messages by the tokenizer's chat template; None: it has none."""
        return None

    def chat(self, messages: list[dict[str, str]], asks: bool = False) -> list[int]:
        """Return messages as tokens, with ``asks`` up to where the assistant's answer begins."""
        found = self.rendered(messages, asks)
        if found is not None:
            return found
        tokens = list(self.start)
        for message in messages:
            for text in (f"<|{message['role']}|>\n", message["content"]):
                tokens += self.whole(text).tolist()
            tokens.append(self.end_of_text())
        return tokens + (self.whole("<|assistant|>\n").tolist() if asks else [])

    def end_of_text(self) -> int:
        """Return the token that ends a text.

        Raises:
            UserError: the tokenizer has none.
        """
        if self.end is None:
            raise UserError(
                "data.tokenizer has no token for the end of a text (eos_token). Set one in its "
                "folder."
            )
        return self.end


class Bytes(Tokens):
    """One token per byte of UTF-8, and one for the end of a text: 259 numbers, as in ByT5.

    >>> Bytes().pairs([("ab", "c")], 8), Bytes().pairs([("abcdef", "xyz")], 6)
    ([[100, 101, 1, 102, 1]], [[100, 101, 1, 123, 124, 1]])
    """

    size = FIRST_BYTE + 256
    end: int | None = END

    def whole(self, text: str) -> NDArray[np.int32]:
        # JSON may escape half a character, which UTF-8 does not have.
        return np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int32) + FIRST_BYTE

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text before the first special token; what is not UTF-8 is replaced."""
        letters = takewhile(lambda token: FIRST_BYTE <= token < self.size, tokens)
        return bytes(token - FIRST_BYTE for token in letters).decode(errors="replace")

    def table(self, texts: Sequence[Sequence[str]], length: int) -> NDArray[np.int32]:
        """Return texts or pairs ``(N, length)``, -1 after the end; longer texts lose their end."""
        return padded(self.pairs(texts, length), length)

    def pairs(self, texts: Sequence[Sequence[str]], length: int) -> list[list[int]]:
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


class Folder(Tokens):
    """A tokenizer of transformers from a local folder; nothing is downloaded.

    Args:
        bos: begin a text that is to be continued with the tokenizer's BOS; None: with the tokens
            that the tokenizer puts before a text, if any.

    Raises:
        UserError: transformers is missing, or the folder holds no tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        transformers = optional("transformers", "text", f"data.tokenizer is {str(path)!r}, which")
        with refused(
            f"data.tokenizer is {str(path)!r}, where no tokenizer can be read",
            "Give a local folder with a tokenizer (tokenizer.json, or vocab.json and merges.txt); "
            "nothing is downloaded. null: bytes are the tokens.",
        ):
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                str(path), local_files_only=True
            )
        self.size = len(self._tokenizer)
        self.end: int | None = self._tokenizer.eos_token_id
        self.bos = self._tokenizer.bos_token_id
        self.start = self._before()

    def _before(self) -> Sequence[int]:
        """Return the tokens that the tokenizer puts before a text."""
        text = self.whole("a").tolist()
        marked: list[int] = self._tokenizer("a")["input_ids"]
        places = range(len(marked) - len(text) + 1)
        first = next((i for i in places if marked[i : i + len(text)] == text), 0)
        return tuple(marked[:first])

    def rendered(self, messages: list[dict[str, str]], asks: bool) -> list[int] | None:
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        if not messages:
            return []
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=asks
        )
        return [int(token) for token in self.whole(text)]

    def whole(self, text: str) -> NDArray[np.int32]:
        return np.asarray(
            self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32
        )

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text before the first special token, such as the end of a message."""
        special = set(self._tokenizer.all_special_ids)
        return str(self._tokenizer.decode(list(takewhile(lambda t: t not in special, tokens))))

    def table(self, texts: Sequence[Sequence[str]], length: int) -> NDArray[np.int32]:
        """Return texts or pairs ``(N, length)``, -1 after the end.

        If the tokenizer marks the second text of a pair (``token_type_ids``, as BERT's does), pairs
        are ``(N, 2, length)``: tokens, and their types.
        """
        columns = [list(column) for column in zip(*texts, strict=True)]
        encoded = self._tokenizer(*columns, truncation=True, max_length=length)
        tokens = padded(encoded["input_ids"], length)
        if len(columns) < 2 or "token_type_ids" not in encoded:
            return tokens
        return np.stack([tokens, padded(encoded["token_type_ids"], length)], axis=1)


def tokenizer_of(path: str | Path | None, bos: bool | None = None) -> Bytes | Folder:
    """Return the tokenizer in a folder; None: bytes.

    Args:
        bos: whether texts begin with ``bos``; None: as the tokenizer begins them.
    """
    made = Bytes() if path is None else Folder(path)
    if bos is None:
        return made
    if bos and made.bos is None:
        raise UserError(
            f"data.bos is true, and data.tokenizer={path} has no token for the beginning of a text "
            "(bos_token): set one in its folder, or leave data.bos out."
        )
    made.start = [made.bos] if bos and made.bos is not None else []
    return made


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
    what = f"{what} is expected in {str(path)!r}, which cannot be read as UTF-8 text"
    with refused(what, "Give the right --data.root."):
        # Drop a byte order mark.
        return path.read_text(encoding="utf-8-sig")
