"""Local AMSGrad: local steps with one learning rate per coordinate, shared by all clients and updated once per round.

Chen, Li, Li: "Toward communication efficient adaptive gradient method", arXiv 2109.05109, 2021, local AMSGrad.

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k <- x;   m_k, v_k as kept by the client
    repeat:  g   = grad f_k(x_k; batch) + weight_decay * x_k
             m_k <- beta1 * m_k + (1 - beta1) * g
             v_k <- beta2 * v_k + (1 - beta2) * g^2
             x_k <- x_k - lr * m_k / sqrt(vhat)             (not in the round's last step)
    vhat <- max(vhat, M_k[v_k])
    x    <- M_k[x_k - lr * m_k / sqrt(vhat)]

m_k and v_k start at 0 and stay on the client; vhat starts at eps and is the same for all. The last step of a round uses
the new vhat, so the server takes it: M_k[x_k] - M_k[lr * m_k] / sqrt(vhat). (Diagnostics report its rate with the old
vhat.)

Sent: up 3*d, down 2*d. Kept on a client: m_k, v_k.

Departures from the paper: under partial participation a client continues with the m_k and v_k of its last round, and
the mean is over the sampled clients. Means use the run's weighting.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import LOCAL_STEPS, WEIGHT_DECAY, decayed, scaled_rate
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate, Steps


class State(NamedTuple):
    """The model, and the second moment that all clients share."""

    x: torch.Tensor
    vhat: torch.Tensor


class LocalAMSGrad(Algorithm):
    """Local momentum steps, scaled by a second moment that all clients share."""

    name = "local_amsgrad"

    lr: Rate = param(1e-3, "learning rate", above=0, search=(1e-4, 1e-1))
    steps: Steps = LOCAL_STEPS
    beta1: float = param(0.9, "decay rate of the first moment", least=0, below=1)
    beta2: float = param(0.99, "decay rate of the second moment", least=0, below=1)
    eps: float = param(1e-6, "the smallest vhat", above=0)
    weight_decay: float = WEIGHT_DECAY

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Start with vhat = eps."""
        return State(x, torch.full_like(x, self.eps))

    def round(self, s: State, clients: Clients) -> State:
        """Update vhat, and take the round's last step with it."""
        dx, last, v = clients.mean(self.local, s.x, s.vhat)
        vhat = torch.maximum(s.vhat, v)
        return State(s.x + dx - last / vhat.sqrt(), vhat)

    @remote
    def local(self, client: Client, x: torch.Tensor, vhat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take local steps; the last one's ``lr * m`` goes to the server instead."""
        zero = torch.zeros_like(x)
        k = client.variables(x=x, last=zero, m=client.kept("m", zero), v=client.kept("v", zero), root=vhat.sqrt())
        for _ in client.loop(self.steps, k):
            k.x = k.x - k.last / k.root  # the step prepared by the previous iteration
            g = decayed(client.grads(k.x, client.draw()), k.x, self.weight_decay)
            k.m = torch.lerp(g, k.m, self.beta1)
            k.v = (self.beta2 * k.v).addcmul_(g, g, value=1 - self.beta2)
            lr = client.rate(self.lr)
            client.report(v=k.v, rate=partial(scaled_rate, lr, k.root))
            k.last = lr * k.m
        client.keep(m=k.m, v=k.v)
        return k.x - x, k.last, k.v
