"""Local-SCGD: local steps with a moving average of the inner function.

Gao, Li, Huang: "On the convergence of local stochastic compositional gradient descent with momentum", ICML 2022: the
method without momentum that theirs is compared with.

Problem: min_x M_k[ f_k( g_k(x) ) ], one level, a local inner mean, no dual.

    x_k, u_k <- x, u;   repeat:  u_k <- (1 - gamma eta) u_k + gamma eta g_k(x_k; inner batch)
                                 x_k <- x_k - beta eta J_k(x_k; inner batch)^T grad f_k(u_k; outer batch)
    x, u <- M_k[x_k], M_k[u_k]

Sent: up d + r, down d + r.

Departures from the paper: the first step of the run has no u and takes u_k = g_k(x). Weights above 1 count as 1. With
partial participation, which the paper does not have, the server's means stand for every client's state.
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


class LocalSCGD(Algorithm):
    """Local compositional steps at a moving average of the inner function, which is averaged over clients too."""

    name = "local_scgd"
    levels = range(1, 2)
    up = down = "d + r"
    answers = {"local": "x u"}

    beta: Rate = param(0.1, "step size, multiplied by eta", above=0, search=RATES)
    eta: Rate = param(1.0, "eta_t, a common factor", above=0)
    gamma: Rate = param(0.9, "weight of a fresh inner value, multiplied by eta", above=0, search=(0.05, 1))
    steps: Steps = param(5, "local steps per round, or Epochs(e), or an Interval")

    def start(self, s: State, clients: Clients) -> State:
        """Make room for the inner estimate; the first step fills it."""
        return s.replace(u=s.x.new_zeros(clients.inner_sizes[0]))

    def round(self, s: State, clients: Clients) -> State:
        """Average models and inner estimates."""
        x, u = clients.mean(self.local, s.x, s.u)
        return s.replace(x=x, u=u)

    def local(self, client: Client, x: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take local steps."""
        x, u = client.repeat(self.steps, self.step, x, u)
        return x, u

    def step(self, client: Client, x: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Renew u at the old x, then step along the gradient at the new u."""
        eta = client.rate(self.eta)
        weight = weight_of(client, self.gamma, eta) if client.clock.iteration > 0 else 1.0
        chain = client.chain(x, client.draw_all(), offsets=[(1 - weight) * u], weight=weight)
        u = moving_average(u, chain.values[0], weight)
        return x - client.rate(self.beta) * eta * chain.gradient, u
