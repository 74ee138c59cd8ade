"""Local-SCGD and Local-SCGDM: local compositional gradient descent, without and with momentum.

Gao, Li, Huang: "On the convergence of local stochastic compositional gradient descent with momentum", ICML 2022,
Algorithm 1; Local-SCGD is the baseline without momentum.

Problem: min_x M_k[ f_k( g_k(x) ) ], one level, a local inner mean, no dual.

    x_k, u_k, m_k <- x, u, m;   repeat:
        u_k <- (1 - gamma eta) u_k + gamma eta g_k(x_k; inner batch)
        m_k <- (1 - alpha eta) m_k + alpha eta J_k(x_k; inner batch)^T grad f_k(u_k; outer batch)
        x_k <- x_k - beta eta m_k
    x, u, m <- M_k[x_k], M_k[u_k], M_k[m_k]

Local-SCGD uses the gradient itself instead of m_k.

Sent, per client and round:
    local_scgd     up d + r      down d + r
    local_scgdm    up 2*d + r    down 2*d + r

Departures from the paper: none with every client in every round. The first step of the run has no u and m and takes
u_k = g_k(x), m_k = the gradient. Weights above 1 count as 1. With partial participation, which the paper does not have,
the server's means replace every client's state.
Note: the mean of the clients' u is not the g of any client, so with heterogeneous clients and a weight below 1 the
limit is biased, whatever the step size.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from fedstrata.algorithms.algorithm import SHARES, Algorithm, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.estimators import moving_average, weight_of
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate, Steps


class State(NamedTuple):
    """The point, the inner estimate, and the momentum, empty without one."""

    x: torch.Tensor
    u: torch.Tensor
    m: torch.Tensor


class LocalSCGDM(Algorithm):
    """Local compositional steps along a momentum, at a moving average of the inner function; all three are averaged."""

    name = "local_scgdm"
    levels = range(1, 2)
    hidden: ClassVar[tuple[str, ...]] = ("momentum",)

    beta: Rate = param(0.1, "step size, multiplied by eta", above=0, search=RATES)
    eta: Rate = param(1.0, "eta_t, a common factor", above=0)
    gamma: Rate = param(0.7, "weight of a fresh inner value, multiplied by eta", above=0, search=SHARES)
    alpha: Rate = param(0.8, "weight of a fresh gradient, multiplied by eta", above=0, search=SHARES)
    momentum: bool = param(True, "step along a momentum; otherwise along the gradient itself")
    steps: Steps = param(5, "local steps per round, or Epochs(e), or an Interval")

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Allocate the inner estimate and the momentum; the first step sets them."""
        return State(x, x.new_zeros(clients.inner_sizes[0]), torch.zeros_like(x) if self.momentum else x[:0])

    def round(self, s: State, clients: Clients) -> State:
        """Average models, inner estimates and momenta."""
        dx, du, dm = clients.mean(self.local, s.x, s.u, s.m)
        return State(s.x + dx, s.u + du, s.m + dm)

    @remote
    def local(
        self, client: Client, x: torch.Tensor, u: torch.Tensor, m: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Update u at the old x, then the momentum at the new u, then step."""
        k = client.variables(x=x, u=u, m=m)
        for _ in client.loop(self.steps, k):
            eta = client.rate(self.eta)
            inner, fresh = (1.0 if client.first else weight_of(client, w, eta) for w in (self.gamma, self.alpha))
            chain = client.chain(k.x, client.draw_all(), offsets=[(1 - inner) * k.u], weight=inner)
            k.u = moving_average(k.u, chain.values[0], inner)
            if self.momentum:
                k.m = moving_average(k.m, chain.gradient, fresh)
            k.x = k.x - client.rate(self.beta) * eta * (k.m if self.momentum else chain.gradient)
        return k.x - x, k.u - u, k.m - m


class LocalSCGD(LocalSCGDM):
    """Local compositional steps at a moving average of the inner function, which is also averaged over clients."""

    name = "local_scgd"
    defaults = {"gamma": 0.9, "momentum": False}
    hidden = ("alpha", "momentum")
