"""A small model with every kind of random layer: dropout, a flip, a crop, jitter, and a function of the user."""

from __future__ import annotations

import torch
from torch import nn

import fedstrata as fs


def shade(images: torch.Tensor, numbers: torch.Tensor, strength: float = 0.5) -> torch.Tensor:
    """Make each image darker along its rows, up to a random column."""
    columns = torch.arange(images.shape[-1], device=images.device) / images.shape[-1]
    dark = columns < numbers[:, :1]
    return images * (1 - strength * numbers[:, 1:] * dark).to(images.dtype)[:, None, None, :]


def register_shade() -> None:
    """Register the function, as a user's file would; the fixture ``registries`` removes it again."""

    @fs.models.augmentation(numbers=2)
    def shade_(
        images: torch.Tensor,
        numbers: torch.Tensor,
        strength: float = fs.param(0.5, "how dark", least=0, most=1),
    ) -> torch.Tensor:
        return shade(images, numbers, strength)


def augmented(dtype: torch.dtype, side: int = 8, classes: int = 10) -> nn.Module:
    """Return the model, for images [1, side, side]."""
    before = [fs.models.RandomFlip(), fs.models.RandomCrop(1), fs.models.RandomJitter()]
    net = fs.models.model("mlp", (1, side, side), classes, hidden=[8], dropout=0.4, seed=0)
    return nn.Sequential(*before, fs.models.RandomFunction(shade, 2), net).to(dtype)


def augmented_example() -> tuple[fs.Problem, fs.FederatedData]:
    """Return the model on seven clients of unequal sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = (9, 5, 12, 7, 6, 8, 10)
    sites = [(torch.rand(n, 1, 4, 4, generator=generator).double(), torch.arange(n) % 3) for n in sizes]
    return fs.erm(augmented(torch.float64, 4, 3)), fs.FederatedData.from_arrays(sites)
