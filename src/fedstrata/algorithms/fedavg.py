"""FedAvg: local SGD, averaged.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017, Algorithm 1.

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k <- x;   repeat:  x_k <- x_k - lr * (grad f_k(x_k; batch) + weight_decay * x_k)
    x   <- x + server_lr * (M_k[x_k] - x)

Sent: up d, down d.

Departures from the paper: the mean is over the sampled clients (uniform or by samples, by the run's weighting), with
weights that sum to one; ``server_lr`` = 1 is the paper's server. Batches follow the run's sampling; the paper's local
epochs are ``steps = Epochs(E)`` with ``sampling = "epochs"``.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import LOCAL_LR, LOCAL_STEPS, WEIGHT_DECAY, local_sgd
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate, Steps


class FedAvg(Algorithm):
    """Local SGD on every client, then the mean of the models."""

    name = "fedavg"

    lr: Rate = LOCAL_LR
    steps: Steps = LOCAL_STEPS
    server_lr: Rate = param(1.0, "how far the server moves towards the mean", above=0)
    weight_decay: float = WEIGHT_DECAY

    def round(self, s: State, clients: Clients) -> State:
        """Move by the clients' mean update."""
        return s._replace(x=s.x.add(clients.mean(self.local, s.x), alpha=clients.rate(self.server_lr)))

    @remote
    def local(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """ClientUpdate: take local steps from the server's model."""
        return local_sgd(client, x, self.steps, self.lr, self.weight_decay)
