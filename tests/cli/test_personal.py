"""Personal models at the command line: evaluated by client, and exported from a run's folder."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from fl_lightning import load
from tests.helpers.commands import typed
from tests.helpers.zygote import Cli

FIT = typed(
    "fit -c base -c trainer/cpu --trainer.enable_progress_bar false", "--trainer.max_epochs 2"
)
SKEWED = typed(
    "--data.partition Dirichlet --data.partition.alpha 0.1", "--data.client_test_fraction 0.25"
)
EVALUATED = typed("--trainer.callbacks+ PerClientEvaluation --trainer.callbacks.finetune_epochs 1")


def test_a_client_without_a_model_of_its_own_is_told(cli: Cli) -> None:
    network = "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self):\n"
    network += "        super().__init__(nn.Flatten(), nn.Linear(64, 10))\n"
    network += "    def get_extra_state(self):\n        return {'a': 1}\n"
    network += "    def set_extra_state(self, state):\n        pass\n"
    (cli.folder / "extra.py").write_text(network)
    # A network may keep what is no tensor.
    run = cli(*FIT, "-c", "method/scaffold", "--model.learner.network", "extra.Net")
    assert run.returncode == 0, run.stderr
    exported = cli("export", "runs/digits-scaffold-1", "--client", 3)
    assert exported.returncode == 0, exported.stderr
    assert "Note: the model of client 3 equals the global one" in exported.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "personal"), [("fedper", True), ("ditto", True), ("fedals", False)]
)
def test_what_is_computed_with_the_servers_model_says_so(
    cli: Cli, method: str, personal: bool
) -> None:
    assert cli(*FIT, "-c", f"method/{method}").returncode == 0
    folder = f"runs/digits-{method}-1"
    for command in ("test", "predict", "export"):
        done = cli(command, folder)
        assert done.returncode == 0, done.stderr
        assert (f"{command} used the server's model" in done.stderr) == personal
    if personal:
        assert "server's model" not in cli("export", folder, "--client", 3).stderr


def test_fit_evaluate_and_export(cli: Cli) -> None:
    run = cli(*FIT, "-c", "method/ditto", "--model.participation", 3, *SKEWED, *EVALUATED)
    assert run.returncode == 0, run.stderr
    assert "Ditto · 3 of 10 clients" in run.stdout + run.stderr, (
        "what measures is no part of the method's name"
    )
    folder = cli.folder / "runs/digits-ditto-1"
    table = list(csv.DictReader((folder / "clients.csv").open()))
    assert (
        len(table) == 10
        and {"client", "samples", "loss", "acc", "acc_finetuned"} <= table[0].keys()
    )
    logged = list(csv.DictReader((folder / "metrics.csv").open()))
    assert (
        logged[0].get("clients/acc", "") == "" and 0 <= float(logged[1]["clients/acc_worst10"]) <= 1
    )
    assert (folder / "clients.png").is_file()

    made = load(folder)
    trained = [i for i in range(10) if made.client_state("ProximalPersonalModel.v", i) is not None]
    (never, *_) = [i for i in range(10) if i not in trained]
    for client in (trained[0], never):
        export = cli("export", "runs/digits-ditto-1", "--client", client)
        assert export.returncode == 0, export.stderr
        state = torch.load(folder / f"client-{client}.pt", weights_only=True)["state_dict"]
        flat = torch.cat([value.reshape(-1) for value in state.values()])
        own = made.client_state("ProximalPersonalModel.v", client)
        server = torch.cat([p.detach().reshape(-1) for p in made.learner.parameters()])
        assert torch.equal(flat, server if own is None else own)
    refused = cli("export", "runs/digits-ditto-1", "--client", 10)
    assert refused.returncode == 2 and "numbered from 0 to 9" in refused.stderr


def test_who_never_trained_exports_the_centre_that_fits_it_best(cli: Cli) -> None:
    run = cli(*FIT, "-c", "method/ifca", "--model.participation", 3, *SKEWED, *EVALUATED)
    assert run.returncode == 0, run.stderr
    folder = cli.folder / "runs/digits-ifca-1"
    record = json.loads((folder / "run.json").read_text())
    assert any("clusters' models, which is not a useful model" in note for note in record["notes"])
    assert record["shown"][0] == "clients/acc"
    saved = torch.load(folder / "checkpoints/last.ckpt", weights_only=False)
    centres = saved["federated"]["server"]["ClusteredModels.centres"]
    found = []
    for client in range(10):
        export = cli("export", "runs/digits-ifca-1", "--client", client)
        assert export.returncode == 0, export.stderr
        state = torch.load(folder / f"client-{client}.pt", weights_only=True)["state_dict"]
        flat = torch.cat([value.reshape(-1) for value in state.values()])
        found.append([torch.equal(flat, centre) for centre in centres].index(True))
    assert set(found) == {0, 1}


def test_kept_parts_and_own_buffers_are_exported(cli: Cli) -> None:
    fit = (*FIT, *typed("-c data/digits -c model/resnet20 -c method/fedbn --model.participation 3"))
    small = typed(
        "--model.learner.network.depth 8 --model.learner.network.width 4", "--model.local_steps 2"
    )
    refused = cli(*FIT, "-c", "method/fedbn")
    assert refused.returncode == 2 and "no normalisation layer" in refused.stderr
    run = cli(
        *fit, *small, "--model.learner.network.in_channels", 1, "--trainer.default_root_dir", "x"
    )
    assert run.returncode == 0, run.stderr
    made = load(cli.folder / "x")
    server = torch.load(cli.folder / "x/checkpoints/last.ckpt", weights_only=True)
    (client, *_) = (i for i in range(10) if made.client_state("parts.round", i) is not None)
    assert cli("export", "x", "--client", client, "-o", "own.pt").returncode == 0
    own = torch.load(cli.folder / "own.pt", weights_only=True)["state_dict"]
    differs = {
        name for name, value in own.items() if not torch.equal(value, server["state_dict"][name])
    }
    buffer = next(name for name in own if name.endswith("running_mean"))
    assert buffer in differs and torch.equal(
        own[buffer], made.client_state("buffer." + buffer, client)
    )
    assert all("bn" in name or "norm" in name or "running" in name for name in differs), differs


def test_a_client_is_exported_by_its_name(cli: Cli) -> None:
    lines = [f"{name},{k % 5},{k % 2}" for name in ("Aachen", "Bergen") for k in range(12)]
    (cli.folder / "t.csv").write_text("\n".join(["hospital,age,outcome", *lines]) + "\n")
    table = ("--data", "FromTable", "--data.path", "t.csv", "--data.client", "hospital")
    network = ("--model.learner.network", "MLP", "--model.learner.network.sizes", "[1,2]")
    run = cli(
        *FIT,
        *("-c", "method/ditto", "--model.participation", "all", *table),
        *("--data.target", "outcome", *network, "--model.learner.num_classes", 2),
        *("--trainer.default_root_dir", "x"),
    )
    assert run.returncode == 0, run.stderr
    assert cli("export", "x", "--client", "Bergen").returncode == 0
    assert cli("export", "x", "--client", 1, "-o", "one.pt").returncode == 0
    found = torch.load(cli.folder / "x/client-1.pt", weights_only=True)["state_dict"]
    one = torch.load(cli.folder / "one.pt", weights_only=True)["state_dict"]
    assert all(torch.equal(found[name], one[name]) for name in found)
    refused = cli("export", "x", "--client", "Bergn")
    assert refused.returncode == 2 and "no client has this name" in refused.stderr
    assert "Did you mean 'Bergen'" in refused.stderr


def test_export_measures_on_the_samples_that_the_clients_had(cli: Cli) -> None:
    """Also if the run's seed, by which it split the data, is not that of the process."""
    run = cli(*FIT, "-c", "method/ifca", *SKEWED, "--model.seed", 4)
    assert run.returncode == 0, run.stderr
    folder = cli.folder / "runs/digits-ifca-1"
    made = load(folder)
    centres = made.checkpoint["federated"]["server"]["ClusteredModels.centres"]
    for client in range(10):
        samples = made.data.client_dataset(client)
        images, labels = default_collate([samples[k] for k in range(len(samples))])
        losses = []
        for centre in centres:
            torch.nn.utils.vector_to_parameters(centre, made.learner.parameters())
            with torch.no_grad():
                losses.append(float(cross_entropy(made.learner(images), labels)))
        best = centres[losses.index(min(losses))]
        export = cli("export", "runs/digits-ifca-1", "--client", client)
        assert export.returncode == 0, export.stderr
        state = torch.load(folder / f"client-{client}.pt", weights_only=True)["state_dict"]
        assert torch.equal(torch.cat([value.reshape(-1) for value in state.values()]), best), client
    other = cli("export", "runs/digits-ifca-1", "--client", 3, "--data.partition.alpha", 9)
    assert other.returncode == 2 and "the data give partition" in other.stderr


def test_a_run_in_double_precision_is_exported_to_the_same_bits(cli: Cli) -> None:
    double = ("--trainer.precision", "64-true", "--trainer.default_root_dir")
    for method in ("ditto", "ifca"):
        given = ("-c", f"method/{method}", *SKEWED, "--model.participation", "all")
        run = cli(*FIT, *given, *double, method)
        assert run.returncode == 0, run.stderr
        export = cli("export", method, "--client", 3, "-o", f"{method}.pt")
        assert export.returncode == 0, export.stderr
    found = {}
    for method in ("ditto", "ifca"):
        state = torch.load(cli.folder / f"{method}.pt", weights_only=True)["state_dict"]
        found[method] = torch.cat([value.reshape(-1) for value in state.values()])
    own = load(cli.folder / "ditto").client_state("ProximalPersonalModel.v", 3)
    assert own is not None and own.dtype == torch.float64
    assert torch.equal(found["ditto"], own)
    centres = load(cli.folder / "ifca").checkpoint["federated"]["server"]["ClusteredModels.centres"]
    assert any(torch.equal(found["ifca"], centre) for centre in centres)
