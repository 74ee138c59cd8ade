"""The models of the jobs as torch modules, for the peers on PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from jobs import Work


class Block(nn.Module):
    """Two 3x3 convolutions with GroupNorm, and a shortcut without weights that subsamples and pads with zeros."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.stride, self.extra = 1 if inside == outside else 2, outside - inside
        self.conv1 = nn.Conv2d(inside, outside, 3, self.stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, inside, H, W] to [B, outside, H / stride, W / stride]."""
        shortcut = x
        if self.extra:
            shortcut = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + shortcut)


def convolutions(first: int, second: int, hidden: list[int], same: bool) -> nn.Module:
    """Return two 5x5 convolutions with max pooling for 28x28 images, then dense layers; ``same``: pad the second."""
    side, second_padding = (7, 2) if same else (5, 0)
    layers: list[nn.Module] = [nn.Conv2d(1, first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(first, second, 5, padding=second_padding), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    width = second * side * side
    for h in hidden:
        layers += [nn.Linear(width, h), nn.ReLU()]
        width = h
    return nn.Sequential(*layers, nn.Linear(width, 10))


def build(model: str, seed: int = 0) -> nn.Module:
    """Build a model by its name in a job."""
    torch.manual_seed(seed)
    if model == "trivial":
        return nn.Linear(1, 1, bias=False)
    if model == "logreg":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    if model == "lenet5":
        return convolutions(6, 16, [120, 84], same=False)
    if model == "cnn":
        return convolutions(32, 64, [512], same=True)
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(inside, outside) for inside, outside in pairwise(widths)]
    first = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def started(work: Work) -> nn.Module:
    """Build the model of a job with its starting weights."""
    model = build(work.job.model)
    model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in work.start.items()})
    return model


def loss_of(model: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss of a job: cross-entropy, or the mean output of the trivial model."""
    return trivial_loss if model == "trivial" else nn.functional.cross_entropy


def trivial_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean output."""
    return output.mean()


def tensors(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of all clients."""
    return torch.from_numpy(work.inputs), torch.from_numpy(work.targets)
