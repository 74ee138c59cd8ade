"""Local AdaAlter: local steps scaled by the gradients of previous rounds, as in Adagrad.

Xie, Koyejo, Gupta, Lin: "Local AdaAlter: communication-efficient stochastic gradient descent with adaptive learning
rates", arXiv 1911.09030, 2019, the algorithm with local steps.

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k, a_k <- x, b
    t = 1, 2, ...:  g   = grad f_k(x_k; batch) + weight_decay * x_k
                    x_k <- x_k - lr * g / sqrt(b + t * eps^2)
                    a_k <- a_k + g^2
    x, b <- M_k[x_k], M_k[a_k]

b, the paper's B^2, starts at b0^2. A gradient affects the scale only from the next round on; until then eps^2 replaces
its square.

Sent: up 2*d, down 2*d.

Departures from the paper: no warm-up of the learning rate. Means are over the sampled clients, by the run's weighting.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import RATES, WEIGHT_DECAY, decayed, scaled_rate
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate, Steps


class State(NamedTuple):
    """The model, and the sum of squares that scales its steps."""

    x: torch.Tensor
    b: torch.Tensor


class LocalAdaAlter(Algorithm):
    """Local SGD with Adagrad's scale, updated once a round."""

    name = "local_adaalter"

    lr: Rate = param(0.5, "learning rate", above=0, search=RATES)
    steps: Steps = param(10, "local steps per round, H, or Epochs(e), or an Interval")
    b0: float = param(1.0, "square root of the initial scale", least=0)
    eps: float = param(1.0, "placeholder for a gradient until the next round", above=0)
    weight_decay: float = WEIGHT_DECAY

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Start with b = b0^2."""
        return State(x, torch.full_like(x, self.b0**2))

    def round(self, s: State, clients: Clients) -> State:
        """Average the clients' models and sums of squares."""
        dx, db = clients.mean(self.local, s.x, s.b)
        return State(s.x + dx, s.b + db)

    @remote
    def local(self, client: Client, x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take local steps with the scale of the previous rounds, and sum the squares of their gradients."""
        k = client.variables(x=x, a=b, b=b)
        for step in client.loop(self.steps, k):
            lr, scale = client.rate(self.lr), (k.b + (step + 1) * self.eps**2).sqrt()
            g = decayed(client.grads(k.x, client.draw()), k.x, self.weight_decay)
            client.report(rate=partial(scaled_rate, lr, scale))
            k.x, k.a = k.x.addcdiv(g, scale, value=-lr), k.a.addcmul(g, g)
        return k.x - x, k.a - b
