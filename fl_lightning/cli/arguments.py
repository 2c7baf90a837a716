"""Arguments of the commands that are not ``fit``; errors in them are said in one paragraph."""

from __future__ import annotations

import argparse
from typing import NoReturn

from fl_lightning.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """The parser of ``fl-lightning <command>``; an error is a ``UserError``.

    Nothing is abbreviated.

    Args:
        command: its name.
        description: for ``--help``, kept as it is.
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
