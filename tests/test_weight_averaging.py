"""Lightning's callbacks that average weights."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from torch import Tensor

from fl_lightning import FederatedModule
from fl_lightning.callback import FederatedCallback
from fl_lightning.callbacks import PartialAveraging
from tests.helpers.learners import Lit, Normed, blobs, federated, trainer
from tests.helpers.processes import same_models_on_one_and_two

DECAY = 0.5
KINDS: dict[str, Any] = {"ema": lambda: EMAWeightAveraging(decay=DECAY), "mean": WeightAveraging}


class Saving(pl.Callback):
    """Keeps every round's checkpoint, and the weights of the server and those that are
    validated."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.w, self.validated = folder, list[Tensor](), list[Tensor]()

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.w.append(module.global_vector.detach().clone())

    def on_validation_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        flat = torch.cat([p.detach().reshape(-1) for p in module.learner.parameters()])
        self.validated[trainer.current_epoch :] = [flat]

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


def fitted(
    averaging: Any,
    folder: Path,
    rounds: int = 4,
    path: Path | None = None,
    methods: Any = (),
    **given: Any,
) -> tuple[FederatedModule, Saving]:
    torch.manual_seed(0)
    module, saving = federated(Normed(), participation="all", **given), Saving(folder)
    run = trainer(rounds, [averaging, saving, *methods], default_root_dir=folder)
    run.fit(module, blobs(clients=3), ckpt_path=path)
    return module, saving


@pytest.mark.parametrize(
    ("engine", "kind"), [("sequential", "ema"), ("sequential", "mean"), ("concurrent", "ema")]
)
@pytest.mark.filterwarnings("ignore:engine=")
def test_averages_are_over_rounds_evaluated_and_exported(
    kind: str, engine: str, tmp_path: Path
) -> None:
    module, saving = fitted(KINDS[kind](), tmp_path, engine=engine)
    torch.manual_seed(0)
    plain, other = Saving(tmp_path), federated(Normed(), participation="all", engine=engine)
    trainer(4, [plain], default_root_dir=tmp_path).fit(other, blobs(clients=3))
    average: Any = None
    for t, w in enumerate(saving.w):
        assert torch.equal(w, plain.w[t]), "training goes on from w, not from its average"
        share = 1 - DECAY if kind == "ema" else 1 / (t + 1)
        average = w if average is None else average + share * (w - average)
        torch.testing.assert_close(saving.validated[t], average, rtol=1e-12, atol=1e-12)
    exported = torch.cat([p.detach().reshape(-1) for p in module.export().parameters()])
    torch.testing.assert_close(exported, average, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("methods", [[], [{"net.3.*": "never"}]], ids=["w", "personal"])
def test_a_run_resumes_to_the_same_bits(kind: str, methods: Any, tmp_path: Path) -> None:
    def run(folder: str, rounds: int, path: Path | None = None) -> tuple[FederatedModule, Saving]:
        added = [PartialAveraging(periods=periods) for periods in methods]
        return fitted(
            KINDS[kind](), tmp_path / folder, rounds, path, added, server_optimizer=momentum
        )

    whole, saved = run("whole", 4)
    for begun in (0, 2):
        run(f"part{begun}", begun + 1)
        resumed, again = run(f"part{begun}", 4, tmp_path / f"part{begun}" / f"{begun}.ckpt")
        for one, two in zip(again.w, saved.w[begun + 1 :], strict=True):
            assert torch.equal(one, two)
        for name, value in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], value), name
        kept, last = (
            torch.load(tmp_path / folder / "3.ckpt") for folder in ("whole", f"part{begun}")
        )
        for part in ("state_dict", "current_model_state", "averaging_state"):
            for name, value in kept[part].items():
                assert torch.equal(last[part][name], value), (part, name)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)


def test_a_checkpoint_within_a_round_resumes_to_the_same_bits(tmp_path: Path) -> None:
    class Within(FederatedCallback):
        def on_round_end(self, server: Any) -> None:
            if server.round == 2 and threading.current_thread() is threading.main_thread():
                self.run.save_checkpoint(tmp_path / "within.ckpt")

        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            self.run = trainer

    whole, _ = fitted(KINDS["ema"](), tmp_path, methods=[Within()])
    resumed, _ = fitted(KINDS["ema"](), tmp_path, path=tmp_path / "within.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_after_an_exception_in_a_validation_a_run_goes_on_from_w(tmp_path: Path) -> None:
    class Ending(Saving):
        ends = True

        def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if self.ends and trainer.current_epoch == 1:
                raise KeyError("in a hook")

    _, whole = fitted(KINDS["ema"](), tmp_path)
    torch.manual_seed(0)
    module, ending = federated(Normed(), participation="all"), Ending(tmp_path)
    run = trainer(4, [KINDS["ema"](), ending], default_root_dir=tmp_path)
    with pytest.raises(KeyError):
        run.fit(module, blobs(clients=3))
    ending.ends = False
    run.fit(module, blobs(clients=3))
    assert all(torch.equal(*pair) for pair in zip(ending.w[-2:], whole.w[-2:], strict=True))


def test_the_averages_are_what_a_plain_learner_loads(tmp_path: Path) -> None:
    class Named(Normed):
        pass

    best = ModelCheckpoint(
        tmp_path, monitor="val/loss", filename="best", enable_version_counter=False
    )
    module = federated(Named(), participation="all")
    run = trainer(3, [KINDS["mean"](), best], enable_checkpointing=True, default_root_dir=tmp_path)
    run.fit(module, blobs(clients=3))
    loaded = Named().double()
    loaded.load_state_dict(torch.load(tmp_path / "best.ckpt", weights_only=True)["state_dict"])
    (scores,) = trainer(1).validate(federated(loaded), blobs(clients=3), verbose=False)
    assert scores["val/loss"] == pytest.approx(float(best.best_model_score), rel=1e-6)


def test_a_learner_that_is_inside_another_module_loads_by_its_own_names() -> None:
    first, other = federated(Lit()), federated(Lit(hidden=8))
    first.learner.net[0].weight.data.fill_(2.0)
    outer = torch.nn.ModuleDict({"inner": other})
    outer.load_state_dict({f"inner.{name}": value for name, value in first.state_dict().items()})
    assert bool((other.learner.net[0].weight == 2.0).all())
    with pytest.raises(RuntimeError, match="unknown"):
        outer.load_state_dict({**outer.state_dict(), "inner.unknown": torch.zeros(1)})


@pytest.mark.slow
def test_two_processes_average_alike(tmp_path: Path) -> None:
    same_models_on_one_and_two(on_ranks, tmp_path)


def on_ranks(folder: Path, rank: int, world: int) -> None:
    module = federated(Normed(), participation="all")
    given = {} if world == 1 else {"strategy": "federated", "devices": world}
    trainer(2, [EMAWeightAveraging(decay=DECAY)], default_root_dir=folder, **given).fit(
        module, blobs(clients=4)
    )
    if rank == 0:
        torch.save(module.export().state_dict(), folder / f"{world}.pt")
