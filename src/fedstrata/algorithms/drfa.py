"""DRFA: distributionally robust federated averaging.

Deng, Kamani, Mahdavi: "Distributionally robust federated averaging", NeurIPS 2020, Algorithm 1.

Problem: min_x max_y sum_k y_k F_k(x), y on the simplex over the clients (``agnostic``).

    m clients drawn with probabilities y, with replacement; t' drawn from 1..tau, one for all of them
    x_k <- x;   tau times:  x_k <- x_k - lr grad F_k(x_k; batch)
    x <- mean of x_k after tau steps,   z <- mean of x_k after t' steps
    m clients drawn uniformly, without replacement:  v_k = (N / m) F_k(z; batch), 0 for the others
    y <- Pi[ y + tau dual_lr v ]

Sent: up 2*d + 1, down 2*d. In two exchanges: d down and 2d up, then d down and 1 up.

Departures from the paper: none known; the original text was not available, and the rule follows descriptions of the
method. The means are uniform whatever the run's weighting, since y acts through the sampling. A client drawn twice
counts twice, in the means and in the bytes. m is the size of the run's cohort.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import LOCAL_LR, RATES, WEIGHT_DECAY, decayed, own_loss
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import EqualSteps, Rate


class DRFA(Algorithm):
    """Local SGD on clients sampled by their dual weights, which are updated with the losses at a snapshot."""

    name = "drfa"
    dual = True
    mixture = True

    lr: Rate = LOCAL_LR
    dual_lr: Rate = param(0.01, "step size of the dual weights", above=0, search=RATES)
    steps: EqualSteps = param(5, "local steps per round, tau, or an Interval")
    weight_decay: float = WEIGHT_DECAY

    def round(self, s: State, clients: Clients) -> State:
        """Average models and snapshots of clients drawn by y, then update y with losses of clients drawn uniformly."""
        steps = clients.steps_now(self.steps)
        snapshot = clients.integer(1, steps)
        drawn = clients.choose(len(clients), probabilities=s.y.cpu())
        dx, dz = drawn.mean(self.local, s.x, snapshot, weighting="uniform")
        uniform = clients.choose(len(clients))
        v = torch.zeros_like(s.y)
        v[torch.from_numpy(uniform.cohort).to(v.device)] = (
            clients.total / len(uniform) * uniform.gather(self.loss, s.x + dz)
        )
        return State(s.x + dx, clients.project_y(s.y + steps * clients.rate(self.dual_lr) * v))

    @remote
    def local(self, client: Client, x: torch.Tensor, snapshot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Take local steps on the client's own loss; return the updates after all and after ``snapshot`` steps."""
        k = client.variables(x=x, z=x)
        for step in client.loop(self.steps, k):
            g = client.f_grads(k.x, client.draw(), own_loss(client))[0]
            k.x = k.x.sub(decayed(g, k.x, self.weight_decay), alpha=client.rate(self.lr))
            if step + 1 == snapshot:
                k.z = k.x
        return k.x - x, k.z - x

    @remote
    def loss(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Return the loss at the snapshot, on one batch: [C]."""
        return client.loss(x, client.draw(), own_loss(client))
