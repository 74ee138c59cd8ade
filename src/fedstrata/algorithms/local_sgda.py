"""Local-SGDA and Local-SGDA+: local stochastic gradient descent ascent; in "+" the ascent uses a stale x.

Deng, Mahdavi: "Local stochastic gradient descent ascent: convergence analysis and communication efficiency", AISTATS
2021; Sharma, Panda, Joshi, Varshney: "Federated minimax optimization: improved convergence analyses and algorithms",
ICML 2022, Algorithms 1 and 4.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level; for "+" every client in every round.

    x_k, y_k <- x, y;   tau times, both from the old point, on one batch:
        x_k <- x_k - lr grad_x f_k(x_k, y_k; batch),    y_k <- Pi[ y_k + dual_lr grad_y f_k(z, y_k; batch) ]
    x, y <- M_k[x_k], M_k[y_k];   every S steps  z <- x

In Local-SGDA z is x_k, as with S = 1.

Sent: up d + p, down d + p. Kept on a client ("+"): z, the snapshot, which is the x of the round in which it was taken,
and the number of the period of S steps that it belongs to.

Departures from the papers: S is a multiple of tau, as in the papers, or 1, which updates z at every local step. With a
snapshot all clients take part, so that z costs no message. Without one, cohorts and means weighted by samples are
possible; the papers use all clients, uniformly.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES, WEIGHT_DECAY, Pair, descend_ascend
from fedstrata.algorithms.snapshots import check_snapshot, gradients_at_snapshot, keep_snapshot, snapshot
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate, Steps


class LocalSGDA(Algorithm):
    """Local descent in x and ascent in y, then averages of both."""

    name = "local_sgda"
    dual = True
    hidden: ClassVar[tuple[str, ...]] = ("snapshot_every",)

    lr: Rate = param(0.1, "learning rate of x", above=0, search=RATES)
    dual_lr: Rate = param(0.1, "learning rate of y", above=0, search=RATES)
    steps: Steps = param(10, "local steps per round, tau, or Epochs(e), or an Interval")
    snapshot_every: int = param(1, "S, steps between snapshots: a multiple of steps, or 1; 0 means steps^2", least=0)
    weight_decay: float = WEIGHT_DECAY

    def __post_init__(self) -> None:
        super().__post_init__()
        check_snapshot(self.name, self.snapshot_every, self.steps)

    def round(self, s: State, clients: Clients) -> State:
        """Average the clients' updates."""
        dx, dy = clients.mean(self.local, s.x, s.y)
        return State(s.x + dx, clients.project_y(s.y + dy))

    def rejoin(self, s: State, clients: Clients) -> None:
        """Use the current x as the snapshot until the next one is taken."""
        if self.snapshot_every != 1:
            clients.restore(self.join, s.x)

    @remote
    def join(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Keep x as the snapshot; nothing is sent."""
        return keep_snapshot(client, x, self.snapshot_every, self.steps)

    @remote
    def local(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> Pair:
        """Take tau local steps with one snapshot."""
        k = client.variables(x=x, y=y)
        z = snapshot(client, x, self.snapshot_every, self.steps)
        for _ in client.loop(self.steps, k):
            g = gradients_at_snapshot(client, k, z, self.weight_decay)
            descend_ascend(client, k, g, (client.rate(self.lr), client.rate(self.dual_lr)))
        return k.x - x, k.y - y


class LocalSGDAPlus(LocalSGDA):
    """Local descent in x and ascent in y, the latter at a snapshot of x."""

    name = "local_sgda_plus"
    full_participation = True
    defaults = {"snapshot_every": 0}
    hidden = ()
