"""What a layer is: a convolution, linear, embedding or attention block, in registration order."""

from __future__ import annotations

from torch import nn

LAYERS = (
    nn.modules.conv._ConvNd,
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.MultiheadAttention,
)


def layers_of(learner: nn.Module) -> list[list[str]]:
    """Names of the parameters of each layer; parameters of other modules belong to the last layer registered before."""
    layers: list[list[str]] = []
    early: list[str] = []
    inside = "\0"
    for name, module in learner.named_modules():
        prefix = name + "." if name else ""
        if name.startswith(inside):
            continue
        layer = isinstance(module, LAYERS) and next(module.parameters(), None) is not None
        own = [prefix + p for p, _ in module.named_parameters(recurse=layer)]
        if layer:
            layers.append(own)
            inside = prefix or "\0"
        else:
            (layers[-1] if layers else early).extend(own)
    if layers:
        layers[0] = early + layers[0]
    return layers or [early]
