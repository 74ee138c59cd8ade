"""AdaMFCGD: MFCGD with an adaptive matrix.

Huang: "Faster adaptive momentum-based federated methods for distributed composition optimization", Algorithm 1,
eqs. (6) to (10).

Problem: min_x M_k[ f_k( g_k(x) ) ], one level, a local inner mean, no dual; every client in every round.

    repeat q times, the last time on the server with the means of x_k and w_k (synchronisation), after A was renewed:
        x_k <- x_k - eta gamma A^{-1} w_k
    and after each step the estimates h_k, u_k, v_k, w_k = u_k^T v_k follow as in MFCGD.
    A, at a synchronisation only:  a <- theta a + (1 - theta) wbar^2,  A = diag(sqrt(a) + rho)     (matrix = "adam")

Sent: up 2d, down 2d. With matrix = "norm", A is one number: down d + 1. Before the first round: up d (for
first_matrix = "average"), down d. Kept on a client: x_k, h_k, u_k, v_k (or x_k, h_k, w_k).

Departures from the paper: those of ``mfcgd``. The paper has "adam" and "norm"; "belief" and "amsgrad" are two of the
"many other" matrices it mentions, see ``matrices.py``. The paper does not say how A_1, which serves until the first
synchronisation, is made: ``first_matrix`` = "average" applies the rule to the mean of the first w_k, "accumulator"
takes a = 0, so A_1 = rho I, "identity" takes A_1 = I.
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
from fedstrata.algorithms.matrices import MATRICES, diagonal, first_memory, next_memory
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import EqualSteps, Rate
from fedstrata.problems.problem import Problem


class AdaMFCGD(Algorithm):
    """MFCGD whose steps are divided by an adaptive matrix, the same on every client between synchronisations."""

    name = "adamfcgd"
    levels = range(1, 2)
    up = "2*d"
    full_participation = True
    answers = {"first": "zero", "local": "x zero"}

    gamma: float = param(0.05, "step size, multiplied by eta", above=0, search=RATES)
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
    matrix: str = param("adam", "the adaptive matrix", choices=MATRICES)
    theta: Rate = param(0.9, "how much of the matrix is remembered", above=0, below=1)
    rho: float = param(
        0.1, "added to the matrix, its smallest entry; small ones make long steps where clients cancel out", above=0
    )
    first_matrix: str = param(
        "average", "the matrix before the first synchronisation", choices=("average", "accumulator", "identity")
    )
    jacobian: str = param("auto", "how the inner Jacobian is kept", choices=("auto", "exact", "product"))
    c_g: float = param(0.0, "radius that the inner Jacobian is projected into; 0 is none", least=0)
    c_f: float = param(0.0, "radius that the outer gradient is projected into; 0 is none", least=0)
    first_batches: int = param(0, "batches for the first estimates; 0 is as many as steps", least=0)
    average: bool = param(False, "return the mean of the server's iterates instead of the last one")

    @property
    def down(self) -> str:
        """What the server sends: x, and the diagonal of A."""
        return "d + 1" if self.matrix == "norm" else "2*d"

    def init(self, problem: Problem) -> State:
        """Start with an empty memory of the matrix."""
        return State(x=problem.x0.clone(), a=first_memory(self.matrix, problem.x0))

    def start(self, s: State, clients: Clients) -> State:
        """Let every client make its first estimates (lines 1 and 2)."""
        w = clients.mean(self.first, s.x, self.exact(clients))
        if self.first_matrix == "average":
            s = s.replace(a=next_memory(self.matrix, s.a, w, min(1.0, clients.rate(self.theta))))
        return s.replace(x_mean=s.x.clone()) if self.average else s

    def round(self, s: State, clients: Clients) -> State:
        """Average x and w, renew the matrix, and take the step with the means (lines 5 to 7)."""
        matrix = diagonal(self.matrix, s.a, self.rho)
        if clients.clock.round == 0 and self.first_matrix == "identity":
            matrix = torch.ones_like(matrix)
        x, w = clients.mean(self.local, s.x, matrix, self.exact(clients))
        last = clients.steps_now(self.steps) - 1
        a = next_memory(self.matrix, s.a, w, min(1.0, clients.rate(self.theta, after=last)))
        x = x - clients.rate(self.eta, after=last) * self.gamma * w / diagonal(self.matrix, a, self.rho)
        if not self.average:
            return s.replace(x=x, a=a)
        return s.replace(x=x, a=a, x_mean=s.x_mean + (x - s.x_mean) / (clients.clock.round + 1))

    def solution(self, s: State) -> State:
        """Return the last iterate, or the mean."""
        return s.replace(x=s.x_mean) if self.average else s

    def exact(self, clients: Clients) -> bool:
        """Whether clients store the inner Jacobian."""
        return stores_jacobian(clients, self.jacobian, (self.c_g, self.c_f))

    def first(self, client: Client, x: torch.Tensor, exact: bool) -> torch.Tensor:
        """Make the first estimates and keep them; send w_1 if A_1 is made of it."""
        estimates = first_estimates(client, x, exact, self.first_batches or client.steps_now(self.steps))
        client.keep(x=x, **estimates)
        return direction(estimates) if self.first_matrix == "average" else x[:, :0]

    def local(
        self, client: Client, x: torch.Tensor, matrix: torch.Tensor, exact: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Renew the estimates at the server's new point, then step and renew, q - 1 times (lines 9 to 21)."""
        kept = kept_estimates(client, x, exact)
        x, _, kept = client.repeat(self.steps, self.iteration, x, client.recall("x", x), kept, matrix)
        client.keep(x=x, **kept)
        return x, direction(kept)

    def iteration(
        self, client: Client, x: torch.Tensor, old: torch.Tensor, kept: dict[str, torch.Tensor], matrix: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Renew the estimates (lines 15 to 20), then step (line 11); the last step of a round is the server's."""
        if client.clock.iteration > 0:
            weights = weights_now(client, (self.alpha, self.beta, self.varrho), self.eta, self.weights)
            kept = next_estimates(client, old, x, kept, weights, (self.c_g, self.c_f))
        if client.clock.step == client.steps_now(self.steps) - 1:
            return x, old, kept
        return x - client.rate(self.eta) * self.gamma * direction(kept) / matrix, x, kept
