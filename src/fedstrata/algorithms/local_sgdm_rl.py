"""LocalSGDM-RL: FedAvg with momentum on the ratio loss, a cross-entropy with class weights from the server.

Wang, Xu, Wang, Zhu: "Addressing class imbalance in federated learning", AAAI 2021.

Problem: min_x M_k[ mean loss of a model on client k's data ], no inner level, no dual; classes, and some samples of
each on the server (``split(auxiliary=...)``, or ``data.auxiliary`` in a configuration file).

    on the server:
        D_c = the change of the last layer's matrix when x is trained on class c alone, as a client would train it
        a position of the matrix is class c's if D_c is the largest there and no other D exceeds 80 % of it in magnitude
        R_c = |sum of D_c| / |sum of the mean of the other D| over its positions; 10 if the divisor is 0, at most 5000
    on a client, from x_k = x, m = 0, repeat:
        m <- momentum m + grad (mean of w[class] loss)(x_k) + weight_decay x_k,    x_k <- x_k - lr m
    x <- M_k[x_k],   w_c <- 1 + 0.1 R_c for the next round (in the first round w = 1)

Sent: up d, down d + C. C is the number of classes.

Departures from the paper: the original text was not available; the rule follows descriptions of it and the authors'
code: weights are one round late, momenta restart in every round, D excludes biases, and the weighted loss is divided by
the batch size. A position where the largest change is exactly 0 belongs to its class if no other change is 0 there. The
samples that the server draws are counted as samples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import LOCAL_STEPS, RATES, WEIGHT_DECAY, decayed
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate, Steps
from fedstrata.problems.problem import Problem


class State(NamedTuple):
    """The model, and the weights of the classes."""

    x: torch.Tensor
    w: torch.Tensor


class LocalSGDMRL(Algorithm):
    """Momentum SGD on clients; the server computes class weights from each class's effect on the last layer."""

    name = "local_sgdm_rl"
    auxiliary = True

    lr: Rate = param(0.1, "learning rate", above=0, search=RATES)
    steps: Steps = LOCAL_STEPS
    momentum: float = param(0.9, "decay rate of the momentum", least=0, below=1, search=(0.1, 0.95))
    slope: float = param(0.1, "weight of a class is 1 + slope R", least=0)
    share: float = param(0.8, "largest change of other classes at a class's position, relative to its own", above=0)
    weight_decay: float = WEIGHT_DECAY

    @classmethod
    def solves(cls, problem: Problem) -> bool:
        """Whether the problem is the mean loss of a model, with samples that can be weighted."""
        plain = not problem.levels and not problem.dual
        return plain and problem.flat is not None and problem.takes_weights

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Give every class the weight 1."""
        return State(x, x.new_ones(clients.classes))

    def round(self, s: State, clients: Clients) -> State:
        """Compute the next weights on the server; average the clients' updates."""
        flat = clients.problem.flat
        assert flat is not None
        alone = clients.on_server(self.local, s.x, torch.ones_like(s.w))
        ratios = change_ratios(alone[:, flat.last_matrix()], self.share)
        return State(s.x + clients.mean(self.local, s.x, s.w), 1 + self.slope * ratios)

    @remote
    def local(self, client: Client, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Take momentum steps on the weighted loss."""
        k = client.variables(x=x, m=torch.zeros_like(x), w=w)
        for _ in client.loop(self.steps, k):
            batch = client.draw().weighted_by_class(k.w)
            k.m = self.momentum * k.m + decayed(client.grads(k.x, batch), k.x, self.weight_decay)
            k.x = k.x.sub(k.m, alpha=client.rate(self.lr))
        return k.x - x


def change_ratios(changes: torch.Tensor, share: float, empty: float = 10.0, cap: float = 5000.0) -> torch.Tensor:
    """Return R_c, [classes], from each class's changes of the last layer, [classes, positions]."""
    classes = len(changes)
    largest, owner = changes.max(0)
    others = changes.abs().scatter(0, owner[None], -1.0)
    # If the largest change is 0, the ratio is undefined: require that no other change is 0.
    owned = torch.where(largest == 0, others != 0, others <= share * largest.abs()).all(0)
    mine = owned & (owner == torch.arange(classes, device=changes.device)[:, None])
    sums = mine.to(changes) @ changes.T  # [class whose positions, class whose changes]
    own = sums.diagonal()
    rest = (sums - torch.diag(own)).sum(1) / (classes - 1)
    return torch.where(rest != 0, own.abs() / rest.abs(), empty).clamp(max=cap)
