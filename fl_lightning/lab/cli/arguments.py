"""Arguments of the commands other than ``fit``; their errors are one paragraph."""

from __future__ import annotations

import argparse
from typing import NoReturn

from fl_lightning.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """The parser of ``fl-lightning <command>``; an error is a ``UserError``.

    Nothing is abbreviated.

    Args:
        command: its name.
        description: text for ``--help``, which keeps its line breaks.
        hint: a sentence added to every error.
    """

    def __init__(self, command: str, description: str, hint: str = "") -> None:
        super().__init__(
            prog=f"fl-lightning {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.command = command
        self.hint = f"{hint} " if hint else ""

    def error(self, message: str) -> NoReturn:
        raise UserError(
            f"{self.command}: {message}. {self.hint}"
            f"`fl-lightning {self.command} --help` shows what it takes."
        )
