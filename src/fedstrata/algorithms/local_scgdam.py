"""LocalSCGDAM: local stochastic compositional gradient descent ascent with momentum.

Zhang, Zhang, Yang, Souvenir, Gao: "Federated compositional deep AUC maximization", NeurIPS 2023.

Problem: min_x max_y M_k[ f_k( M_i[ g_i(x) ], y ) ], one level, a global inner mean, with a dual or without.

    before the first step, on a client's own batches:  h = g_k(x);  p, q = the gradients at h
    x, y, h, p, q on client k <- the server's;   tau times, on fresh batches:
        x <- x - gamma_x eta p,    y <- Pi[ y + gamma_y eta q ]
        h <- (1 - alpha eta) h + alpha eta g_k(x)
        p <- (1 - rho_x eta) p + rho_x eta J_k(x)^T grad_1 f_k(h, y)
        q <- (1 - rho_y eta) q + rho_y eta grad_2 f_k(h, y)
    x, y, h, p, q <- their means over the clients

Sent: up 2*d + R + 2*p, down 2*d + R + 2*p. R is the size of the level's value; if it is d, the sum is 3d + 2p.

Departures from the paper: the original text was not available; the rule follows descriptions of the method. The order
of the lines (first the step, then the estimates at the new point) and the first estimates are those of LocalSMCGDAM
with K = 1 and a moving average. The weights of the momenta, beta in the paper, are rho here. Weights above 1 count as
1. The projection, ``weight_decay`` (an L2 penalty in x) and cohorts are additions.
Note: like LocalSMCGDAM it averages no Jacobians, and with weights below 1 the moving average lags behind g(x).
"""

from __future__ import annotations

from typing import Any

import torch

from fedstrata.algorithms import layered
from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import WEIGHT_DECAY, decayed
from fedstrata.algorithms.estimators import moving_average, weight_of
from fedstrata.algorithms.layered import State, estimate_levels
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import EqualSteps, Rate


class LocalSCGDAM(Algorithm):
    """Local steps along momenta, at a moving average of the inner function; everything is averaged."""

    name = "local_scgdam"
    levels = range(1, 2)
    dual = None
    inner_mean = "global"

    eta: Rate = layered.ETA
    gamma_x: Rate = layered.GAMMA_X
    gamma_y: Rate = layered.GAMMA_Y
    rho_x: Rate = layered.RHO_X
    rho_y: Rate = layered.RHO_Y
    alpha: Rate = param(3.0, "weight of a fresh inner value, multiplied by eta", above=0, search=(0.3, 3.3))
    steps: EqualSteps = layered.TAU
    first_batches: int = layered.FIRST_BATCHES
    weight_decay: float = WEIGHT_DECAY

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Allocate the estimates; the first step of the run sets them."""
        return State.empty(x, y, clients)

    def round(self, s: State, clients: Clients) -> State:
        """Average everything."""
        return s.plus(clients.mean(self.local, s.h, s.y, s.p, s.q), clients)

    @remote
    def local(self, client: Client, h: Any, y: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> tuple[Any, ...]:
        """Take tau local steps: step, then update h, p and q at the new point."""
        k = client.variables(h=h, y=y, p=p, q=q)
        if client.first:
            estimate_levels(client, k, self.first_batches, self.weight_decay)
        for _ in client.loop(self.steps, k):
            eta = client.rate(self.eta)
            k.h[0] = k.h[0].sub(k.p, alpha=client.rate(self.gamma_x) * eta)
            k.y = client.project_y(k.y.add(k.q, alpha=client.rate(self.gamma_y) * eta))
            weight = weight_of(client, self.alpha, eta)
            x, g = k.h
            chain = client.chain(x, client.draw_all(), k.y, [(1 - weight) * g], weight)
            k.h[1] = moving_average(g, chain.values[0], weight)
            u = decayed(chain.gradient, x, self.weight_decay)
            k.p = moving_average(k.p, u, weight_of(client, self.rho_x, eta))
            k.q = moving_average(k.q, chain.outer_grads[1], weight_of(client, self.rho_y, eta))
        return k.updates(h=h, y=y, p=p, q=q)
