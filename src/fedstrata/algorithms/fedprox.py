"""FedProx: local SGD held near the server's model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated optimization in heterogeneous networks", MLSys 2020,
Algorithm 2.

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k <- x;   repeat:  x_k <- x_k - lr * (grad f_k(x_k; batch) + weight_decay * x_k + mu * (x_k - x))
    x   <- x + server_lr * (M_k[x_k] - x)

Sent: up d, down d.

Departures from the paper: the paper's inexact local solver is a given number of SGD steps (as in the authors' code);
clients are sampled uniformly and averaged as the run's weighting says, where the paper samples by size and averages
uniformly.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES, decayed
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import Rate, Steps


class FedProx(Algorithm):
    """Local SGD with a proximal pull towards the server's model."""

    name = "fedprox"
    up = down = "d"
    answers = {"local": "x"}

    lr: Rate = param(0.1, "local learning rate", above=0, search=RATES)
    mu: float = param(0.01, "strength of the proximal pull", least=0, search=(1e-3, 1.0))
    steps: Steps = param(10, "local steps per round, or Epochs(e), or an Interval")
    server_lr: Rate = param(1.0, "how far the server moves towards the mean", above=0)
    weight_decay: float = param(0.0, "L2 penalty on the local objective", least=0)

    def round(self, s: State, clients: Clients) -> State:
        """Average the clients' models."""
        x = clients.mean(self.local, s.x)
        return s.replace(x=s.x + clients.rate(self.server_lr) * (x - s.x))

    def local(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Solve the proximal problem inexactly, from the server's model."""
        x_k: torch.Tensor = client.repeat(self.steps, self.step, x, x)
        return x_k

    def step(self, client: Client, x_k: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Take one SGD step on h_k(x_k) = f_k(x_k) + mu/2 ||x_k - x||^2."""
        g = decayed(client.grads(x_k, client.draw()), x_k, self.weight_decay)
        return x_k.sub(g + self.mu * (x_k - x), alpha=client.rate(self.lr))
