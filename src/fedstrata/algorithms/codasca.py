"""CODASCA: AUC maximisation by proximal local steps corrected by control variates.

Yuan, Guo, Xu, Ying, Yang: "Federated deep AUC maximization for heterogeneous data with a constant communication
complexity", ICML 2021.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level (made for ``auc`` with form = "margin": x = (weights, a, b),
y = alpha >= 0); every client in every round.

    x_k, y_k <- x, y;   I times, both from the old point, with g the gradients on a batch:
        x_k <- x_k - lr (clip(g_x) - c_kx + c_x + (x_k - x_ref) / gamma + weight_decay x_k)
        y_k <- Pi[ y_k + lr (g_y - c_ky + c_y) ]
    c_k <- the mean of the round's g (not clipped),  c <- M_k[c_k],   x <- x + server_lr M_k[x_k - x],  y likewise
    every T_0 steps  lr <- lr / 3,   x_ref <- the mean of x_k over those steps and the clients

Sent, per client and round:
    codasca                     up 2*(d + p)    down 2*(d + p)
    codasca, control = false    up d + p        down d + p
Every T_0 steps another d up and d down. Kept on a client: c_k, the number of the stage, its x_ref, and the sum of its
x_k - x_ref.

Departures from the paper: this follows the authors' code, since the paper's algorithm was not available. It differs
from that code as follows: every round has I steps, including the first; both gradients are taken at the old point;
x_ref starts at x instead of small noise, and is the same for all clients; the gradient in alpha is that of the problem
(the code uses a and b instead of mean scores, and omits the factor p(1-p): see ``scale_dual`` of ``auc``). ``control =
false`` is the step of PESG without momentum. As in the code, the variates are means of raw gradients while the steps
use clipped ones: if clipping stays active for long, the difference accumulates and the method diverges; ``clip = 0``
avoids this.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import RATES, Tensors, descend_ascend, gradients
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import EqualSteps, Rate, steps_at


class State(NamedTuple):
    """The point, the centre of the stage, and the control variates, empty without them."""

    x: torch.Tensor
    y: torch.Tensor
    x_ref: torch.Tensor
    c_x: torch.Tensor
    c_y: torch.Tensor


class CODASCA(Algorithm):
    """Proximal local descent ascent in stages, with drift corrected by control variates."""

    name = "codasca"
    dual = True
    full_participation = True

    lr: Rate = param(0.1, "learning rate of x and y", above=0, search=RATES)
    steps: EqualSteps = param(10, "local steps per round, I, or an Interval")
    stage_rounds: int = param(500, "rounds of a stage, T_0 / I", least=1)
    factor: float = param(3.0, "factor by which the rate falls after each stage", least=1)
    gamma: float = param(500.0, "inverse strength of the pull towards the centre of a stage", above=0)
    clip: float = param(1.0, "largest entry of the gradient in x; 0 for no clipping", least=0)
    server_lr: Rate = param(1.0, "learning rate of the server", above=0)
    weight_decay: float = param(1e-5, "L2 penalty on x", least=0)
    control: bool = param(True, "use control variates")

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Start with the centre at x and the control variates at zero."""
        c = (torch.zeros_like(x), torch.zeros_like(y)) if self.control else (x[:0], y[:0])
        return State(x, y, x, *c)

    def round(self, s: State, clients: Clients) -> State:
        """Average updates and control variates; at the end of a stage, compute the next centre."""
        stage, rounds_done = divmod(clients.clock.round, self.stage_rounds)
        dx, dy, c_x, c_y = clients.mean(self.local, s.x, s.y, stage, s.c_x, s.c_y)
        rate, x_ref = clients.rate(self.server_lr), s.x_ref
        if rounds_done == self.stage_rounds - 1:
            x_ref = s.x_ref + clients.mean(self.mean_of_stage, stage)
            clients.mean(self.centre, x_ref, stage + 1)
        return State(s.x + rate * dx, clients.project_y(s.y + rate * dy), x_ref, c_x, c_y)

    def rejoin(self, s: State, clients: Clients) -> None:
        """Send the centre of the stage, and c as the client's c_k, so that its first steps are not corrected.

        Steps that a client missed count as if it had stayed at the centre.
        """
        clients.restore(self.join, s.x_ref, (clients.clock.round + 1) // self.stage_rounds, s.c_x, s.c_y)

    @remote
    def join(
        self, client: Client, x_ref: torch.Tensor, stage: int, c_x: torch.Tensor, c_y: torch.Tensor
    ) -> torch.Tensor:
        """Keep the centre and the variates; nothing is sent."""
        client.keep(c_x=c_x, c_y=c_y)
        return self.centre(client, x_ref, stage)

    @remote
    def centre(self, client: Client, x_ref: torch.Tensor, stage: int) -> torch.Tensor:
        """Keep the centre of a stage, and 0 as the sum of the differences from it; nothing is sent."""
        client.keep(x_ref=x_ref, total=torch.zeros_like(x_ref))
        client.stamp(stage=stage)
        return x_ref[:, :0]

    @remote
    def mean_of_stage(self, client: Client, stage: int) -> torch.Tensor:
        """Return the mean of the client's iterates in the stage, minus the centre of the stage."""
        client.require(stage=stage)
        rounds = range(stage * self.stage_rounds, (stage + 1) * self.stage_rounds)
        return client.recall("total").total / sum(steps_at(self.steps, number) for number in rounds)

    @remote
    def local(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, stage: int, c_x: torch.Tensor, c_y: torch.Tensor
    ) -> Tensors:
        """Take corrected proximal steps, then set c_k to the mean gradient."""
        if client.first:
            self.centre(client, x, stage)
        client.require(stage=stage)
        pace, zero_x, zero_y = self.factor**-stage, torch.zeros_like(x), torch.zeros_like(y)
        drift_x, drift_y = zero_x, zero_y
        if self.control:
            drift_x, drift_y = c_x - client.kept("c_x", zero_x), c_y - client.kept("c_y", zero_y)
        k = client.recall("x_ref", "total", x=x, y=y, drift_x=drift_x, drift_y=drift_y, sum_x=zero_x, sum_y=zero_y)
        for _ in client.loop(self.steps, k):
            g_x, g_y = gradients(client, k.x, k.y, client.draw())
            clipped = g_x.clamp(-self.clip, self.clip) if self.clip else g_x
            direction = clipped + k.drift_x + (k.x - k.x_ref) / self.gamma + self.weight_decay * k.x
            lr = pace * client.rate(self.lr)
            descend_ascend(client, k, (direction, g_y + k.drift_y), (lr, lr))
            k.total, k.sum_x, k.sum_y = k.total + (k.x - k.x_ref), k.sum_x + g_x, k.sum_y + g_y
        client.keep(total=k.total)
        if self.control:
            steps = client.steps_now(self.steps)
            c_x, c_y = k.sum_x / steps, k.sum_y / steps
            client.keep(c_x=c_x, c_y=c_y)
        return k.x - x, k.y - y, c_x, c_y  # c is empty without control, so nothing is sent
