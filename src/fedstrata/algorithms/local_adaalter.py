"""Local AdaAlter: local steps scaled by the gradients of the rounds before, as in Adagrad.

Xie, Koyejo, Gupta, Lin: "Local AdaAlter: communication-efficient stochastic gradient descent with adaptive learning
rates", arXiv 1911.09030, 2019, the algorithm with local steps.

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k, a_k <- x, b
    t = 1, 2, ...:  g   = grad f_k(x_k; batch) + weight_decay * x_k
                    x_k <- x_k - lr * g / sqrt(b + t * eps^2)
                    a_k <- a_k + g^2
    x, b <- M_k[x_k], M_k[a_k]

b, the paper's B^2, starts at b0^2. A gradient changes the scale only from the next round on; until then eps^2 stands in
for its square.

Sent: up 2d, down 2d.

Departures from the paper: no warm-up of the learning rate. Means are over the sampled clients, weighted as the run
says.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES, decayed
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import Rate, Steps
from fedstrata.problems.oracles import Tensors
from fedstrata.problems.problem import Problem


class LocalAdaAlter(Algorithm):
    """Local SGD with Adagrad's scale, renewed once a round."""

    name = "local_adaalter"
    up = down = "2*d"
    answers = {"local": "x b"}

    lr: Rate = param(0.5, "learning rate", above=0, search=RATES)
    steps: Steps = param(10, "local steps per round, H, or Epochs(e), or an Interval")
    b0: float = param(1.0, "square root of the scale's start", least=0)
    eps: float = param(1.0, "what stands in for a gradient until the next round", above=0)
    weight_decay: float = param(0.0, "L2 penalty on the local objective", least=0)

    def init(self, problem: Problem) -> State:
        """Start with b = b0^2."""
        return super().init(problem).replace(b=torch.full_like(problem.x0, self.b0**2))

    def round(self, s: State, clients: Clients) -> State:
        """Average the clients' models and sums of squares."""
        x, b = clients.mean(self.local, s.x, s.b)
        return s.replace(x=x, b=b)

    def local(self, client: Client, x: torch.Tensor, b: torch.Tensor) -> Tensors:
        """Take local steps at the scale of the rounds before."""
        x, a = client.repeat(self.steps, self.step, x, b, b)
        return x, a

    def step(self, client: Client, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Tensors:
        """Take one step, and add its gradient to the sum of squares."""
        lr, scale = client.rate(self.lr), (b + (client.clock.step + 1) * self.eps**2).sqrt()
        g = decayed(client.grads(x, client.draw()), x, self.weight_decay)
        client.report(rate=lambda: lr / scale)
        return x.addcdiv(g, scale, value=-lr), a.addcmul(g, g)
