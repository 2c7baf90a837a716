"""A data module's own hooks, state and attributes, beneath FromDataModule and in subclasses of our
own modules."""

from __future__ import annotations

import copy
import pickle

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import InMemoryDataModule
from fl_lightning.datamodules import IID, FromDataModule, FromDatasets
from tests.helpers.learners import Lit, federated, trainer

OFFSET, SPREAD = 1437.0, 250.0


def clean():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 20, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (60,), generator=generator)


class Raw(pl.LightningDataModule):
    """Pixels as they come; normalised after the transfer, as torchgeo's data modules do."""

    def __init__(self, spread: float = SPREAD):
        super().__init__()
        self.save_hyperparameters()
        self.seen, self.asked, self.ended, self.counted, self.found = [], [], [], 3, None

    def setup(self, stage):
        x, y = clean()
        self.data = TensorDataset(x * self.hparams.spread + OFFSET, y)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=6, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=25)

    test_dataloader = val_dataloader

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        self.seen.append((self.trainer.training, self.trainer.validating, len(x)))
        return (x - OFFSET) / self.hparams.spread, y

    def teardown(self, stage):
        self.ended.append(stage)
        del self.data

    def state_dict(self):
        return {"counted": self.counted}

    def load_state_dict(self, state_dict):
        self.found = state_dict["counted"]

    def on_exception(self, exception):
        self.asked.append(type(exception).__name__)


def around(learner, engine="sequential"):
    torch.manual_seed(0)
    return federated(learner(), participation="all", engine=engine)


def run(data, rounds=2, learner=Lit, engine="sequential", **settings):
    module = around(learner, engine)
    fit = trainer(rounds, **settings)
    fit.fit(module, data)
    return module, fit


def federate(inner):
    return FromDataModule(inner, partition=IID(), num_clients=3, seed=5)


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_clients_train_on_what_the_transfer_hook_makes(engine):
    x, y = clean()
    x = (x * SPREAD + OFFSET - OFFSET) / SPREAD
    plain = InMemoryDataModule(
        (x, y), test=(x, y), partition=IID(), num_clients=3, batch_size=6, seed=5
    )
    expected, _ = run(plain, engine=engine)
    inner = Raw()
    module, fit = run(federate(inner), engine=engine)
    assert torch.equal(module.global_vector, expected.global_vector)
    tested = fit.test(module, federate(Raw()), verbose=False)[0]["test/acc"]
    assert tested == trainer().test(module, plain, verbose=False)[0]["test/acc"]
    evaluated = [entry for entry in inner.seen if entry[1]]
    # once a batch, and never the round's token
    assert evaluated == [(False, True, n) for n in (25, 25, 10)] * 2
    assert all(entry[0] and entry[2] in (6, 2) for entry in inner.seen if not entry[1])


def test_full_gradients_see_the_hooks_too():
    data = federate(Raw())
    data.datamodule.trainer = data.trainer = trainer()
    whole = torch.cat([x for (x, _), _ in data.full_batches(1)])
    assert torch.allclose(whole, clean()[0][data.client_indices(1)])
    assert torch.allclose(data.one_batch(1, 2)[0], whole[:2])


def test_all_three_hooks_come_in_lightnings_order_and_replace_each_other():
    class Three(Raw):
        order = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [*batch, "before"]

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return [*batch, device.type]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [*batch, "after"]

    batch = next(federate(Three()).client_batches(0, 0, 1))
    assert batch[2:] == ["before", "cpu", "after"]
    assert (
        federate(Three()).transfer_hooks == Three.order
        and federate(Raw()).transfer_hooks == Three.order[2:]
    )


@pytest.mark.parametrize(
    "hook", ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
)
@pytest.mark.parametrize("made", ["memory", "datasets"])
def test_hooks_get_the_batch_where_lightning_would_give_it(made, hook):
    def see(self, batch, *rest):
        self.seen = batch[0].device.type
        return [part.to(rest[0]) for part in batch] if hook == "transfer_batch_to_device" else batch

    kind = type("Seeing", (InMemoryDataModule if made == "memory" else FromDatasets,), {hook: see})
    data = kind(clean() if made == "memory" else TensorDataset(*clean()), num_clients=2)
    (x, y), *_ = data.client_batches(0, 0, 1, device=torch.device("meta"))
    assert (
        x.is_meta
        and y.is_meta
        and data.seen == ("meta" if hook == "on_after_batch_transfer" else "cpu")
    )


def test_random_numbers_in_a_hook_are_found_by_the_engines():
    class Noisy(Raw):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            x, y = super().on_after_batch_transfer(batch, dataloader_idx)
            return x + 0.1 * torch.randn_like(x), y

    module, _ = run(federate(Noisy()), rounds=1, engine="auto")
    again, _ = run(federate(Noisy()), rounds=1, engine="auto")
    assert (
        module.engine_facts["engine"] == "sequential"
        and "clients draw random numbers" in module.engine_facts["why"]
    )
    assert torch.equal(module.global_vector, again.global_vector)


def test_hooks_of_a_subclass_of_ours_are_honoured_and_spared_the_token():
    class Doubled(InMemoryDataModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            x, y = batch
            return x.mul_(2), y  # in place, as batches of a DataLoader allow

    x, y = clean()
    made = [cls((z, y), test=(z, y), num_clients=3, batch_size=6, seed=5)
            for cls, z in ((Doubled, x), (InMemoryDataModule, 2 * x))]  # fmt: skip
    (ours, fit), (expected, other) = (run(data, rounds=3) for data in made)
    assert torch.equal(ours.global_vector, expected.global_vector)
    assert fit.callback_metrics["val/loss"] == other.callback_metrics["val/loss"]


def test_a_learner_may_change_its_evaluation_batch_in_place():
    class Careless(Lit):
        def validation_step(self, batch, batch_idx):
            batch[0].mul_(0.5)
            super().validation_step(batch, batch_idx)

    class Careful(Lit):
        def validation_step(self, batch, batch_idx):
            super().validation_step([0.5 * batch[0], batch[1]], batch_idx)

    x, y = clean()
    losses = []
    for learner in (Careless, Careful):
        data = InMemoryDataModule((x, y), test=(x, y), num_clients=3, seed=5)
        _, fit = run(data, rounds=3, learner=learner)
        losses.append(fit.callback_metrics["val/loss"])
    assert losses[0] == losses[1]


def test_state_hyper_parameters_and_teardown_are_the_wrapped_ones(tmp_path):
    inner = Raw(spread=100.0)
    checkpoints = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    module, fit = run(federate(inner), **checkpoints)
    assert inner.ended == ["fit"]
    path = fit.checkpoint_callback.best_model_path
    assert Raw.load_from_checkpoint(path, map_location="cpu").hparams.spread == 100.0
    later = Raw(spread=100.0)
    trainer(3, **checkpoints).fit(around(Lit), federate(later), ckpt_path=path)
    assert later.found == 3
    trainer(1).fit(module, federate(inner))
    again = federate(inner)
    for _ in range(2):  # teardown gave its data back: setup makes them anew
        trainer(1).fit(around(Lit), again)
    assert inner.ended == ["fit"] * 4 and again.counted == 3 and again.hparams.spread == 100.0
    with pytest.raises(AttributeError, match="nothing"):
        _ = again.nothing


def test_an_exception_reaches_it():
    class Broken(Lit):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    inner = Raw()
    with pytest.raises(RuntimeError, match="broken"):
        run(federate(inner), learner=Broken)
    assert inner.asked == ["RuntimeError"]


def test_a_data_module_of_lightning_pytorch_and_a_copy():
    lightning = pytest.importorskip("lightning.pytorch")

    class Other(lightning.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(*clean()), batch_size=6)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] + 1, batch[1]

    data = federate(Other())
    first = next(data.client_batches(0, 0, 1))[0]
    assert torch.equal(first, clean()[0][data.client_indices(0)[data.order(0, 0, 0)][:6]] + 1)
    twin = copy.deepcopy(data)
    assert torch.equal(next(twin.client_batches(0, 0, 1))[0], first)
    assert twin.on_after_batch_transfer([first, None], 0)[0].equal(first + 1)
    ours = pickle.loads(pickle.dumps(federate(Raw())))
    assert ours.datamodule is not None and ours.num_clients == 3
