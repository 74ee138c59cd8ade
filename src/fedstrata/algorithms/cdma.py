"""CDMA: local variance-reduced descent ascent around a gradient of a first cohort, made by a second one.

Xie, Zhang, Shen, Liu, Qian: "CDMA: a practical cross-device federated learning algorithm for general minimax problems",
AAAI 2023.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level. z = (x, y), and F_k is the gradient on all of client k's data.

    a cohort is asked for G:    G = M_k[ F_k(z) ]                                                                (CDMA)
                                G = M_k[ F_k(z) - (1 - a) F_k(z_old) ] + (1 - a) G_old                        (CDMA-ADA)
    another cohort:  z_k <- z;   K times, on a batch:  D = grad f_k(z_k) - grad f_k(z) + G,
                                x_k <- x_k - lr D_x,    y_k <- Pi[ y_k + dual_lr D_y ]
    z_old <- z,   z <- M_k[ z_k ]

Sent: up 2*(d + p), down 3*(d + p). In two exchanges. CDMA-ADA (ada = true) sends z_old too: down 4*(d + p).

Departures from the paper: the rule is that of the authors' public code; the paper's text could not be consulted. The
learning rates of CDMA-ADA are divided by (r + 1)^exponent in round r, and a = min(1, weight / (r + 1)^(2 exponent)).
The cohorts have the run's size, the second is drawn anew. With every client in both, CDMA-ADA's past cancels out and
its gradient is CDMA's.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.saddles import Pair, down_up, gradients
from fedstrata.clients import Client, Clients
from fedstrata.core.errors import InputError
from fedstrata.core.schedules import EqualSteps, Rate
from fedstrata.problems.problem import Problem


class CDMA(Algorithm):
    """Full gradients of one cohort, then local steps of another around them."""

    name = "cdma"
    dual = True
    up = "2*(d + p)"
    answers = {"collect": "zero zero", "change": "zero zero", "local": "x y"}

    lr: Rate = param(0.1, "learning rate of x", above=0, search=RATES)
    dual_lr: Rate = param(0.1, "learning rate of y", above=0, search=RATES)
    steps: EqualSteps = param(10, "local steps per round, K, or an Interval")
    ada: bool = param(False, "CDMA-ADA: the gradient carries the past, and rates decay")
    weight: float = param(0.95, "weight of the fresh gradient of CDMA-ADA in round 0", above=0)
    exponent: float = param(0.0, "how CDMA-ADA's rates decay with the rounds", least=0)
    weight_decay: float = param(0.0, "L2 penalty on x", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ada and (self.weight, self.exponent) != (CDMA.weight, CDMA.exponent):
            raise InputError("The weight and the exponent of cdma belong to CDMA-ADA: pass ada = true with them.")

    @property
    def down(self) -> str:
        """What the server sends in a round."""
        return "4*(d + p)" if self.ada else "3*(d + p)"

    def init(self, problem: Problem) -> State:
        """Start CDMA-ADA with an empty past."""
        s = super().init(problem)
        if not self.ada:
            return s
        return s.replace(x_old=s.x, y_old=s.y, g_x=torch.zeros_like(s.x), g_y=torch.zeros_like(s.y))

    def round(self, s: State, clients: Clients) -> State:
        """Ask one cohort for the gradient and another for local steps."""
        time = clients.clock.round + 1
        if self.ada:
            kept = 0.0 if time == 1 else 1 - min(1.0, self.weight / time ** (2 * self.exponent))
            g_x, g_y = clients.mean(self.change, s.x, s.y, s.x_old, s.y_old, kept)
            g_x, g_y = g_x + kept * s.g_x, g_y + kept * s.g_y
            s = s.replace(x_old=s.x, y_old=s.y, g_x=g_x, g_y=g_y)
        else:
            g_x, g_y = clients.mean(self.collect, s.x, s.y)
        pace = time**-self.exponent if self.ada else 1.0
        second = clients.choose(len(clients))
        x, y = second.mean(self.local, s.x, s.y, g_x, g_y, pace)
        return s.replace(x=x, y=y)

    def collect(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> Pair:
        """Return the gradients on all of a client's data."""
        return gradients(client, x, y, client.all_data(), self.weight_decay)

    def change(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, x_old: torch.Tensor, y_old: torch.Tensor, kept: float
    ) -> Pair:
        """Return how the gradients on all of a client's data differ from a part of what they were."""
        batch = client.all_data()
        g_x, g_y = gradients(client, x, y, batch, self.weight_decay)
        if kept == 0:
            return g_x, g_y
        old_x, old_y = gradients(client, x_old, y_old, batch, self.weight_decay)
        return g_x - kept * old_x, g_y - kept * old_y

    def local(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, g_x: torch.Tensor, g_y: torch.Tensor, pace: float
    ) -> Pair:
        """Take K local steps around the gradient."""
        out: Pair = client.repeat(self.steps, self.step, x, y, x, y, g_x, g_y, pace)
        return out

    def step(self, client: Client, x: torch.Tensor, y: torch.Tensor, *others: torch.Tensor) -> Pair:
        """Take one step; ``others`` are the point where G was taken, G, and the pace."""
        x_0, y_0, g_x, g_y, pace = others
        batch = client.draw()
        here_x, here_y = gradients(client, x, y, batch, self.weight_decay)
        there_x, there_y = gradients(client, x_0, y_0, batch, self.weight_decay)
        rates = float(pace) * client.rate(self.lr), float(pace) * client.rate(self.dual_lr)
        return down_up(client, x, y, (here_x - there_x + g_x, here_y - there_y + g_y), rates)
