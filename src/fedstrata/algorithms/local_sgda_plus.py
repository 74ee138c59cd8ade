"""Local-SGDA+: Local-SGDA whose ascent sees a stale x.

Deng, Mahdavi: "Local stochastic gradient descent ascent: convergence analysis and communication efficiency", AISTATS
2021; Sharma, Panda, Joshi, Varshney: "Federated minimax optimization: improved convergence analyses and algorithms",
ICML 2022, Algorithm 4.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level; every client in every round.

    x_k, y_k <- x, y;   tau times, both from the old point, on one batch:
        x_k <- x_k - lr grad_x f_k(x_k, y_k; batch),    y_k <- Pi[ y_k + dual_lr grad_y f_k(z, y_k; batch) ]
    x, y <- M_k[x_k], M_k[y_k];   every S steps  z <- x

Sent: up d + p, down d + p. Kept on a client: z, the snapshot, which is the x of the round in which it was renewed.

Departures from the paper: S is a multiple of tau, as in the papers, or 1, which renews z at every local step and so is
Local-SGDA. All clients take part, so that z costs no message.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.saddles import Pair, check_period, down_up, gradients_at_snapshot, snapshot
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import Rate


class LocalSGDAPlus(Algorithm):
    """Local steps down in x and up in y, the latter seen from a snapshot of x."""

    name = "local_sgda_plus"
    dual = True
    up = down = "d + p"
    full_participation = True
    answers = {"local": "x y"}

    lr: Rate = param(0.1, "learning rate of x", above=0, search=RATES)
    dual_lr: Rate = param(0.1, "learning rate of y", above=0, search=RATES)
    steps: int = param(10, "local steps per round, tau", least=1)
    snapshot_every: int = param(0, "S, steps between snapshots: a multiple of steps, or 1; 0 is steps^2", least=0)
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
        x, y = client.repeat(self.steps, self.step, x, y, z)
        return x, y

    def step(self, client: Client, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor | None) -> Pair:
        """Take one step down in x and up in y."""
        directions = gradients_at_snapshot(client, x, y, z, self.weight_decay)
        return down_up(client, x, y, directions, (client.rate(self.lr), client.rate(self.dual_lr)))
