"""The networks of the workloads, as everybody writes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CHARACTERS = 90  # in the vocabulary of LEAF's Shakespeare


class SmallConvolutions(nn.Sequential):
    """pfl's CIFAR-10 benchmark: two 3x3 convolutions (32, 64), pooling, 128 units."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 14 * 14, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


class SmallTransformer(nn.Sequential):
    """Two encoder layers of width 32 over 16 positions, without dropout."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        super().__init__(
            nn.Linear(16, 32),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Flatten(),
            nn.Linear(16 * 32, 10),
        )


class CharacterLSTM(nn.Module):
    """LEAF's Shakespeare network: embedding of 8, two layers of 256 units, the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, 8)
        self.recurrent = nn.LSTM(8, 256, 2, batch_first=True)
        self.head = nn.Linear(256, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(text))[0])


class Decoder(nn.Module):
    """A causal transformer: four layers of width 128, four heads, dropout 0.1."""

    def __init__(self, positions: int = 64) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            128, 4, 512, dropout=0.1, batch_first=True, norm_first=True, activation="gelu"
        )
        self.embedding = nn.Embedding(CHARACTERS, 128)
        self.positions = nn.Parameter(0.02 * torch.randn(positions, 128))
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, CHARACTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(positions))

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.positions
        return self.head(self.layers(x, mask=self.mask, is_causal=True))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter B A of rank 8 beside it, scaled by 2."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.dropout = nn.Dropout(0.05)
        self.a = nn.Parameter(torch.randn(8, frozen.in_features) / 8)
        self.b = nn.Parameter(torch.zeros(frozen.out_features, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + 2 * (self.dropout(x) @ self.a.T @ self.b.T)


def adapted_decoder() -> Decoder:
    """A frozen decoder with adapters in its feed-forward layers."""
    network = Decoder().requires_grad_(False)
    for layer in network.layers.layers:
        layer.linear1 = Adapted(layer.linear1)
        layer.linear2 = Adapted(layer.linear2)
    return network


class Series(nn.Sequential):
    """Three 1-d convolutions over 9 channels of 128 values, as for human activity."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv1d(9, 64, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(64, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(64, 64, 5, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(8),
            nn.Flatten(),
            nn.Linear(512, 10),
        )


class HandwritingConvolutions(nn.Sequential):
    """FEMNIST's network of FLUTE, pfl and TensorFlow Federated, with its two dropouts."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * 12 * 12, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 62),
        )


def adapted_vision_transformer() -> nn.Module:
    """timm's DeiT-Tiny with patches of 4 pixels, frozen, with LoRA of rank 8 and a trained head."""
    from fl_lightning.models import Timm  # older checkouts do not have it

    return Timm(
        "deit_tiny_patch16_224",
        num_classes=10,
        input_size=32,
        options={"patch_size": 4},
        lora={"r": 8, "lora_alpha": 16, "target_modules": ["qkv"]},
    )
