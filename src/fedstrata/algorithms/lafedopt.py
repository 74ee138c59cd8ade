"""LaFedOPT: an adaptive optimiser on every client, restarted each round, and a correction of its bias.

Wang, Xu, Garrett, Charles, Liu, Joshi: "Local adaptivity in federated learning: convergence and consistency",
arXiv 2106.02305, 2021; the correction as in the authors' code (google-research/federated, local_adaptivity).

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k, m_k, v_k, S_k, C_k <- x, 0, v0, 0, 0
    repeat:  g   = grad f_k(x_k; batch) + weight_decay * x_k
             m_k <- beta1 * m_k + (1 - beta1) * g
             v_k <- v_k + g^2                                        (adagrad, beta1 = 0)
                    beta2 * v_k + (1 - beta2) * g^2                  (adam)
                    v_k - (1 - beta2) * sign(v_k - g^2) * g^2        (yogi)
             P   = 1 / (sqrt(v_k) + eps)
             x_k <- x_k - lr * m_k * P
             S_k <- beta1 * S_k + (1 - beta1) * P;    C_k <- C_k + S_k
    joint:   Delta = M_k[(x_k - x) / C_k] / M_k[1 / C_k]
    local:   Delta = M_k[(x_k - x) / C_k]
    none:    Delta = M_k[x_k] - x
    x <- x + server_lr * Delta                                                        (server "sgd")
    x <- x + server_lr * m / (sqrt(v) + tau), m and v the moments of Delta            (server "adam")

Clients with long steps would pull the mean towards their own minima. Dividing by C_k, the factor by which a constant
gradient would have been multiplied, corrects this.

Sent, per client and round:
    lafedopt                          up 2*d    down d
    lafedopt, correction = "local"    up d      down d
    lafedopt, correction = "none"     up d      down d

Departures from the paper: the optimisers have no bias correction (Adam in the authors' code has one, which its P
ignores). A client that diverges stops the run, while that code leaves it out of the mean. Means use the run's
weighting, while that code weights by samples.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import LOCAL_STEPS, RATES, WEIGHT_DECAY, Tensors, decayed
from fedstrata.algorithms.matrices import second_moment
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate, Steps

MOMENTS = {"optimizer": ("adam", "yogi")}
SERVER_ADAM = {"server": ("adam",)}


class State(NamedTuple):
    """The model, and the server's moments, empty if its optimiser has none."""

    x: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor


class LaFedOPT(Algorithm):
    """Adagrad, Adam or Yogi on each client, with a correction of the bias that preconditioning causes in the mean."""

    name = "lafedopt"

    lr: Rate = param(1e-2, "local learning rate", above=0, search=(1e-4, 1e-1))
    steps: Steps = LOCAL_STEPS
    optimizer: str = param("adam", "the clients' optimiser", choices=("adagrad", "adam", "yogi"))
    correction: str = param(
        "joint", "how the clients' preconditioning is corrected", choices=("joint", "local", "none")
    )
    beta1: float = param(0.9, "decay rate of the first moment", least=0, below=1, only=MOMENTS)
    beta2: float = param(0.99, "decay rate of the second moment", least=0, below=1, only=MOMENTS)
    eps: float = param(1e-3, "added to the root; smaller is more adaptive", above=0)
    v0: float = param(0.0, "initial second moment in each round", least=0)
    server: str = param("sgd", "the server's optimiser", choices=("sgd", "adam"))
    server_lr: Rate = param(1.0, "server learning rate", above=0, search=RATES)
    server_beta1: float = param(0.9, "decay rate of the server's first moment", least=0, below=1, only=SERVER_ADAM)
    server_beta2: float = param(0.99, "decay rate of the server's second moment", least=0, below=1, only=SERVER_ADAM)
    tau: float = param(1e-3, "added to the server's root; smaller is more adaptive", above=0, only=SERVER_ADAM)
    weight_decay: float = WEIGHT_DECAY

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Start the server's moments, if any, at m = 0 and v = tau^2."""
        if self.server == "sgd":
            return State(x, x[:0], x[:0])
        return State(x, torch.zeros_like(x), torch.full_like(x, self.tau**2))

    def round(self, s: State, clients: Clients) -> State:
        """Correct the clients' mean update, and take the server's step with it."""
        delta, inverse = clients.mean(self.local, s.x)
        if self.correction == "joint":  # a channel may drop the same entry on every client
            delta = torch.where(inverse > 0, delta / inverse, 0)
        lr = clients.rate(self.server_lr)
        if self.server == "sgd":
            return s._replace(x=s.x + lr * delta)
        m = self.server_beta1 * s.m + (1 - self.server_beta1) * delta
        v = self.server_beta2 * s.v + (1 - self.server_beta2) * delta**2
        return State(s.x + lr * m / (v.sqrt() + self.tau), m, v)

    @remote
    def local(self, client: Client, x: torch.Tensor) -> Tensors:
        """Take the optimiser's steps from the server's model, and correct the update."""
        zero, beta1 = torch.zeros_like(x), 0.0 if self.optimizer == "adagrad" else self.beta1
        k = client.variables(x=x, m=zero, v=torch.full_like(x, self.v0), s=zero, c=zero)
        for _ in client.loop(self.steps, k):
            lr = client.rate(self.lr)
            g = decayed(client.grads(k.x, client.draw()), k.x, self.weight_decay)
            k.m, k.v = torch.lerp(g, k.m, beta1), second_moment(self.optimizer, k.v, g * g, self.beta2)
            p = 1 / (k.v.sqrt() + self.eps)
            client.report(v=k.v, rate=partial(torch.mul, p, lr))
            k.x = k.x.addcmul(k.m, p, value=-lr)
            if self.correction != "none":
                k.s = torch.lerp(p, k.s, beta1)
                k.c = k.c + k.s
        if self.correction == "none":
            return k.x - x, x[:, :0]
        return (k.x - x) / k.c, 1 / k.c if self.correction == "joint" else x[:, :0]
