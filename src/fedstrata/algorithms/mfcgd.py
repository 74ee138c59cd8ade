"""MFCGD: momentum-based federated compositional gradient descent.

Huang: "Faster adaptive momentum-based federated methods for distributed composition optimization", Algorithm 1 with
A = I, eqs. (7) to (10).

Problem: min_x M_k[ f_k( g_k(x) ) ], one level, a local inner mean, no dual; every client in every round.

    repeat q times, the last time on the server with the means of x_k and w_k (synchronisation):
        x_k <- x_k - eta gamma w_k
    and after each step, on fresh batches, from the client's own old point to the new one:
        h_k <- g(x_new) + (1 - alpha) (h_k - g(x_old))
        u_k <- Pi[ J(x_new) + (1 - beta) (u_k - J(x_old)) ]
        v_k <- Pi[ grad f(h_new) + (1 - varrho) (v_k - grad f(h_old)) ]
        w_k  = u_k^T v_k

Sent: up 2d, down d. Before the first round: down d. Kept on a client: x_k, h_k, u_k, v_k (or x_k, h_k, w_k).

Departures from the paper: ``jacobian = "product"`` is for inner functions whose Jacobian, d times r numbers, is too
large to keep (MAML has r = d). It replaces u and v by one STORM estimate of their product, w <- z(x_new, h_new) + (1 -
beta) (w - z(x_old, h_old)) with z(x, h) = J(x)^T grad f(h), has no projections, and uses beta for varrho; for a linear
g with one Jacobian and beta = varrho the two forms agree. "auto" stores the Jacobian where r = 1 or d r is at most
65,536. The projections, off by default, are in the Frobenius norm. w_1 is taken to be u_1^T v_1. Batches of any size
take the place of single samples; the first estimates use ``first_batches`` of them (the paper has q samples). The
update after a synchronisation needs the server's new model, so a client makes it on receipt, first thing in the next
round. The paper's output is a random iterate; here it is the last one, or with ``average`` the mean of the server's
iterates. A rate that follows the rounds, not the iterations, is read in the round of the update. ``cube_root`` counts
t from 0, the paper from 1: its n is this n - 1.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.estimators import (
    direction,
    first_estimates,
    kept_estimates,
    next_estimates,
    stores_jacobian,
    weights_now,
)
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import EqualSteps, Rate


class MFCGD(Algorithm):
    """Local steps along STORM estimates of the inner value, its Jacobian and the outer gradient."""

    name = "mfcgd"
    levels = range(1, 2)
    answers = {"first": "zero", "local": "x zero"}
    up, down = "2*d", "d"
    full_participation = True

    gamma: float = param(0.1, "step size, multiplied by eta", above=0, search=RATES)
    eta: Rate = param(1.0, "eta_t: 1 and constant weights, or the theorem's cube_root schedule", above=0)
    steps: EqualSteps = param(5, "q, local steps per round, the synchronisation among them, or an Interval")
    alpha: Rate = param(0.5, "weight of a fresh inner value; c_1 with weights = 'theorem'", above=0, search=(0.05, 1))
    beta: Rate = param(0.5, "weight of a fresh inner Jacobian; c_2", above=0, search=(0.05, 1))
    varrho: Rate = param(0.5, "weight of a fresh outer gradient; c_3", above=0, search=(0.05, 1))
    weights: str = param(
        "constant",
        "'constant': alpha, beta, varrho as they are; 'theorem': times eta_t^2; either way at most 1",
        choices=("constant", "theorem"),
    )
    jacobian: str = param("auto", "how the inner Jacobian is kept", choices=("auto", "exact", "product"))
    c_g: float = param(0.0, "radius that the inner Jacobian is projected into; 0 is none", least=0)
    c_f: float = param(0.0, "radius that the outer gradient is projected into; 0 is none", least=0)
    first_batches: int = param(0, "batches for the first estimates; 0 is as many as steps", least=0)
    average: bool = param(False, "return the mean of the server's iterates instead of the last one")

    def start(self, s: State, clients: Clients) -> State:
        """Let every client make its first estimates (lines 1 and 2)."""
        clients.mean(self.first, s.x, self.exact(clients))
        return s.replace(x_mean=s.x.clone()) if self.average else s

    def round(self, s: State, clients: Clients) -> State:
        """Average x and w and take the step with the means (lines 5 and 7)."""
        x, w = clients.mean(self.local, s.x, self.exact(clients))
        x = x - clients.rate(self.eta, after=clients.steps_now(self.steps) - 1) * self.gamma * w
        if not self.average:
            return s.replace(x=x)
        return s.replace(x=x, x_mean=s.x_mean + (x - s.x_mean) / (clients.clock.round + 1))

    def solution(self, s: State) -> State:
        """Return the last iterate, or the mean."""
        return s.replace(x=s.x_mean) if self.average else s

    def exact(self, clients: Clients) -> bool:
        """Whether clients store the inner Jacobian."""
        return stores_jacobian(clients, self.jacobian, (self.c_g, self.c_f))

    def first(self, client: Client, x: torch.Tensor, exact: bool) -> torch.Tensor:
        """Make the first estimates and keep them; nothing is sent."""
        client.keep(x=x, **first_estimates(client, x, exact, self.first_batches or client.steps_now(self.steps)))
        return x[:, :0]

    def local(self, client: Client, x: torch.Tensor, exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Renew the estimates at the server's new point, then step and renew, q - 1 times (lines 9 to 21)."""
        kept = kept_estimates(client, x, exact)
        x, _, kept = client.repeat(self.steps, self.iteration, x, client.recall("x", x), kept)
        client.keep(x=x, **kept)
        return x, direction(kept)

    def iteration(
        self, client: Client, x: torch.Tensor, old: torch.Tensor, kept: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Renew the estimates (lines 15 to 20), then step (line 11); the last step of a round is the server's."""
        if client.clock.iteration > 0:
            weights = weights_now(client, (self.alpha, self.beta, self.varrho), self.eta, self.weights)
            kept = next_estimates(client, old, x, kept, weights, (self.c_g, self.c_f))
        if client.clock.step == client.steps_now(self.steps) - 1:
            return x, old, kept
        return x - client.rate(self.eta) * self.gamma * direction(kept), x, kept
