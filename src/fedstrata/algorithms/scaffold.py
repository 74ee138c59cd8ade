"""SCAFFOLD: local SGD corrected by control variates.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic controlled averaging for federated learning",
ICML 2020, Algorithm 1.

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k <- x;   repeat K_k times:  x_k <- x_k - lr * (grad f_k(x_k; batch) - c_k + c)
    c_k' = grad f_k(x; another batch)                    (option I)
    c_k' = c_k - c + (x - x_k) / (K_k lr)                (option II, the default)
    x <- x + server_lr * M_k[x_k - x],    c <- c + (|S|/N) * M_k[c_k' - c_k],    c_k <- c_k'

Sent: up 2d, down 2d. Kept on a client: c_k.

Departures from the paper: with ``weighting = "samples"`` both means are weighted by samples and |S|/N becomes the
cohort's share of all samples, so that c stays the weighted mean of the c_k; the paper weights uniformly. The learning
rate is held for the round (option II needs that), whatever its schedule does within one. Weight decay is part of the
local objective, so it is part of the gradients and of c_k.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES, decayed
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import Rate, Steps
from fedstrata.problems.problem import Problem


class Scaffold(Algorithm):
    """Local SGD whose drift is corrected by what the other clients' gradients look like."""

    name = "scaffold"
    up = down = "2*d"
    answers = {"local": "zero zero"}

    lr: Rate = param(0.1, "local learning rate", above=0, search=RATES)
    steps: Steps = param(10, "local steps per round, or Epochs(e), or an Interval")
    server_lr: Rate = param(1.0, "server learning rate", above=0)
    option: str = param("II", "how a client renews its control variate", choices=("I", "II"))
    weight_decay: float = param(0.0, "L2 penalty on the local objective", least=0)

    def init(self, problem: Problem) -> State:
        """Start with the control variate at zero."""
        return State(x=problem.x0.clone(), c=torch.zeros_like(problem.x0))

    def round(self, s: State, clients: Clients) -> State:
        """Average the changes of models and control variates (lines 16, 17)."""
        dx, dc = clients.mean(self.local, s.x, s.c, clients.rate(self.lr))
        return s.replace(x=s.x + clients.rate(self.server_lr) * dx, c=s.c + clients.share * dc)

    def local(self, client: Client, x: torch.Tensor, c: torch.Tensor, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Take corrected steps, then renew c_k (lines 7 to 14)."""
        c_k = client.recall("c", torch.zeros_like(x))
        counts = torch.from_numpy(client.step_counts(self.steps)).to(x).unsqueeze(1)
        if self.option == "I":
            new = decayed(client.grads(x, client.draw(stream=1)), x, self.weight_decay)
        x_k = client.repeat(self.steps, lambda client, y, drift: self.step(client, y, drift, lr), x, c - c_k)
        if self.option == "II":
            new = c_k - c + (x - x_k) / (counts * lr)
        client.keep(c=new)
        return x_k - x, new - c_k

    def step(self, client: Client, x: torch.Tensor, drift: torch.Tensor, lr: float) -> torch.Tensor:
        """Take one corrected SGD step (line 10)."""
        g = decayed(client.grads(x, client.draw()), x, self.weight_decay)
        return x.sub(g + drift, alpha=lr)
