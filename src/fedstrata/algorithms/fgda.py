"""FGDA: federated gradient descent ascent with variance-reduced estimates.

Huang, Wang, Li, Chen: "Adaptive federated minimax optimization with lower complexities", AISTATS 2024, Algorithm 1 with
A = B = I.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level; every client in every round.

    repeat q times, the last time on the server with the means of x_k, y_k, w_k, v_k (synchronisation):
        x_k <- x_k - eta gamma w_k,    y_k <- Pi[ y_k + eta lam v_k ]
    and after each step, on one fresh batch, from the client's own old point to the new one:
        w_k <- grad_x f(new) + (1 - beta)  (w_k - grad_x f(old))
        v_k <- grad_y f(new) + (1 - alpha) (v_k - grad_y f(old))
    after a synchronisation w_k and v_k are then averaged as well (two phases).

Sent: up 3*(d + p), down 2*(d + p). In two exchanges: down w, v, up x, y, w, v; then down x, y, up w, v. With
synchronisation = "single" one exchange: up 2*(d + p), down d + p. Before the first round: down and up d + p. Kept on a
client: x_k, y_k, w_k, v_k.

Departures from the paper: as printed, the update of the estimates stands in the branch without synchronisation, so
what w and v are after one is open. The proof needs them equal on all clients right after it (Lemma 11), and each to
come from the client's own old point (Lemma 8): so the clients make the update at the server's new point and average it,
the second phase; the first estimates are averaged too. ``synchronisation = "single"`` leaves both averages out, which
saves an exchange. On a noise-free quadratic with heterogeneous clients two phases reach the saddle when alpha and beta
are 0, or fall to 0 as the theorem's do; constant weights above 0, and the single exchange, stop short of it. The
projection is not in the paper, where y is free; it is of y + eta lam v. The text after Algorithm 1 has a minus in the
step of y; the algorithm has the plus. Batches of any size take the place of single samples; the first estimates use
``first_batches`` of them (the paper has q samples). The paper's output is a random iterate; here it is the last one. A
rate that follows the rounds, not the iterations, is read in the round of the update. ``cube_root`` counts t from 0, the
paper from 1.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.estimators import weights_now
from fedstrata.algorithms.saddles import Pair, down_up, first_estimates, kept_estimates, storm_pair
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import EqualSteps, Rate


class FGDA(Algorithm):
    """Local descent ascent along STORM estimates of both gradients, synchronised with the points."""

    name = "fgda"
    dual = True
    full_participation = True

    gamma: float = param(0.1, "step size of x, multiplied by eta", above=0, search=RATES)
    lam: float = param(0.1, "lambda, step size of y, multiplied by eta", above=0, search=RATES)
    eta: Rate = param(1.0, "eta_t: 1 and constant weights, or the theorem's cube_root schedule", above=0)
    steps: EqualSteps = param(10, "q, local steps per round, the synchronisation among them, or an Interval")
    alpha: Rate = param(0.5, "weight of a fresh gradient in y; c_1 with weights = 'theorem'", least=0, search=(0.05, 1))
    beta: Rate = param(0.5, "weight of a fresh gradient in x; c_2", least=0, search=(0.05, 1))
    weights: str = param(
        "constant",
        "'constant': alpha and beta as they are; 'theorem': times eta_t^2; either way at most 1",
        choices=("constant", "theorem"),
    )
    synchronisation: str = param(
        "two_phase",
        "'two_phase' averages the estimates too; 'single' saves that exchange",
        choices=("two_phase", "single"),
    )
    first_batches: int = param(0, "batches for the first estimates; 0 is as many as steps", least=0)

    @property
    def answers(self) -> dict[str, str]:
        """What clients answer: two phases start from points that only the clients keep."""
        if self.synchronisation == "single":
            return {"first": "zero zero", "renew_and_local": "x y zero zero"}
        return {"first": "zero zero", "local": "point point w v", "renew": "zero zero"}

    @property
    def up(self) -> str:
        """What a client sends in a round."""
        return "3*(d + p)" if self.synchronisation == "two_phase" else "2*(d + p)"

    @property
    def down(self) -> str:
        """What the server sends in a round."""
        return "2*(d + p)" if self.synchronisation == "two_phase" else "d + p"

    def start(self, s: State, clients: Clients) -> State:
        """Let every client make its first estimates, and average them (lines 1 and 2)."""
        w, v = clients.mean(self.first, s.x, s.y)
        return s.replace(w=w, v=v)

    def round(self, s: State, clients: Clients) -> State:
        """Average, step with the means (lines 5 to 8), then average the estimates at the new point."""
        if self.synchronisation == "single":
            x, y, w, v = clients.mean(self.renew_and_local, s.x, s.y)
        else:
            x, y, w, v = clients.mean(self.local, s.w, s.v)
        eta = clients.rate(self.eta, after=clients.steps_now(self.steps) - 1)
        x, y = x - eta * self.gamma * w, clients.problem.projected(y + eta * self.lam * v)
        if self.synchronisation == "two_phase":
            w, v = clients.mean(self.renew, x, y)
        return s.replace(x=x, y=y, w=w, v=v)

    def first(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> Pair:
        """Make the first estimates, and keep them with the point."""
        return first_estimates(client, x, y, self.first_batches or client.steps_now(self.steps))

    def local(self, client: Client, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Step and renew the estimates, q - 1 times from the server's last point (lines 10 to 16)."""
        x, y = client.recall("x", w), client.recall("y", v)
        steps = client.steps_now(self.steps)
        if steps > 1:
            x, y, w, v = client.repeat(steps - 1, self.step, x, y, w, v)
        client.keep(x=x, y=y, w=w, v=v)
        return x, y, w, v

    def renew(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> Pair:
        """Renew the estimates from the client's own old point to the server's new one (lines 14 to 16)."""
        w, v = client.repeat(1, self.estimate, *kept_estimates(client, x, y), x, y)
        client.keep(x=x, y=y)
        return w, v

    def step(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, *estimates: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Step (lines 11, 12), then renew the estimates (lines 14 to 16)."""
        new = self.move(client, (x, y), estimates)
        return (*new, *self.estimate(client, *estimates, x, y, *new))

    def move(self, client: Client, point: Pair, estimates: tuple[torch.Tensor, ...]) -> Pair:
        """Step down in x and up in y (lines 11, 12)."""
        eta = client.rate(self.eta)
        return down_up(client, *point, (estimates[0], estimates[1]), (eta * self.gamma, eta * self.lam))

    def estimate(self, client: Client, *vectors: torch.Tensor, ago: int = 0) -> Pair:
        """Renew w and v after the step from the old x and y to the new ones: the six ``vectors`` (lines 14 to 16)."""
        w, v, x_old, y_old, x, y = vectors
        weights = weights_now(client, (self.alpha, self.beta), self.eta, self.weights, ago)
        return storm_pair(client, (x_old, y_old), (x, y), (w, v), weights)

    def renew_and_local(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Do both in one exchange: renew at the server's new point on receipt, then step and renew, q - 1 times."""
        x, y, w, v, _, _ = client.repeat(self.steps, self.renew_and_step, x, y, *kept_estimates(client, x, y))
        client.keep(x=x, y=y, w=w, v=v)
        return x, y, w, v

    def renew_and_step(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Renew the estimates, then step; the last step of a round is the server's."""
        w, v, x_old, y_old = others
        if client.clock.iteration > 0:
            w, v = self.estimate(client, w, v, x_old, y_old, x, y, ago=1)
        if client.clock.step == client.steps_now(self.steps) - 1:
            return x, y, w, v, x_old, y_old
        return (*self.move(client, (x, y), (w, v)), w, v, x, y)
