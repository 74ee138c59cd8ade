"""FedAMS: local SGD, AMSGrad on the server.

Wang, Lin, Chen: "Communication-efficient adaptive federated learning", ICML 2022, Algorithm 1, both options.

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k <- x;   repeat:  x_k <- x_k - lr * (grad f_k(x_k; batch) + weight_decay * x_k)
    Delta = M_k[x_k] - x
    m <- beta1 * m + (1 - beta1) * Delta
    v <- beta2 * v + (1 - beta2) * Delta^2
    option 1:  vhat <- max(vhat, v, eps);   x <- x + server_lr * m / sqrt(vhat)
    option 2:  vhat <- max(vhat, v);        x <- x + server_lr * m / (sqrt(vhat) + eps)

m, v and vhat start at 0; there is no bias correction. Mind that the eps of option 1 stands under the square root.

Sent: up d, down d.

Departures from the paper: means are weighted as the run says, where the paper's average is uniform. ``maximum = false``
leaves the running maximum out, vhat = v, which makes option 2 FedAdam started at v = 0.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES, local_sgd
from fedstrata.clients import Client, Clients
from fedstrata.core.errors import invalid
from fedstrata.core.schedules import Rate, Steps
from fedstrata.problems.problem import Problem


class FedAMS(Algorithm):
    """Local SGD on every client, AMSGrad on the mean change."""

    name = "fedams"
    up = down = "d"
    answers = {"local": "x"}

    lr: Rate = param(0.01, "local learning rate", above=0, search=RATES)
    server_lr: Rate = param(1.0, "server learning rate", above=0, search=RATES)
    steps: Steps = param(10, "local steps per round, or Epochs(e), or an Interval")
    option: int = param(1, "1: eps as a floor under the root; 2: eps added to the root")
    beta1: float = param(0.9, "memory of the first moment", least=0, below=1)
    beta2: float = param(0.99, "memory of the second moment", least=0, below=1)
    eps: float = param(1e-3, "what keeps the denominator from zero", above=0)
    maximum: bool = param(True, "keep the running maximum of v")
    weight_decay: float = param(0.0, "L2 penalty on the local objective", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.option not in (1, 2):
            raise invalid(f"option of {self.name}", self.option, "1 or 2")

    def init(self, problem: Problem) -> State:
        """Start with m = v = vhat = 0."""
        zero = torch.zeros_like(problem.x0)
        return super().init(problem).replace(m=zero, v=zero.clone(), vhat=zero.clone())

    def round(self, s: State, clients: Clients) -> State:
        """Take one AMSGrad step along the clients' mean change."""
        delta = clients.mean(self.local, s.x) - s.x
        m = self.beta1 * s.m + (1 - self.beta1) * delta
        v = self.beta2 * s.v + (1 - self.beta2) * delta**2
        vhat = torch.maximum(s.vhat, v) if self.maximum else v
        if self.option == 1:
            vhat = vhat.clamp(min=self.eps)
            step = m / vhat.sqrt()
        else:
            step = m / (vhat.sqrt() + self.eps)
        return s.replace(x=s.x + clients.rate(self.server_lr) * step, m=m, v=v, vhat=vhat)

    def local(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Take local steps from the server's model."""
        return local_sgd(client, x, self.steps, self.lr, self.weight_decay)
