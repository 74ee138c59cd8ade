"""AFL: agnostic federated learning.

Mohri, Sivek, Suresh: "Agnostic federated learning", ICML 2019, Figure 3 (Stochastic-AFL).

Problem: min_x max_y sum_k y_k F_k(x), y on the simplex over the clients (``agnostic``); every client in every round.

    every client:  grad F_k(x; batch), F_k(x; batch)
    x <- x - lr sum_k y_k grad F_k(x),     y <- Pi[ y + dual_lr (F_1(x), ..., F_N(x)) ],     both at the old x and y
    the solution is the mean of the iterates x, and of the iterates y

Sent: up d + 1, down d.

Departures from the paper: x is not projected. ``average = false`` returns the last iterate. The mean is over the
iterates after each round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import RATES, own_loss
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate


class State(NamedTuple):
    """The current point, and the means of the iterates."""

    x: torch.Tensor
    y: torch.Tensor
    x_mean: torch.Tensor
    y_mean: torch.Tensor


class AFL(Algorithm):
    """One gradient step per round on the currently worst mixture of clients."""

    name = "afl"
    dual = True
    mixture = True
    full_participation = True

    lr: Rate = param(0.1, "step size of the model", above=0, search=RATES)
    dual_lr: Rate = param(0.1, "step size of the dual weights", above=0, search=RATES)
    average: bool = param(True, "return the mean of the iterates, as in the paper, instead of the last iterate")

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Start at x_0 and the uniform mixture, which are also the first means."""
        return State(x, y, x, y)

    def round(self, s: State, clients: Clients) -> State:
        """Take one step in x and one in y."""
        gradients, losses = clients.gather(self.gradient, s.x)
        x = s.x - clients.rate(self.lr) * (s.y @ gradients)
        y = clients.project_y(s.y + clients.rate(self.dual_lr) * losses)
        weight = 1 / (clients.clock.round + 1)
        return State(x, y, s.x_mean + weight * (x - s.x_mean), s.y_mean + weight * (y - s.y_mean))

    def solution(self, s: State) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the means of the iterates, or the last iterates."""
        return (s.x_mean, s.y_mean) if self.average else (s.x, s.y)

    @remote
    def gradient(self, client: Client, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient and the value of the client's own loss on one batch."""
        k = client.variables()
        for _ in client.loop(1, k):
            batch, y = client.draw(), own_loss(client)
            k.g, k.loss = client.f_grads(x, batch, y)[0], client.loss(x, batch, y)
        return k.g, k.loss
