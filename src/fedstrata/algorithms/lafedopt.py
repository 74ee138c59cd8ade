"""LaFedOPT: an adaptive optimiser on every client, started anew each round, and a correction of its bias.

Wang, Xu, Garrett, Charles, Liu, Joshi: "Local adaptivity in federated learning: convergence and consistency",
arXiv 2106.02305, 2021; the correction as in its authors' program (google-research/federated, local_adaptivity).

Problem: min_x M_k[ f_k(x) ], no inner level, no dual.

    x_k, m_k, v_k, S_k, C_k <- x, 0, v0, 0, 0
    repeat:  g   = grad f_k(x_k; batch) + weight_decay * x_k
             m_k <- beta1 * m_k + (1 - beta1) * g
             v_k <- v_k + g^2                                        (adagrad, beta1 = 0)
                    beta2 * v_k + (1 - beta2) * g^2                  (adam)
                    v_k - (1 - beta2) * sign(v_k - g^2) * g^2        (yogi)
             P   = 1 / (sqrt(v_k) + eps)
             x_k <- x_k - lr * m_k * P
             S_k <- beta1 * S_k + (1 - beta1) * P;    C_k <- C_k + S_k
    joint:   Delta = M_k[(x_k - x) / C_k] / M_k[1 / C_k]
    local:   Delta = M_k[(x_k - x) / C_k]
    none:    Delta = M_k[x_k] - x
    x <- x + server_lr * Delta                                                        (server "sgd")
    x <- x + server_lr * m / (sqrt(v) + tau), m and v the moments of Delta            (server "adam")

Clients whose steps are long would draw the mean towards their own minima; dividing by C_k, what a constant gradient
would have been multiplied with, takes that away.

Sent: up 2d, down d. Without the joint correction: up d.

Departures from the paper: the optimisers have no bias correction (the program's Adam has one, which its P leaves out).
A client that diverges stops the run, where the program leaves it out of the mean. Means are weighted as the run says,
where the program weighs by samples.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.adaptive import adaptive_state, adaptive_step
from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES, decayed
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import Rate, Steps
from fedstrata.problems.oracles import Tensors
from fedstrata.problems.problem import Problem


class LaFedOPT(Algorithm):
    """A client's own Adagrad, Adam or Yogi, corrected for what its preconditioner does to the mean."""

    name = "lafedopt"
    down = "d"
    answers = {"local": "zero zero"}

    lr: Rate = param(1e-2, "local learning rate", above=0, search=(1e-4, 1e-1))
    steps: Steps = param(10, "local steps per round, or Epochs(e), or an Interval")
    optimizer: str = param("adam", "the clients' optimiser", choices=("adagrad", "adam", "yogi"))
    correction: str = param("joint", "what the server divides by", choices=("joint", "local", "none"))
    beta1: float = param(0.9, "memory of the first moment (not of adagrad)", least=0, below=1)
    beta2: float = param(0.99, "memory of the second moment (not of adagrad)", least=0, below=1)
    eps: float = param(1e-3, "adaptivity: smaller is more adaptive", above=0)
    v0: float = param(0.0, "where the second moment starts in each round", least=0)
    server: str = param("sgd", "the server's optimiser", choices=("sgd", "adam"))
    server_lr: Rate = param(1.0, "server learning rate", above=0, search=RATES)
    server_beta1: float = param(0.9, "memory of the server's first moment", least=0, below=1)
    server_beta2: float = param(0.99, "memory of the server's second moment", least=0, below=1)
    tau: float = param(1e-3, "adaptivity of the server: smaller is more adaptive", above=0)
    weight_decay: float = param(0.0, "L2 penalty on the local objective", least=0)

    @property
    def up(self) -> str:
        """What a client sends in a round."""
        return "2*d" if self.correction == "joint" else "d"

    def init(self, problem: Problem) -> State:
        """Start the server's moments at m = 0 and v = tau^2, where it has any."""
        return super().init(problem) if self.server == "sgd" else adaptive_state(problem, self.tau)

    def round(self, s: State, clients: Clients) -> State:
        """Correct the clients' mean change, and take the server's step along it."""
        answer = clients.mean(self.local, s.x)
        delta = answer[0]
        if self.correction == "joint":  # a channel may leave out an entry of all clients
            delta = torch.where(answer[1] > 0, delta / answer[1], 0)
        lr = clients.rate(self.server_lr)
        if self.server == "sgd":
            return s.replace(x=s.x + lr * delta)
        v = self.server_beta2 * s.v + (1 - self.server_beta2) * delta**2
        return adaptive_step(s, delta, v, self.server_beta1, lr, self.tau)

    def local(self, client: Client, x: torch.Tensor) -> Tensors:
        """Take the optimiser's steps from the server's model, and correct the change."""
        zero = torch.zeros_like(x)
        if self.correction == "none":
            x_k, _, _ = client.repeat(self.steps, self.step, x, zero, torch.full_like(x, self.v0))
            return (x_k - x,)
        x_k, _, _, _, c = client.repeat(self.steps, self.step, x, zero, torch.full_like(x, self.v0), zero, zero)
        return ((x_k - x) / c, 1 / c) if self.correction == "joint" else ((x_k - x) / c,)

    def step(self, client: Client, x: torch.Tensor, m: torch.Tensor, v: torch.Tensor, *sums: torch.Tensor) -> Tensors:
        """Take one step of the client's optimiser; ``sums`` are S and C, where they are needed."""
        lr, beta1 = client.rate(self.lr), 0.0 if self.optimizer == "adagrad" else self.beta1
        g = decayed(client.grads(x, client.draw()), x, self.weight_decay)
        m = torch.lerp(g, m, beta1)
        v = self.second_moment(v, g * g)
        p = 1 / (v.sqrt() + self.eps)
        client.report(v=v, rate=lambda: lr * p)
        x = x.addcmul(m, p, value=-lr)
        if not sums:
            return x, m, v
        s = torch.lerp(p, sums[0], beta1)
        return x, m, v, s, sums[1] + s

    def second_moment(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """Return the second moment after a gradient with this square."""
        if self.optimizer == "adagrad":
            return v + square
        if self.optimizer == "adam":
            return torch.lerp(square, v, self.beta2)
        return v - (1 - self.beta2) * torch.sign(v - square) * square
