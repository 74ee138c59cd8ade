"""Local-SCGDM: local compositional gradient descent with momentum.

Gao, Li, Huang: "On the convergence of local stochastic compositional gradient descent with momentum", ICML 2022,
Algorithm 1.

Problem: min_x M_k[ f_k( g_k(x) ) ], one level, a local inner mean, no dual.

    x_k, u_k, m_k <- x, u, m;   repeat:
        u_k <- (1 - gamma eta) u_k + gamma eta g_k(x_k; inner batch)
        m_k <- (1 - alpha eta) m_k + alpha eta J_k(x_k; inner batch)^T grad f_k(u_k; outer batch)
        x_k <- x_k - beta eta m_k
    x, u, m <- M_k[x_k], M_k[u_k], M_k[m_k]

Sent: up 2d + r, down 2d + r.

Departures from the paper: none with every client in every round. The first step of the run has no u and m and takes
u_k = g_k(x), m_k = the gradient. Weights above 1 count as 1. With partial participation, which the paper does not have,
the server's means stand for every client's state.
Worth knowing: the mean of the clients' u is no client's g, so with clients that differ, and a weight below 1, the limit
is biased whatever the step size.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.estimators import moving_average, weight_of
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import Rate, Steps


class LocalSCGDM(Algorithm):
    """Local compositional steps along a momentum, at a moving average of the inner function; all three are averaged."""

    name = "local_scgdm"
    levels = range(1, 2)
    up = down = "2*d + r"
    answers = {"local": "x u m"}

    beta: Rate = param(0.1, "step size, multiplied by eta", above=0, search=RATES)
    eta: Rate = param(1.0, "eta_t, a common factor", above=0)
    gamma: Rate = param(0.7, "weight of a fresh inner value, multiplied by eta", above=0, search=(0.05, 1))
    alpha: Rate = param(0.8, "weight of a fresh gradient, multiplied by eta", above=0, search=(0.05, 1))
    steps: Steps = param(5, "local steps per round, or Epochs(e), or an Interval")

    def start(self, s: State, clients: Clients) -> State:
        """Make room for the inner estimate and the momentum; the first step fills them."""
        return s.replace(u=s.x.new_zeros(clients.inner_sizes[0]), m=torch.zeros_like(s.x))

    def round(self, s: State, clients: Clients) -> State:
        """Average models, inner estimates and momenta."""
        x, u, m = clients.mean(self.local, s.x, s.u, s.m)
        return s.replace(x=x, u=u, m=m)

    def local(self, client: Client, x: torch.Tensor, u: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take local steps."""
        x, u, m = client.repeat(self.steps, self.step, x, u, m)
        return x, u, m

    def step(self, client: Client, x: torch.Tensor, u: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Renew u at the old x, then the momentum at the new u, then step."""
        eta = client.rate(self.eta)
        first = client.clock.iteration == 0
        inner, momentum = (1.0 if first else weight_of(client, w, eta) for w in (self.gamma, self.alpha))
        chain = client.chain(x, client.draw_all(), offsets=[(1 - inner) * u], weight=inner)
        u = moving_average(u, chain.values[0], inner)
        m = moving_average(m, chain.gradient, momentum)
        return x - client.rate(self.beta) * eta * m, u, m
