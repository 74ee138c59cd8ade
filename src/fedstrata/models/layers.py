"""Layers of the models in ``fedstrata.models.zoo``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fedstrata.core.errors import InputError


class ChannelsLast(nn.Module):
    """Move the channels of images to the last axis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, channels, H, W] to [B, H, W, channels]."""
        return x.permute(0, 2, 3, 1)


class Patches(nn.Module):
    """Cut maps with channels last into adjacent patches; sides are padded with zeros to multiples of ``size``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, H, W, channels] to [B, H / size, W / size, size * size * channels]."""
        n = self.size
        x = nn.functional.pad(x, (0, 0, 0, -x.shape[2] % n, 0, -x.shape[1] % n))
        batch, height, width, channels = x.shape
        x = x.reshape(batch, height // n, n, width // n, n, channels).transpose(2, 3)
        return x.reshape(batch, height // n, width // n, n * n * channels)


class Columns(nn.Module):
    """Cut images into adjacent patches, one column each; rows and columns beyond the last patch are dropped."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, channels, H, W] to [B, channels * size * size, patches]."""
        batch, channels, height, width = x.shape
        n = self.size
        x = x[:, :, : height // n * n, : width // n * n].reshape(batch, channels, height // n, n, width // n, n)
        return x.permute(0, 1, 3, 5, 2, 4).reshape(batch, channels * n * n, -1)


class Residual(nn.Module):
    """Add the input of a layer to its output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x + layer(x)."""
        out: torch.Tensor = x + self.layer(x)
        return out


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut that has no weights: it subsamples and pads with zeros."""

    def __init__(self, inside: int, outside: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = norm(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = norm(outside)
        self.stride, self.extra = stride, outside - inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, inside, H, W] to [B, outside, H / stride, W / stride]."""
        shortcut = x
        if self.extra:
            shortcut = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + shortcut)


class Pointwise(nn.Module):
    """A 1x1 convolution as a matrix product."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Linear(channels, outputs).parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, channels, positions] to [B, outputs, positions]."""
        return self.weight @ x + self.bias[:, None]


class Depthwise(nn.Module):
    """A convolution within each channel of small maps, as a matrix product.

    On a map of P positions a kernel acts as a P x P matrix of the kernel's entries; ``places`` says where each goes.
    For maps of up to 64 positions this is faster than convolving, especially for several clients at once.
    """

    places: torch.Tensor

    def __init__(self, channels: int, kernel: int, height: int, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Conv2d(channels, channels, kernel, groups=channels).parameters()
        unit = torch.eye(height * width).reshape(-1, 1, height, width)
        taps = torch.eye(kernel**2).reshape(-1, 1, kernel, kernel)
        places = nn.functional.conv2d(unit, taps, padding=kernel // 2)  # [position in, tap, position out]
        self.register_buffer("places", places.flatten(2).transpose(0, 1).flatten(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, channels, positions] to the same shape."""
        positions = x.shape[-1]
        matrices = (self.weight.flatten(1) @ self.places.to(x.dtype)).reshape(-1, positions, positions)
        return (x.transpose(0, 1) @ matrices).transpose(0, 1) + self.bias[:, None]


class MeanOverPositions(nn.Module):
    """Average maps over their positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, channels, ...] to [B, channels]."""
        return x.flatten(2).mean(-1)


class CharacterLSTM(nn.Module):
    """Embedding, stacked LSTM and a linear layer on the last state."""

    def __init__(self, outputs: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(outputs, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [B, length] to [B, outputs]."""
        if tokens.is_floating_point():
            raise InputError(f"The model lstm takes sequences of integers (tokens). Got {tokens.dtype}.")
        states, _ = self.lstm(self.embed(tokens.long()))
        out: torch.Tensor = self.out(states[:, -1])
        return out
