"""A plain text, cut into windows; each client has its own part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_lightning.accepted import BelowOne, PositiveInt
from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.biases import Bias
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.datamodules.formats.tokens import Bytes, Folder, read_text, tokenizer_of
from fl_lightning.datamodules.partitions.partition import Contiguous
from fl_lightning.errors import UserError

NO_LABEL = -1


class LanguageModelling(FederatedDataModule):
    """Windows of ``length`` + 1 tokens of a text file; each begins with the last token of the
    previous one.

    x ``(length + 1,)`` are tokens, of which a learner predicts all but the first; y is -1, because
    there are no classes. By default clients hold contiguous parts of the text with equal numbers of
    windows. The end of the text is the test set.

    Args:
        root: the folder that holds ``file``.
        file: a text in UTF-8, such as tinyshakespeare's ``input.txt``.
        length: number of tokens that a window predicts.
        tokenizer: a local folder with a tokenizer of transformers; None: the tokens are bytes, 259
            numbers.
        test_fraction: the share of the text, from its end, that is the test set.
        augment, biases, download: have to be False and empty, because texts have none.
        eval_batch_size: windows per batch in evaluation; a network's outputs have one number per
            possible token.
        arguments: as in ``FederatedDataModule``.
    """

    texts = True  # tells the command line that the samples are not images
    default_clients = 5
    default_partition = Contiguous()

    def __init__(
        self,
        root: str | Path = "data",
        file: str = "input.txt",
        length: PositiveInt = 64,
        tokenizer: str | Path | None = None,
        test_fraction: BelowOne = 0.1,
        biases: Sequence[Bias] = (),
        batch_size: int | None = 16,
        augment: bool = False,
        download: bool = False,
        eval_batch_size: int | None = 64,
        **arguments: Any,
    ) -> None:
        super().__init__(
            biases=biases, batch_size=batch_size, eval_batch_size=eval_batch_size, **arguments
        )
        no_pixels("LanguageModelling", augment, biases, download)
        self.path = Path(root) / file
        self.length = length
        self.tokenizer = tokenizer
        self.test_fraction = test_fraction
        # number of tokens in the vocabulary; None until the data are loaded
        self.vocabulary: int | None = None
        self.encoder: Bytes | Folder | None = None  # likewise

    def load(self) -> None:
        self.encoder = tokenizer = tokenizer_of(self.tokenizer)
        tokens = tokenizer.whole(read_text(self.path, "LanguageModelling's text"))
        cut = len(tokens) - round(self.test_fraction * len(tokens))
        self.train_set = self._windows(tokens[:cut], "training")
        self.test_set = self._windows(tokens[cut:], "test") if self.test_fraction else None
        self.vocabulary = tokenizer.size

    def _windows(
        self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]], what: str
    ) -> TensorSamples:
        count = (len(tokens) - 1) // self.length
        if count < 1:
            raise UserError(
                f"{str(self.path)!r} has {len(tokens)} tokens for the {what} set, fewer than a "
                f"window of data.length {self.length} and one more: give a longer text, a smaller "
                "length, or another test_fraction."
            )
        starts = np.arange(count)[:, None] * self.length
        return TensorSamples(
            tokens[starts + np.arange(self.length + 1)], torch.full((count,), NO_LABEL)
        )


def no_pixels(name: str, augment: bool, biases: Sequence[Bias], download: bool) -> None:
    """Refuse options that texts do not have."""
    for option, value in (("augment", augment), ("biases", list(biases))):
        if value:
            raise UserError(f"{name}'s {option} is {value}, which is for images: leave it out.")
    if download:
        raise UserError(
            f"{name}'s download is true, but you have to bring the texts yourself: put them into "
            "data.root."
        )
