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

Sent: up d + p, down d + p. At the end of a stage another d up (with average), then d down and p up (where
the problem knows its best y). Kept on a client: x_0, and the sum
of the stage's x_k.

Departures from the paper: the original text could not be consulted; the rule is that of the method's descriptions. The
best alpha there is the mean score of a client's negatives minus that of its positives, averaged over clients; here it
is the maximiser of the mean of f_k on the batches, which is the same when clients have the same share of positives, and
defined when one has no positives at all. A problem that does not know its best y keeps the mean of the y_k. The last
round of a stage is shorter where I does not divide the stage. ``average = false`` goes on from the last iterate.
"""

from __future__ import annotations

import math

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.saddles import gradients
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import EqualSteps


class CoDA(Algorithm):
    """Stages of proximal local steps; the rate falls and the stages grow."""

    name = "coda"
    dual = True
    up = down = "d + p"
    full_participation = True

    lr: float = param(0.1, "learning rate of x and y in the first stage", above=0, search=RATES)
    steps: EqualSteps = param(10, "local steps per round, I, or an Interval")
    stage_steps: int = param(2000, "local steps of the first stage, T_0", least=1)
    factor: float = param(3.0, "by which the rate falls and the stages grow", least=1)
    gamma: float = param(500.0, "how far a stage may go from its start; the larger the farther", above=0)
    estimate_batches: int = param(10, "batches for the best y at the end of a stage", least=1)
    average: bool = param(True, "a stage ends in the mean of its iterates instead of the last one")

    @property
    def answers(self) -> dict[str, str]:
        """What clients answer: the mean over a stage starts from nothing that is sent."""
        return {"local": "x y", "best": "zero"} | ({"result": "point"} if self.average else {})

    def round(self, s: State, clients: Clients) -> State:
        """Average what the clients' steps led to; at the end of a stage, average over the stage and renew y."""
        stage, done, length = self.place(clients.clock.round)
        here = min(clients.steps_now(self.steps), length - done)
        x, y = clients.mean(self.local, s.x, s.y, self.lr / self.factor**stage, here, done == 0)
        if done + here == length:
            if self.average:
                x = clients.mean(self.result, length)
            if clients.problem.best_y is not None:
                y = clients.problem.projected(clients.mean(self.best, x))
        return s.replace(x=x, y=y)

    def place(self, number: int) -> tuple[int, int, int]:
        """Return the stage that a round is in, the steps of the stage done before it, and the stage's length."""
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

    def local(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, lr: float, steps: int, first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take proximal local steps, and add their points to the stage's sum."""
        x_0 = x if first else client.recall("x_0", x)
        total = torch.zeros_like(x) if first else client.recall("total", x)
        x, y, total = client.repeat(steps, self.step, x, y, total, x_0, lr)
        client.keep(x_0=x_0, total=total)
        return x, y

    def step(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, total: torch.Tensor, x_0: torch.Tensor, lr: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take one proximal step down in x and one step up in y."""
        g_x, g_y = gradients(client, x, y, client.draw())
        x = (x + (lr / self.gamma) * x_0 - lr * g_x) / (1 + lr / self.gamma)
        return x, client.project_y(y + lr * g_y), total + x

    def result(self, client: Client, length: int) -> torch.Tensor:
        """Return the mean of the client's points in the stage."""
        return client.recall("total", client.problem.x0.expand(len(client), -1)) / length

    def best(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Return the best y at x, on so many batches."""
        return client.best_y(x, client.draw(batch_size=client.worth(self.estimate_batches)))
