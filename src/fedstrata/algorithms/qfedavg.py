"""q-FedAvg: averages with higher weights for clients with a higher loss.

Li, Sanjabi, Beirami, Smith: "Fair resource allocation in federated learning", ICLR 2020, Algorithm 2 (q-FedAvg).

Problem: min_x M_k[ f_k(x) ], no inner level, no dual; the method minimises M_k[ f_k(x)^(q+1) ] / (q + 1).

    x_k <- x;   repeat:  x_k <- x_k - lr * (grad f_k(x_k; batch) + weight_decay * x_k)
    D_k = (x - x_k) / lr,   F_k = f_k(x) on all of the client's data, at the received x
    h_k = q F_k^(q-1) ||D_k||^2 + F_k^q / lr
    x  <- x - M_k[ F_k^q D_k ] / M_k[ h_k ]

q = 0 is FedAvg.

Sent: up d + 1, down d.

Departures from the paper: the paper samples clients by size and sums; here clients are sampled uniformly and the means
use the run's weighting, for the same objective. F_k + 1e-10 replaces F_k, as in the authors' code. The learning rate is
constant during a round, since 1/lr plays the role of the Lipschitz constant. Weight decay applies to the local steps,
not to F_k.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import LOCAL_LR, LOCAL_STEPS, WEIGHT_DECAY, local_sgd
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate, Steps


class QFedAvg(Algorithm):
    """Local SGD, averaged with weights that are powers of the clients' losses."""

    name = "qfedavg"

    lr: Rate = LOCAL_LR
    q: float = param(0.2, "0 is FedAvg; larger values give more weight to high losses", least=0, search=(0.01, 5.0))
    steps: Steps = LOCAL_STEPS
    weight_decay: float = WEIGHT_DECAY

    def round(self, s: State, clients: Clients) -> State:
        """Move by the ratio of the two means."""
        direction, h = clients.mean(self.local, s.x, clients.rate(self.lr))
        return s._replace(x=s.x - direction / h)

    @remote
    def local(self, client: Client, x: torch.Tensor, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Run local SGD and scale its update by the loss at the received model."""
        loss = client.loss(x, client.all_data()) + 1e-10
        d = -local_sgd(client, x, self.steps, lr, self.weight_decay) / lr
        weight = loss**self.q
        h = self.q * loss ** (self.q - 1) * d.square().sum(1) + weight / lr
        return weight.unsqueeze(1) * d, h
