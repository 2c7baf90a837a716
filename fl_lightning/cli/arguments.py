"""The arguments of the commands that are not ``fit``: what is wrong with them is said in one paragraph."""

from __future__ import annotations

import argparse
from typing import NoReturn

from fl_lightning.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """Of ``fl-lightning <command>``; nothing is abbreviated, and an error is a ``UserError``.

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
        self.command, self.hint = command, f"{hint} " if hint else ""

    def error(self, message: str) -> NoReturn:
        raise UserError(
            f"{self.command}: {message}. {self.hint}`fl-lightning {self.command} --help` shows what it takes."
        )
