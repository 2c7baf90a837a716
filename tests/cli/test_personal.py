"""Personal models at the command line: evaluated by client, and exported from a run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters
from torch.utils.data import default_collate

from fl_lightning import load
from tests.helpers.commands import QUIET_FIT, done, said, table, typed
from tests.helpers.zygote import Cli

FIT = (*QUIET_FIT, "--trainer.max_epochs", "2")
SKEWED = typed(
    "--data.partition Dirichlet --data.partition.alpha 0.1", "--data.client_test_fraction 0.25"
)
EVALUATED = typed("--trainer.callbacks+ PerClientEvaluation --trainer.callbacks.finetune_epochs 1")


def weights(cli: Cli, run: str, client: int) -> torch.Tensor:
    """The model of a client that ``export`` writes, as one vector."""
    done(cli("export", run, "--client", client, "-o", "own.pt"))
    state = torch.load(cli.folder / "own.pt", weights_only=True)["state_dict"]
    return torch.cat([value.reshape(-1) for value in state.values()])


def centres(folder: Path) -> Any:
    return load(folder).checkpoint["federated"]["server"]["ClusteredModels.centres"]


NETWORK = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
    def get_extra_state(self):
        return {'a': 1}
    def set_extra_state(self, state):
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "personal"), [("fedper", True), ("fedals", False)])
def test_what_is_computed_with_the_servers_model_says_so(
    cli: Cli, method: str, personal: bool
) -> None:
    # A network may keep what is no tensor.
    (cli.folder / "extra.py").write_text(NETWORK)
    done(cli(*FIT, "-c", f"method/{method}", "--model.learner.network", "extra.Net"))
    folder = f"runs/digits-{method}-1"
    for command in ("test", "predict", "export"):
        told = done(cli(command, folder)).stderr
        assert (f"{command} used the server's model" in told) == personal
    assert "server's model" not in done(cli("export", folder, "--client", 3)).stderr


def test_fit_evaluate_and_export(cli: Cli) -> None:
    run = cli(*FIT, "-c", "method/ditto", "--model.participation", 3, *SKEWED, *EVALUATED)
    # What measures is no part of the method's name.
    done(run, "Ditto · 3 of 10 clients")
    folder = cli.folder / "runs/digits-ditto-1"
    rows = table(folder / "clients.csv")
    columns = {"client", "samples", "loss", "acc", "acc_finetuned"}
    assert len(rows) == 10 and columns <= rows[0].keys()
    logged = table(folder / "metrics.csv")
    assert logged[0].get("clients/acc", "") == ""
    assert 0 <= float(logged[1]["clients/acc_worst10"]) <= 1
    assert (folder / "clients.png").is_file()

    made = load(folder)
    models = [made.client_state("ProximalPersonalModel.v", i) for i in range(10)]
    trained = [i for i, model in enumerate(models) if model is not None]
    (never, *_) = [i for i in range(10) if i not in trained]
    server = torch.cat([p.detach().reshape(-1) for p in made.learner.parameters()])
    for client in (trained[0], never):
        own = models[client]
        flat = weights(cli, "runs/digits-ditto-1", client)
        assert torch.equal(flat, server if own is None else own)
    said(cli("export", "runs/digits-ditto-1", "--client", 10), "numbered from 0 to 9")


def test_who_never_trained_exports_the_centre_that_fits_it_best(cli: Cli) -> None:
    """On the samples that it had, also if the run's seed is not that of the process."""
    given = ("--model.participation", 3, *SKEWED, *EVALUATED, "--model.seed", 4)
    done(cli(*FIT, "-c", "method/ifca", *given))
    folder = cli.folder / "runs/digits-ifca-1"
    record = json.loads((folder / "run.json").read_text())
    assert any("clusters' models, which is not a useful model" in note for note in record["notes"])
    assert record["shown"][0] == "clients/acc"
    made = load(folder)
    chosen: set[int] = set()
    for client in range(10):
        samples = made.data.client_dataset(client)
        images, labels = default_collate([samples[k] for k in range(len(samples))])
        losses = []
        for centre in centres(folder):
            vector_to_parameters(centre, made.learner.parameters())
            with torch.no_grad():
                losses.append(float(cross_entropy(made.learner(images), labels)))
        best = losses.index(min(losses))
        if best not in chosen:
            assert torch.equal(weights(cli, "runs/digits-ifca-1", client), centres(folder)[best])
        chosen.add(best)
    assert chosen == {0, 1}
    other = ("--client", 3, "--data.partition.alpha", 9)
    said(cli("export", "runs/digits-ifca-1", *other), "the data give partition")


def test_kept_parts_and_own_buffers_are_exported(cli: Cli) -> None:
    said(cli(*FIT, "-c", "method/fedbn"), "no normalisation layer")
    fit = typed("-c data/digits -c model/resnet20 -c method/fedbn --model.participation 3")
    small = typed("--model.learner.network.depth 8 --model.learner.network.width 4")
    done(cli(*FIT, *fit, *small, "--model.local_steps", 2, "--trainer.default_root_dir", "x"))
    made = load(cli.folder / "x")
    server = torch.load(cli.folder / "x/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    (client, *_) = (i for i in range(10) if made.client_state("parts.round", i) is not None)
    weights(cli, "x", client)
    own = torch.load(cli.folder / "own.pt", weights_only=True)["state_dict"]
    differs = {name for name, value in own.items() if not torch.equal(value, server[name])}
    buffer = next(name for name in own if name.endswith("running_mean"))
    assert buffer in differs
    assert torch.equal(own[buffer], made.client_state("buffer." + buffer, client))
    assert all("bn" in name or "norm" in name or "running" in name for name in differs), differs


def test_a_client_is_exported_by_its_name(cli: Cli) -> None:
    lines = [f"{name},{k % 5},{k % 2}" for name in ("Aachen", "Bergen") for k in range(12)]
    (cli.folder / "t.csv").write_text("\n".join(["hospital,age,outcome", *lines]) + "\n")
    run = typed(
        "-c method/ditto --model.participation all --data FromTable --data.path t.csv",
        "--data.client hospital --data.target outcome --trainer.default_root_dir x",
    )
    done(cli(*FIT, *run))
    done(cli("export", "x", "--client", "Bergen"))
    found = torch.load(cli.folder / "x/client-1.pt", weights_only=True)["state_dict"]
    flat = torch.cat([value.reshape(-1) for value in found.values()])
    assert torch.equal(flat, weights(cli, "x", 1))
    refused = cli("export", "x", "--client", "Bergn")
    said(refused, "no client has this name", "Did you mean 'Bergen'")


def test_a_run_in_double_precision_is_exported_to_the_same_bits(cli: Cli) -> None:
    double = ("--trainer.precision", "64-true", "--trainer.default_root_dir")
    for method in ("ditto", "ifca"):
        given = ("-c", f"method/{method}", *SKEWED, "--model.participation", "all")
        done(cli(*FIT, *given, *double, method))
    own = load(cli.folder / "ditto").client_state("ProximalPersonalModel.v", 3)
    assert own is not None and own.dtype == torch.float64
    assert torch.equal(weights(cli, "ditto", 3), own)
    found = weights(cli, "ifca", 3)
    assert any(torch.equal(found, centre) for centre in centres(cli.folder / "ifca"))
