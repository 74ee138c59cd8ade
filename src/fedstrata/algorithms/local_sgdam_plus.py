"""Momentum-Local-SGDA+: Momentum-Local-SGDA whose ascent sees a stale x.

Sharma, Panda, Joshi, Varshney: "Federated minimax optimization: improved convergence analyses and algorithms", ICML
2022, Algorithm 5.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level; every client in every round.

    x_k, y_k, d_k <- x, y, 0;   tau times:
        x_k <- x_k - alpha lr d_kx,    y_k <- Pi[ y_k + alpha dual_lr d_ky ]
        d_kx <- (1 - beta alpha) d_kx + beta alpha grad_x f_k(x_k, y_k; batch), at the new point
        d_ky <- (1 - beta alpha) d_ky + beta alpha grad_y f_k(z, y_k; batch)
    x, y <- M_k[x_k], M_k[y_k];   every S steps  z <- x

Sent: up d + p, down d + p. Kept on a client: z, the snapshot, which is the x of the round in which it was renewed.

Departures from the paper: none known; the original text could not be consulted, the rule is that of the method's
descriptions. The momenta start every round at 0, so the first of the tau steps does not move: tau is at least 2. The
projection is of y + alpha dual_lr d. beta alpha is cut off at 1. S is a multiple of tau, or 1, which renews z at every
step.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.estimators import moving_average
from fedstrata.algorithms.saddles import Pair, check_period, down_up, gradients_at_snapshot, snapshot
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import Rate


class LocalSGDAMPlus(Algorithm):
    """Local steps down in x and up in y along momenta, the latter's seen from a snapshot of x."""

    name = "local_sgdam_plus"
    dual = True
    up = down = "d + p"
    full_participation = True
    answers = {"local": "x y"}

    lr: Rate = param(0.1, "learning rate of x", above=0, search=RATES)
    dual_lr: Rate = param(0.1, "learning rate of y", above=0, search=RATES)
    steps: int = param(10, "local steps per round, tau, at least 2", least=2)
    snapshot_every: int = param(0, "S, steps between snapshots: a multiple of steps, or 1; 0 is steps^2", least=0)
    alpha: Rate = param(1.0, "multiplies both learning rates and beta", above=0)
    beta: float = param(0.5, "weight of a fresh gradient in the momenta, times alpha", above=0, search=(0.05, 1))
    weight_decay: float = param(0.0, "L2 penalty on x", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_period(self.name, self.snapshot_every, self.steps)

    def round(self, s: State, clients: Clients) -> State:
        """Average what the clients' steps led to."""
        x, y = clients.mean(self.local, s.x, s.y)
        return s.replace(x=x, y=y)

    def local(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> Pair:
        """Take tau local steps with one snapshot."""
        z = snapshot(client, x, self.snapshot_every or self.steps**2)
        zeros = torch.zeros_like(x), torch.zeros_like(y)
        x, y, _, _ = client.repeat(self.steps, self.step, x, y, *zeros, z)
        return x, y

    def step(
        self,
        client: Client,
        x: torch.Tensor,
        y: torch.Tensor,
        d_x: torch.Tensor,
        d_y: torch.Tensor,
        z: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Step along the momenta, then renew them at the new point."""
        alpha = client.rate(self.alpha)
        x, y = down_up(client, x, y, (d_x, d_y), (alpha * client.rate(self.lr), alpha * client.rate(self.dual_lr)))
        g_x, g_y = gradients_at_snapshot(client, x, y, z, self.weight_decay)
        weight = min(1.0, self.beta * alpha)
        return x, y, moving_average(d_x, g_x, weight), moving_average(d_y, g_y, weight)
