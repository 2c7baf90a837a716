"""Messages as bytes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from fl_lightning.deploy.transport import Message, packed, said, unpacked


def test_a_message_comes_back_as_it_was_sent() -> None:
    arrays = {
        "w": np.array([0.1, -0.0, np.nan], np.float32),
        "none": np.zeros((0, 3), np.float64),
        "one": np.array(5, np.int64),
        "bits": np.array([[True, False]]),
        "other way round": np.arange(6, dtype=">i4").reshape(2, 3).T,
    }
    numbers = {"run": 2**63, "rate": 0.1, "lost": float("nan"), "end": float("inf")}
    came = unpacked(packed(Message("round", "a", numbers, arrays)), "b")
    assert (came.what, came.site) == ("round", "b")
    assert repr(came.numbers) == repr(numbers)
    for name, array in arrays.items():
        assert came.arrays[name].dtype == array.dtype.newbyteorder("=")
        assert came.arrays[name].shape == array.shape
        assert came.arrays[name].tobytes() == array.astype(came.arrays[name].dtype).tobytes()


def damaged() -> list[bytes]:
    whole = packed(Message("round", "a", {"t": 1}, {"w": np.zeros(3)}))
    objects = whole.replace(b'"<f8"', b'"|O8"')
    text = whole.replace(b'"t": 1', b'"t":""')
    return [b"", whole[:-1], whole + b"x", objects, text, pickle.dumps({"w": 1}), whole[:20]]


@pytest.mark.parametrize("data", damaged())
def test_what_is_no_message_is_refused_and_names_the_site(data: bytes) -> None:
    message = unpacked(data, "north")
    text = "site north: the data that arrived are not a message of fl-lightning"
    assert message.what == "damaged" and said(message.arrays["text"]).startswith(text)


def test_objects_do_not_travel() -> None:
    with pytest.raises(TypeError, match="can hold only numbers"):
        packed(Message("round", arrays={"w": np.array([object()])}))
