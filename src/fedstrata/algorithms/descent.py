"""Local gradient descent, as several algorithms share it."""

from __future__ import annotations

import torch

from fedstrata.clients import Client
from fedstrata.core.schedules import Rate, Steps

RATES = (1e-3, 1.0)
"""The range of learning rates that ``fedstrata tune`` searches, on a logarithmic scale."""


def decayed(gradient: torch.Tensor, x: torch.Tensor, weight_decay: float) -> torch.Tensor:
    """Return the gradient of the loss plus ``weight_decay / 2 * ||x||^2``."""
    return gradient.add(x, alpha=weight_decay) if weight_decay else gradient


def local_sgd(client: Client, x: torch.Tensor, steps: Steps, lr: Rate, weight_decay: float) -> torch.Tensor:
    """Take SGD steps from ``x``: x <- x - lr * (grad f(x; batch) + weight_decay * x)."""

    def step(client: Client, x: torch.Tensor) -> torch.Tensor:
        g = decayed(client.grads(x, client.draw()), x, weight_decay)
        rate = client.rate(lr)
        client.report(rate=lambda: torch.full_like(x, rate))
        return x.sub(g, alpha=rate)

    out: torch.Tensor = client.repeat(steps, step, x)
    return out
