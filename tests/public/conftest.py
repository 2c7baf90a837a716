"""Prints what came out of each package at the end."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.public.agreement")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    agreement = sys.modules.get("tests.public.agreement")
    for line in getattr(agreement, "TABLE", ()):
        terminalreporter.write_line(line)
