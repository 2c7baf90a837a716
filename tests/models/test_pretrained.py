"""A run's network, written as peft and transformers read it, has the logits of ``export()``."""

from __future__ import annotations

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


@pytest.mark.parametrize("method", ["fedit", "flora", "fedex"])
@pytest.mark.parametrize("kind", ["opt", "gpt2"])
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
OTHER_PRODUCTS = ("dora", "lora_bias")
CASES = [
    pytest.param(name, method, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in VARIANTS
    for method in ("fedit", "fedex")
    if method == "fedit" or name not in OTHER_PRODUCTS
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


def test_prompts_are_written_without_the_base(tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    module = FederatedModule(Own(peft.get_peft_model(network("opt"), config)))
    module.save_pretrained(tmp_path)
    assert not (tmp_path / "base").exists()
    loaded = peft.PeftModel.from_pretrained(network("opt"), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(module.export().network))


def test_a_base_of_an_earlier_call_goes(tmp_path: Path) -> None:
    trained("opt", [ResidualMerge()]).save_pretrained(tmp_path)
    assert (tmp_path / "base").exists()
    (tmp_path / "notes.txt").write_text("mine")
    trained("opt", []).save_pretrained(tmp_path)
    assert not (tmp_path / "base").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_product_that_another_module_would_get_is_not_merged(tmp_path: Path) -> None:
    """OPT's lm_head has the embedding's weight: with the product of the embedding's adapter it
    would be another head."""
    module = trained("opt", [], target_modules=["embed_tokens"])
    with pytest.raises(UserError, match=r"merged=True the outputs are up to .*Leave out merged"):
        module.save_pretrained(tmp_path / "merged", merged=True)
    assert list(tmp_path.iterdir()) == []
    module.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(network("opt"), tmp_path)
    expected = logits(module.export().network)
    torch.testing.assert_close(logits(loaded), expected, atol=1e-5, rtol=1e-5)


def test_adapters_that_peft_cannot_merge_are_refused(tmp_path: Path) -> None:
    module = FederatedModule(adapted("opt", alora_invocation_tokens=[3, 4], task_type="CAUSAL_LM"))
    with pytest.raises(UserError, match=r"peft cannot merge these adapters.*Leave out merged"):
        module.save_pretrained(tmp_path, merged=True)


class OfPictures(pl.LightningModule):
    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        found = self.network(x)
        logits: Tensor = getattr(found, "logits", found)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3)


def resnet() -> Any:
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "image_size": 16}
    config = transformers.ResNetConfig(num_channels=3, layer_type="basic", num_labels=3, **sizes)
    return transformers.ResNetForImageClassification(config)


def flat() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Flatten(), nn.Linear(768, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return nn.Sequential(*layers)


def of_pictures(base: nn.Module, targets: list[str]) -> tuple[FederatedModule, Tensor]:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(24, 3, 16, 16, generator=draws)
    y = torch.randint(3, (24,), generator=draws)
    learner = OfPictures(peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=targets)))
    data = InMemoryDataModule((x, y), num_clients=3, batch_size=4)
    return fit(learner, data, [], 2, participation="all", local_steps=2).module, x[:5]


def test_statistics_of_batchnorm_lie_in_the_base_beside_the_adapter(tmp_path: Path) -> None:
    module, x = of_pictures(resnet(), ["convolution"])
    expected = module.export().eval()(x)
    module.save_pretrained(tmp_path)
    base = type(resnet()).from_pretrained(tmp_path / "base")
    found = peft.PeftModel.from_pretrained(base, tmp_path).eval()(x).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_statistics_of_batchnorm_in_a_base_of_ones_own_are_refused(tmp_path: Path) -> None:
    module, _ = of_pictures(flat(), ["1", "3"])
    with pytest.raises(UserError, match=r"do not hold \S+running_mean.*module\.export"):
        module.save_pretrained(tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_a_drawn_beginning_over_a_base_of_ones_own_is_refused(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights="pissa_niter_2")
    module = FederatedModule(Own(peft.get_peft_model(plain, config)))
    says = r"do not hold the base that init_lora_weights='pissa_niter_2' made.*Sequential"
    with pytest.raises(UserError, match=says):
        module.save_pretrained(tmp_path / "adapter")


def test_an_adapter_with_another_name_is_refused(tmp_path: Path) -> None:
    """peft writes it into a folder of its own, where from_pretrained does not look."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    made = peft.get_peft_model(network("opt"), config, adapter_name="mine")
    with pytest.raises(UserError, match=r"reads base_model\.\S+ back.*Use merged=True"):
        FederatedModule(Own(made)).save_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_of_16_bits_is_merged(dtype: torch.dtype, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    made = peft.get_peft_model(network("opt").to(dtype), config)
    module = FederatedModule(Own(made))
    module.save_pretrained(tmp_path / "adapter")
    module.save_pretrained(tmp_path / "merged", merged=True)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(whole), logits(made), atol=2e-2, rtol=2e-2)


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


@pytest.mark.slow
def test_the_command_writes_both(cli: Cli) -> None:
    run_of(cli, {"class_path": "StackedAdapters"})
    for name, more in (("adapter", []), ("merged", ["--merged", "true"])):
        result = cli("export", "run", "--pretrained", name, *more)
        assert result.returncode == 0, result.stderr
    read = transformers.AutoModelForCausalLM.from_pretrained
    loaded = peft.PeftModel.from_pretrained(
        read(cli.folder / "adapter/base"), cli.folder / "adapter"
    )
    whole = read(cli.folder / "merged")
    torch.testing.assert_close(logits(loaded), logits(whole), atol=1e-5, rtol=1e-5)


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
    saved = safetensors.load_file(cli.folder / "c/adapter_model.safetensors")
    written = [value for name, value in saved.items() if "lora_B" in name]
    assert len(own) == len(written) == 2
    for one, other, mean in zip(own, written, everyone, strict=True):
        assert torch.equal(one, other) and not torch.equal(one, mean)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--merged", "true"), "--merged true: without --pretrained"),
        (("--pretrained", "c", "-o", "c.pt"), "-o c.pt: with --pretrained"),
    ],
)
def test_the_command_refuses_what_it_would_not_do(given: Any, says: str, cli: Cli) -> None:
    fit = ("fit", "-c", "base", "-c", "trainer/cpu", "--trainer.max_epochs", 1)
    assert cli(*fit, "--trainer.default_root_dir", "run").returncode == 0
    result = cli("export", "run", *given)
    assert result.returncode == 2 and says in result.stderr
    assert not (cli.folder / "c").exists() and not (cli.folder / "run/model.pt").exists()
