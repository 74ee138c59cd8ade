"""Layers that draw random numbers: dropout and random changes to images, the same on every engine and with any chunk.

In a run their numbers are a function of names, as batches are: the seed, client, round, exchange, step, level and
stream, the layer, and the position in the layer's input. Two gradients on one batch see the same numbers, as
variance-reduced methods require. When a model is evaluated, and in the module that a run returns if it is in
evaluation mode, these layers change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from fedstrata.core import rng
from fedstrata.core.errors import InputError, invalid, is_number


class Noise:
    """What a model's random layers draw from while a function of a problem runs.

    words: two random words [2] of the client's batch; None when nothing is random, as in an evaluation.
    calls: how often the model has been called with these words; every call draws its own numbers.
    """

    def __init__(self) -> None:
        self.words: torch.Tensor | None = None
        self.calls = 0

    @contextmanager
    def drawing_from(self, words: torch.Tensor | None) -> Iterator[None]:
        """Let the layers draw from these words."""
        before = self.words, self.calls
        self.words, self.calls = words, 0
        try:
            yield
        finally:
            self.words, self.calls = before


class RandomLayer(nn.Module):
    """A layer that draws random numbers: reproducibly in a run, else from PyTorch's generator if in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: Noise | None = None
        self.number = 0

    def uniforms(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor | None:
        """Return numbers in [0, 1), or None if the layer must not change its input now."""
        if self.noise is None:
            return torch.rand(*shape, dtype=like.dtype, device=like.device) if self.training else None
        if self.noise.words is None:
            return None
        words = rng.words_of_tensors(self.noise.words, (self.number, self.noise.calls), math.prod(shape))
        # 24 bits are exact in every dtype, so that no number is rounded up to 1.
        return ((words >> 8).to(like.dtype) * 2.0**-24).view(*shape)


class Dropout(RandomLayer):
    """Dropout; ``channels`` drops whole channels. It replaces ``original``, a dropout layer of PyTorch."""

    def __init__(self, p: float, channels: bool, original: nn.Module) -> None:
        super().__init__()
        self.p, self.channels = float(p), channels
        self.original = (original,)  # in a tuple, so that it is not a part of this module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Set numbers, or channels of [B, channels, ...], to zero with probability p; divide the others by 1 - p."""
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.channels else x.shape
        uniforms = self.uniforms(shape, x)
        if uniforms is None:
            return x
        return x * (uniforms >= self.p) / (1 - self.p) if self.p < 1 else torch.zeros_like(x)


class RandomFlip(RandomLayer):
    """Mirror each image left to right with probability 1/2, in training only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images [B, channels, H, W] to the same shape."""
        uniforms = self.uniforms((len(x), *[1] * (x.dim() - 1)), x)
        return x if uniforms is None else torch.where(uniforms < 0.5, x, x.flip(-1))


class RandomCrop(RandomLayer):
    """Shift each image by up to ``padding`` pixels along both axes, and fill with zeros, in training only."""

    def __init__(self, padding: int = 4) -> None:
        super().__init__()
        if not is_number(padding) or isinstance(padding, float) or padding < 1:
            raise invalid("padding of RandomCrop", padding, "a whole number of at least 1")
        self.padding = padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images [B, channels, H, W] to the same shape."""
        uniforms = self.uniforms((2, len(x)), x)
        if uniforms is None:
            return x
        rows, columns = (uniforms * (2 * self.padding + 1)).long()
        padded = nn.functional.pad(x, [self.padding] * 4)
        for shift, axis in ((rows, 2), (columns, 3)):
            shape = [len(x) if i == 0 else x.shape[axis] if i == axis else 1 for i in range(4)]
            index = (shift[:, None] + torch.arange(x.shape[axis], device=x.device)).view(shape)
            wide = [x.shape[i] if i in (0, axis) else padded.shape[i] for i in range(4)]
            padded = padded.gather(axis, index.expand(wide))
        return padded


AUGMENTATIONS: dict[str, type[RandomFlip] | type[RandomCrop]] = {"flip": RandomFlip, "crop": RandomCrop}
"""Random changes to images, by name in a configuration file."""


def by_names(name: str, layer: nn.Module) -> nn.Module | None:
    """Return a layer with reproducible numbers to replace a random layer of PyTorch; None if it is not random."""
    whole = isinstance(layer, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d)
    if type(layer) is nn.Dropout or whole:
        return Dropout(layer.p, whole, layer) if layer.p > 0 else None  # type: ignore[arg-type,operator]
    p = layer.p if isinstance(layer, nn.modules.dropout._DropoutNd) else getattr(layer, "dropout", 0.0)
    if isinstance(p, int | float) and p > 0:
        raise InputError(
            f"The layer {name!r} ({type(layer).__name__}, dropout {p}) draws random numbers that cannot be reproduced. "
            "Use nn.Dropout, nn.Dropout1d, 2d or 3d instead, or set its dropout to 0."
        )
    return None
