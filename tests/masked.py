"""Samples with two inputs, tokens and a mask, and the same samples with one input that holds both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

import fedstrata as fs

LENGTH, WIDTH = 5, 3


class Masked(nn.Module):
    """The mean of some features over the tokens [n, LENGTH, WIDTH] that a boolean mask [n, LENGTH] selects."""

    def __init__(self, outputs: int, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.outer = nn.Linear(4, outputs, dtype=dtype)
        with torch.no_grad():
            for k, weights in enumerate(self.parameters()):
                weights.copy_(torch.linspace(-0.6, 0.9 - 0.2 * k, weights.numel()).view_as(weights))

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        features = torch.where(mask.unsqueeze(-1), self.inner(tokens).tanh(), 0)
        mean = features.sum(-2) / mask.sum(-1, keepdim=True).clamp(min=1)
        return self.outer(self.dropout(mean))


class Packed(nn.Module):
    """The same model for inputs [n, LENGTH, WIDTH + 1], whose last entries are the mask."""

    def __init__(self, model: Masked) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(inputs[..., :WIDTH], inputs[..., WIDTH] > 0.5)


Arrays = tuple[np.ndarray, ...]


def rows(size: int, classes: int, seed: int) -> Arrays:
    """Return tokens, a mask and targets."""
    rng = np.random.default_rng(seed)
    tokens, mask = rng.normal(size=(size, LENGTH, WIDTH)), rng.random((size, LENGTH)) < 0.6
    score = (tokens[..., 0] * mask).sum(1) + 0.3 * rng.normal(size=size)
    return tokens, mask, np.digitize(score, np.quantile(score, np.arange(1, classes) / classes))


def packed(arrays: Arrays) -> Arrays:
    """Return the same samples with one input."""
    tokens, mask, targets = arrays
    return np.concatenate([tokens, mask[..., None]], axis=2), targets


def sites(classes: int = 3, sizes: Sequence[int] = (6, 12, 7, 18, 8)) -> tuple[fs.FederatedData, fs.FederatedData]:
    """Return the data of some clients with two inputs, and with one, and a test set."""
    clients, test = [rows(n, classes, seed) for seed, n in enumerate(sizes)], rows(30, classes, 99)
    one = fs.FederatedData.from_arrays([packed(c) for c in clients], test=packed(test), classes=classes)
    return fs.FederatedData.from_arrays(clients, test=test, classes=classes), one
