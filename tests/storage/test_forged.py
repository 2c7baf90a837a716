"""Whatever stands in a checkpoint where something else belongs.

The run goes on, or says where, in one paragraph.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning.callbacks import ControlVariates, PartialAveraging
from fl_lightning.errors import UserError
from fl_lightning.lab.contracts.federation import fit, quiet

GONE = object()
FORMS = {
    "gone": GONE,
    "text": "text",
    "None": None,
    "minus": -7,
    "list": [1, "a"],
    "dict": {"a": 1},
}
SEEN = [  # to end in an error of Python
    ("federated.server.ControlVariates.c", "complex"),
    ("federated.chosen.rounds", "None"),
    ("federated.clients", "None"),
    ("federated.folders", "gone"),
    ("federated.w0", "text"),
    ("federated.seed", "gone"),
    ("federated.version", "list"),
    ("federated.engine.written", "list"),
    ("federated.methods", "list"),
    ("federated.buffers", "minus"),
    ("federated", "text"),
    ("loops.fit_loop.epoch_progress", "list"),
    ("loops.fit_loop.epoch_progress.current", "gone"),
    ("loops", "None"),
    ("optimizer_states", "minus"),
    ("optimizer_states.0.param_groups.0.weight_decay", "None"),
    ("lr_schedulers", "gone"),
    ("callbacks", "list"),
    ("pytorch-lightning_version", "gone"),
    ("pytorch-lightning_version", "dict"),
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all that a checkpoint holds, from the outside in."""
    if at:
        yield at
    keys = (
        value.keys()
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    for key in keys:
        yield from places(value[key], (*at, key))


def forge(checkpoint: dict[str, Any], at: tuple[Any, ...], form: str) -> dict[str, Any]:
    forged = copy.deepcopy(checkpoint)
    holder: Any = forged
    for key in at[:-1]:
        holder = holder[key]
    if form == "gone":
        del holder[at[-1]]
    else:
        held = holder[at[-1]]
        holder[at[-1]] = held.to(torch.complex64) if form == "complex" else FORMS[form]
    return forged


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run")
    with quiet():
        fit([ControlVariates()], 1, folder=str(folder))
    return folder, torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def resumed(folder: Path, forged: dict[str, Any]) -> None:
    torch.save(forged, folder / "checkpoints" / "last.ckpt")
    with quiet():
        fit([ControlVariates()], 2, folder=str(folder), resume=True)


@pytest.mark.parametrize(("place", "form"), SEEN)
def test_what_ended_in_an_error_of_python_names_the_place(
    begun: Any, place: str, form: str
) -> None:
    folder, checkpoint = begun
    (at,) = [at for at in places(checkpoint) if ".".join(map(str, at)) == place]
    with pytest.raises(UserError, match=r"damaged|not written by a federated run") as refused:
        resumed(folder, forge(checkpoint, at, form))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("form", ["gone", "clients of its own"])
@pytest.mark.parametrize("key", ["parts.x", "parts.origin", "parts.elapsed", "parts.round"])
def test_rows_of_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, key: str, form: str
) -> None:
    def keeping(rounds: int, resume: bool = False) -> None:
        with quiet():
            fit(
                [PartialAveraging(periods={"*": "never"})],
                rounds,
                folder=str(tmp_path),
                resume=resume,
            )

    keeping(1)
    file = tmp_path / "checkpoints" / "last.ckpt"
    forged = torch.load(file, weights_only=True)
    rows = forged["federated"]["clients"]
    if form == "gone":
        del rows[key]
    else:
        rows[key]["clients"] = rows[key]["clients"] + 1
    torch.save(forged, file)
    with pytest.raises(UserError, match=r"federated\.clients"):
        keeping(2, resume=True)


@pytest.mark.slow
def test_forgeries_drawn_from_all_places_end_in_a_paragraph_or_go_on(begun: Any) -> None:
    folder, checkpoint = begun
    draw = random.Random(0)
    cases = [(at, form) for at in places(checkpoint) for form in FORMS]
    refused = 0
    for at, form in draw.sample(cases, 60):
        try:
            resumed(folder, forge(checkpoint, at, form))
        except UserError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{at} {form}") from error
    assert refused > 20


def test_the_checkpoint_itself_goes_on(begun: Any) -> None:
    assert any(isinstance(value, Tensor) for value in begun[1]["state_dict"].values())
    resumed(*begun)
