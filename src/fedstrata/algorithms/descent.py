"""Gradient steps that several algorithms share: local SGD, and descent in x with ascent in y."""

from __future__ import annotations

from functools import partial

import torch

from fedstrata.clients import Client, Variables
from fedstrata.core.options import param
from fedstrata.core.schedules import Rate, Steps
from fedstrata.data.batch import Batch

Pair = tuple[torch.Tensor, torch.Tensor]
"""A vector for x and one for y."""

Tensors = tuple[torch.Tensor, ...]

RATES = (1e-3, 1.0)
"""The range of learning rates that ``fedstrata tune`` searches, on a logarithmic scale."""

LOCAL_LR = param(0.1, "local learning rate", above=0, search=RATES)
LOCAL_STEPS = param(10, "local steps per round, or Epochs(e), or an Interval")
WEIGHT_DECAY = param(0.0, "L2 penalty on x", least=0)
WEIGHTS = param(
    "constant",
    "'constant': use the weights as given; 'theorem': multiply them by eta_t^2; in both cases at most 1",
    choices=("constant", "theorem"),
)
FIRST_BATCHES = param(0, "batches for the first estimates; 0 means as many as steps", least=0)
"""Options with the same meaning in several algorithms. Others declare their own, with the letter of their paper."""


def decayed(gradient: torch.Tensor, x: torch.Tensor, weight_decay: float) -> torch.Tensor:
    """Return the gradient of the loss plus ``weight_decay / 2 * ||x||^2``."""
    return gradient.add(x, alpha=weight_decay) if weight_decay else gradient


def local_sgd(client: Client, x: torch.Tensor, steps: Steps, lr: Rate, weight_decay: float) -> torch.Tensor:
    """Take steps x_k <- x_k - lr * (grad f(x_k; batch) + weight_decay * x_k) from ``x``; return the update x_k - x."""
    k = client.variables(x=x.clone())
    for _ in client.loop(steps, k):
        rate = client.rate(lr)
        client.report(rate=partial(torch.full_like, k.x, rate))
        client.descend(k.x, client.draw(), rate, weight_decay)
    return k.x - x


def scaled_rate(lr: float, scale: torch.Tensor) -> torch.Tensor:
    """Return the learning rate of every entry, for diagnostics."""
    return lr / scale


def gradients(client: Client, x: torch.Tensor, y: torch.Tensor, batch: Batch, weight_decay: float = 0.0) -> Pair:
    """Return the gradients of f in x and in y; ``weight_decay`` is an L2 penalty on x."""
    g_x, g_y = client.f_grads(x, batch, y)
    return decayed(g_x, x, weight_decay), g_y


def descend_ascend(client: Client, k: Variables, directions: Pair, rates: tuple[float, float]) -> None:
    """Descend in k.x and ascend in k.y, both from the old point, and project y."""
    k.x = k.x.sub(directions[0], alpha=rates[0])
    k.y = client.project_y(k.y.add(directions[1], alpha=rates[1]))


def own_loss(client: Client) -> torch.Tensor:
    """Return the dual of a mixture at which f_k is the client's own loss: the uniform one."""
    y0 = client.problem.y0
    assert y0 is not None
    return torch.full_like(y0, 1 / len(y0)).expand(len(client), -1)
