"""SCAFFOLD: local SGD corrected by control variates.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic controlled averaging for federated learning",
ICML 2020, Algorithm 1.

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k <- x;   repeat K_k times:  x_k <- x_k - lr * (grad f_k(x_k; batch) - c_k + c)
    c_k' = grad f_k(x; another batch)                    (option I)
    c_k' = c_k - c + (x - x_k) / (K_k lr)                (option II, the default)
    x <- x + server_lr * M_k[x_k - x],    c <- c + (|S|/N) * M_k[c_k' - c_k],    c_k <- c_k'

Sent: up 2*d, down 2*d. Kept on a client: c_k.

Departures from the paper: with ``weighting = "samples"`` both means are weighted by samples and |S|/N becomes the
cohort's fraction of all samples, so that c stays the weighted mean of the c_k; the paper weights uniformly. The
learning rate is constant during a round, as option II needs, whatever its schedule. Weight decay is part of the local
objective, so it is part of the gradients and of c_k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import LOCAL_LR, LOCAL_STEPS, WEIGHT_DECAY, decayed
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate, Steps


class State(NamedTuple):
    """The model, and the server's control variate."""

    x: torch.Tensor
    c: torch.Tensor


class Scaffold(Algorithm):
    """Local SGD with drift corrected by estimates of the other clients' gradients."""

    name = "scaffold"

    lr: Rate = LOCAL_LR
    steps: Steps = LOCAL_STEPS
    server_lr: Rate = param(1.0, "server learning rate", above=0)
    option: str = param("II", "how a client updates its control variate", choices=("I", "II"))
    weight_decay: float = WEIGHT_DECAY

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Start with the control variate at zero."""
        return State(x, torch.zeros_like(x))

    def round(self, s: State, clients: Clients) -> State:
        """Average the updates of models and control variates (lines 16, 17)."""
        dx, dc = clients.mean(self.local, s.x, s.c, clients.rate(self.lr))
        return State(s.x + clients.rate(self.server_lr) * dx, s.c + clients.share * dc)

    @remote
    def local(self, client: Client, x: torch.Tensor, c: torch.Tensor, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Take corrected steps, then update c_k (lines 7 to 14)."""
        c_k = client.kept("c", torch.zeros_like(x))
        if self.option == "I":
            new = decayed(client.grads(x, client.draw(stream=1)), x, self.weight_decay)
        k = client.variables(x=x.clone(), drift=c - c_k)
        for _ in client.loop(self.steps, k):
            client.descend(k.x, client.draw(), lr, self.weight_decay).sub_(k.drift, alpha=lr)  # line 10
        if self.option == "II":
            counts = torch.from_numpy(client.step_counts(self.steps)).to(x).unsqueeze(1)
            new = c_k - c + (x - k.x) / (counts * lr)
        client.keep(c=new)
        return k.x - x, new - c_k
