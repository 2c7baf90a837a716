"""Networks of timm and torchvision by name, and what a classifier can be told beside its loss."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.callbacks import PerClientEvaluation
from fl_lightning.errors import UserError
from fl_lightning.models import MLP, Classifier, Timm, Torchvision
from fl_lightning.models.class_metrics import metrics_named, update
from tests.cli.test_any_data_any_model import learner
from tests.helpers.learners import trainer

SMALL = {"patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["qkv"]}


def pictures(samples: int = 16, classes: int = 4, side: int = 16) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 3, side, side, generator=made)
    return x, torch.arange(samples) % classes


def small_deit(**arguments: Any) -> Timm:
    pytest.importorskip("timm")
    torch.manual_seed(0)
    given: dict[str, Any] = {"num_classes": 4, "input_size": 16, "options": SMALL, **arguments}
    return Timm("deit_tiny_patch16_224", **given)


def deit_with_lora() -> nn.Module:
    pytest.importorskip("peft")
    return small_deit(lora=LORA)


def resnet18() -> nn.Module:
    torch.manual_seed(0)
    return Torchvision("resnet18", num_classes=4)


@pytest.mark.parametrize(("make", "lr"), [(deit_with_lora, 0.05), (resnet18, 0.01)])
def test_two_rounds_are_those_of_a_plain_loop(make: Any, lr: float) -> None:
    """Two clients with two steps on all their samples; the mean of parameters and statistics."""
    # In float64, because BatchNorm over eight samples amplifies rounding.
    network, (x, y) = make().double(), pictures()
    x = x.double()
    parts = [torch.arange(0, 16, 2), torch.arange(1, 16, 2)]
    plain = copy.deepcopy(network)
    clients = [part.tolist() for part in parts]
    data = InMemoryDataModule((x, y), (x, y), clients=clients, batch_size=None)
    module = FederatedModule(
        Classifier(network, 4, lr=lr, momentum=0.9), participation="all", local_steps=2, seed=0
    )
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    trainer(2).fit(module, data)
    for _ in range(2):
        ends = []
        for part in parts:
            own = copy.deepcopy(plain).train()
            moved = [each for each in own.parameters() if each.requires_grad]
            optimizer = torch.optim.SGD(moved, lr=lr, momentum=0.9)
            for _ in range(2):
                optimizer.zero_grad()
                cross_entropy(own(x[part]), y[part]).backward()
                optimizer.step()
            ends.append(own.state_dict())
        averaged = {name: (one + ends[1][name]) / 2 for name, one in ends[0].items()}
        plain.load_state_dict(averaged)
    found = module.export().network.state_dict()
    wanted = plain.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
    assert any(not value.equal(start[name]) for name, value in wanted.items())


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_by_name_classes_and_channels_are_the_data_s(library: str) -> None:
    pytest.importorskip(library)
    option = ("--model.learner.network", f"{library}:resnet18")
    found = learner("-c", "base", "-c", "data/mnist", *option)
    given = found["init_args"]["network"]["init_args"]
    assert (given["name"], given["num_classes"], given["in_channels"]) == ("resnet18", 10, 1)
    made = {"timm": Timm, "torchvision": Torchvision}[library](**given)
    assert made(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    with pytest.raises(UserError, match=r"Did you mean 'resnet18'"):
        learner("-c", "base", "-c", "data/mnist", option[0], f"{library}:resnet1")


def test_the_packaged_lora_trains_factors_and_the_head() -> None:
    pytest.importorskip("timm")
    pytest.importorskip("peft")
    found = learner("-c", "data/cifar10", "-c", "model/lora_vision")
    network = Timm(**found["init_args"]["network"]["init_args"])
    numbers = {True: 0, False: 0}
    for name, each in network.named_parameters():
        numbers[each.requires_grad] += each.numel()
        trained = "lora_" in name or "modules_to_save" in name
        assert each.requires_grad is trained, name
    assert (sum(numbers.values()), numbers[True]) == (5_565_140, 75_658)


def test_one_argument_of_the_adapters_may_be_given_on_the_command_line() -> None:
    pytest.importorskip("timm")
    pytest.importorskip("peft")
    own = ("--model.learner.network.lora.r", "4")
    found = learner("-c", "data/cifar10", "-c", "model/lora_vision", *own)
    network = Timm(**found["init_args"]["network"]["init_args"])
    factors = [each for name, each in network.named_parameters() if "lora_A" in name]
    assert [each.shape for each in factors] == [(4, 192)] * 12


def test_timm_s_own_options_reach_the_network() -> None:
    network = small_deit(options={**SMALL, "drop_path_rate": 0.5}).network
    assert network.blocks[-1].drop_path1.drop_prob == 0.5
    with pytest.raises(UserError, match=r"options=\{'drop_pat': 1\} is not possible"):
        small_deit(options={"drop_pat": 1})


def test_weights_come_from_a_file(tmp_path: Path) -> None:
    file = str(tmp_path / "weights.pth")
    large = small_deit(num_classes=7, input_size=32).network
    torch.save(large.state_dict(), file)
    own = small_deit(pretrained=file).network
    assert own.blocks[1].attn.qkv.weight.equal(large.blocks[1].attn.qkv.weight)
    assert own.head.weight.shape == (4, 12) and own.pos_embed.shape != large.pos_embed.shape
    theirs = Torchvision("resnet18", num_classes=7)
    torch.save(theirs.network.state_dict(), file)
    grey = Torchvision("resnet18", num_classes=4, in_channels=1, pretrained=file).network
    assert grey.layer4[1].conv2.weight.equal(theirs.network.layer4[1].conv2.weight)
    assert grey(torch.zeros(2, 1, 32, 32)).shape == (2, 4)
    with pytest.raises(UserError, match=r"of another network than resnet34"):
        Torchvision("resnet34", num_classes=4, pretrained=file)
    with pytest.raises(UserError, match=r"is 'no.pth', which is not a file"):
        Torchvision("resnet18", num_classes=4, pretrained="no.pth")


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_missing_weights_are_said_to_be_got_by_hand(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    if library == "timm":
        hub = pytest.importorskip("huggingface_hub")
        monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *place: None)
    make = {"timm": Timm, "torchvision": Torchvision}[library]
    with pytest.raises(UserError, match=rf"Get them once: python -c .*{library}.*resnet18"):
        make("resnet18", num_classes=4, pretrained=True)
    # Where a library keeps them, they are found.
    (tmp_path / "checkpoints").mkdir()
    url = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    if library == "torchvision":
        other = make("resnet18", num_classes=1000)
        torch.save(other.network.state_dict(), tmp_path / "checkpoints" / url.rpartition("/")[2])
        found = make("resnet18", num_classes=4, pretrained=True)
        assert found.network.conv1.weight.equal(other.network.conv1.weight)


def test_a_network_with_other_outputs_stops_before_round_0() -> None:
    from torchvision.models import resnet18 as theirs

    data = InMemoryDataModule(pictures(), pictures(), num_clients=2)
    module = FederatedModule(Classifier(theirs(), 4), local_steps=1, seed=0)
    with pytest.raises(UserError, match=r"has 1000 outputs, and num_classes is 4"):
        trainer(1).fit(module, data)
    assert module.learner.training
    few = FederatedModule(Classifier(MLP([768, 3]), 3), local_steps=1, seed=0)
    with pytest.raises(UserError, match=r"num_classes is 3, but InMemoryDataModule has 4 classes"):
        trainer(1).fit(few, data)


def scores(classes: int, there: list[int], samples: int = 60) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(classes)
    logits = torch.randn(samples, classes, generator=made)
    picked = torch.randint(0, len(there), (samples,), generator=made)
    return logits, torch.tensor(there)[picked]


@pytest.mark.parametrize("there", [[0, 1, 2, 3, 4, 5], [1, 4]])
def test_metrics_are_sklearn_s_over_the_classes_with_samples(there: list[int]) -> None:
    logits, y = scores(6, there)
    names = ["auroc", "balanced_acc", "f1", "precision", "mcc", "kappa", "top3", "top5"]
    made = metrics_named(names, 6)
    for k in range(0, 60, 20):
        update(made, logits[k : k + 20], y[k : k + 20])
    p, predicted = logits.softmax(1), logits.argmax(1)
    every: dict[str, Any] = {"labels": there, "average": "macro", "zero_division": 0}
    each = [sk.roc_auc_score(y == c, p[:, c]) for c in there]
    wanted = {
        "auroc": sum(each) / len(each),
        "balanced_acc": sk.recall_score(y, predicted, **every),
        "f1": sk.f1_score(y, predicted, **every),
        "precision": sk.precision_score(y, predicted, **every),
        "mcc": sk.matthews_corrcoef(y, predicted),
        "kappa": sk.cohen_kappa_score(y, predicted),
        "top3": sk.top_k_accuracy_score(y, p, k=3, labels=list(range(6))),
        "top5": sk.top_k_accuracy_score(y, p, k=5, labels=list(range(6))),
    }
    assert {name: float(made[name].compute()) for name in names} == pytest.approx(wanted, abs=1e-6)


def test_metrics_by_name_in_validation_and_per_client() -> None:
    x, y = pictures(40)
    # Client 0 has the classes 0 and 2, client 1 the others.
    clients = [[i for i in range(40) if i % 2 == j] for j in (0, 1)]
    data = InMemoryDataModule((x, y), (x, y), clients=clients, client_test_fraction=0.5)
    made = Classifier(MLP([768, 4]), 4, lr=0.01, metrics=["auroc", "balanced_acc"])
    module = FederatedModule(made, participation="all", local_steps=2, seed=0)
    measured = PerClientEvaluation()
    run = trainer(1, [measured])
    run.fit(module, data)
    logits = module.export().eval()(x).detach()
    expected = sk.roc_auc_score(y, logits.softmax(1), multi_class="ovr")
    assert float(run.callback_metrics["val/auroc"]) == pytest.approx(expected, abs=1e-6)
    for client in (0, 1):
        own = torch.tensor(data.client_test_indices(client).tolist())
        right = sk.balanced_accuracy_score(y[own], logits[own].argmax(1))
        assert measured.table["balanced_acc"][client] == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize(
    ("names", "says"), [(["f2"], "accepted are .* top5"), (["top5"], "always 1 for 4")]
)
def test_metrics_that_cannot_be(names: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Classifier(MLP([3, 4]), 4, metrics=names)


def test_smooth_labels_in_training_only() -> None:
    x, y = pictures()
    made = Classifier(MLP([768, 4]), 4, label_smoothing=0.2)
    logged: dict[str, Any] = {}
    made.log = lambda name, value, **_: logged.update({name: value})  # type: ignore[method-assign]
    shares = torch.full((16, 4), 0.05).scatter_(1, y[:, None], 0.85)
    assert made.training_step((x, y), 0).equal(logged["train/loss"])
    torch.testing.assert_close(logged["train/loss"], cross_entropy(made(x), shares).detach())
    made.validation_step((x, y), 0)
    assert logged["val/loss"].equal(cross_entropy(made(x), y))


def test_randaugment_takes_pictures_normalised_by_oneself() -> None:
    x = (torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(1)) - 0.4) / 0.2
    augment = {"randaugment": {"operations": 1, "mean": [0.4] * 3, "std": [0.2] * 3}}
    data = InMemoryDataModule(
        (x, torch.arange(8) % 4), num_clients=1, batch_size=None, augment=[augment]
    )
    data.setup("fit")
    ((made, _),) = data.client_batches(0, 0, 1)
    low, high = -0.4 / 0.2, 0.6 / 0.2
    assert low - 1e-5 <= float(made.min()) and float(made.max()) <= high + 1e-5
    assert not any(made[i].equal(each) for i in range(8) for each in x)
