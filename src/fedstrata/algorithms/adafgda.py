"""AdaFGDA: FGDA with adaptive matrices.

Huang, Wang, Li, Chen: "Adaptive federated minimax optimization with lower complexities", AISTATS 2024, Algorithm 1.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level; every client in every round.

    repeat q times, the last time on the server with the means of x_k, y_k, w_k, v_k, after A and B were renewed:
        x_k <- x_k - eta gamma A^{-1} w_k,    y_k <- Pi[ y_k + eta lam B^{-1} v_k ]
    and after each step the estimates w_k and v_k follow as in FGDA, in two phases at a synchronisation.
    A, at a synchronisation only:  a <- theta a + (1 - theta) wbar^2,  A = diag(sqrt(a) + rho)        (matrix = "adam")
                                   a <- theta a + (1 - theta) (wbar - previous wbar)^2              (matrix = "belief")
    B likewise, from vbar.

Sent: up 3*(d + p), down 3*(d + p). In two exchanges: down w, v, A, B, up x, y, w, v; then down x, y, up w, v. With
synchronisation = "single" one exchange: up 2*(d + p), down 2*(d + p). With matrix = "norm", A and B are one number
each: down 2*(d + p) + 2, or d + p + 2. Before the first round: down and up d + p. Kept on a client: as for FGDA.

Departures from the paper: those of ``fgda``. "norm" and "amsgrad" are two of the "many other" matrices it mentions, see
``matrices.py``. The paper does not say how A_1 and B_1, which serve until the first synchronisation, are made:
``first_matrix`` = "average" applies the rule to the means of the first estimates, "accumulator" takes a = b = 0, so
A_1 = B_1 = rho I, "identity" takes I. The previous wbar of "belief" is that of the first phase; it starts at 0.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.estimators import weights_now
from fedstrata.algorithms.matrices import MATRICES, diagonal, first_memory, next_memory
from fedstrata.algorithms.saddles import Pair, down_up, first_estimates, kept_estimates, storm_pair
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import EqualSteps, Rate
from fedstrata.problems.problem import Problem


class AdaFGDA(Algorithm):
    """FGDA whose steps are divided by adaptive matrices, the same on every client between synchronisations."""

    name = "adafgda"
    dual = True
    full_participation = True

    gamma: float = param(0.01, "step size of x, multiplied by eta", above=0, search=RATES)
    lam: float = param(0.01, "lambda, step size of y, multiplied by eta", above=0, search=RATES)
    eta: Rate = param(1.0, "eta_t: 1 and constant weights, or the theorem's cube_root schedule", above=0)
    steps: EqualSteps = param(10, "q, local steps per round, the synchronisation among them, or an Interval")
    alpha: Rate = param(0.5, "weight of a fresh gradient in y; c_1 with weights = 'theorem'", least=0, search=(0.05, 1))
    beta: Rate = param(0.5, "weight of a fresh gradient in x; c_2", least=0, search=(0.05, 1))
    weights: str = param(
        "constant",
        "'constant': alpha and beta as they are; 'theorem': times eta_t^2; either way at most 1",
        choices=("constant", "theorem"),
    )
    matrix: str = param("adam", "the adaptive matrices", choices=MATRICES)
    theta: Rate = param(0.9, "how much of the matrices is remembered, varrho in the paper", above=0, below=1)
    rho: float = param(0.1, "added to the matrices, their smallest entry", above=0)
    first_matrix: str = param(
        "average", "the matrices before the first synchronisation", choices=("average", "accumulator", "identity")
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
        """What the server sends in a round: the points and estimates, and the diagonals of A and B."""
        points = "2*(d + p)" if self.synchronisation == "two_phase" else "d + p"
        return f"{points} + 2" if self.matrix == "norm" else f"{points} + d + p"

    def init(self, problem: Problem) -> State:
        """Start with nothing remembered."""
        s = super().init(problem)
        return s.replace(a=first_memory(self.matrix, s.x), b=first_memory(self.matrix, s.y))

    def start(self, s: State, clients: Clients) -> State:
        """Let every client make its first estimates, and average them (lines 1 and 2)."""
        w, v = clients.mean(self.first, s.x, s.y)
        if self.first_matrix == "average":
            s = self.remember(s, w, v, clients.rate(self.theta))
        return s.replace(w=w, v=v)

    def round(self, s: State, clients: Clients) -> State:
        """Average, renew the matrices, step with the means (lines 5 to 8), then average the estimates."""
        matrices = self.matrices(s)
        if clients.clock.round == 0 and self.first_matrix == "identity":
            matrices = torch.ones_like(matrices[0]), torch.ones_like(matrices[1])
        if self.synchronisation == "single":
            x, y, w, v = clients.mean(self.renew_and_local, s.x, s.y, *matrices)
        else:
            x, y, w, v = clients.mean(self.local, s.w, s.v, *matrices)
        last = clients.steps_now(self.steps) - 1
        s = self.remember(s, w, v, clients.rate(self.theta, after=last))
        a, b = self.matrices(s)
        eta = clients.rate(self.eta, after=last)
        x, y = x - eta * self.gamma * w / a, clients.problem.projected(y + eta * self.lam * v / b)
        if self.synchronisation == "two_phase":
            w, v = clients.mean(self.renew, x, y)
        return s.replace(x=x, y=y, w=w, v=v)

    def remember(self, s: State, w: torch.Tensor, v: torch.Tensor, theta: float) -> State:
        """Renew what the matrices are made of (line 6)."""
        theta = min(1.0, theta)
        return s.replace(a=next_memory(self.matrix, s.a, w, theta), b=next_memory(self.matrix, s.b, v, theta))

    def matrices(self, s: State) -> Pair:
        """Return the diagonals of A and B."""
        return diagonal(self.matrix, s.a, self.rho), diagonal(self.matrix, s.b, self.rho)

    def first(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> Pair:
        """Make the first estimates, and keep them with the point."""
        return first_estimates(client, x, y, self.first_batches or client.steps_now(self.steps))

    def local(
        self, client: Client, w: torch.Tensor, v: torch.Tensor, *matrices: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Step and renew the estimates, q - 1 times from the server's last point (lines 10 to 16)."""
        x, y = client.recall("x", w), client.recall("y", v)
        steps = client.steps_now(self.steps)
        if steps > 1:
            x, y, w, v = client.repeat(steps - 1, self.step, x, y, w, v, *matrices)
        client.keep(x=x, y=y, w=w, v=v)
        return x, y, w, v

    def renew(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> Pair:
        """Renew the estimates from the client's own old point to the server's new one (lines 14 to 16)."""
        w, v = client.repeat(1, self.estimate, *kept_estimates(client, x, y), x, y)
        client.keep(x=x, y=y)
        return w, v

    def step(self, client: Client, x: torch.Tensor, y: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Step (lines 11, 12), then renew the estimates (lines 14 to 16)."""
        w, v, *matrices = others
        new = self.move(client, (x, y), (w, v), *matrices)
        return (*new, *self.estimate(client, w, v, x, y, *new))

    def move(self, client: Client, point: Pair, estimates: Pair, a: torch.Tensor, b: torch.Tensor) -> Pair:
        """Step down in x and up in y (lines 11, 12)."""
        eta = client.rate(self.eta)
        return down_up(client, *point, (estimates[0] / a, estimates[1] / b), (eta * self.gamma, eta * self.lam))

    def estimate(self, client: Client, *vectors: torch.Tensor, ago: int = 0) -> Pair:
        """Renew w and v after the step from the old x and y to the new ones: the six ``vectors`` (lines 14 to 16)."""
        w, v, x_old, y_old, x, y = vectors
        weights = weights_now(client, (self.alpha, self.beta), self.eta, self.weights, ago)
        return storm_pair(client, (x_old, y_old), (x, y), (w, v), weights)

    def renew_and_local(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, *matrices: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Do both in one exchange: renew at the server's new point on receipt, then step and renew, q - 1 times."""
        x, y, w, v, _, _ = client.repeat(
            self.steps, self.renew_and_step, x, y, *kept_estimates(client, x, y), *matrices
        )
        client.keep(x=x, y=y, w=w, v=v)
        return x, y, w, v

    def renew_and_step(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Renew the estimates, then step; the last step of a round is the server's."""
        w, v, x_old, y_old, *matrices = others
        if client.clock.iteration > 0:
            w, v = self.estimate(client, w, v, x_old, y_old, x, y, ago=1)
        if client.clock.step == client.steps_now(self.steps) - 1:
            return x, y, w, v, x_old, y_old
        return (*self.move(client, (x, y), (w, v), *matrices), w, v, x, y)
