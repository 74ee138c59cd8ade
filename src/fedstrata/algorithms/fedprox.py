"""FedProx: local SGD with a proximal term that keeps clients near the server's model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated optimization in heterogeneous networks", MLSys 2020,
Algorithm 2.

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k <- x;   repeat:  x_k <- x_k - lr * (grad f_k(x_k; batch) + weight_decay * x_k + mu * (x_k - x))
    x   <- x + server_lr * (M_k[x_k] - x)

Sent: up d, down d.

Departures from the paper: the paper's inexact local solver is a given number of SGD steps (as in the authors' code);
clients are sampled uniformly and averaged by the run's weighting, while the paper samples by size and averages
uniformly.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import LOCAL_LR, LOCAL_STEPS, WEIGHT_DECAY, decayed
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate, Steps


class FedProx(Algorithm):
    """Local SGD with a proximal pull towards the server's model."""

    name = "fedprox"

    lr: Rate = LOCAL_LR
    mu: float = param(0.01, "strength of the proximal pull", least=0, search=(1e-3, 1.0))
    steps: Steps = LOCAL_STEPS
    server_lr: Rate = param(1.0, "how far the server moves towards the mean", above=0)
    weight_decay: float = WEIGHT_DECAY

    def round(self, s: State, clients: Clients) -> State:
        """Move by the clients' mean update."""
        return s._replace(x=s.x + clients.rate(self.server_lr) * clients.mean(self.local, s.x))

    @remote
    def local(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Take SGD steps on h_k(x_k) = f_k(x_k) + mu/2 ||x_k - x||^2."""
        k = client.variables(x=x, start=x)
        for _ in client.loop(self.steps, k):
            g = decayed(client.grads(k.x, client.draw()), k.x, self.weight_decay)
            k.x = k.x.sub(g + self.mu * (k.x - k.start), alpha=client.rate(self.lr))
        return k.x - x
