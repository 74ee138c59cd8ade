"""FedAdam, FedYogi, FedAdagrad and FedAMS: local SGD, an adaptive optimiser on the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive federated optimization", ICLR 2021,
Algorithm 2 (the first three). Wang, Lin, Chen: "Communication-efficient adaptive federated learning", ICML 2022,
Algorithm 1, both options (FedAMS).

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k <- x;   repeat:  x_k <- x_k - lr * (grad f_k(x_k; batch) + weight_decay * x_k)
    Delta = M_k[x_k] - x
    m <- beta1 * m + (1 - beta1) * Delta
    v <- beta2 * v + (1 - beta2) * Delta^2                      (FedAdam, FedAMS)
         v - (1 - beta2) * Delta^2 * sign(v - Delta^2)          (FedYogi)
         v + Delta^2                                            (FedAdagrad)
    x <- x + server_lr * m / (sqrt(v) + tau)                    (FedAdam, FedYogi, FedAdagrad)
    FedAMS, option 1:  vhat <- max(vhat, v, eps);   x <- x + server_lr * m / sqrt(vhat)
            option 2:  vhat <- max(vhat, v);        x <- x + server_lr * m / (sqrt(vhat) + eps)

m starts at 0, and v at tau^2; in FedAMS v and vhat start at 0. There is no bias correction. The eps of option 1 is
under the square root.

Sent: up d, down d.

Departures from the papers: the mean uses the run's weighting, while both papers average uniformly. ``beta1`` = 0,
FedAdagrad's default, is the paper's usual setting. ``maximum = false`` of FedAMS skips the running maximum, vhat = v,
so that option 2 is FedAdam started at v = 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import LOCAL_LR, LOCAL_STEPS, RATES, WEIGHT_DECAY, local_sgd
from fedstrata.algorithms.matrices import second_moment
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate, Steps


class State(NamedTuple):
    """The model, and the moments of its updates; vhat is empty except for FedAMS."""

    x: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    vhat: torch.Tensor


class FedOpt(Algorithm):
    """Local SGD on every client, an adaptive optimiser on the mean update."""

    name = ""

    lr: Rate = LOCAL_LR
    server_lr: Rate = param(0.1, "server learning rate", above=0, search=RATES)
    steps: Steps = LOCAL_STEPS
    optimizer: str = param("adam", "the server's optimiser", choices=("adam", "yogi", "adagrad", "amsgrad"))
    option: int = param(1, "1: eps as a floor under the root; 2: eps added to the root", choices=(1, 2))
    beta1: float = param(0.9, "decay rate of the first moment", least=0, below=1)
    beta2: float = param(0.99, "decay rate of the second moment", least=0, below=1)
    tau: float = param(1e-3, "added to the root; smaller is more adaptive", above=0)
    eps: float = param(1e-3, "keeps the denominator above 0", above=0)
    maximum: bool = param(True, "keep the running maximum of v")
    weight_decay: float = WEIGHT_DECAY

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Start the moments."""
        zero = torch.zeros_like(x)
        if self.optimizer == "amsgrad":
            return State(x, zero, zero, zero)
        return State(x, zero, torch.full_like(x, self.tau**2), zero[:0])

    def round(self, s: State, clients: Clients) -> State:
        """Take one step of the optimiser along the clients' mean update."""
        delta = clients.mean(self.local, s.x)
        m = self.beta1 * s.m + (1 - self.beta1) * delta
        v = second_moment(self.optimizer, s.v, delta**2, self.beta2)
        vhat, root = s.vhat, v.sqrt() + self.tau
        if self.optimizer == "amsgrad":
            vhat = torch.maximum(s.vhat, v) if self.maximum else v
            vhat = vhat.clamp(min=self.eps) if self.option == 1 else vhat
            root = vhat.sqrt() if self.option == 1 else vhat.sqrt() + self.eps
        return State(s.x + clients.rate(self.server_lr) * m / root, m, v, vhat)

    @remote
    def local(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Take local steps from the server's model."""
        return local_sgd(client, x, self.steps, self.lr, self.weight_decay)


class FedAdam(FedOpt):
    """Local SGD on every client, Adam on the mean update."""

    name = "fedadam"
    hidden = ("optimizer", "option", "eps", "maximum")


class FedYogi(FedOpt):
    """Local SGD on every client, Yogi on the mean update."""

    name = "fedyogi"
    defaults = {"optimizer": "yogi"}
    hidden = ("optimizer", "option", "eps", "maximum")


class FedAdagrad(FedOpt):
    """Local SGD on every client, Adagrad on the mean update."""

    name = "fedadagrad"
    defaults = {"optimizer": "adagrad", "beta1": 0.0}
    hidden = ("optimizer", "option", "beta2", "eps", "maximum")


class FedAMS(FedOpt):
    """Local SGD on every client, AMSGrad on the mean update."""

    name = "fedams"
    defaults = {"optimizer": "amsgrad", "lr": 0.01, "server_lr": 1.0}
    hidden = ("optimizer", "tau")
