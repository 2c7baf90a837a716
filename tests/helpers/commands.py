"""Command lines as they are typed."""

from __future__ import annotations


def typed(*texts: str) -> tuple[str, ...]:
    """The words of a command line."""
    return tuple(" ".join(texts).split())
