"""Momentum-Local-SGDA and Momentum-Local-SGDA+: Local-SGDA along moving averages of both gradients.

Sharma, Panda, Joshi, Varshney: "Federated minimax optimization: improved convergence analyses and algorithms", ICML
2022, Algorithms 2 and 5.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level; for "+" every client in every round.

    x_k, y_k, d_k <- x, y, d  ("+": d_k <- 0);   tau times:
        x_k <- x_k - alpha lr d_kx,    y_k <- Pi[ y_k + alpha dual_lr d_ky ]
        d_kx <- (1 - beta alpha) d_kx + beta alpha grad_x f_k(x_k, y_k; batch), at the new point
        d_ky <- (1 - beta alpha) d_ky + beta alpha grad_y f_k(z, y_k; batch), z = x_k  ("+": the snapshot)
    x, y, d <- M_k[x_k], M_k[y_k], M_k[d_k];   "+": every S steps  z <- x

Sent, per client and round:
    local_sgdam                                                      up 2*(d + p)    down 2*(d + p)
    local_sgdam, average_momentum = false                            up d + p        down d + p
    local_sgdam_plus                                                 up d + p        down d + p
    local_sgdam, before the first round                              up d + p        down d + p
    local_sgdam, average_momentum = false, before the first round    up 0            down d + p
Kept on a client: its momenta, where they are not averaged; "+": z, the snapshot, which is the x of the round in which
it was taken, and the number of the period of S steps that it belongs to.

Departures from the paper: ``average_momentum = false`` is what the paper's experiments use, according to a footnote.
The first d is the gradient on one batch, averaged if momenta are; the original text of that, and of "+", was not
available, and the rule follows descriptions of the method. The momenta of "+" start every round at 0, so the first of
the tau steps does not move: tau is at least 2. The projection is of y + alpha dual_lr d. beta alpha is at most 1. S is
a multiple of tau, or 1, which updates z at every step. Cohorts are possible without "+"; the paper uses all clients.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from fedstrata.algorithms.algorithm import SHARES, Algorithm, param
from fedstrata.algorithms.descent import RATES, WEIGHT_DECAY, Pair, Tensors, descend_ascend, gradients
from fedstrata.algorithms.estimators import moving_average, weight_of
from fedstrata.algorithms.snapshots import check_snapshot, gradients_at_snapshot, keep_snapshot, snapshot
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.errors import invalid
from fedstrata.core.schedules import EqualSteps, Rate


class State(NamedTuple):
    """The point, and the mean momenta, empty if they are not averaged."""

    x: torch.Tensor
    y: torch.Tensor
    d_x: torch.Tensor
    d_y: torch.Tensor


class LocalSGDAM(Algorithm):
    """Local descent in x and ascent in y along momenta."""

    name = "local_sgdam"
    dual = True
    hidden: ClassVar[tuple[str, ...]] = ("snapshot_every", "restart")

    lr: Rate = param(0.1, "learning rate of x", above=0, search=RATES)
    dual_lr: Rate = param(0.1, "learning rate of y", above=0, search=RATES)
    steps: EqualSteps = param(10, "local steps per round, tau, or an Interval")
    snapshot_every: int = param(1, "S, steps between snapshots: a multiple of steps, or 1; 0 means steps^2", least=0)
    alpha: Rate = param(1.0, "factor of both learning rates and of beta", above=0)
    beta: float = param(0.5, "weight of a fresh gradient in the momenta, times alpha", above=0, search=SHARES)
    average_momentum: bool = param(True, "average the momenta with x and y; otherwise they stay on their clients")
    restart: bool = param(False, "start the momenta of every round at 0; needs at least 2 steps")
    weight_decay: float = WEIGHT_DECAY

    def __post_init__(self) -> None:
        super().__post_init__()
        check_snapshot(self.name, self.snapshot_every, self.steps)
        if self.restart and self.steps == 1:
            raise invalid(f"steps of {self.name}", self.steps, "a whole number of at least 2")

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Start the momenta at the gradients."""
        if self.restart:
            return State(x, y, x[:0], y[:0])
        return State(x, y, *clients.mean(self.first, x, y))

    def round(self, s: State, clients: Clients) -> State:
        """Average the clients' updates."""
        dx, dy, dd_x, dd_y = clients.mean(self.local, s.x, s.y, s.d_x, s.d_y)
        return State(s.x + dx, clients.project_y(s.y + dy), s.d_x + dd_x, s.d_y + dd_y)

    def rejoin(self, s: State, clients: Clients) -> None:
        """Use the current x as the snapshot until the next one is taken; start the momenta at the gradients."""
        if self.snapshot_every != 1:
            clients.restore(self.join, s.x)
        elif not self.average_momentum:
            clients.restore(self.first, s.x, s.y)

    @remote
    def join(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Keep x as the snapshot; nothing is sent."""
        return keep_snapshot(client, x, self.snapshot_every, self.steps)

    @remote
    def first(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> Pair:
        """Return the gradients on one batch, or keep them."""
        d_x, d_y = gradients(client, x, y, client.draw(), self.weight_decay)
        if self.average_momentum:
            return d_x, d_y
        client.keep(d_x=d_x, d_y=d_y)
        return d_x[:, :0], d_y[:, :0]

    @remote
    def local(self, client: Client, x: torch.Tensor, y: torch.Tensor, d_x: torch.Tensor, d_y: torch.Tensor) -> Tensors:
        """Take tau local steps: step along the momenta, then update them at the new point."""
        if self.restart:
            k = client.variables(x=x, y=y, d_x=torch.zeros_like(x), d_y=torch.zeros_like(y))
        elif self.average_momentum:
            k = client.variables(x=x, y=y, d_x=d_x, d_y=d_y)
        else:
            k = client.recall("d_x", "d_y", x=x, y=y)
        z = snapshot(client, x, self.snapshot_every, self.steps)
        for _ in client.loop(self.steps, k):
            alpha = client.rate(self.alpha)
            descend_ascend(client, k, (k.d_x, k.d_y), (alpha * client.rate(self.lr), alpha * client.rate(self.dual_lr)))
            g_x, g_y = gradients_at_snapshot(client, k, z, self.weight_decay)
            weight = weight_of(client, self.beta, alpha)
            k.d_x, k.d_y = moving_average(k.d_x, g_x, weight), moving_average(k.d_y, g_y, weight)
        if self.average_momentum and not self.restart:
            return k.x - x, k.y - y, k.d_x - d_x, k.d_y - d_y
        if not self.restart:
            client.keep(d_x=k.d_x, d_y=k.d_y)
        return k.x - x, k.y - y, d_x, d_y  # the momenta are empty, so nothing is sent


class LocalSGDAMPlus(LocalSGDAM):
    """Local descent in x and ascent in y along momenta; that of y is updated at a snapshot of x."""

    name = "local_sgdam_plus"
    full_participation = True
    defaults = {"snapshot_every": 0, "restart": True}
    hidden = ("average_momentum", "restart")
