"""Networks for images by their names in timm and torchvision; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from fl_lightning.errors import UserError, optional, suggest
from fl_lightning.introspection.accepted import PositiveInt
from fl_lightning.introspection.init_args import Given


class Named(Given, nn.Module):
    """A network of a library; with ``lora`` only adapters and the last layer are trained."""

    def __init__(self, network: nn.Module, lora: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.network = network
        self.frozen_stay = lora is not None
        if lora is not None:
            peft = optional("peft", "lora", f"{type(self).__name__} with lora")
            # The last layer is new, so it is trained whole.
            given = {"modules_to_save": [_head(network)], **_typed(lora)}
            try:
                self.network = peft.get_peft_model(network, peft.LoraConfig(**given))
            except (TypeError, ValueError) as error:
                raise UserError(f"{type(self).__name__}: lora={dict(lora)}: {error}") from None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.network(x)
        return y


class Timm(Named):
    """A network of timm, such as ``deit_tiny_patch16_224`` (needs the extra ``vision``).

    Args:
        name: as in ``timm.list_models()``, also with the weights' name after a dot.
        input_size: pixels per side; networks of one size, such as vision transformers, are built
            for it. None: the network's own size.
        pretrained: weights: a file, or True for those in timm's cache. timm fits them to the
            channels and the size, and leaves out a last layer for other classes.
        options: further arguments of ``timm.create_model``: ``drop_path_rate``, ``patch_size``, ….
        lora: arguments of peft's LoraConfig, such as ``{r: 8, target_modules: [qkv]}``; the last
            layer is trained too, unless ``modules_to_save`` names others.

    Raises:
        UserError: timm has no such network, an option is not accepted, or the weights are missing.
    """

    def __init__(
        self,
        name: str,
        num_classes: PositiveInt,
        in_channels: PositiveInt = 3,
        input_size: PositiveInt | None = None,
        pretrained: bool | str = False,
        options: Mapping[str, Any] | None = None,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        timm = optional("timm", "vision", f"the network timm:{name}")
        if not timm.is_model(name):
            raise _unknown(timm, name, timm.list_models(), "timm.list_models()")
        known = timm.get_pretrained_cfg(name)
        given = {"num_classes": num_classes, "in_chans": in_channels, **_typed(options)}
        # Other networks take images of any size, and have no such argument.
        if input_size is not None and known is not None and known.fixed_input_size:
            given.setdefault("img_size", input_size)
        if pretrained:
            file = _weights_of_timm(name, known) if pretrained is True else _file(name, pretrained)
            given |= {"pretrained": True, "pretrained_cfg_overlay": {"file": file}}
        try:
            network = timm.create_model(name, **given)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise _not_made("Timm", name, options, error) from error
        super().__init__(network, lora)


class Torchvision(Named):
    """A network of torchvision, such as ``mobilenet_v3_small``.

    Args:
        name: as in ``torchvision.models.list_models()``.
        pretrained: weights: a file, or True for those in torch's cache. The last layer is left out
            if it is for other classes, and the first if it is for other channels.
        options: further arguments of the network, such as ``dropout``.
        lora: as in :class:`Timm`.

    Raises:
        UserError: torchvision has no such network, an option is not accepted, or the weights are
            missing.
    """

    def __init__(
        self,
        name: str,
        num_classes: PositiveInt,
        in_channels: PositiveInt = 3,
        pretrained: bool | str = False,
        options: Mapping[str, Any] | None = None,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        import torchvision

        names = torchvision.models.list_models(module=torchvision.models)
        if name not in names:
            raise _unknown(torchvision, name, names, "torchvision.models.list_models()")
        try:
            given = {"num_classes": num_classes, **_typed(options)}
            network = torchvision.models.get_model(name, **given)
        except (TypeError, ValueError) as error:
            raise _not_made("Torchvision", name, options, error) from error
        if in_channels != 3:
            _set_channels(network, in_channels)
        if pretrained:
            file = _weights_of_torchvision(name) if pretrained is True else _file(name, pretrained)
            _load(network, name, file)
        super().__init__(network, lora)


def _typed(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return options with numbers in place of their texts, as ``--….lora.r 4`` gives them."""
    found = dict(options or {})
    for name, value in found.items():
        if isinstance(value, str):
            with suppress(yaml.YAMLError):
                found[name] = yaml.safe_load(value)
    return found


def _unknown(library: Any, name: str, names: Sequence[str], listing: str) -> UserError:
    return UserError(
        f"{library.__name__} {library.__version__} has no network {name!r}.{suggest(name, names)} "
        f"python -c 'import {library.__name__}; print({listing})' prints their names."
    )


def _not_made(kind: str, name: str, options: Any, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:300]
    return UserError(f"{kind}: {name} with options={dict(options or {})} is not possible: {reason}")


def _head(network: nn.Module) -> str:
    """Return the path of the layer that gives the logits."""
    known: Any = getattr(network, "pretrained_cfg", {})
    of_timm = known.get("classifier")
    if isinstance(of_timm, str):
        return str(of_timm)
    return _paths(network, nn.Linear)[-1]


def _first(network: nn.Module) -> str:
    return _paths(network, nn.Conv2d)[0]


def _paths(network: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [path for path, each in network.named_modules() if isinstance(each, kind)]


def _set_channels(network: nn.Module, channels: int) -> None:
    """Put a new first convolution into a network, for images of so many channels."""
    path = _first(network)
    first: Any = network.get_submodule(path)
    sizes = (first.kernel_size, first.stride, first.padding)
    new = nn.Conv2d(channels, first.out_channels, *sizes, bias=first.bias is not None)
    # torchvision's residual networks initialise it in this way.
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    outer, _, own = path.rpartition(".")
    setattr(network.get_submodule(outer), own, new)


def _file(name: str, given: str) -> str:
    if not Path(given).is_file():
        raise UserError(
            f"model.learner.network: pretrained is {given!r}, which is not a file. Give the file "
            f"with the weights of {name}, or true for those in its library's cache; nothing is "
            "downloaded."
        )
    return given


def _missing(name: str, get: str) -> UserError:
    return UserError(
        f"model.learner.network: pretrained is true, and the weights of {name} are not on this "
        f"machine. Get them once: {get}; or give pretrained the path of a file with them. A run "
        "downloads nothing."
    )


def _weights_of_timm(name: str, known: Any) -> str:
    """Return the file of a network's weights in the cache of timm, Hugging Face or torch."""
    if known is None or not (known.hf_hub_id or known.url):
        raise UserError(f"Timm: timm has no weights for {name}. Leave pretrained out.")
    if known.hf_hub_id:
        from huggingface_hub import try_to_load_from_cache

        for file in ("model.safetensors", "pytorch_model.bin"):
            found = try_to_load_from_cache(known.hf_hub_id, file)
            if isinstance(found, str):
                return found
    in_torch = _in_torch(known.url) if known.url else None
    if in_torch is not None:
        return str(in_torch)
    raise _missing(name, f"python -c \"import timm; timm.create_model('{name}', pretrained=True)\"")


def _weights_of_torchvision(name: str) -> str:
    import torchvision

    weights = torchvision.models.get_model_weights(name).DEFAULT
    found = _in_torch(weights.url)
    if found is None:
        get = f"import torchvision; torchvision.models.get_model('{name}', weights='DEFAULT')"
        raise _missing(name, f'python -c "{get}"')
    return str(found)


def _in_torch(url: str) -> Path | None:
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    return path if path.is_file() else None


def _load(network: nn.Module, name: str, file: str) -> None:
    """Load weights; the first and the last layer stay new if the file's have other shapes."""
    state = torch.load(file, map_location="cpu", weights_only=True)
    own = network.state_dict()
    other = [key for key in own if key not in state or state[key].shape != own[key].shape]
    new = (_first(network), _head(network))
    wrong = [key for key in other if key.rpartition(".")[0] not in new]
    if wrong:
        raise UserError(
            f"model.learner.network: pretrained={file!r} is of another network than {name}: "
            f"{wrong[0]} is missing, or has another shape."
        )
    network.load_state_dict({key: own[key] if key in other else state[key] for key in own})
