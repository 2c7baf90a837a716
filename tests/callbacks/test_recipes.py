"""recipe/ agrees with the tools' own rules, stated again in NumPy, to 1e-6. Models, settings and
the order of hooks come from the packaged configs. The network is small, and the batches are ours,
because the tools' come from generators of the whole process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import InMemoryDataModule, callbacks
from fl_lightning.datamodules.batches.augmentations import Pixels, augmentations_of
from fl_lightning.lab.cli.compose import Command, packaged
from fl_lightning.models import Classifier
from fl_lightning.round.cohort import Cohort
from tests.helpers.federation import Network, Run, fit
from tests.oracles.fl_simulator import Options, augmented, coins, run
from tests.oracles.oracle import TwoLayer
from tests.oracles.problems import Vector

M, SAMPLES, BATCH, ROUNDS = 6, 8, 4, 3
RECIPES = {
    "fedavg": Options(),
    "fedadam": Options("FedAdam", global_lr=0.1),
    "scaffold": Options("SCAFFOLD"),
    "fedcm": Options("FedCM"),
    "feddyn": Options("FedDyn", lr_decay=0.9995),
    "fedsam": Options("FedSAM"),
    "fedsmoo": Options("FedSMOO"),
}


def made(node: dict[str, Any], *arguments: Any) -> Any:
    """The object that a node of a config stands for."""
    module, _, name = node["class_path"].rpartition(".")
    cls = getattr(import_module(module) if module else callbacks, name)
    return cls(*arguments, **node.get("init_args", {}))


def config_of(*names: str) -> dict[str, Any]:
    command = Command()
    for name in names:
        command.add_config(name)
    return command.config


def ours(config: dict[str, Any], sizes: Sequence[int] = (SAMPLES,) * M, **changed: Any) -> Run:
    given = {k: v for k, v in config["model"].items() if k != "learner"} | changed
    server = given.pop("server_optimizer")
    if server is not None:
        given["server_optimizer"] = lambda w: made(server, w)
    init = config["model"]["learner"]["init_args"]
    learner = Classifier(
        Network().net, 3, lr=init["lr"], weight_decay=init.get("weight_decay", 0.0)
    ).double()
    r = np.random.default_rng(3)
    x = np.concatenate([r.normal(size=(n, 3)) + 2 * r.normal(size=3) for n in sizes])
    y = r.integers(0, 3, len(x))
    data = InMemoryDataModule(
        (torch.from_numpy(x), torch.from_numpy(y)),
        clients=np.split(np.arange(len(x)), np.cumsum(sizes)[:-1]),
        batch_size=BATCH,
        drop_last=config["data"]["init_args"]["drop_last"],
    )
    return fit(learner, data, [made(node) for node in config["method"]], ROUNDS, **given)


# All clients and no clipping, or the simulator's coins and clipping: the rest is between the two.
SETTINGS = {"all": (1.0, 10.0), "coins, clipped": (0.4, 0.2)}


@pytest.mark.parametrize(("setting", "ri"), [("all", False), ("coins, clipped", True)])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_simulator(
    name: str, setting: str, ri: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratio, clip = SETTINGS[setting]
    thrown = [coins(t, 20, M, ratio).tolist() for t in range(ROUNDS)]
    monkeypatch.setattr(Cohort, "_sampled", lambda self, t: tuple(thrown[t]))
    averages_models = name in ("feddyn", "fedsmoo")
    added = ["method/ri" if averages_models else "recipe/flsimulator/ri"] if ri else []
    config = config_of(f"recipe/flsimulator/{name}", *added)
    assert config["model"]["clip_norm"] == 10.0 and config["model"]["participation"] == 0.1
    found = ours(config, clip_norm=clip, participation=ratio)
    batches = found.schedule.rounds
    assert [sorted(cohort) for cohort in batches] == thrown

    def simulated(options: Options) -> list[Vector]:
        network = TwoLayer(3, 4, 3)
        return run(options, network, found.start, M, SAMPLES, lambda t, i: batches[t][i], ROUNDS)

    options = replace(RECIPES[name], use_ri=ri, ratio=ratio, batchsize=BATCH, max_norm=clip)
    theirs = simulated(options)
    for t, w in enumerate(theirs):
        np.testing.assert_allclose(found.record.w[t], w, rtol=0, atol=1e-6)
    # Each of these would be seen.
    for other in ({"weight_decay": 0.0}, {"lr_decay": 1.0}, {"use_ri": not ri}, {"max_norm": 0.1}):
        last = simulated(replace(options, **other))[-1]
        assert np.abs(last - theirs[-1]).max() > 1e-5, other


def test_images_are_flipped_and_cropped_as_the_simulator_does() -> None:
    """Half of the images are cropped, from a frame of zeros after normalisation."""
    init = config_of("recipe/flsimulator/fedavg")["data"]["init_args"]
    flip, crop = augmentations_of(init["augment"])
    pixels = Pixels(init["mean"], init["std"])
    x = torch.randn(400, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(400)
    changed, _ = crop(
        *flip(x, y, np.random.default_rng(5), pixels), np.random.default_rng(6), pixels
    )
    flips = np.random.default_rng(5).random(400) < 0.5
    draw = np.random.default_rng(6)
    places, crops = draw.integers(0, 9, (400, 2)), draw.random(400) < 0.5
    for i in range(400):
        (row, column) = places[i]
        expected = augmented(x[i].numpy(), flips[i], crops[i], row, column)
        assert np.array_equal(changed[i].numpy(), expected)
    assert 150 < flips.sum() < 250 and 150 < crops.sum() < 250


def test_the_recipes_differ_in_their_method_alone() -> None:
    names = [name for name in packaged() if name.startswith("recipe/flsimulator/")]
    assert {name.rpartition("/")[2] for name in names} == {*RECIPES, "ri"}
    (fedavg, *others) = (config_of(f"recipe/flsimulator/{name}") for name in RECIPES)
    for other in others:
        assert other["data"] == fedavg["data"] and other["trainer"] == fedavg["trainer"]
        same = {
            k: v for k, v in fedavg["model"].items() if k not in ("server_optimizer", "lr_decay")
        }
        assert same.items() <= other["model"].items()


def test_pfllib_weighs_by_samples_and_leaves_out_short_batches() -> None:
    config = config_of("recipe/pfllib/fedavg")
    sizes = [11, 4, 6, 9]
    found = ours(config, sizes)
    network, w = TwoLayer(3, 4, 3), found.start
    for t, cohort in enumerate(found.schedule.rounds):
        assert sorted(cohort) == [0, 1, 2, 3]
        ends = []
        for i, n in enumerate(sizes):
            x = w.copy()
            assert [len(y) for _, y in cohort[i]] == [BATCH] * (n // BATCH)
            for batch in cohort[i]:
                x = x - 0.005 * network.gradient(x, i, batch)
            ends.append(x)
        w = np.average(ends, axis=0, weights=sizes)
        np.testing.assert_allclose(found.record.w[t], w, rtol=0, atol=1e-9)
    equal = np.mean(ends, axis=0)
    assert np.abs(equal - w).max() > 1e-5, "so that the weights say something"
    # A rate or epochs of its own would be seen above; the rest is its default settings.
    init = config["data"]["init_args"]
    assert (init["mean"], init["std"], init["batch_size"]) == ([0.5], [0.5], 10)
    assert init["pooled"] and init["partition"]["init_args"]["test_share"] == 0.25
