"""ComFedL: local compositional gradient steps, averaged.

Huang, Li, Huang: "Compositional federated learning: applications in distributionally robust averaging and meta
learning", arXiv 2106.11264, Algorithm 1. The paper calls the inner function f and the outer one g; here g is inside.

Problem: min_x M_k[ f_k( g_k(x) ) ], any number K >= 1 of levels, a local inner mean, no dual.

    x_k <- x;   repeat:  u = g_k(x_k; inner batch),  v = grad f_k(u; outer batch)
                         x_k <- x_k - lr * J_k(x_k; inner batch)^T v
    x   <- M_k[x_k]

Sent, per client and round:
    comfedl                                                                  up d        down d
    comfedl (f weights losses)                                               up d + 1    down d + 1
    comfedl (f weights losses), normalise = false                            up d        down d
    comfedl (f weights losses), before the first round                       up 1        down d
    comfedl (f weights losses), normalise = false, before the first round    up 0        down 0
f weights losses in ``robust`` and ``damaml``.

Departures from the paper: with more than one level, every level has its own batch and the Jacobians are chained. The
mean inside exp is over a minibatch, as printed, so the direction is biased for small inner batches. ``normalise`` (on
by default, only for problems that weight losses): v is the client's weight, exp(loss / gamma) up to a constant. As
printed, the weights at the start are 200 for gamma = 0.5 on ten classes, and 1e11 for gamma = 0.1, where the run
diverges. Here a step uses v / s, capped at the number of clients in the cohort, which exact weights of a uniform mean
never exceed; s is the mean of v over the clients in the previous round. So the weights average to about one: this is
the gradient of the paper's eq. (5), gamma log M_k[exp(loss_k / gamma)], of which eq. (6) omits the logarithm. (With a
link other than exp it is the gradient of eq. (6) times a common factor.) ``normalise = false`` is the printed
algorithm.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import ANY_LEVELS, Algorithm, param
from fedstrata.algorithms.descent import RATES
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import Rate, Steps

TINY_WEIGHT = 1e-30
"""A mean weight below this is close to underflow in single precision."""


class State(NamedTuple):
    """The point, and the clients' mean weight in the last round, empty without weights."""

    x: torch.Tensor
    weight: torch.Tensor


class ComFedL(Algorithm):
    """Local SGD on a composition, with the inner value and its Jacobian on the same batch."""

    name = "comfedl"
    levels = ANY_LEVELS

    lr: Rate = param(0.1, "local learning rate, eta", above=0, search=RATES)
    steps: Steps = param(5, "local steps per round, tau, or Epochs(e), or an Interval")
    normalise: bool = param(
        True, "normalise the clients' weights to a mean of about one, for problems that weight losses"
    )

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Ask for the mean weight at the starting point, if there are weights."""
        weighted = self.normalise and clients.problem.weighs
        return State(x, clients.mean(self.first_weight, x) if weighted else x[:0])

    def round(self, s: State, clients: Clients) -> State:
        """Average the clients' models (line 20), and their weights if the steps are normalised."""
        if not len(s.weight):
            return s._replace(x=s.x + clients.mean(self.local, s.x))
        dx, change = clients.mean(self.local_normalised, s.x, s.weight, len(clients))
        weight = s.weight + change
        if float(weight) < TINY_WEIGHT:
            warnings.warn(
                f"The clients' mean weight is {float(weight):.1g}: their losses are so far below the shift that the "
                "weights will soon vanish and training will stall. Use a larger gamma.",
                stacklevel=2,
            )
        return State(s.x + dx, weight)

    @remote
    def local(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Take local steps (lines 6 to 17)."""
        k = client.variables(x=x.clone())
        for _ in client.loop(self.steps, k):
            client.descend_chain(k.x, client.draw_all(), client.rate(self.lr))
        return k.x - x

    @remote
    def first_weight(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Return grad f at the starting point: [C, 1]."""
        return client.chain(x, client.draw_all()).outer_grads[0]

    @remote
    def local_normalised(
        self, client: Client, x: torch.Tensor, weight: torch.Tensor, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take steps with weights divided by ``weight``, capped at ``most``; also return the mean weight's update."""
        counts = torch.from_numpy(client.step_counts(self.steps)).to(x).unsqueeze(1)
        tiny = torch.finfo(x.dtype).tiny
        k = client.variables(x=x.clone(), total=torch.zeros_like(weight), inverse=1 / weight.clamp(min=tiny))

        def capped(v: torch.Tensor) -> torch.Tensor:
            return torch.minimum(k.inverse, most / v.clamp(min=tiny))

        for _ in client.loop(self.steps, k):
            v = client.descend_chain(k.x, client.draw_all(), client.rate(self.lr), capped)
            k.total = k.total + v
        return k.x - x, k.total / counts - weight
