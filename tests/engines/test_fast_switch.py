"""With the fast ways switched off a run is what it was, and who asks for one is told."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import fl_lightning
from fl_lightning.engines import auto
from fl_lightning.engines.fast_switch import SWITCH
from fl_lightning.errors import UserError
from tests.helpers.learners import Lit, blobs, federated, trainer


@pytest.fixture
def switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")


def ran(**arguments: Any) -> Any:
    torch.manual_seed(3)
    module = federated(Lit(), participation=0.6, local_epochs=4, workers=2, **arguments)
    trainer(2).fit(module, blobs())
    return module


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ((("engine", "stacked"),), "engine='stacked'"),
        ((("engine", "concurrent"), ("capture", True)), "capture=True"),
        ((("engine", "auto"), ("capture", True)), "capture=True"),
    ],
    ids=["stacks", "recordings", "recordings under auto"],
)
@pytest.mark.usefixtures("switched_off")
def test_who_asks_for_a_fast_way_is_told(asked: tuple[tuple[str, Any], ...], name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} is one of the fast ways.*FL_LIGHTNING_FAST=0"):
        ran(**dict(asked))


@pytest.mark.fast
@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("engine", ["auto", "concurrent"])
def test_a_run_leaves_the_same_bits_without_them(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(auto, "TINY_SECONDS", 0.0)
    fast = ran(engine=engine)
    assert fast.engine_facts["capture"] == "yes"
    monkeypatch.setenv(SWITCH, "0")
    slow = ran(engine=engine)
    # Uncaptured steps of a small network would wait for each other, so auto takes them in order.
    assert slow.engine_facts["engine"] == ("sequential" if engine == "auto" else engine)
    assert "switches them off" in slow.engine_facts.get("capture", "switches them off")
    assert torch.equal(fast.global_vector, slow.global_vector)


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:engine=")
def test_a_stacked_run_goes_on_with_another_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keeping: dict[str, Any] = {"default_root_dir": tmp_path, "enable_checkpointing": True}
    first = trainer(1, **keeping)
    first.fit(federated(Lit(), engine="stacked"), blobs())
    monkeypatch.setenv(SWITCH, "0")
    module = federated(Lit())
    path = first.checkpoint_callback.best_model_path
    with pytest.warns(UserWarning, match="continues a run that 'stacked' began"):
        trainer(2, **keeping).fit(module, blobs(), ckpt_path=path)
    assert module.engine_facts["engine"] != "stacked"


WITHOUT = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
import fl_lightning
from fl_lightning.engines.fast_switch import why_off
assert fl_lightning.__file__.startswith(sys.argv[1])
assert "is not installed" in why_off()
from tests.helpers.learners import Lit, blobs, federated, trainer
module = federated(Lit(), engine="concurrent", workers=2)
trainer(1).fit(module, blobs())
assert torch.isfinite(module.global_vector).all()
"""


@pytest.mark.slow
def test_without_the_folder_everything_is_there(bare_python: str, tmp_path: Path) -> None:
    package = Path(fl_lightning.__file__).parent
    shutil.copytree(package, tmp_path / "fl_lightning")
    shutil.copytree(package.parent / "tests", tmp_path / "tests")
    shutil.rmtree(tmp_path / "fl_lightning" / "engines" / "fast")
    command = [bare_python, "-c", WITHOUT, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
