"""FedLALR: AMSGrad on every client, each with learning rates of its own; model and moments averaged.

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

m starts at 0 and vhat at eps^2. There is neither an epsilon in the denominator, because vhat never falls below eps^2,
nor a bias correction. ``restart`` is Corollary 2: every round begins with m_k = 0, and m is not sent. ``aggregate =
"max"`` is Corollary 3: the server takes the elementwise maximum of the vhat_k. The adaptive interval of Theorem 2 is
``steps = Interval(initial, base)``.

Sent: up 3d, down 3d. With ``restart``: up 2d, down 2d.

Departures from the paper: section V-D prints a ceiling around the interval's logarithm, but only a floor gives the 10
local steps in rounds 64 to 100 that it tells of (a ceiling gives 11 from round 65 on), so an ``Interval`` rounds down
unless told ``rounding = "ceil"``; its t counts rounds from 1. Under partial participation the means and the maximum are
over the sampled clients, as in lines 15 to 17. Line 7's v_{t,i} is read as v_{t,k,i}. Means are weighted as the run
says; after the mean, rounding is kept from taking vhat below eps^2. Section V has weight decay without saying how it
enters: here it is part of g, and so of m and v.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import decayed
from fedstrata.clients import Client, Clients
from fedstrata.core.errors import invalid
from fedstrata.core.schedules import Rate, Steps
from fedstrata.problems.oracles import Tensors
from fedstrata.problems.problem import Problem


class FedLALR(Algorithm):
    """Local AMSGrad whose learning rates follow each client's own data; averaged with the model."""

    name = "fedlalr"
    answers = {"local": "x vhat moments"}

    lr: Rate = param(2e-3, "base learning rate, alpha", above=0, search=(1e-4, 1e-1))
    steps: Steps = param(10, "local steps per round, or Epochs(e), or an Interval")
    beta1: float = param(0.9, "memory of the first moment", least=0, below=1)
    beta2: float = param(0.995, "memory of the second moment", least=0, below=1)
    eps: float = param(1e-8, "square root of the smallest vhat", above=0)
    restart: bool = param(False, "begin every round with m = 0, and do not send m")
    aggregate: str = param("mean", "what the server makes of the clients' vhat", choices=("mean", "max"))
    weight_decay: float = param(0.0, "L2 penalty on the local objective", least=0)

    @property
    def up(self) -> str:
        """What a client sends in a round."""
        return "2*d" if self.restart else "3*d"

    @property
    def down(self) -> str:
        """What the server sends in a round."""
        return self.up

    def init(self, problem: Problem) -> State:
        """Start with m = 0 and vhat = eps^2."""
        if torch.tensor(self.eps, dtype=problem.x0.dtype) ** 2 == 0:
            raise invalid(f"eps of {self.name}", self.eps, f"one whose square is above 0 in {problem.x0.dtype}")
        s = super().init(problem).replace(vhat=torch.full_like(problem.x0, self.eps**2))
        return s if self.restart else s.replace(m=torch.zeros_like(problem.x0))

    def round(self, s: State, clients: Clients) -> State:
        """Average the clients' models and moments (lines 14 to 18)."""
        moments = () if self.restart else (s.m,)
        how = ("mean", self.aggregate, *("mean" for _ in moments))
        x, vhat, *m = clients.combine(how, self.local, s.x, s.vhat, *moments)
        s = s.replace(x=x, vhat=vhat.clamp(min=self.eps**2))
        return s if self.restart else s.replace(m=m[0])

    def local(self, client: Client, x: torch.Tensor, vhat: torch.Tensor, *moments: torch.Tensor) -> Tensors:
        """Take AMSGrad steps from the server's model and moments (lines 3 to 11)."""
        m = torch.zeros_like(x) if self.restart else moments[0].clone()
        x, m, _, vhat = client.repeat(self.steps, self.step, x, m, vhat.clone(), vhat.clone())
        return (x, vhat) if self.restart else (x, vhat, m)

    def step(self, client: Client, x: torch.Tensor, m: torch.Tensor, v: torch.Tensor, vhat: torch.Tensor) -> Tensors:
        """Take one AMSGrad step (lines 5 to 10); the client's own m, v and vhat are renewed in place."""
        lr = client.rate(self.lr)
        g = decayed(client.grads(x, client.draw()), x, self.weight_decay)
        m.lerp_(g, 1 - self.beta1)
        v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        torch.maximum(vhat, v, out=vhat)
        client.report(vhat=vhat, rate=lambda: lr * vhat.rsqrt())
        return x.addcdiv(m, vhat.sqrt(), value=-lr), m, v, vhat
