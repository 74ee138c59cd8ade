"""FedLALR: AMSGrad on every client, with client-specific learning rates; model and moments averaged.

Sun, Shen, Chen, Sun, Li, Sun, Tao: "FedLALR: client-specific adaptive learning rates achieve linear speedup for
non-IID data", arXiv 2309.09719, 2023, Algorithm 1 and Corollaries 2 and 3.

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k, m_k <- x, m;   v_k, vhat_k <- vhat
    repeat:  g      = grad f_k(x_k; batch) + weight_decay * x_k
             m_k    <- beta1 * m_k + (1 - beta1) * g
             v_k    <- beta2 * v_k + (1 - beta2) * g^2
             vhat_k <- max(vhat_k, v_k)
             x_k    <- x_k - lr * m_k / sqrt(vhat_k)
    x, m, vhat <- M_k[x_k], M_k[m_k], M_k[vhat_k]

m starts at 0 and vhat at eps^2. There is no bias correction, and no epsilon in the denominator, since vhat never falls
below eps^2. ``restart`` is Corollary 2: every round begins with m_k = 0, and m is not sent. ``aggregate =
"max"`` is Corollary 3: the server takes the elementwise maximum of the vhat_k. The adaptive interval of Theorem 2 is
``steps = Interval(initial, base)``.

Sent, per client and round:
    fedlalr                    up 3*d    down 3*d
    fedlalr, restart = true    up 2*d    down 2*d

Departures from the paper: section V-D prints a ceiling around the interval's logarithm, but only a floor gives the 10
local steps in rounds 64 to 100 that it reports (a ceiling gives 11 from round 65 on), so an ``Interval`` rounds down
unless ``rounding = "ceil"``; its t counts rounds from 1. Under partial participation the means and the maximum are over
the sampled clients, as in lines 15 to 17. Line 7's v_{t,i} is read as v_{t,k,i}. Means use the run's weighting; after
the mean, vhat is clamped to at least eps^2, since rounding can make it smaller. Section V uses weight decay without
saying where: here it is part of g, and so of m and v.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import LOCAL_STEPS, WEIGHT_DECAY, Tensors, decayed, scaled_rate
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.errors import invalid
from fedstrata.core.schedules import Rate, Steps


class State(NamedTuple):
    """The model and the moments; m is empty if every round begins with m = 0."""

    x: torch.Tensor
    vhat: torch.Tensor
    m: torch.Tensor


class FedLALR(Algorithm):
    """Local AMSGrad with client-specific learning rates; the moments are averaged with the model."""

    name = "fedlalr"

    lr: Rate = param(2e-3, "base learning rate, alpha", above=0, search=(1e-4, 1e-1))
    steps: Steps = LOCAL_STEPS
    beta1: float = param(0.9, "decay rate of the first moment", least=0, below=1)
    beta2: float = param(0.995, "decay rate of the second moment", least=0, below=1)
    eps: float = param(1e-8, "square root of the smallest vhat", above=0)
    restart: bool = param(False, "begin every round with m = 0, and do not send m")
    aggregate: str = param("mean", "how the server combines the clients' vhat", choices=("mean", "max"))
    weight_decay: float = WEIGHT_DECAY

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Start with m = 0 and vhat = eps^2."""
        if torch.tensor(self.eps, dtype=x.dtype) ** 2 == 0:
            raise invalid(f"eps of {self.name}", self.eps, f"a number whose square is above 0 in {x.dtype}")
        return State(x, torch.full_like(x, self.eps**2), x[:0] if self.restart else torch.zeros_like(x))

    def round(self, s: State, clients: Clients) -> State:
        """Average the clients' models and moments (lines 14 to 18)."""
        how = ("mean", self.aggregate, "mean")  # of x, vhat and m
        dx, dvhat, dm = clients.combine(how, self.local, s.x, s.vhat, s.m)
        return State(s.x + dx, (s.vhat + dvhat).clamp(min=self.eps**2), s.m + dm)

    @remote
    def local(self, client: Client, x: torch.Tensor, vhat: torch.Tensor, m: torch.Tensor) -> Tensors:
        """Take AMSGrad steps from the server's model and moments; the client's own moments are updated in place."""
        first = torch.zeros_like(x) if self.restart else m.clone()
        k = client.variables(x=x.clone(), m=first, v=vhat.clone(), vhat=vhat.clone())
        for _ in client.loop(self.steps, k):  # lines 3 to 11
            lr = client.rate(self.lr)
            g = decayed(client.grads(k.x, client.draw()), k.x, self.weight_decay)
            k.m.lerp_(g, 1 - self.beta1)
            k.v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            torch.maximum(k.vhat, k.v, out=k.vhat)
            root = k.vhat.sqrt()
            client.report(vhat=k.vhat, rate=partial(scaled_rate, lr, root))
            k.x.addcdiv_(k.m, root, value=-lr)
        return k.x - x, k.vhat - vhat, m if self.restart else k.m - m
