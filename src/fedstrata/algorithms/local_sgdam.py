"""Momentum-Local-SGDA: Local-SGDA along moving averages of both gradients.

Sharma, Panda, Joshi, Varshney: "Federated minimax optimization: improved convergence analyses and algorithms", ICML
2022, Algorithm 2.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level.

    x_k, y_k, d_k <- x, y, d;   tau times:
        x_k <- x_k - alpha lr d_kx,    y_k <- Pi[ y_k + alpha dual_lr d_ky ]
        d_k <- (1 - beta alpha) d_k + beta alpha grad f_k(x_k, y_k; batch), at the new point, in x and in y
    x, y, d <- M_k[x_k], M_k[y_k], M_k[d_k]

Sent: up 2*(d + p), down 2*(d + p). With average_momentum = false the momenta stay on their clients, and up d + p, down
d + p. Before the first round: down and up d + p. (Momenta that stay on their clients are not sent up then.)

Departures from the paper: ``average_momentum = false`` is what the paper's experiments do by a footnote. The first d is
the gradient on one batch, averaged where momenta are; the original text could not be consulted on that. The projection
is of y + alpha dual_lr d. beta alpha is cut off at 1. Cohorts are possible; the paper has all clients.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.estimators import moving_average
from fedstrata.algorithms.saddles import Pair, down_up, gradients
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import EqualSteps, Rate


class LocalSGDAM(Algorithm):
    """Local steps down in x and up in y along momenta."""

    name = "local_sgdam"
    dual = True
    answers = {"first": "zero zero", "local": "x y d", "local_own": "x y"}

    lr: Rate = param(0.1, "learning rate of x", above=0, search=RATES)
    dual_lr: Rate = param(0.1, "learning rate of y", above=0, search=RATES)
    steps: EqualSteps = param(10, "local steps per round, tau, or an Interval")
    alpha: Rate = param(1.0, "multiplies both learning rates and beta", above=0)
    beta: float = param(0.5, "weight of a fresh gradient in the momenta, times alpha", above=0, search=(0.05, 1))
    average_momentum: bool = param(True, "average the momenta with x and y; otherwise they stay on their clients")
    weight_decay: float = param(0.0, "L2 penalty on x", least=0)

    @property
    def up(self) -> str:
        """What a client sends in a round."""
        return "2*(d + p)" if self.average_momentum else "d + p"

    @property
    def down(self) -> str:
        """What the server sends in a round."""
        return self.up

    def start(self, s: State, clients: Clients) -> State:
        """Start the momenta as gradients."""
        d_x, d_y = clients.mean(self.first, s.x, s.y)
        return s.replace(d_x=d_x, d_y=d_y) if self.average_momentum else s

    def round(self, s: State, clients: Clients) -> State:
        """Average what the clients' steps led to."""
        if not self.average_momentum:
            x, y = clients.mean(self.local_own, s.x, s.y)
            return s.replace(x=x, y=y)
        x, y, d_x, d_y = clients.mean(self.local, s.x, s.y, s.d_x, s.d_y)
        return s.replace(x=x, y=y, d_x=d_x, d_y=d_y)

    def first(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> Pair:
        """Return the gradients on one batch, or keep them."""
        d_x, d_y = gradients(client, x, y, client.draw(), self.weight_decay)
        if self.average_momentum:
            return d_x, d_y
        client.keep(d_x=d_x, d_y=d_y)
        return d_x[:, :0], d_y[:, :0]

    def local(self, client: Client, x: torch.Tensor, y: torch.Tensor, *d: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take tau local steps."""
        out: tuple[torch.Tensor, ...] = client.repeat(self.steps, self.step, x, y, *d)
        return out

    def local_own(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> Pair:
        """Take tau local steps with the client's own momenta."""
        x, y, d_x, d_y = self.local(client, x, y, client.recall("d_x", x), client.recall("d_y", y))
        client.keep(d_x=d_x, d_y=d_y)
        return x, y

    def step(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, d_x: torch.Tensor, d_y: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Step along the momenta, then renew them at the new point."""
        alpha = client.rate(self.alpha)
        x, y = down_up(client, x, y, (d_x, d_y), (alpha * client.rate(self.lr), alpha * client.rate(self.dual_lr)))
        g_x, g_y = gradients(client, x, y, client.draw(), self.weight_decay)
        weight = min(1.0, self.beta * alpha)
        return x, y, moving_average(d_x, g_x, weight), moving_average(d_y, g_y, weight)
