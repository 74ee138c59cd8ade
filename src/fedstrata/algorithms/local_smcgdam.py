"""LocalSMCGDAM: local stochastic multi-level compositional gradient descent ascent with momentum.

Zhang, Payani, Lee, Souvenir, Gao: "A federated stochastic multi-level compositional minimax algorithm for deep AUC
maximization", ICML 2024, Algorithm 1, eqs. (9) to (12).

Problem: min_x max_y M_k[ f_k( M_i[ g_i^(K) o ... o g_i^(1)(x) ], y ) ], one level or more, a global inner mean, with a
dual or without.

    before the first step, on a client's own batches:  h_j = g_j(h_{j-1}),  h_0 = x;  p, q = u, v of eq. (10)
    x, y, h_1..h_K, p, q on every client <- the server's;   tau times, on a fresh batch for each level j and one for f:
        x <- x - gamma_x eta p,    y <- Pi[ y + gamma_y eta q ]
        h_j <- (1 - alpha eta^2) (h_j - g_j(old h_{j-1})) + g_j(new h_{j-1}),  j = 1..K, both on one batch    (9)
        u = J_1^T ... J_K^T grad_1 f(h_K, y),  J_j at the new h_{j-1} on the batch of (9);  v = grad_2 f(h_K, y)  (10)
        p <- (1 - rho_x eta) p + rho_x eta u,    q <- (1 - rho_y eta) q + rho_y eta v    (11)
    x, y, p, q and every h_j <- their means over the clients

Sent: up 2*d + R + 2*p, down 2*d + R + 2*p. R is the size of all K levels' values together; if each has d numbers,
the sum is (K + 2) d + 2p.

Departures from the paper: eq. (12) has p and q at the true inner functions and h on a batch; here all are on the same
batches, ``first_batches`` of them. As printed, these first values are not averaged (the proof assumes they are equal).
After averaging, the old h_0 is the averaged x, as in the proof. Weights above 1 count as 1. The projection,
``weight_decay`` (an L2 penalty in x, added to u) and cohorts are not in Algorithm 1. A run ends with an average.
Note: Jacobians are not averaged, and u is computed before h is averaged. So with heterogeneous clients the method
converges not to the solution of the problem above but to that of a problem between it and the one with local inner
means, depending on alpha eta^2 (at 1 nothing of the mean is left). The paper's proof is for clients with equal
distributions. If eta falls by a factor of 10, the weight alpha eta^2 falls by a factor of 100, and h hardly forgets:
its error at that moment, and any sudden change of the levels, such as a smaller inner rate, persist for 100 times as
many steps.
"""

from __future__ import annotations

from typing import Any

import torch

from fedstrata.algorithms import layered
from fedstrata.algorithms.algorithm import ANY_LEVELS, Algorithm, param
from fedstrata.algorithms.descent import WEIGHT_DECAY
from fedstrata.algorithms.estimators import moving_average, weight_of
from fedstrata.algorithms.layered import State, chain_rule, estimate_levels
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import EqualSteps, Rate


class LocalSMCGDAM(Algorithm):
    """Local steps along momenta, at STORM estimates of every level; everything is averaged."""

    name = "local_smcgdam"
    levels = ANY_LEVELS
    dual = None
    inner_mean = "global"

    eta: Rate = layered.ETA
    gamma_x: Rate = layered.GAMMA_X
    gamma_y: Rate = layered.GAMMA_Y
    rho_x: Rate = layered.RHO_X
    rho_y: Rate = layered.RHO_Y
    alpha: Rate = param(3.0, "weight of fresh inner values, multiplied by eta^2", above=0, search=(0.3, 10))
    steps: EqualSteps = layered.TAU
    first_batches: int = layered.FIRST_BATCHES
    weight_decay: float = WEIGHT_DECAY

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Allocate the estimates; the first step of the run sets them."""
        return State.empty(x, y, clients)

    def round(self, s: State, clients: Clients) -> State:
        """Average everything (lines 10 to 15)."""
        return s.plus(clients.mean(self.local, s.h, s.y, s.p, s.q), clients)

    @remote
    def local(self, client: Client, h: Any, y: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> tuple[Any, ...]:
        """Take tau local steps; in the first round they begin with line 1."""
        k = client.variables(h=h, y=y, p=p, q=q)
        levels = range(1, len(h))
        if client.first:
            estimate_levels(client, k, self.first_batches, self.weight_decay)  # line 1, eq. (12)
        for j in levels:  # updated in place, to avoid a second copy of the levels
            k.h[j] = k.h[j].clone()
        for _ in client.loop(self.steps, k):
            eta = client.rate(self.eta)
            batches = client.draw_all()
            past = 1 - weight_of(client, self.alpha, eta**2)
            for j in reversed(levels):  # eq. (9): h[j-1] is still old
                k.h[j].sub_(client.g(j, k.h[j - 1], batches[j - 1])).mul_(past)
            k.h[0] = k.h[0].sub(k.p, alpha=client.rate(self.gamma_x) * eta)  # lines 3-4
            k.y = client.project_y(k.y.add(k.q, alpha=client.rate(self.gamma_y) * eta))
            for j in levels:  # eq. (9): h[j-1] is new
                k.h[j].add_(client.g(j, k.h[j - 1], batches[j - 1]))
            u, v = chain_rule(client, k, batches, self.weight_decay)  # eq. (10)
            k.p = moving_average(k.p, u, weight_of(client, self.rho_x, eta))  # eq. (11)
            k.q = moving_average(k.q, v, weight_of(client, self.rho_y, eta))
            del u, v
        return k.updates(h=h, y=y, p=p, q=q)
