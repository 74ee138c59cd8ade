"""SAGDA: local descent ascent corrected by control variates, with rates of its own on the server.

Yang, Liu, Zhang, Liu: "SAGDA: achieving O(eps^-2) communication complexity in federated min-max learning", NeurIPS
2022.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level.

    x_k, y_k <- x, y;   K times, both from the old point, with g the gradients on a batch:
        x_k <- x_k - lr (g_x - c_kx + c_x),    y_k <- Pi[ y_k + dual_lr (g_y - c_ky + c_y) ]
    c_k' = the mean of the round's g;    x <- x + server_lr M_k[x_k - x],   y <- Pi[ y + server_dual_lr M_k[y_k - y] ]
    c <- c + (|S|/N) M_k[c_k' - c_k],    c_k <- c_k'

Sent: up 2*(d + p), down 2*(d + p). Kept on a client: c_k, in x and y. With control = false, up d + p, down d + p.

Departures from the paper: its algorithm could not be consulted. Its abstract says that gradient estimates of sampled
clients serve as control variates, that there are two learning rates, on the server and on the clients, and that FSGDA
(``control = false``) is the method without control variates. The rest, how the variates are made and renewed, is the
method's descriptions and SCAFFOLD's rule: do not take agreement with this file for agreement with the paper.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.saddles import Pair, down_up, gradients
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import EqualSteps, Rate
from fedstrata.problems.problem import Problem


class SAGDA(Algorithm):
    """Local descent ascent whose drift is corrected by what the other clients' gradients look like."""

    name = "sagda"
    dual = True
    answers = {"local": "zero zero zero zero"}

    lr: Rate = param(0.1, "learning rate of x on the clients", above=0, search=RATES)
    dual_lr: Rate = param(0.1, "learning rate of y on the clients", above=0, search=RATES)
    steps: EqualSteps = param(10, "local steps per round, K, or an Interval")
    server_lr: Rate = param(1.0, "learning rate of x on the server", above=0)
    server_dual_lr: Rate = param(1.0, "learning rate of y on the server", above=0)
    control: bool = param(True, "use control variates; without them it is FSGDA")
    weight_decay: float = param(0.0, "L2 penalty on x", least=0)

    @property
    def up(self) -> str:
        """What a client sends in a round."""
        return "2*(d + p)" if self.control else "d + p"

    @property
    def down(self) -> str:
        """What the server sends in a round."""
        return self.up

    def init(self, problem: Problem) -> State:
        """Start with the control variates at zero."""
        s = super().init(problem)
        return s.replace(c_x=torch.zeros_like(s.x), c_y=torch.zeros_like(s.y)) if self.control else s

    def round(self, s: State, clients: Clients) -> State:
        """Step along the mean changes, and renew the control variates."""
        if self.control:
            dx, dy, dc_x, dc_y = clients.mean(self.local, s.x, s.y, s.c_x, s.c_y)
            s = s.replace(c_x=s.c_x + clients.share * dc_x, c_y=s.c_y + clients.share * dc_y)
        else:
            dx, dy = clients.mean(self.local, s.x, s.y)
        x = s.x + clients.rate(self.server_lr) * dx
        y = clients.problem.projected(s.y + clients.rate(self.server_dual_lr) * dy)
        return s.replace(x=x, y=y)

    def local(self, client: Client, x: torch.Tensor, y: torch.Tensor, *c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take corrected steps, then renew c_k."""
        zeros = torch.zeros_like(x), torch.zeros_like(y)
        drift: Pair = zeros
        if self.control:
            c_kx, c_ky = client.recall("c_x", zeros[0]), client.recall("c_y", zeros[1])
            drift = c[0] - c_kx, c[1] - c_ky
        x_k, y_k, sum_x, sum_y = client.repeat(self.steps, self.step, x, y, *zeros, *drift)
        if not self.control:
            return x_k - x, y_k - y
        steps = client.steps_now(self.steps)
        new_x, new_y = sum_x / steps, sum_y / steps
        client.keep(c_x=new_x, c_y=new_y)
        return x_k - x, y_k - y, new_x - c_kx, new_y - c_ky

    def step(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take one corrected step; ``others`` are the sums of the gradients, and the drifts c - c_k."""
        sum_x, sum_y, drift_x, drift_y = others
        g_x, g_y = gradients(client, x, y, client.draw(), self.weight_decay)
        rates = client.rate(self.lr), client.rate(self.dual_lr)
        return (*down_up(client, x, y, (g_x + drift_x, g_y + drift_y), rates), sum_x + g_x, sum_y + g_y)
