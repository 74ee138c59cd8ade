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

Sent: up 2d + R + 2p, down 2d + R + 2p, R the numbers that the K levels give: (K + 2) d + 2p where each gives d.

Departures from the paper: eq. (12) has p and q at the true inner functions and h on a batch; here all are on the same
batches, ``first_batches`` of them. As printed these first values are not averaged (the proof takes them to be equal).
After an averaging the old h_0 is the averaged x, as in the proof. Weights above 1 count as 1. The projection,
``weight_decay`` (an L2 penalty in x, added to u) and cohorts are not in Algorithm 1. A run ends with an averaging.
Worth knowing: nobody averages Jacobians, and u is made before h is averaged. So with clients that differ the method
does not find the solution of the problem above, but of one between it and that with local inner means; which, depends
on alpha eta^2 (at 1 nothing of the mean is left). The paper's proof is for clients with equal distributions. When eta
falls by 10, the weight alpha eta^2 falls by 100, and h hardly forgets any more: what it is off by at that moment, and
any sudden change of the levels, such as a smaller inner rate, stays in it for 100 times as many steps.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.estimators import weight_of
from fedstrata.algorithms.layered import (
    Estimates,
    Message,
    Tensors,
    chain_rule,
    first_levels,
    momenta,
    moved,
    received,
    room,
    to_send,
)
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import EqualSteps, Rate


class LocalSMCGDAM(Algorithm):
    """Local steps along momenta, at STORM estimates of every level; all of it is averaged."""

    name = "local_smcgdam"
    levels = range(1, 100)
    dual = None
    inner_mean = "global"
    up = down = "2*d + R + 2*p"
    answers = {"local": "x y estimates"}

    eta: Rate = param(0.3, "eta, a common factor of steps and weights", above=0)
    gamma_x: Rate = param(0.33, "step size of x, multiplied by eta", above=0, search=RATES)
    gamma_y: Rate = param(0.33, "step size of y, multiplied by eta", above=0, search=RATES)
    rho_x: Rate = param(3.3, "weight of a fresh gradient in p, multiplied by eta", above=0, search=(0.2, 3.3))
    rho_y: Rate = param(3.3, "weight of a fresh gradient in q, multiplied by eta", above=0, search=(0.2, 3.3))
    alpha: Rate = param(3.0, "weight of fresh inner values, multiplied by eta^2", above=0, search=(0.3, 10))
    steps: EqualSteps = param(4, "local steps per round, tau, or an Interval")
    first_batches: int = param(1, "batches for the first estimates", least=1)
    weight_decay: float = param(0.0, "L2 penalty on x", least=0)

    def start(self, s: State, clients: Clients) -> State:
        """Make room for the estimates; the first step of the run fills them."""
        return room(s, clients)

    def round(self, s: State, clients: Clients) -> State:
        """Average everything (lines 10 to 15)."""
        return received(clients.mean(self.local, *to_send(s, clients)))

    def local(self, client: Client, x: torch.Tensor, y: Tensors, estimates: Estimates) -> Message:
        """Take tau local steps; the very first ones begin with line 1."""
        if client.clock.iteration == 0:
            estimates = first_levels(client, x, y, self.first_batches, self.weight_decay)
        h, p, q = estimates
        del estimates  # or the first values would be held twice
        h = tuple(level.clone() for level in h)
        x, y, h, p, q = client.repeat(self.steps, self.step, x, y, h, p, q)
        return x, y, (h, p, q)

    def step(
        self, client: Client, x: torch.Tensor, y: Tensors, h: Tensors, p: torch.Tensor, q: Tensors
    ) -> tuple[torch.Tensor, Tensors, Tensors, torch.Tensor, Tensors]:
        """Do lines 3 to 9. ``h`` is renewed in place: no second copy of the levels is held."""
        eta = client.rate(self.eta)
        *batches, outer = client.draw_all()
        carried = 1 - weight_of(client, self.alpha, eta**2)
        for j in reversed(range(len(h))):
            h[j].sub_(client.g(j + 1, h[j - 1] if j else x, batches[j])).mul_(carried)
        x, y = moved(client, x, y, p, q, (client.rate(self.gamma_x) * eta, client.rate(self.gamma_y) * eta))
        for j in range(len(h)):
            h[j].add_(client.g(j + 1, h[j - 1] if j else x, batches[j]))
        u, v = chain_rule(client, (x, *h), y, (*batches, outer), self.weight_decay)
        p, q = momenta(client, (p, q), (u, v), (self.rho_x, self.rho_y), eta)
        return x, y, h, p, q
