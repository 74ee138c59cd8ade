"""Local-SGDA: local stochastic gradient descent ascent.

Deng, Mahdavi: "Local stochastic gradient descent ascent: convergence analysis and communication efficiency", AISTATS
2021; Sharma, Panda, Joshi, Varshney: "Federated minimax optimization: improved convergence analyses and algorithms",
ICML 2022, Algorithm 1.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level.

    x_k, y_k <- x, y;   tau times, both from the old point:
        x_k <- x_k - lr grad_x f_k(x_k, y_k; batch),    y_k <- Pi[ y_k + dual_lr grad_y f_k(x_k, y_k; batch) ]
    x, y <- M_k[x_k], M_k[y_k]

Sent: up d + p, down d + p.

Departures from the paper: cohorts, and means weighted by samples, are possible; the papers have all clients, uniformly.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.saddles import Pair, down_up, gradients
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import Rate, Steps


class LocalSGDA(Algorithm):
    """Local steps down in x and up in y, then averages of both."""

    name = "local_sgda"
    dual = True
    up = down = "d + p"
    answers = {"local": "x y"}

    lr: Rate = param(0.1, "learning rate of x", above=0, search=RATES)
    dual_lr: Rate = param(0.1, "learning rate of y", above=0, search=RATES)
    steps: Steps = param(10, "local steps per round, tau, or Epochs(e), or an Interval")
    weight_decay: float = param(0.0, "L2 penalty on x", least=0)

    def round(self, s: State, clients: Clients) -> State:
        """Average what the clients' steps led to."""
        x, y = clients.mean(self.local, s.x, s.y)
        return s.replace(x=x, y=y)

    def local(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> Pair:
        """Take tau local steps."""
        x, y = client.repeat(self.steps, self.step, x, y)
        return x, y

    def step(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> Pair:
        """Take one step down in x and up in y."""
        directions = gradients(client, x, y, client.draw(), self.weight_decay)
        return down_up(client, x, y, directions, (client.rate(self.lr), client.rate(self.dual_lr)))
