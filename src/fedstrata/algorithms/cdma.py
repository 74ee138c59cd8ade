"""CDMA: one cohort computes a gradient, a second one takes local variance-reduced descent ascent steps with it.

Xie, Zhang, Shen, Liu, Qian: "CDMA: a practical cross-device federated learning algorithm for general minimax problems",
AAAI 2023.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level. z = (x, y), and F_k is the gradient on all of client k's data.

    one cohort computes G:      G = M_k[ F_k(z) ]                                                                (CDMA)
                                G = M_k[ F_k(z) - (1 - a) F_k(z_old) ] + (1 - a) G_old                        (CDMA-ADA)
    another cohort:  z_k <- z;   K times, on a batch:  D = grad f_k(z_k) - grad f_k(z) + G,
                                x_k <- x_k - lr D_x,    y_k <- Pi[ y_k + dual_lr D_y ]
    z_old <- z,   z <- M_k[ z_k ]

Sent, per client and round:
    cdma                up 2*(d + p)    down 3*(d + p)
    cdma, ada = true    up 2*(d + p)    down 4*(d + p)
In two exchanges; CDMA-ADA sends z_old too.

Departures from the paper: the rule is that of the authors' code; the paper's text was not available. The learning rates
of CDMA-ADA are divided by (r + 1)^exponent in round r, and a = min(1, weight / (r + 1)^(2 exponent)), but 1 in the
first round. Both cohorts have the size of the run's, and the second is drawn independently. With every client in both,
the history of CDMA-ADA cancels and its gradient is that of CDMA.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import RATES, WEIGHT_DECAY, Pair, descend_ascend, gradients
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import EqualSteps, Rate


class State(NamedTuple):
    """The point; for CDMA-ADA also the previous point and the gradient G, else empty."""

    x: torch.Tensor
    y: torch.Tensor
    x_old: torch.Tensor
    y_old: torch.Tensor
    g_x: torch.Tensor
    g_y: torch.Tensor


class CDMA(Algorithm):
    """Full gradients of one cohort, which another cohort then uses in its local steps."""

    name = "cdma"
    dual = True

    lr: Rate = param(0.1, "learning rate of x", above=0, search=RATES)
    dual_lr: Rate = param(0.1, "learning rate of y", above=0, search=RATES)
    steps: EqualSteps = param(10, "local steps per round, K, or an Interval")
    ada: bool = param(False, "CDMA-ADA: a recursive gradient estimate, and decaying rates")
    weight: float = param(
        0.95,
        "weight of the fresh gradient of CDMA-ADA, divided by (r + 1)^(2 exponent); 1 in the first round",
        above=0,
        only={"ada": (True,)},
    )
    exponent: float = param(0.0, "exponent of the decay of CDMA-ADA's rates", least=0, only={"ada": (True,)})
    weight_decay: float = WEIGHT_DECAY

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Start CDMA-ADA without history."""
        if not self.ada:
            return State(x, y, x[:0], y[:0], x[:0], y[:0])
        return State(x, y, x, y, torch.zeros_like(x), torch.zeros_like(y))

    def round(self, s: State, clients: Clients) -> State:
        """Ask one cohort for the gradient and another for local steps."""
        time, pace = clients.clock.round + 1, 1.0
        if self.ada:
            pace = time**-self.exponent
            past = 0.0 if time == 1 else 1 - min(1.0, self.weight / time ** (2 * self.exponent))
            g_x, g_y = clients.mean(self.correction, s.x, s.y, s.x_old, s.y_old, past)
            g_x, g_y = g_x + past * s.g_x, g_y + past * s.g_y
            s = s._replace(x_old=s.x, y_old=s.y, g_x=g_x, g_y=g_y)
        else:
            g_x, g_y = clients.mean(self.gradient, s.x, s.y)
        dx, dy = clients.choose(len(clients)).mean(self.local, s.x, s.y, g_x, g_y, pace)
        return s._replace(x=s.x + dx, y=clients.project_y(s.y + dy))

    @remote
    def gradient(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> Pair:
        """Return the gradients on all of a client's data."""
        return gradients(client, x, y, client.all_data(), self.weight_decay)

    @remote
    def correction(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, x_old: torch.Tensor, y_old: torch.Tensor, past: float
    ) -> Pair:
        """Return the gradients on all of a client's data, minus a part of those at the previous point."""
        batch = client.all_data()
        g_x, g_y = gradients(client, x, y, batch, self.weight_decay)
        if past == 0:
            return g_x, g_y
        old_x, old_y = gradients(client, x_old, y_old, batch, self.weight_decay)
        return g_x - past * old_x, g_y - past * old_y

    @remote
    def local(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, g_x: torch.Tensor, g_y: torch.Tensor, pace: float
    ) -> Pair:
        """Take K local steps corrected by G."""
        k = client.variables(x=x, y=y)
        for _ in client.loop(self.steps, k):
            batch = client.draw()
            new_x, new_y = gradients(client, k.x, k.y, batch, self.weight_decay)
            old_x, old_y = gradients(client, x, y, batch, self.weight_decay)
            rates = pace * client.rate(self.lr), pace * client.rate(self.dual_lr)
            descend_ascend(client, k, (new_x - old_x + g_x, new_y - old_y + g_y), rates)
        return k.x - x, k.y - y
