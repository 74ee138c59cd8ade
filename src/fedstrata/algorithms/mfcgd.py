"""MFCGD and AdaMFCGD: momentum-based federated compositional gradient descent, and with an adaptive matrix.

Huang: "Faster adaptive momentum-based federated methods for distributed composition optimization", Algorithm 1,
eqs. (6) to (10); MFCGD is A = I.

Problem: min_x M_k[ f_k( g_k(x) ) ], one level, a local inner mean, no dual; every client in every round.

    repeat q times, the last time on the server with the means of x_k and w_k (synchronisation), after A was updated:
        x_k <- x_k - eta gamma A^{-1} w_k
    and after each step, on fresh batches, from the client's own old point to the new one:
        h_k <- g(x_new) + (1 - alpha) (h_k - g(x_old))
        u_k <- Pi[ J(x_new) + (1 - beta) (u_k - J(x_old)) ]
        v_k <- Pi[ grad f(h_new) + (1 - varrho) (v_k - grad f(h_old)) ]
        w_k  = u_k^T v_k
    A, at a synchronisation only:  a <- theta a + (1 - theta) wbar^2,  A = diag(sqrt(a) + rho)     (matrix = "adam")
    see ``matrices.py`` for the other matrices

Sent, per client and round:
    mfcgd                                                             up 2*d    down d
    adamfcgd                                                          up 2*d    down 2*d
    adamfcgd, matrix = "norm"                                         up 2*d    down d + 1
    adamfcgd, matrix = "identity"                                     up 2*d    down d
    mfcgd, before the first round                                     up 0      down d
    adamfcgd, before the first round                                  up d      down d
    adamfcgd, matrix = "identity", before the first round             up 0      down d
    adamfcgd, first_matrix = "accumulator", before the first round    up 0      down d
    adamfcgd, first_matrix = "identity", before the first round       up 0      down d
Kept on a client: x_k, h_k, u_k, v_k, or x_k, h_k, w_k.

Departures from the paper: ``jacobian = "product"`` is for inner functions whose Jacobian, d times r numbers, is too
large to keep (MAML has r = d). It replaces u and v by one STORM estimate of their product, w <- z(x_new, h_new) + (1 -
beta) (w - z(x_old, h_old)) with z(x, h) = J(x)^T grad f(h), has no projections, and uses beta for varrho; for a linear
g with one Jacobian and beta = varrho the two forms agree. "auto" stores the Jacobian where r = 1 or d r is at most
65,536. The projections, off by default, are in the Frobenius norm. w_1 is taken to be u_1^T v_1. Batches of any size
replace single samples; the first estimates use ``first_batches`` of them (the paper has q samples). The update after a
synchronisation needs the server's new model, so a client makes it at the start of the next round. The paper returns a
random iterate; here it is the last one, or with ``average`` the mean of the server's iterates. A rate that is scheduled
by rounds, not iterations, is read in the round of the update. ``cube_root`` counts t from 0, the paper from 1: its n is
this n - 1. The paper has the matrices "adam" and "norm"; "belief" and "amsgrad" are two of the "many other" ones it
mentions. It does not define A_1, which is used until the first synchronisation; here ``first_matrix`` does.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from fedstrata.algorithms.algorithm import SHARES, Algorithm, param
from fedstrata.algorithms.descent import FIRST_BATCHES, RATES, WEIGHTS
from fedstrata.algorithms.estimators import direction, estimate_first, estimate_next, stores_jacobian, weights_now
from fedstrata.algorithms.matrices import FIRST_MATRIX, MATRICES, RHO, THETA, Matrix, divided
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import EqualSteps, Rate


class State(NamedTuple):
    """The point, the accumulator of A, and the mean of the iterates, empty unless it is the solution."""

    x: torch.Tensor
    a: torch.Tensor
    mean: torch.Tensor


class MFCGD(Algorithm):
    """Local steps along STORM estimates of the inner value, its Jacobian and the outer gradient."""

    name = "mfcgd"
    levels = range(1, 2)
    full_participation = True
    hidden: ClassVar[tuple[str, ...]] = ("matrix", "theta", "rho", "first_matrix")

    gamma: float = param(0.1, "step size, multiplied by eta", above=0, search=RATES)
    eta: Rate = param(1.0, "eta_t: 1 with constant weights, or the theorem's cube_root schedule", above=0)
    steps: EqualSteps = param(5, "q, local steps per round including the synchronisation, or an Interval")
    alpha: Rate = param(0.5, "weight of a fresh inner value; c_1 with weights = 'theorem'", above=0, search=SHARES)
    beta: Rate = param(0.5, "weight of a fresh inner Jacobian; c_2", above=0, search=SHARES)
    varrho: Rate = param(0.5, "weight of a fresh outer gradient; c_3", above=0, search=SHARES)
    weights: str = WEIGHTS
    matrix: str = param("identity", "the matrix A", choices=tuple(MATRICES))
    theta: Rate = THETA
    rho: float = RHO
    first_matrix: str = FIRST_MATRIX
    jacobian: str = param("auto", "how the inner Jacobian is stored", choices=("auto", "exact", "product"))
    c_g: float = param(0.0, "radius of the ball that the inner Jacobian is projected onto; 0 for none", least=0)
    c_f: float = param(0.0, "radius of the ball that the outer gradient is projected onto; 0 for none", least=0)
    first_batches: int = FIRST_BATCHES
    average: bool = param(False, "return the mean of the server's iterates instead of the last iterate")

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Compute the first estimates on every client (lines 1 and 2)."""
        w = clients.mean(self.first, x, self.exact(clients))
        return State(x, self.rule.start(x, w, clients), x if self.average else x[:0])

    def round(self, s: State, clients: Clients) -> State:
        """Average x and w, update the matrix, and take the step with the means (lines 5 to 7)."""
        A = self.rule.diagonal(s.a, first=clients.clock.round == 0)
        dx, w = clients.mean(self.local, s.x, A, self.exact(clients))
        last = clients.steps_now(self.steps) - 1
        a = self.rule.update(s.a, w, clients, last)  # line 6
        A = self.rule.diagonal(a)
        x = s.x + dx - clients.rate(self.eta, after=last) * self.gamma * divided(w, A)  # line 7
        mean = s.mean + (x - s.mean) / (clients.clock.round + 1) if self.average else s.mean
        return State(x, a, mean)

    def rejoin(self, s: State, clients: Clients) -> None:
        """Recompute the estimates at the current point."""
        clients.restore(self.first, s.x, self.exact(clients))

    def solution(self, s: State) -> tuple[torch.Tensor, None]:
        """Return the last iterate, or the mean."""
        return s.mean if self.average else s.x, None

    @property
    def rule(self) -> Matrix:
        """The rule for A."""
        return MATRICES[self.matrix](self.theta, self.rho, self.first_matrix)

    def exact(self, clients: Clients) -> bool:
        """Whether clients store the inner Jacobian."""
        return stores_jacobian(clients, self.name, self.jacobian, (self.c_g, self.c_f))

    @remote
    def first(self, client: Client, x: torch.Tensor, exact: bool) -> torch.Tensor:
        """Compute and keep the first estimates; return w_1 if A_1 is computed from it."""
        k = client.variables(x=x)
        estimate_first(client, k, exact, self.first_batches or client.steps_now(self.steps))
        client.keep(k)
        needed = self.matrix != "identity" and self.first_matrix == "average"
        return direction(k, exact) if needed else x[:, :0]

    @remote
    def local(self, client: Client, x: torch.Tensor, A: torch.Tensor, exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Estimate at the server's new point, then step and estimate, q - 1 times (lines 9 to 21)."""
        k = client.recall("x", "h", *(("u", "v") if exact else ("w",)))
        to, last = x, client.steps_now(self.steps) - 1
        for step in client.loop(self.steps, k):
            if not client.first:
                weights = weights_now(client, (self.alpha, self.beta, self.varrho), self.eta, self.weights)
                estimate_next(client, k, to, exact, weights, (self.c_g, self.c_f))  # lines 15 to 20
            k.x = to
            if step < last:  # the last step of a round is the server's
                to = k.x - client.rate(self.eta) * self.gamma * divided(direction(k, exact), A)  # line 11
        client.keep(k)
        return k.x - x, direction(k, exact)


class AdaMFCGD(MFCGD):
    """MFCGD with steps divided by an adaptive matrix, which all clients share between synchronisations."""

    name = "adamfcgd"
    defaults = {"matrix": "adam", "gamma": 0.05}
    hidden = ()
