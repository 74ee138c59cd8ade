"""LocalMOML: meta-learning with a moving average of each client's adapted model.

Wang, Yuan, Ying, Yang: "Memory-based optimization methods for model-agnostic meta-learning and personalized federated
learning", JMLR 24 (2023), the federated method.

Problem: min_x M_k[ f_k( g_k(x) ) ], one level, a local inner mean, no dual. In the paper g_k(x) = x - a grad loss_k(x)
and f_k = loss_k, which is ``maml``.

    x_k <- x;   u <- g_k(x; big batch)
    repeat:  u   <- (1 - beta) u + beta g_k(x_k; batch)
             x_k <- x_k - lr J_k(x_k; another batch)^T grad f_k(u; a third batch)
    x <- M_k[x_k]

Sent: up d, down d.

Departures from the paper: the authors' code drops the Hessian; here that is a property of the problem (``first_order``
of ``maml``). That code scales the step of one variant by beta; the paper and this file do not. ``beta = 1`` is
Per-FedAvg. The big batch has as many samples as ``first_batches`` batches.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import SHARES, Algorithm, State, param
from fedstrata.algorithms.descent import LOCAL_LR
from fedstrata.algorithms.estimators import moving_average, weight_of
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate, Steps


class LocalMOML(Algorithm):
    """Local steps at a moving average of the inner function, which each client restarts in every round."""

    name = "local_moml"
    levels = range(1, 2)

    lr: Rate = LOCAL_LR
    steps: Steps = param(4, "local steps per round, H, or Epochs(e), or an Interval")
    beta: Rate = param(0.9, "weight of a fresh inner value", above=0, search=SHARES)
    first_batches: int = param(4, "batches for the first inner value of each round", least=1)

    def round(self, s: State, clients: Clients) -> State:
        """Average the clients' models."""
        return s._replace(x=s.x + clients.mean(self.local, s.x))

    @remote
    def local(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Start the average on the big batch, then take local steps with three independent batches each."""
        first = client.draw(1, batch_size=client.worth(self.first_batches))
        k = client.variables(x=x, u=client.g(1, x, first))
        for _ in client.loop(self.steps, k):
            fresh = client.g(1, k.x, client.draw(1, stream=1))
            k.u = moving_average(k.u, fresh, weight_of(client, self.beta, 1.0))
            v = client.f_grads(k.u, client.draw(0, stream=2))[0]
            k.x = k.x - client.rate(self.lr) * client.g_vjp(1, k.x, v, client.draw(1, stream=3))
        return k.x - x
