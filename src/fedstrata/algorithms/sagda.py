"""SAGDA: local descent ascent corrected by control variates, with separate server learning rates.

Yang, Liu, Zhang, Liu: "SAGDA: achieving O(eps^-2) communication complexity in federated min-max learning", NeurIPS
2022.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level.

    x_k, y_k <- x, y;   K times, both from the old point, with g the gradients on a batch:
        x_k <- x_k - lr (g_x - c_kx + c_x),    y_k <- Pi[ y_k + dual_lr (g_y - c_ky + c_y) ]
    c_k' = the mean of the round's g;    x <- x + server_lr M_k[x_k - x],   y <- Pi[ y + server_dual_lr M_k[y_k - y] ]
    c <- c + (|S|/N) M_k[c_k' - c_k],    c_k <- c_k'

Sent, per client and round:
    sagda                     up 2*(d + p)    down 2*(d + p)
    sagda, control = false    up d + p        down d + p
Kept on a client: c_k, in x and y.

Departures from the paper: its algorithm was not available. Its abstract says that gradient estimates of sampled clients
serve as control variates, that there are two learning rates, on the server and on the clients, and that FSGDA
(``control = false``) is the method without control variates. The rest, how the variates are computed and updated,
follows descriptions of the method and SCAFFOLD's rule: agreement with this file does not imply agreement with the
paper.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import RATES, WEIGHT_DECAY, Tensors, descend_ascend, gradients
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import EqualSteps, Rate


class State(NamedTuple):
    """The point, and the control variates, empty without them."""

    x: torch.Tensor
    y: torch.Tensor
    c_x: torch.Tensor
    c_y: torch.Tensor


class SAGDA(Algorithm):
    """Local descent ascent with drift corrected by estimates of the other clients' gradients."""

    name = "sagda"
    dual = True

    lr: Rate = param(0.1, "learning rate of x on the clients", above=0, search=RATES)
    dual_lr: Rate = param(0.1, "learning rate of y on the clients", above=0, search=RATES)
    steps: EqualSteps = param(10, "local steps per round, K, or an Interval")
    server_lr: Rate = param(1.0, "learning rate of x on the server", above=0)
    server_dual_lr: Rate = param(1.0, "learning rate of y on the server", above=0)
    control: bool = param(True, "use control variates; without them it is FSGDA")
    weight_decay: float = WEIGHT_DECAY

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Start with the control variates at zero."""
        return State(x, y, torch.zeros_like(x), torch.zeros_like(y)) if self.control else State(x, y, x[:0], y[:0])

    def round(self, s: State, clients: Clients) -> State:
        """Step along the mean updates, and update the control variates."""
        dx, dy, dc_x, dc_y = clients.mean(self.local, s.x, s.y, s.c_x, s.c_y)
        x = s.x + clients.rate(self.server_lr) * dx
        y = clients.project_y(s.y + clients.rate(self.server_dual_lr) * dy)
        return State(x, y, s.c_x + clients.share * dc_x, s.c_y + clients.share * dc_y)

    @remote
    def local(self, client: Client, x: torch.Tensor, y: torch.Tensor, c_x: torch.Tensor, c_y: torch.Tensor) -> Tensors:
        """Take corrected steps, then update c_k to the mean gradient."""
        zero_x, zero_y = torch.zeros_like(x), torch.zeros_like(y)
        c_kx, c_ky = client.kept("c_x", zero_x), client.kept("c_y", zero_y)
        drift_x, drift_y = (c_x - c_kx, c_y - c_ky) if self.control else (zero_x, zero_y)
        k = client.variables(x=x, y=y, drift_x=drift_x, drift_y=drift_y, sum_x=zero_x, sum_y=zero_y)
        for _ in client.loop(self.steps, k):
            g_x, g_y = gradients(client, k.x, k.y, client.draw(), self.weight_decay)
            rates = client.rate(self.lr), client.rate(self.dual_lr)
            descend_ascend(client, k, (g_x + k.drift_x, g_y + k.drift_y), rates)
            k.sum_x, k.sum_y = k.sum_x + g_x, k.sum_y + g_y
        if not self.control:
            return k.x - x, k.y - y, c_x, c_y  # c is empty, so nothing is sent
        steps = client.steps_now(self.steps)
        new_x, new_y = k.sum_x / steps, k.sum_y / steps
        client.keep(c_x=new_x, c_y=new_y)
        return k.x - x, k.y - y, new_x - c_kx, new_y - c_ky
