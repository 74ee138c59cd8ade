"""Layers that draw random numbers, the same on every engine and with any chunk: dropout, and the base of augmentations.

In a run their numbers are a function of names, as batches are: the seed, client, round, exchange, step, level and
stream, the layer, and the position in the layer's input. Two gradients on one batch see the same numbers, as
variance-reduced methods require. When a model is evaluated, and in the module that a run returns if it is in
evaluation mode, these layers change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from fedstrata.core import rng
from fedstrata.core.errors import InputError, is_number

DropoutRule = Literal["on", "off"]


class Noise:
    """What a model's random layers draw from while a function of a problem runs.

    words: two random words [2] of the client's batch; None when nothing is random, as in an evaluation.
    calls: how often the model has been called with these words; every call draws its own numbers.
    uses:  how often each layer has drawn in this call; a layer that the model uses twice draws twice.
    """

    def __init__(self) -> None:
        self.words: torch.Tensor | None = None
        self.calls = 0
        self.uses: dict[int, int] = {}

    @contextmanager
    def drawing_from(self, words: torch.Tensor | None) -> Iterator[None]:
        """Let the layers draw from these words."""
        before = self.words, self.calls, self.uses
        self.words, self.calls, self.uses = words, 0, {}
        try:
            yield
        finally:
            self.words, self.calls, self.uses = before

    def next_call(self) -> None:
        """Begin a call of the model."""
        self.calls, self.uses = self.calls + 1, {}

    def draw(self, layer: int, count: int) -> torch.Tensor | None:
        """Return ``count`` 32-bit words for the next use of a layer; None when nothing is random."""
        if self.words is None:
            return None
        use = self.uses[layer] = self.uses.get(layer, -1) + 1
        return rng.words_of_tensors(self.words, (layer + (use << 16), self.calls), count)


class RandomLayer(nn.Module):
    """A layer that draws random numbers: reproducibly in a run, else from PyTorch's generator if in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: Noise | None = None
        self.number = 0

    def uniforms(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor | None:
        """Return numbers in [0, 1), or None if the layer must not change its input now."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32  # inputs may be integers
        if self.noise is None:
            return torch.rand(*shape, dtype=dtype, device=like.device) if self.training else None
        words = self.noise.draw(self.number, math.prod(shape))
        # 24 bits are exact in both dtypes, so that no number is rounded up to 1.
        return None if words is None else ((words >> 8).to(dtype) * 2.0**-24).view(*shape)


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


def by_names(name: str, layer: nn.Module) -> nn.Module | None:
    """Return a layer with reproducible numbers to replace a random layer of PyTorch; None if it is not random."""
    whole = isinstance(layer, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d)
    if type(layer) is nn.Dropout or whole:
        return Dropout(layer.p, whole, layer) if layer.p > 0 else None  # type: ignore[arg-type,operator]
    p = layer.p if isinstance(layer, nn.modules.dropout._DropoutNd) else getattr(layer, "dropout", 0.0)
    if is_number(p) and p > 0:
        raise InputError(
            f"The layer {name!r} ({type(layer).__name__}, dropout {p}) draws random numbers that cannot be reproduced. "
            "Use nn.Dropout, nn.Dropout1d, 2d or 3d instead, or pass dropout='off' to train without dropout."
        )
    return None


def switch_off_dropout(module: nn.Module) -> None:
    """Set every dropout of a module to 0, and its layers that are not PyTorch's own to evaluation mode.

    The latter is for dropout that a layer applies in its forward, ``F.dropout(x, p, self.training)``.
    """
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif is_number(getattr(part, "dropout", None)):
            part.dropout = 0.0  # type: ignore[assignment]
        if not type(part).__module__.startswith("torch.nn."):
            part.training = False
