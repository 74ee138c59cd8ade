"""CoDA: communication-efficient AUC maximisation by stages of proximal local steps.

Guo, Liu, Yuan, Shen, Liu, Yang: "Communication-efficient distributed stochastic AUC maximization with deep neural
networks", ICML 2020, Algorithms 1 and 2.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level (made for ``auc``: x = (weights, a, b), y = alpha); every client
in every round.

    stage s = 0, 1, ... with the rate lr / 3^s and T_0 3^s steps, from x_0, the last stage's result:
        x_k <- argmin_x  <grad_x f_k, x> + ||x - x_k||^2 / (2 rate) + ||x - x_0||^2 / (2 gamma)
             = (x_k + (rate / gamma) x_0 - rate grad_x f_k) / (1 + rate / gamma)
        y_k <- Pi[ y_k + rate grad_y f_k ], both from the old point; every I steps the means of x_k and y_k
    at its end  x <- the mean of x_k over the stage's steps and the clients,   y <- Pi[ the best y at x, on a batch ]

Sent: up d + p, down d + p. At the end of a stage another d up (with average), then d down and p up (if the problem has
``best_y``). Kept on a client: the number of the stage, x_0, the sum of the stage's x_k - x_0; the round, and its y.

Departures from the paper: the original text was not available; the rule follows descriptions of the method. The best
alpha there is the mean score of a client's negatives minus that of its positives, averaged over clients. Here it is the
maximiser of the mean of f_k on the batches, which is the same if all clients have the same fraction of positives, and
is defined even if a client has none. A problem without ``best_y`` keeps the mean of the y_k. The last round of a stage
is shorter if I does not divide the stage. With ``average = false`` the next stage starts from the last iterate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import RATES, Pair, gradients
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import EqualSteps


class State(NamedTuple):
    """The point, and the x_0 of the stage."""

    x: torch.Tensor
    y: torch.Tensor
    x_0: torch.Tensor


class CoDA(Algorithm):
    """Stages of proximal local steps, with falling rates and growing lengths."""

    name = "coda"
    dual = True
    full_participation = True

    lr: float = param(0.1, "learning rate of x and y in the first stage", above=0, search=RATES)
    steps: EqualSteps = param(10, "local steps per round, I, or an Interval")
    stage_steps: int = param(2000, "local steps of the first stage, T_0", least=1)
    factor: float = param(3.0, "factor by which the rate falls and the stages grow", least=1)
    gamma: float = param(500.0, "inverse strength of the pull towards the start of a stage", above=0)
    estimate_batches: int = param(10, "batches for the best y at the end of a stage", least=1)
    average: bool = param(True, "end a stage with the mean of its iterates instead of the last iterate")

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Start the first stage."""
        return State(x, y, x)

    def round(self, s: State, clients: Clients) -> State:
        """Average the clients' updates; at the end of a stage, average over it and compute the best y."""
        stage, done, length = self.stage_of(clients.clock.round)
        steps = min(clients.steps_now(self.steps), length - done)
        dx, dy = clients.mean(self.local, s.x, s.y, stage, steps, done == 0)
        x, y = s.x + dx, clients.project_y(s.y + dy)
        if done + steps < length:
            return State(x, y, s.x_0)
        if self.average:
            x = s.x_0 + clients.mean(self.mean_of_stage, stage, length)
        if clients.problem.best_y is not None:
            y = clients.project_y(s.y + clients.mean(self.best, x))
        return State(x, y, x)

    def rejoin(self, s: State, clients: Clients) -> None:
        """Send the start of the stage; steps that a client missed count as if it had stayed there."""
        clients.restore(self.join, s.x_0, self.stage_of(clients.clock.round + 1)[0])

    def stage_of(self, number: int) -> tuple[int, int, int]:
        """Return the stage of a round, the steps of the stage before the round, and the length of the stage."""
        stage, earlier = 0, 0
        while True:
            length = max(1, round(self.stage_steps * self.factor**stage))
            if isinstance(self.steps, int):
                rounds, done = math.ceil(length / self.steps), (number - earlier) * self.steps
            else:
                rounds, done, first = 0, 0, 0
                while first < length:
                    done = first if earlier + rounds == number else done
                    first += self.steps(earlier + rounds)
                    rounds += 1
            if number < earlier + rounds:
                return stage, done, length
            stage, earlier = stage + 1, earlier + rounds

    @remote
    def local(self, client: Client, x: torch.Tensor, y: torch.Tensor, stage: int, steps: int, first: bool) -> Pair:
        """Take proximal local steps, and add the iterates to the stage's sum."""
        lr = self.lr / self.factor**stage
        if first:
            self.join(client, x, stage)
        client.require(stage=stage)
        k = client.recall("x_0", "total", x=x, y=y)
        for _ in client.loop(steps, k):
            g_x, g_y = gradients(client, k.x, k.y, client.draw())
            k.x = (k.x + (lr / self.gamma) * k.x_0 - lr * g_x) / (1 + lr / self.gamma)
            k.y = client.project_y(k.y + lr * g_y)
            k.total = k.total + (k.x - k.x_0)
        client.keep(total=k.total, y=y)
        client.stamp(round=client.clock.round)
        return k.x - x, k.y - y

    @remote
    def join(self, client: Client, x_0: torch.Tensor, stage: int) -> torch.Tensor:
        """Keep the start of the stage, and 0 as the sum of the differences from it; nothing is sent."""
        client.keep(x_0=x_0, total=torch.zeros_like(x_0))
        client.stamp(stage=stage)
        return x_0[:, :0]

    @remote
    def mean_of_stage(self, client: Client, stage: int, length: int) -> torch.Tensor:
        """Return the mean of the client's iterates in the stage, minus the start of the stage."""
        client.require(stage=stage)
        return client.recall("total").total / length

    @remote
    def best(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Return the best y at x, on ``estimate_batches`` batches, minus the y at the start of the round."""
        client.require(round=client.clock.round)
        y = client.recall("y").y
        return client.best_y(x, client.draw(batch_size=client.worth(self.estimate_batches))) - y
