"""Each client's model on its own test samples, against plain PyTorch; what is said, drawn, written.
Unseen by a run."""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning import callbacks as c
from fl_lightning.callback import Clients, ClientState, FederatedCallback
from fl_lightning.callbacks.loggers.per_client_evaluation import summary
from fl_lightning.datamodules import ByGroup
from fl_lightning.evaluation.client_tables import ClientRounds
from tests.helpers.learners import Dropping, Lit, client_rows, federated, trainer


class Last(FederatedCallback):
    last = ClientState(synchronised=False)

    def on_local_end(self, clients: Clients) -> None:
        self.last[clients] = clients.x

    def personal(self, clients: Clients) -> Tensor:
        return self.last[clients]


def data(
    clients: int = 10, batch_size: int | None = 8, fraction: float = 0.25, last: int = 1
) -> Any:
    """Client i holds 20 - 2 (i mod 5) samples, at most ``last`` the last one."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 20, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 4, (clients * 20,), generator=draw)
    x = centres[y] + torch.randn(len(y), 20, generator=draw, dtype=torch.float64)
    own = [np.arange(i * 20, (i + 1) * 20 - 2 * (i % 5)) for i in range(clients)]
    own[-1] = own[-1][:last]
    return InMemoryDataModule(
        (x, y),
        test=(x, y),
        clients=own,
        batch_size=batch_size,
        client_test_fraction=fraction,
        seed=7,
    )


def run(
    *callbacks: Any, learner: Any = Lit, rounds: int = 3, federation: Any = None, **arguments: Any
) -> Any:
    settings = arguments.pop("settings", {})
    torch.manual_seed(3)
    module = federated(learner(), **arguments)
    trainer(rounds, callbacks, **settings).fit(module, data() if federation is None else federation)
    return module


def measured(module: Any) -> dict[str, float]:
    return {
        k[8:]: float(v)
        for k, v in module.trainer.callback_metrics.items()
        if k.startswith("clients/")
    }


def by_hand(module: Any, models: dict[int, Tensor], of: Any = None) -> dict[str, dict[int, float]]:
    """Loss and accuracy of these models on the clients' own test samples."""
    federation = module.trainer.datamodule if of is None else of
    (x, y), found = (
        federation._given_sets["train"],
        {"loss": dict[int, float](), "acc": dict[int, float]()},
    )
    learner = module.export().eval()
    for i, w in models.items():
        own = federation.client_test_indices(i)
        if len(own):
            torch.nn.utils.vector_to_parameters(w, learner.parameters())
            out = learner.net(x[own]).detach()
            found["loss"][i] = float(cross_entropy(out, y[own]))
            found["acc"][i] = float((out.argmax(1) == y[own]).double().mean())
    return found


def agree(
    logged: dict[str, float], found: dict[str, dict[int, float]], samples: Any, suffix: str = ""
) -> None:
    for name, by_client in found.items():
        v, n = np.array(list(by_client.values())), np.array([samples[i] for i in by_client])
        worst = np.sort(v)[::-1][:1] if name == "loss" else np.sort(v)[:1]  # of nine clients one
        expected = {
            "": v.mean(),
            "_weighted": (v * n).sum() / n.sum(),
            "_std": v.std(ddof=1),
            "_worst10": worst.mean(),
        }
        for what, value in expected.items():
            assert logged[f"{name}{suffix}{what}"] == pytest.approx(value, rel=1e-6, abs=1e-9), (
                name,
                suffix,
                what,
            )


def test_of_fedavg_every_client_uses_the_servers_model() -> None:
    module = run(seen := c.PerClientEvaluation())
    agree(
        measured(module),
        by_hand(module, dict.fromkeys(range(10), module.global_vector.detach())),
        seen.samples,
    )
    assert len(seen.table["acc"]) == 9
    assert any("1 of 10 clients hold no test sample" in note for note in module.notes)
    assert {"acc", "acc_weighted", "acc_std", "acc_worst10", "loss_worst10"} <= measured(
        module
    ).keys()


def test_kept_parts_and_a_methods_own_model_and_clients_that_never_trained() -> None:
    """Three of ten clients a round for three rounds: at least one has never trained, and uses w."""
    module = run(seen := c.PerClientEvaluation(), c.PartialAveraging({"net.2.*": "never"}))
    w, store, models = module.global_vector.detach(), module.client_rows.store, {}
    head = slice(8 * 21, None)
    for i in range(10):
        row, models[i] = store.read("parts.x", i), w.clone()
        if row is not None:
            models[i][head] = row
    trained = {i for t in range(3) for i in module.participants(t)}
    assert (
        0 < len(trained) < 10
        and {i for i in models if torch.equal(models[i], w)} == set(range(10)) - trained
    )
    agree(measured(module), by_hand(module, models), seen.samples)
    assert torch.equal(
        torch.cat([p.reshape(-1) for p in module.export(client=min(trained)).parameters()]),
        models[min(trained)],
    )

    module = run(seen := c.PerClientEvaluation(), Last())
    rows = {i: module.client_rows.read("Last.last", i) for i in range(10)}
    assert {i for i, row in rows.items() if row is not None} == trained
    models = {i: module.global_vector.detach() if row is None else row for i, row in rows.items()}
    agree(measured(module), by_hand(module, models), seen.samples)


def test_a_part_that_was_averaged_since_is_the_servers() -> None:
    """Period 2, four rounds: after round 3 all is averaged, after round 2 participants have a copy
    of their own."""
    parts = lambda: c.PartialAveraging({"net.2.*": 2})  # noqa: E731
    module = run(c.PerClientEvaluation(), parts(), rounds=4)
    agree(
        measured(module),
        by_hand(module, dict.fromkeys(range(10), module.global_vector.detach())),
        {i: len(module.trainer.datamodule.client_test_indices(i)) for i in range(10)},
    )
    module = run(c.PerClientEvaluation(), parts(), rounds=3)
    own = [
        i
        for i in range(10)
        if not torch.equal(_flat(module.export(client=i)), module.global_vector)
    ]
    assert own == sorted(module.participants(2))


def _flat(learner: Any) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in learner.parameters()])


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "epochs"), [(None, 1, 2), (4, 2, 1), (4, 3, 1)]
)
def test_fine_tuning_is_local_training_from_the_personal_model(
    batch_size: int | None, accumulate: int, epochs: int
) -> None:
    """At the round's rate, without clipping; a step may be of several batches."""
    module = run(
        seen := c.PerClientEvaluation(finetune_epochs=epochs),
        Last(),
        federation=data(batch_size=batch_size),
        accumulate=accumulate,
        lr_decay=0.5,
        clip_norm=1e-3,
    )
    federation = module.trainer.datamodule
    models = {}
    for i in range(10):
        learner = copy.deepcopy(module.export(client=i))
        optimizer = torch.optim.SGD(learner.parameters(), lr=0.1 * 0.5**2, weight_decay=1e-3)
        number = epochs * federation.batches_per_epoch(i)
        batches = list(federation.client_batches(i, 2, number, purpose="finetune"))
        for first in range(0, number, accumulate):
            step = batches[first : first + accumulate]
            samples = sum(len(y) for _, y in step)
            optimizer.zero_grad()
            for x, y in step:
                (cross_entropy(learner.net(x), y, reduction="sum") / samples).backward()
            optimizer.step()
        models[i] = _flat(learner)
    agree(measured(module), by_hand(module, models), seen.samples, "_finetuned")
    assert measured(module)["loss_finetuned"] < measured(module)["loss"]


@pytest.mark.parametrize("learner", [Dropping])
def test_no_bit_of_the_training_changes(learner: Any) -> None:
    plain = run(Last(), learner=learner, federation=data(batch_size=5, last=9))
    measuring = c.PerClientEvaluation(1, finetune_epochs=1.5)
    seen = run(Last(), measuring, learner=learner, federation=data(batch_size=5, last=9))
    assert torch.equal(plain.global_vector, seen.global_vector)
    rows, theirs = client_rows(plain), client_rows(seen)
    assert rows.keys() == theirs.keys() and all(torch.equal(rows[key], theirs[key]) for key in rows)
    assert all(
        torch.equal(b, seen.learner.get_buffer(name)) for name, b in plain.learner.named_buffers()
    )
    logged = {k: v for k, v in plain.trainer.callback_metrics.items() if "time/" not in k}
    assert all(torch.equal(v, seen.trainer.callback_metrics[k]) for k, v in logged.items())


def test_a_drawn_sample_is_fixed_by_the_seed_and_looks_at_no_other_client() -> None:
    class Asked(list[Any]):
        def __getitem__(self, i: Any) -> Any:
            asked.add(i)
            return super().__getitem__(i)

    asked: set[int] = set()
    drawn = []
    for seed in (1, 1, 2):
        federation = data()
        module = run(seen := c.PerClientEvaluation(clients=4), federation=federation, seed=seed)
        drawn.append(list(seen.samples))
        federation._split.clients = Asked(federation._split.clients)
        federation._split._latest.clear()
        asked.clear()
        seen.measure(module)
        assert asked == set(drawn[-1])
    assert drawn[0] == drawn[1] != drawn[2] and all(len(ids) == 4 == len(set(ids)) for ids in drawn)
    run(seen := c.PerClientEvaluation(clients=99))
    assert list(seen.samples) == list(range(10))


def test_what_is_written_at_the_end(tmp_path: Path) -> None:
    settings = {"default_root_dir": str(tmp_path), "enable_checkpointing": True}
    module = run(seen := c.PerClientEvaluation(finetune_epochs=1), settings=settings)
    rows = list(csv.DictReader((tmp_path / "clients.csv").open()))
    assert [int(row["client"]) for row in rows] == list(range(10))
    assert rows[9] == {"client": "9", "samples": "0"} | dict.fromkeys(seen.table, "")
    assert list(rows[0]) == ["client", "samples", "loss", "acc", "loss_finetuned", "acc_finetuned"]
    assert all(float(rows[i]["acc"]) == value for i, value in seen.table["acc"].items())
    assert (tmp_path / "clients.png").read_bytes()[
        :4
    ] == b"\x89PNG" and module.trainer.current_epoch == 3


class Regressor(Lit):
    """Logs no loss in validation, but an error of its own, under a name without prefix."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return ((self.net(batch[0])[:, 0] - batch[1]) ** 2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        away = (self.net(batch[0])[:, 0] - batch[1]).abs()
        self.log("mae", away.mean())
        self.log("val_within", (away < 1).double().mean())


def test_the_worst_tenth_is_a_mean_and_what_is_no_longer_logged_is_no_longer_told() -> None:
    values = {client: float(client) for client in range(20)}
    assert summary(values, dict.fromkeys(values, 1), greater=True)["_worst10"] == 0.5
    assert summary(values, dict.fromkeys(values, 1), greater=False)["_worst10"] == 18.5

    class Early(Lit):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if self.current_epoch == 0:
                self.log("val/early_loss", 1.0)

    tables = list[set[str]]()

    class Watching(c.PerClientEvaluation):
        def measure(self, module: Any) -> dict[str, float]:
            found = super().measure(module)
            tables.append(set(self.table))
            return found

    run(Watching(1), learner=Early, rounds=2)
    assert tables == [{"loss", "acc", "early_loss"}, {"loss", "acc"}]


def test_a_client_whose_metric_is_nan_has_no_value_of_it(tmp_path: Path) -> None:
    """As an AUROC of one class: the others' numbers are of them alone, all four, which is told."""

    class Ranked(Lit):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            one_class = len(batch[1].unique()) < 4
            self.log("val/auroc", torch.nan if one_class else batch[0].sum())
            self.log("val/gini_max", torch.nan)

    with pytest.warns(UserWarning, match="have no value of auroc") as caught:
        module = run(
            seen := c.PerClientEvaluation(1, modes={"auroc": "max", "gini_max": "max"}),
            learner=Ranked,
            settings={"default_root_dir": tmp_path, "enable_checkpointing": True},
        )
    logged = measured(module)
    (x, y) = module.trainer.datamodule._given_sets["train"]
    samples = {i: module.trainer.datamodule.client_test_indices(i) for i in range(10)}
    auroc = {
        i: float(x[own].sum())
        for i, own in samples.items()
        if len(own) and len(y[own].unique()) == 4
    }
    assert 1 < len(auroc) < 9
    counts = {i: len(own) for i, own in samples.items()}
    agree(logged, {"auroc": auroc}, counts)
    assert seen.table["auroc"].keys() == auroc.keys()
    assert not [name for name in logged if "gini" in name]
    told = [str(each.message) for each in caught if "have no value of" in str(each.message)]
    assert len(told) == 2, "once of each metric, in three rounds"
    assert f"{9 - len(auroc)} of 9 clients have no value of auroc" in told[0]
    assert "9 of 9 clients have no value of gini_max" in told[1]
    rows = list(csv.DictReader((tmp_path / "clients.csv").read_text().splitlines()))
    assert [row["client"] for row in rows if row["auroc"]] == [str(i) for i in auroc]


def test_regression_and_metrics_of_the_learners_own() -> None:
    with pytest.raises(
        UserError, match=r"which way is better in within is not known.*modes="
    ) as caught:
        run(unsaid := c.PerClientEvaluation(), learner=Regressor)
    assert unsaid._ended == -1 and "mae" not in str(
        caught.value
    )  # before round 0, and of that name alone
    module = run(seen := c.PerClientEvaluation(modes={"within": "max"}), learner=Regressor)
    assert seen.table.keys() == {"loss", "mae", "within"}
    assert measured(module)["mae_worst10"] == pytest.approx(
        max(seen.table["mae"].values()), rel=1e-6
    )
    assert measured(module)["within_worst10"] == pytest.approx(
        min(seen.table["within"].values()), rel=1e-6
    )
    with pytest.raises(UserError, match=r"highest.*a mapping to 'max' or 'min'"):
        c.PerClientEvaluation(modes={"within": "highest"})


def test_what_cannot_be_measured_is_refused_before_training() -> None:
    arguments: dict[str, Any]
    for arguments in (
        {"clients": "some"},
        {"clients": 0},
        {"finetune_epochs": -1},
        {"every_n_rounds": 0},
    ):
        with pytest.raises(UserError, match=f"PerClientEvaluation: {next(iter(arguments))}"):
            c.PerClientEvaluation(**arguments)
    with pytest.raises(UserError, match="client_test_fraction"):
        run(c.PerClientEvaluation(), federation=data(fraction=0.0))
    with pytest.raises(UserError, match="numbered from 0 to 9"):
        run().export(client=10)


def test_every_round_that_was_measured_is_kept_and_a_resumed_run_leaves_the_same_file(
    tmp_path: Path,
) -> None:
    def trained(folder: Path, rounds: int, resumed: bool = False) -> Path:
        settings = {"default_root_dir": str(folder), "enable_checkpointing": True}
        last = str(folder / "last.ckpt") if resumed else None
        torch.manual_seed(3)
        training = trainer(rounds, [c.PerClientEvaluation(1)], **settings)
        training.fit(federated(), data(), ckpt_path=last)
        training.save_checkpoint(folder / "last.ckpt")
        return folder / "clients_rounds.csv"

    whole = trained(tmp_path / "whole", 4)
    rows = list(csv.DictReader(whole.open()))
    assert [int(row["round"]) for row in rows[::10]] == [0, 1, 2, 3] and len(rows) == 40
    last = [{name: row[name] for name in row if name != "round"} for row in rows[-10:]]
    assert last == list(csv.DictReader((tmp_path / "whole/clients.csv").open()))
    # Killed in the middle of a line of round 2, and resumed from the end of round 1.
    part = trained(tmp_path / "part", 2)
    with part.open("a") as file:
        file.write("".join(whole.read_text().splitlines(True)[21:24])[:-4])
    assert trained(tmp_path / "part", 4, resumed=True).read_bytes() == whole.read_bytes()


class KilledAtTheEnd(pl.Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        raise KeyError("killed")


def test_what_a_kill_at_the_end_of_an_early_stopped_run_took_is_measured_by_its_resume(
    tmp_path: Path,
) -> None:
    def trained(folder: Path, *first: Any, resumed: bool = False) -> dict[str, float]:
        measuring = (c.PerClientEvaluation(finetune_epochs=1), c.GlobalLossLogger(None))
        bored = EarlyStopping("val/loss", patience=1, min_delta=10.0)
        saving = ModelCheckpoint(folder, save_last=True)
        settings = {"default_root_dir": str(folder), "enable_checkpointing": True}
        torch.manual_seed(3)
        training = trainer(9, [*first, *measuring, bored, saving], **settings)
        training.fit(federated(), data(), ckpt_path=folder / "last.ckpt" if resumed else None)
        assert training.current_epoch == 2
        logged = training.callback_metrics
        return {k: float(v) for k, v in logged.items() if k.startswith(("clients/", "global/"))}

    def files(folder: Path) -> list[bytes]:
        return [(folder / name).read_bytes() for name in ("clients.csv", "clients_rounds.csv")]

    whole = trained(tmp_path / "whole")
    written = files(tmp_path / "whole")
    with pytest.raises(KeyError):
        trained(tmp_path / "killed", KilledAtTheEnd())
    assert not (tmp_path / "killed/clients.csv").exists()
    for folder in ("killed", "whole"):
        assert trained(tmp_path / folder, resumed=True) == whole
        assert files(tmp_path / folder) == written


def test_a_metric_that_comes_later_has_a_column_of_its_own(tmp_path: Path) -> None:
    rounds = ClientRounds(tmp_path / "clients_rounds.csv")
    rounds.add(0, {"loss": {3: 0.5, 4: 1.0}}, {3: 7, 4: 2})
    rounds.add(2, {"loss": {3: 0.25}, "acc": {3: 1.0}}, {3: 7, 4: 2})
    rounds.add(4, {"loss": {3: 0.125}, "acc": {3: 0.5}}, {3: 7})
    assert rounds.path.read_text() == (
        "round,client,samples,loss,acc\n0,3,7,0.5,\n0,4,2,1.0,\n2,3,7,0.25,1.0\n2,4,2,,\n"
        "4,3,7,0.125,0.5\n"
    )
    rounds.keep(before=2)
    assert rounds.path.read_text() == "round,client,samples,loss,acc\n0,3,7,0.5,\n0,4,2,1.0,\n"


def test_names_of_clients_stand_in_the_last_column(tmp_path: Path) -> None:
    x, y = blobs_of_names()
    groups = np.array(["south", "east", "north"])[np.arange(len(x)) % 3]
    federation = InMemoryDataModule(
        (x, y), (x, y), partition=ByGroup(groups), batch_size=8, client_test_fraction=0.3
    )
    settings = {"default_root_dir": str(tmp_path), "enable_checkpointing": True}
    run(c.PerClientEvaluation(), federation=federation, settings=settings)
    for name in ("clients.csv", "clients_rounds.csv"):
        rows = list(csv.DictReader((tmp_path / name).open()))
        assert list(rows[0])[-1] == "name"
        names = {row["client"]: row["name"] for row in rows}
        assert names == {"0": "east", "1": "north", "2": "south"}


def blobs_of_names() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(60, 20, generator=drawn, dtype=torch.float64), torch.arange(60) % 4


class Shared(Lit):
    """One metric in both steps, which measure different things."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.update(100.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.update(1.0)
        self.log("val/seen_loss", self.seen)


def test_what_the_training_step_puts_into_a_shared_metric_is_not_measured() -> None:
    measured = c.PerClientEvaluation()
    trainer(1, [measured]).fit(federated(Shared()), data())
    assert set(measured.table["seen_loss"].values()) == {1.0}


def clients_with(module: Any, fits: Callable[[Tensor], Any]) -> set[int]:
    """The clients whose test samples fit; the samples of class 0 are the positives."""
    data = module.trainer.datamodule
    y = data._given_sets["train"][1]
    found = {i for i in range(10) if fits(y[data.client_test_indices(i)] == 0)}
    assert 1 < len(found) < 9
    return found


@pytest.mark.parametrize(
    ("by_hand", "task", "thresholds"),
    [(False, "binary", None), (True, "binary", 50), (False, "multi", None)],
)
@pytest.mark.filterwarnings("ignore:No positive samples")
def test_an_auroc_of_one_class_is_no_value(by_hand: bool, task: str, thresholds: Any) -> None:
    """torchmetrics returns 0 for it, which would count as the worst possible ranking."""

    class Binary(Lit):
        def __init__(self) -> None:
            super().__init__()
            kind = "multiclass" if task == "multi" else "binary"
            self.auroc = torchmetrics.AUROC(kind, thresholds, num_classes=2)
            self.hits = torchmetrics.Accuracy("binary")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            scores, y = self.net(batch[0])[:, 0], (batch[1] == 0).long()
            self.log("val/loss", cross_entropy(self.net(batch[0]), batch[1]))
            pairs = torch.stack([-scores, scores], 1).softmax(1)
            self.auroc.update(pairs if task == "multi" else scores, y)
            self.hits.update(scores, y)
            self.log("val/acc", self.hits)
            if not by_hand:
                self.log("val/auroc", self.auroc)

        def on_validation_epoch_end(self) -> None:
            if by_hand:
                self.log("val/auroc", self.auroc.compute())
                self.auroc.reset()

    with pytest.warns(UserWarning, match="clients have no value of auroc"):
        module = run(seen := c.PerClientEvaluation(1), learner=Binary, rounds=1)
    both = clients_with(module, lambda positive: len(positive.unique()) == 2)
    assert seen.table["auroc"].keys() == both
    assert len(seen.table["acc"]) == 9
