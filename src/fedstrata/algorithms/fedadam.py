"""FedAdam: local SGD, Adam on the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive federated optimization", ICLR 2021,
Algorithm 2.

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k <- x;   repeat:  x_k <- x_k - lr * (grad f_k(x_k; batch) + weight_decay * x_k)
    Delta = M_k[x_k] - x
    m <- beta1 * m + (1 - beta1) * Delta
    v <- beta2 * v + (1 - beta2) * Delta^2
    x <- x + server_lr * m / (sqrt(v) + tau)

m starts at 0 and v at tau^2; there is no bias correction.

Sent: up d, down d.

Departures from the paper: the mean is weighted as the run says, where the paper's algorithm box averages
uniformly.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.adaptive import adaptive_state, adaptive_step
from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES, local_sgd
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import Rate, Steps
from fedstrata.problems.problem import Problem


class FedAdam(Algorithm):
    """Local SGD on every client, Adam on the mean change."""

    name = "fedadam"
    up = down = "d"
    answers = {"local": "x"}

    lr: Rate = param(0.1, "local learning rate", above=0, search=RATES)
    server_lr: Rate = param(0.1, "server learning rate", above=0, search=RATES)
    steps: Steps = param(10, "local steps per round, or Epochs(e), or an Interval")
    beta1: float = param(0.9, "memory of the first moment", least=0, below=1)
    beta2: float = param(0.99, "memory of the second moment", least=0, below=1)
    tau: float = param(1e-3, "adaptivity: smaller is more adaptive", above=0)
    weight_decay: float = param(0.0, "L2 penalty on the local objective", least=0)

    def init(self, problem: Problem) -> State:
        """Start with m = 0 and v = tau^2."""
        return adaptive_state(problem, self.tau)

    def round(self, s: State, clients: Clients) -> State:
        """Take one Adam step along the clients' mean change."""
        delta = clients.mean(self.local, s.x) - s.x
        v = self.beta2 * s.v + (1 - self.beta2) * delta**2
        return adaptive_step(s, delta, v, self.beta1, clients.rate(self.server_lr), self.tau)

    def local(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Take local steps from the server's model."""
        return local_sgd(client, x, self.steps, self.lr, self.weight_decay)
