"""FGDA and AdaFGDA: federated gradient descent ascent with variance-reduced estimates, and with adaptive matrices.

Huang, Wang, Li, Chen: "Adaptive federated minimax optimization with lower complexities", AISTATS 2024, Algorithm 1;
FGDA is A = B = I.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level; every client in every round.

    repeat q times, the last time on the server with the means of x_k, y_k, w_k, v_k, after A and B were updated:
        x_k <- x_k - eta gamma A^{-1} w_k,    y_k <- Pi[ y_k + eta lam B^{-1} v_k ]
    and after each step, on one fresh batch, from the client's own old point to the new one:
        w_k <- grad_x f(new) + (1 - beta)  (w_k - grad_x f(old))
        v_k <- grad_y f(new) + (1 - alpha) (v_k - grad_y f(old))
    after a synchronisation w_k and v_k are then averaged as well (two phases).
    A, at a synchronisation only:  a <- theta a + (1 - theta) wbar^2,  A = diag(sqrt(a) + rho)        (matrix = "adam")
    B likewise, from vbar; theta is varrho in the paper; see ``matrices.py`` for the other matrices.

Sent, per client and round:
    fgda                                                        up 3*(d + p)    down 2*(d + p)
    fgda, synchronisation = "single"                            up 2*(d + p)    down d + p
    adafgda                                                     up 3*(d + p)    down 3*(d + p)
    adafgda, matrix = "norm"                                    up 3*(d + p)    down 2*(d + p) + 2
    adafgda, matrix = "identity"                                up 3*(d + p)    down 2*(d + p)
    adafgda, synchronisation = "single"                         up 2*(d + p)    down 2*(d + p)
    adafgda, synchronisation = "single", matrix = "norm"        up 2*(d + p)    down d + p + 2
    adafgda, synchronisation = "single", matrix = "identity"    up 2*(d + p)    down d + p
    before the first round                                      up d + p        down d + p
In two exchanges: w, v, A, B down and x, y, w, v up, then x, y down and w, v up; in one with "single". Kept on a client:
x_k, y_k, w_k, v_k; with two phases, also the round of the last point it got from the server, and of its last local
steps. A client that missed one of the previous two exchanges cannot continue: with faults it is left out of the round,
and rejoins.

Departures from the paper: as printed, the estimates are updated only in the branch without synchronisation, so w and v
after a synchronisation are undefined. The proof needs them equal on all clients right after it (Lemma 11), each updated
from the client's own old point (Lemma 8). So the clients update them at the server's new point and average the result,
the second phase; the first estimates are averaged too. ``synchronisation = "single"`` skips both averages, which saves
an exchange. On a noise-free quadratic with heterogeneous clients, two phases reach the saddle point if alpha and beta
are 0, or decrease to 0 as in the theorem; constant weights above 0, and the single exchange, do not reach it. The
projection, of y + eta lam v, is not in the paper, where y is unconstrained. The text after Algorithm 1 has a minus in
the step of y; the algorithm has the plus. Batches of any size replace single samples; the first estimates use
``first_batches`` of them (the paper has q samples). The paper returns a random iterate; here it is the last one. A rate
that is scheduled by rounds, not iterations, is read in the round of the update. ``cube_root`` counts t from 0, the
paper from 1. The paper has the matrices "adam" and "belief"; "norm" and "amsgrad" are two of the "many other" ones it
mentions. It does not define A_1 and B_1, which are used until the first synchronisation; here ``first_matrix`` does.
The previous wbar of "belief" is that of the first phase; it starts at 0.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from torch import Tensor

from fedstrata.algorithms.algorithm import SHARES, Algorithm, param
from fedstrata.algorithms.descent import FIRST_BATCHES, RATES, WEIGHTS, Pair, Tensors, gradients
from fedstrata.algorithms.estimators import storm, weights_now
from fedstrata.algorithms.matrices import FIRST_MATRIX, MATRICES, RHO, THETA, Matrix, divided
from fedstrata.clients import Client, Clients, Variables, remote
from fedstrata.core.schedules import EqualSteps, Rate


class State(NamedTuple):
    """The point, the estimates w and v of its gradients, and the accumulators of A and B."""

    x: Tensor
    y: Tensor
    w: Tensor
    v: Tensor
    a: Tensor
    b: Tensor


class FGDA(Algorithm):
    """Local descent ascent along STORM estimates of both gradients, synchronised with the points."""

    name = "fgda"
    dual = True
    full_participation = True
    hidden: ClassVar[tuple[str, ...]] = ("matrix", "theta", "rho", "first_matrix")

    gamma: float = param(0.1, "step size of x, multiplied by eta", above=0, search=RATES)
    lam: float = param(0.1, "lambda, step size of y, multiplied by eta", above=0, search=RATES)
    eta: Rate = param(1.0, "eta_t: 1 with constant weights, or the theorem's cube_root schedule", above=0)
    steps: EqualSteps = param(10, "q, local steps per round including the synchronisation, or an Interval")
    alpha: Rate = param(0.5, "weight of a fresh gradient in y; c_1 with weights = 'theorem'", least=0, search=SHARES)
    beta: Rate = param(0.5, "weight of a fresh gradient in x; c_2", least=0, search=SHARES)
    weights: str = WEIGHTS
    matrix: str = param("identity", "the matrices A and B", choices=tuple(MATRICES))
    theta: Rate = THETA
    rho: float = RHO
    first_matrix: str = FIRST_MATRIX
    synchronisation: str = param(
        "two_phase",
        "'two_phase' also averages the estimates; 'single' saves that exchange",
        choices=("two_phase", "single"),
    )
    first_batches: int = FIRST_BATCHES

    def start(self, x: Tensor, y: Tensor, clients: Clients) -> State:
        """Compute and average the first estimates."""
        w, v = clients.mean(self.first, x, y)  # lines 1-2
        return State(x, y, w, v, self.rule.start(x, w, clients), self.rule.start(y, v, clients))

    def round(self, s: State, clients: Clients) -> State:
        """Run the local steps, synchronise, then average the estimates at the new point."""
        rule, first = self.rule, clients.clock.round == 0
        A, B = rule.diagonal(s.a, first), rule.diagonal(s.b, first)  # line 13: frozen between synchronisations
        if self.synchronisation == "single":
            dx, dy, w, v = clients.mean(self.catch_up, s.x, s.y, A, B)
        else:
            dx, dy, dw, dv = clients.mean(self.local, s.w, s.v, A, B)  # lines 10-16, then 5
            w, v = s.w + dw, s.v + dv
        last = clients.steps_now(self.steps) - 1
        a, b = rule.update(s.a, w, clients, last), rule.update(s.b, v, clients, last)  # line 6
        A, B = rule.diagonal(a), rule.diagonal(b)
        eta = clients.rate(self.eta, after=last)
        x, y = self.move(clients, eta, s.x + dx, s.y + dy, w, v, A, B)  # lines 7-8
        if self.synchronisation == "two_phase":
            w, v = clients.mean(self.refresh, x, y)  # lines 14-16, at the server's point
        return State(x, y, w, v, a, b)

    def rejoin(self, s: State, clients: Clients) -> None:
        """Recompute the estimates at the current point."""
        clients.restore(self.first, s.x, s.y)

    @property
    def rule(self) -> Matrix:
        """The rule for A and B."""
        return MATRICES[self.matrix](self.theta, self.rho, self.first_matrix)

    def move(
        self, on: Client | Clients, eta: float, x: Tensor, y: Tensor, w: Tensor, v: Tensor, A: Tensor, B: Tensor
    ) -> Pair:
        """Descend in x and ascend in y: lines 7-8 on the server, 11-12 on a client."""
        return x - eta * self.gamma * divided(w, A), on.project_y(y + eta * self.lam * divided(v, B))

    def follow(self, client: Client, k: Variables, x: Tensor, y: Tensor, ago: int = 0) -> None:
        """Move to (x, y) and update the estimates on one fresh batch (lines 14-16)."""
        alpha, beta = weights_now(client, (self.alpha, self.beta), self.eta, self.weights, ago)
        batch = client.draw()
        (w_new, v_new), (w_old, v_old) = gradients(client, x, y, batch), gradients(client, k.x, k.y, batch)
        k.w, k.v = storm(k.w, w_new, w_old, beta), storm(k.v, v_new, v_old, alpha)
        k.x, k.y = x, y

    @remote
    def first(self, client: Client, x: Tensor, y: Tensor) -> Pair:
        """Return the first estimates, and keep them with the point."""
        batches = self.first_batches or client.steps_now(self.steps)
        w, v = gradients(client, x, y, client.draw(batch_size=client.worth(batches)))
        client.keep(x=x, y=y, w=w, v=v)
        client.stamp(point=client.clock.round + 1)
        return w, v

    @remote
    def local(self, client: Client, w: Tensor, v: Tensor, A: Tensor, B: Tensor) -> Tensors:
        """Take q - 1 steps from the server's last point, which each client kept."""
        client.require(point=client.clock.round)
        k = client.recall("x", "y", w=w, v=v)
        x, y = k.x, k.y
        for _ in client.loop(client.steps_now(self.steps) - 1, k):
            eta = client.rate(self.eta)
            self.follow(client, k, *self.move(client, eta, k.x, k.y, k.w, k.v, A, B))
        client.keep(k)
        client.stamp(local=client.clock.round)
        return k.x - x, k.y - y, k.w - w, k.v - v

    @remote
    def refresh(self, client: Client, x: Tensor, y: Tensor) -> Pair:
        """Return the estimates at the server's new point, from the client's own old point."""
        client.require(local=client.clock.round)
        k = client.recall("x", "y", "w", "v")
        for _ in client.loop(1, k):
            self.follow(client, k, x, y)
        client.keep(x=x, y=y)
        client.stamp(point=client.clock.round + 1)
        return k.w, k.v

    @remote
    def catch_up(self, client: Client, x: Tensor, y: Tensor, A: Tensor, B: Tensor) -> Tensors:
        """Refresh the estimates at the server's new point, then take q - 1 steps, in one exchange."""
        k = client.recall("x", "y", "w", "v")
        to, last = (x, y), client.steps_now(self.steps) - 1
        for step in client.loop(self.steps, k):
            if not client.first:
                self.follow(client, k, *to, ago=1)
            if step < last:
                to = self.move(client, client.rate(self.eta), k.x, k.y, k.w, k.v, A, B)
        client.keep(k)
        return k.x - x, k.y - y, k.w, k.v


class AdaFGDA(FGDA):
    """FGDA with steps divided by adaptive matrices, which all clients share between synchronisations."""

    name = "adafgda"
    defaults = {"matrix": "adam", "gamma": 0.01, "lam": 0.01}
    hidden = ()
