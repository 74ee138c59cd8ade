"""AFL: agnostic federated learning.

Mohri, Sivek, Suresh: "Agnostic federated learning", ICML 2019, Figure 3 (Stochastic-AFL).

Problem: min_x max_y sum_k y_k F_k(x), y on the simplex over the clients (``agnostic``); every client in every round.

    every client:  grad F_k(x; batch), F_k(x; batch)
    x <- x - lr sum_k y_k grad F_k(x),     y <- Pi[ y + dual_lr (F_1(x), ..., F_N(x)) ],     both at the old x and y
    the solution is the mean of the iterates x, and of the iterates y

Sent: up d + 1, down d.

Departures from the paper: x is not projected. ``average = false`` returns the last iterate. The mean is over the
iterates after each round.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.mixture import own_loss
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import Rate
from fedstrata.problems.problem import Problem


class AFL(Algorithm):
    """One gradient step per round on the mixture of clients that is worst at the moment."""

    name = "afl"
    dual = True
    mixture = True
    answers = {"gradient": "zero zero"}
    up, down = "d + 1", "d"
    full_participation = True

    lr: Rate = param(0.1, "step size of the model", above=0, search=RATES)
    dual_lr: Rate = param(0.1, "step size of the dual weights", above=0, search=RATES)
    average: bool = param(True, "return the mean of the iterates, as in the paper, instead of the last one")

    def init(self, problem: Problem) -> State:
        """Start at x_0 and the uniform mixture; they are also their own means."""
        assert problem.y0 is not None
        x, y = problem.x0, problem.y0
        return State(x=x.clone(), y=y.clone(), x_mean=x.clone(), y_mean=y.clone())

    def round(self, s: State, clients: Clients) -> State:
        """Take one step in x and one in y."""
        gradients, losses = clients.gather(self.gradient, s.x)
        x = s.x - clients.rate(self.lr) * (s.y @ gradients)
        y = clients.problem.projected(s.y + clients.rate(self.dual_lr) * losses)
        part = 1 / (clients.clock.round + 1)
        return s.replace(x=x, y=y, x_mean=s.x_mean + part * (x - s.x_mean), y_mean=s.y_mean + part * (y - s.y_mean))

    def solution(self, s: State) -> State:
        """Return the means of the iterates, or the last ones."""
        return s.replace(x=s.x_mean, y=s.y_mean) if self.average else s

    def gradient(self, client: Client, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gradient and value of the client's own loss on one batch."""
        g, loss = client.repeat(1, self.step, x)
        return g, loss

    def step(self, client: Client, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Do the one step's work."""
        batch = client.draw()
        return client.f_grads(x, batch, own_loss(client))[0], client.loss(x, batch, own_loss(client))
