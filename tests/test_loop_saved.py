"""A checkpoint saved anywhere in a round, as by SLURM's signal, resumes to the bits of an
undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.breaking import AT_SERVER, LOCAL, Case, Fuse, Interrupt, different, leavings
from tests.helpers.learners import blobs
from tests.test_loop import CASES, uninterrupted

IN_THE_LOOP = (*AT_SERVER, "on_client_end", "on_before_optimizer_step", "first logger")
IN_THE_LOOP += ("second logger",)


class Saving(Fuse):
    """Saves a checkpoint at its place, and lets the run go on."""

    run: Any
    path: Path

    def blow(self) -> None:
        self.blown = True
        self.run.save_checkpoint(self.path)


class Signal(Interrupt, Saving):
    """Saves at the n-th line that runs at the server."""

    blow = Saving.blow


def resumed(case: Case, fuse: Any, folder: Path) -> dict[str, Any]:
    """What a run leaves that was resumed from what the fuse saved."""
    fuse.path = folder / "within.ckpt"
    module, run, before = case.begun(fuse, default_root_dir=folder)
    fuse.run = run
    run.fit(module, blobs())
    if not fuse.blown:
        return {}
    module, run, logged = case.begun(Fuse(""), default_root_dir=folder)
    run.fit(module, blobs(), ckpt_path=fuse.path)
    logged.add(before.table)
    return leavings(module, run, logged)


@pytest.mark.parametrize("place", [*IN_THE_LOOP, *LOCAL])
@pytest.mark.parametrize("case", ["sequential", "partial"])
def test_resumed_from_a_checkpoint_saved_in_a_hook_of_a_round(
    tmp_path: Path, case: str, place: str
) -> None:
    assert not different(resumed(CASES[case], Saving(place), tmp_path), uninterrupted(case))


@pytest.mark.parametrize("place", IN_THE_LOOP)
@pytest.mark.parametrize("case", ["concurrent", "stacked"])
def test_in_each_engine(tmp_path: Path, case: str, place: str) -> None:
    assert not different(resumed(CASES[case], Saving(place), tmp_path), uninterrupted(case))


@pytest.mark.parametrize(("case", "first"), [("sequential", 1), ("partial", 42)])
def test_saved_at_any_line_of_the_end(tmp_path: Path, case: str, first: int) -> None:
    # Most lines are the same for both, which take turns; with a step of 1 it takes minutes.
    for line in range(first, 10_000, 82):
        left = resumed(CASES[case], Signal(line), tmp_path)
        if not left:  # fewer lines than that
            assert line > 200
            break
        assert not different(left, uninterrupted(case)), line
