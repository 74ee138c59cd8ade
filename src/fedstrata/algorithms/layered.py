"""Shared code of the two algorithms for levels with a global inner mean.

Their points are h = (x, h_1, ..., h_K): h_0 is x, and level j maps h_{j-1} to h_j. Without a dual, y and q have length
0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fedstrata.algorithms.descent import RATES, decayed
from fedstrata.clients import Client, Clients, Variables
from fedstrata.core.options import param
from fedstrata.data.batch import Batch

Update = tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor, torch.Tensor]
"""A client's answer: the updates of h, y, p and q."""

ETA = param(0.3, "eta, a common factor of steps and weights", above=0)
GAMMA_X = param(0.33, "step size of x, multiplied by eta", above=0, search=RATES)
GAMMA_Y = param(0.33, "step size of y, multiplied by eta", above=0, search=RATES)
RHO_X = param(3.3, "weight of a fresh gradient in p, multiplied by eta", above=0, search=(0.2, 3.3))
RHO_Y = param(3.3, "weight of a fresh gradient in q, multiplied by eta", above=0, search=(0.2, 3.3))
TAU = param(4, "local steps per round, tau, or an Interval")
FIRST_BATCHES = param(1, "batches for the first estimates", least=1)
"""Options of both algorithms."""

FIRST = 1
"""The stream of the batches before the first step."""


class State(NamedTuple):
    """x and the estimates of the levels, (x, h_1, ..., h_K); y; the momenta p of x and q of y."""

    h: tuple[torch.Tensor, ...]
    y: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor

    @property
    def x(self) -> torch.Tensor:
        """The model's vector."""
        return self.h[0]

    @staticmethod
    def empty(x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Return the state with room for the estimates, which the first step of the run fills."""
        h = (x.new_zeros(size) for size in clients.inner_sizes)
        return State((x, *h), y, torch.zeros_like(x), torch.zeros_like(y))

    def plus(self, update: Update, clients: Clients) -> State:
        """Return the state after the clients' mean update."""
        h, y, p, q = update
        h = tuple(a + b for a, b in zip(self.h, h, strict=True))
        return State(h, clients.project_y(self.y + y), self.p + p, self.q + q)


def estimate_levels(client: Client, k: Variables, batches: int, weight_decay: float) -> None:
    """Set h_j = g_j(h_{j-1}), and p and q to the gradients there, on as many samples as ``batches`` batches."""
    drawn = client.draw_all(FIRST, client.worth(batches))
    for j, batch in enumerate(drawn[:-1], 1):
        k.h[j] = client.g(j, k.h[j - 1], batch)
    k.p, k.q = chain_rule(client, k, drawn, weight_decay)


def chain_rule(
    client: Client, k: Variables, batches: Sequence[Batch], weight_decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return J_1^T ... J_K^T grad f, and the gradient in y; level j at h_{j-1}, f at h_K.

    Processes one level at a time, from the last to the first, so that only one level's graph is in memory.
    """
    u, v = client.f_grads(k.h[-1], batches[-1], k.y)
    for j in range(len(k.h) - 1, 0, -1):
        u = client.g_vjp(j, k.h[j - 1], u, batches[j - 1])
    return decayed(u, k.h[0], weight_decay), v
