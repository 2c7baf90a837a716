"""A run's network, written as peft and transformers read it, has the logits of ``export()``."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch import Tensor, nn

from fl_lightning import FederatedModule, InMemoryDataModule, UserError
from fl_lightning.callbacks import ResidualMerge, StackedAdapters
from tests.helpers.federation import fit
from tests.helpers.low_rank import Adapted
from tests.helpers.texts import opt, text_file
from tests.helpers.zygote import Cli

missing = "pip install 'fl-lightning[lora]'"
peft = pytest.importorskip("peft", reason=missing)
transformers = pytest.importorskip("transformers", reason=missing)
safetensors = pytest.importorskip("safetensors.torch", reason=missing)


class Own(pl.LightningModule):
    """peft within a module of the user's own."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, _ = batch
        loss: Tensor = self.network(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def network(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":  # its Conv1D stores weights transposed
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 19, "n_positions": 12}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    given = {**opt(layers=2), "vocab_size": 19}
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    )


def adapted(kind: str, norms: bool = False, **options: Any) -> Own:
    """``norms``: train the normalisation layers, too."""
    targets = {"gpt2": ["c_attn", "c_proj"], "opt": ["q_proj", "fc1"]}[kind]
    transposed = {"fan_in_fan_out": True} if kind == "gpt2" else {}
    given = {"r": 3, "lora_alpha": 5, "target_modules": targets, **transposed, **options}
    made = peft.get_peft_model(network(kind), peft.LoraConfig(**given))
    for name, parameter in made.named_parameters() if norms else ():
        if "norm" in name:
            parameter.requires_grad_(True)
    return Own(made)


def tokens(n: int = 12) -> Tensor:
    return torch.randint(19, (n, 8), generator=torch.Generator().manual_seed(1))


def trained(kind: str, methods: list[Any], **options: Any) -> FederatedModule:
    data = InMemoryDataModule((tokens(), torch.zeros(12)), num_clients=3, batch_size=2)
    learner = adapted(kind, **options)
    return fit(learner, data, methods, 2, participation="all", local_steps=2).module


def logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(input_ids=tokens(3)).logits
    return found


@pytest.mark.parametrize(
    ("kind", "method"), [("opt", "fedit"), ("opt", "flora"), ("gpt2", "fedit"), ("gpt2", "fedex")]
)
def test_folders_have_the_logits_of_the_export(kind: str, method: str, tmp_path: Path) -> None:
    methods = {"fedit": [], "flora": [StackedAdapters()], "fedex": [ResidualMerge()]}[method]
    module = trained(kind, methods)
    expected = logits(module.export().network)
    assert not torch.allclose(expected, logits(adapted(kind).network))
    module.save_pretrained(tmp_path / "adapter")
    module.save_pretrained(tmp_path / "merged", merged=True)
    base = network(kind)
    if method != "fedit":
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter/base")
    else:
        assert not (tmp_path / "adapter/base").exists()
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), expected, atol=1e-5, rtol=1e-5)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(whole), expected, atol=1e-5, rtol=1e-5)
    # The run's own network is as it was.
    assert logits(module.export().network).equal(expected)


QUICK = ("pissa", "pissa, drawn", "norms", "head")
# Options of LoraConfig; whether the base lies beside the adapter although no method changed it.
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "pissa": ({"init_lora_weights": "pissa"}, False),
    "pissa, drawn": ({"init_lora_weights": "pissa_niter_4"}, True),
    "olora": ({"init_lora_weights": "olora"}, False),
    "orthogonal": ({"init_lora_weights": "orthogonal", "r": 2}, False),
    "norms": ({"norms": True}, True),
    "head": ({"modules_to_save": ["lm_head"]}, False),
    "biases": ({"bias": "all"}, False),
    "dora": ({"use_dora": True}, False),
    "lora_bias": ({"lora_bias": True}, False),
    "tokens": ({"trainable_token_indices": [1, 2]}, False),
    "ranks": ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"fc1": 7}}, False),
}
CASES = [
    pytest.param(name, method, marks=[] if name in QUICK else [pytest.mark.slow])
    for method, names in (("fedit", VARIANTS), ("fedex", ("pissa", "norms", "biases", "ranks")))
    for name in names
]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_variants_of_lora_are_read_back(name: str, method: str, tmp_path: Path) -> None:
    """From the base that the run began with, or from the one that lies beside the adapter."""
    options, beside = VARIANTS[name]
    module = trained("opt", [ResidualMerge()] if method == "fedex" else [], **options)
    expected = logits(module.export().network)
    state = torch.get_rng_state()
    module.save_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)  # what is drawn when it is read back does not count
    base = network("opt")
    assert (tmp_path / "base").exists() == (beside or method == "fedex")
    if (tmp_path / "base").exists():
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(logits(loaded), expected, atol=1e-5, rtol=1e-5)
    module.save_pretrained(tmp_path / "merged", merged=True)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(whole), expected, atol=1e-5, rtol=1e-5)


def test_a_learner_without_such_a_network_is_refused(tmp_path: Path) -> None:
    module = FederatedModule(Adapted())
    with pytest.raises(UserError, match=r"Adapted has none.*module\.export"):
        module.save_pretrained(tmp_path)


def test_a_base_of_ones_own_cannot_be_read_back_merged(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    learner = Own(peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["0"])))
    module = FederatedModule(learner)
    module.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter/adapter_config.json").exists()
    with pytest.raises(UserError, match="the base under the adapters is a Sequential"):
        module.save_pretrained(tmp_path / "merged", merged=True)


@pytest.mark.parametrize("fails", [0, 1])
def test_an_export_that_fails_leaves_the_earlier_one(
    fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def content() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    folder = tmp_path / "adapter"
    first, second = (trained("opt", [], r=rank) for rank in (2, 3))
    first.save_pretrained(folder)
    (folder / "notes.txt").write_text("mine")
    earlier = content()
    moved: list[Any] = []

    def move(rename: Any, *names: Any) -> None:
        moved.append(names)
        if len(moved) == fails + 1:
            raise OSError(28, "No space left on device")
        rename(*names)

    with monkeypatch.context() as patched:
        for name in ("rename", "replace"):
            patched.setattr(os, name, partial(move, getattr(os, name)))
        with pytest.raises(OSError, match="No space left"):
            second.save_pretrained(folder)
    assert content() == earlier
    second.save_pretrained(folder)
    assert content().keys() == earlier.keys() and content()["notes.txt"] == b"mine"
    assert content()["adapter_model.safetensors"] != earlier["adapter_model.safetensors"]
    with pytest.raises(UserError, match=r"holds other files \(adapter\)"):
        second.save_pretrained(tmp_path)


def run_of(cli: Cli, method: dict[str, Any]) -> None:
    """Fit a small OPT with adapters by one method, into the folder run."""
    text_file(cli.folder)
    document = {
        "seed_everything": 0,
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False},
        "model": {
            "learner": {
                "class_path": "CausalLanguageModel",
                "init_args": {
                    "config": opt(layers=2),
                    "lora": {"r": 2, "target_modules": ["q_proj"]},
                    "lr": 0.05,
                },
            },
            "local_steps": 2,
            "participation": "all",
        },
        "data": {
            "class_path": "LanguageModelling",
            "init_args": {"root": str(cli.folder), "length": 12, "num_clients": 3},
        },
        "method": [method],
    }
    (cli.folder / "mine.yaml").write_text(yaml.safe_dump(document))
    result = cli("fit", "-c", "mine.yaml", "--trainer.default_root_dir", "run")
    assert result.returncode == 0, result.stderr


def test_the_command_writes_a_clients_own_network(cli: Cli) -> None:
    periods = {"*lora_B*": "never"}
    run_of(cli, {"class_path": "PartialAveraging", "init_args": {"periods": periods}})
    for given in (("-o", "c.pt"), ("--pretrained", "c")):
        result = cli("export", "run", "--client", 0, *given)
        assert result.returncode == 0, result.stderr
    state = torch.load(cli.folder / "c.pt", weights_only=True)["state_dict"]
    own = [value for name, value in state.items() if "lora_B" in name]
    shared = torch.load(cli.folder / "run/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    everyone = [value for name, value in shared.items() if "lora_B" in name]
    saved = safetensors.load_file(cli.folder / "run/c/adapter_model.safetensors")
    written = [value for name, value in saved.items() if "lora_B" in name]
    assert len(own) == len(written) == 2
    for one, other, mean in zip(own, written, everyone, strict=True):
        assert torch.equal(one, other) and not torch.equal(one, mean)
