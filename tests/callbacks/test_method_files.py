"""A method's file is its paper: it says what travels, and shows something true (the doctests run
with the suite).

That it imports fl_lightning.callback alone is held by tests/lint.py.
"""

from __future__ import annotations

import doctest

import pytest

from fl_lightning import callbacks
from fl_lightning.callback import FederatedCallback

METHODS = [
    c for c in vars(callbacks).values() if isinstance(c, type) and issubclass(c, FederatedCallback)
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_a_method_says_what_travels_and_shows_something_true(
    method: type[FederatedCallback],
) -> None:
    text = method.__doc__ or ""
    assert ("Sent:" in text and "Kept" in text) or "Sent and kept:" in text
    assert any(example.want for example in doctest.DocTestParser().get_examples(text))
