"""``fl-lightning check CLASS``: the contracts of a method, from the command line."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from fl_lightning.lab.cli import arguments

USAGE = """usage: fl-lightning check CLASS [--OPTION VALUE ...]

Put a method through the contracts that every method has to keep, and print a table (exit status 0:
all hold, else 1).

  CLASS     one of ours (ControlVariates), or my_module.MyMethod; the current directory is on the
            path
  --OPTION  an argument of the class, such as --beta 0.2; `fl-lightning check CLASS --help` lists
            them"""


def main(argv: Sequence[str]) -> int:
    """Check the class that ``argv`` names and print the report; 0 if every contract holds, else 1.

    Raises:
        UserError: there is no such class, or it does not take these arguments.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    # These import torch, which --help should not wait for.
    from jsonargparse import ArgumentError, ArgumentParser

    from fl_lightning.introspection.accepted import words_of
    from fl_lightning.lab.cli.classes import hint_of, listed, method_class, parameters
    from fl_lightning.lab.cli.wrong_settings import place
    from fl_lightning.testing import check_method

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    cls = method_class(argv[0])
    parser = ArgumentParser(prog=f"fl-lightning check {argv[0]}", exit_on_error=False)
    parser.add_class_arguments(cls, instantiate=False)
    try:
        with warnings.catch_warnings():
            # Values are built here only to parse them. The method that is checked warns itself.
            warnings.simplefilter("ignore")
            options = vars(parser.instantiate(parser.parse_args(list(argv[1:]))))
    except (ArgumentError, argparse.ArgumentError) as error:
        option, told = place(str(error))
        if hint := hint_of(cls, option):
            told = f"--{option} has to be {words_of(hint)}."
        accepted = listed(parameters(cls)) or "none"
        told = f"{told.rstrip('.')}. Its arguments: {accepted}"
        arguments.ArgumentParser(f"check {argv[0]}", "").error(told)
    # The contracts also build the method with other settings, such as its neutral one.
    report = check_method(lambda **others: cls(**{**options, **others}))
    print(report)
    return 0 if report.ok else 1
