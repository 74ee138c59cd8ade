"""FedNest in its minimax and its compositional mode.

Tarzanagh, Li, Thrampoulidis, Oymak: "FedNest: federated bilevel, minimax, and compositional optimization", ICML 2022,
Algorithms 1 to 4: bilevel optimisation, min_x M_k[ f_k(x, u*(x)) ] with u*(x) = argmin_u M_k[ g_k(x, u) ].

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level: u = y and g_k = -f_k (minimax). Or min_x M_k[ f_k( M_j[ r_j(x) ]
) ], one level, a global inner mean, no dual: g_k(x, u) = ||u - r_k(x)||^2 / 2 (compositional). Every client in every
round.

    minimax:
    T times (FedInn):  q = M_k[grad_y f_k(x, y)];   y_k <- y;   tau times, on a batch:
                       y_k <- Pi[ y_k + (beta / tau) (grad_y f_k(x, y_k) - grad_y f_k(x, y) + q) ];   y <- M_k[y_k]
    then (FedOut):     h = M_k[grad_x f_k(x, y)];   x_k <- x;   tau times, on a batch:
                       x_k <- x_k - (alpha / tau) (grad_x f_k(x_k, y) - grad_x f_k(x, y) + h);   x <- M_k[x_k]

    compositional:
    T times (FedInn):  q = M_k[u - r_k(x)];   u_k <- u;   tau times:  u_k <- u_k - (beta / tau) (u_k - u + q);
                       u <- M_k[u_k]
    then (FedOut):     p = M_k[grad f_k(u)],  h = M_k[J_k(x)^T p]
                       x_k <- x;   tau times:  x_k <- x_k - (alpha / tau) h;   x <- M_k[x_k]

Sent, minimax: up 2*T*p + 2*d, down 2*T*d + 3*T*p + 3*d + 2*p. In 2T + 2 exchanges. Compositional: up 2*T*r + r + 2*d,
down T*d + 3*T*r + 3*d + 2*r. In 2T + 3 exchanges; before the first round: up r, down d.

Departures from the paper: not the general bilevel mode. In these two the inner Hessian needs no Neumann series: at the
maximum the indirect part of the gradient vanishes, and in the compositional mode the Hessian is the identity. There the
variance-reduced corrections of the local steps cancel exactly as well: in FedInn both inner gradients see the same
batch and the same x, in FedOut f does not see x; so clients draw no data in their local steps and all take the same
ones; they are kept, with their messages, because the method is counted by them. u starts at the mean of r_k(x_0) on a
batch. The projection of y, after each local step, is not in the paper.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.saddles import gradients
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import EqualSteps, Rate
from fedstrata.problems.problem import Problem


class FedNest(Algorithm):
    """Inner rounds for y, or for the mean inner value, then an outer round for x."""

    name = "fednest"
    levels = range(2)
    dual = True
    inner_mean = "global"
    full_participation = True
    answers = {
        "grad_y": "zero",
        "climb": "y",
        "grad_x": "zero",
        "descend": "x",
        "inner": "zero",
        "residual": "zero",
        "inner_steps": "u",
        "outer": "zero",
        "pull": "zero",
        "outer_steps": "x",
    }

    alpha: Rate = param(0.1, "outer step size", above=0, search=RATES)
    beta: Rate = param(0.5, "inner step size", above=0, search=(0.05, 1))
    inner_rounds: int = param(1, "T, inner rounds before each outer one", least=1)
    steps: EqualSteps = param(5, "tau, local steps, or an Interval")

    @property
    def up(self) -> str:
        """What a client sends in an epoch."""
        return f"2*{self.inner_rounds}*(p + r) + r + 2*d"

    @property
    def down(self) -> str:
        """What the server sends in an epoch."""
        return f"(2 - K)*{self.inner_rounds}*d + 3*{self.inner_rounds}*(p + r) + 3*d + 2*(p + r)"

    @classmethod
    def solves(cls, problem: Problem) -> bool:
        """Whether it is a maximum without levels, or one level with a global mean and no maximum."""
        if problem.dual:
            return not problem.levels
        return len(problem.levels) == 1 and problem.inner_mean == "global"

    def start(self, s: State, clients: Clients) -> State:
        """Start the inner variable of a composition at the mean of r_k."""
        return s if clients.problem.dual else s.replace(u=clients.mean(self.inner, s.x))

    def round(self, s: State, clients: Clients) -> State:
        """Do one epoch (Algorithm 1)."""
        return self.minimax(s, clients) if clients.problem.dual else self.compositional(s, clients)

    # --- minimax ------------------------------------------------------------------------------------------------

    def minimax(self, s: State, clients: Clients) -> State:
        """Climb in y, then descend in x."""
        x, y = s.x, s.y
        for _ in range(self.inner_rounds):
            q = clients.mean(self.grad_y, x, y)
            y = clients.mean(self.climb, x, y, q, clients.rate(self.beta) / clients.steps_now(self.steps))
        h = clients.mean(self.grad_x, x, y)
        x = clients.mean(self.descend, x, y, h, clients.rate(self.alpha) / clients.steps_now(self.steps))
        return s.replace(x=x, y=y)

    def grad_y(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the gradient in y on a batch (Algorithm 3)."""
        return gradients(client, x, y, client.draw())[1]

    def grad_x(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the gradient in x on a batch (Algorithm 2)."""
        return gradients(client, x, y, client.draw())[0]

    def climb(self, client: Client, x: torch.Tensor, y: torch.Tensor, q: torch.Tensor, lr: float) -> torch.Tensor:
        """Take corrected steps up in y (Algorithm 3)."""

        def step(client: Client, y_k: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            x, y, q = others
            batch = client.draw()
            change = gradients(client, x, y_k, batch)[1] - gradients(client, x, y, batch)[1]
            return client.project_y(y_k + lr * (change + q))

        out: torch.Tensor = client.repeat(self.steps, step, y, x, y, q)
        return out

    def descend(self, client: Client, x: torch.Tensor, y: torch.Tensor, h: torch.Tensor, lr: float) -> torch.Tensor:
        """Take corrected steps down in x (Algorithm 2)."""

        def step(client: Client, x_k: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            x, y, h = others
            batch = client.draw()
            change = gradients(client, x_k, y, batch)[0] - gradients(client, x, y, batch)[0]
            return x_k - lr * (change + h)

        out: torch.Tensor = client.repeat(self.steps, step, x, x, y, h)
        return out

    # --- compositional ------------------------------------------------------------------------------------------

    def compositional(self, s: State, clients: Clients) -> State:
        """Follow the mean inner value, then descend in x."""
        x, u = s.x, s.u
        for _ in range(self.inner_rounds):
            q = clients.mean(self.residual, x, u)
            u = clients.mean(self.inner_steps, u, q, clients.rate(self.beta) / clients.steps_now(self.steps))
        p = clients.mean(self.outer, u)
        h = clients.mean(self.pull, x, p)
        x = clients.mean(self.outer_steps, x, h, clients.rate(self.alpha) / clients.steps_now(self.steps))
        return s.replace(x=x, u=u)

    def inner(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Return r_k(x)."""
        return client.g(1, x, client.draw(1))

    def residual(self, client: Client, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Return the inner gradient u - r_k(x) (Algorithm 3)."""
        return u - client.g(1, x, client.draw(1))

    def inner_steps(self, client: Client, u: torch.Tensor, q: torch.Tensor, lr: float) -> torch.Tensor:
        """Take corrected inner steps (Algorithm 3)."""
        out: torch.Tensor = client.repeat(self.steps, lambda client, v, u, q: v - lr * (v - u + q), u, u, q)
        return out

    def outer(self, client: Client, u: torch.Tensor) -> torch.Tensor:
        """Return grad f_k(u) (Algorithm 4)."""
        return client.f_grads(u, client.draw())[0]

    def pull(self, client: Client, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Return J_k(x)^T p (Algorithm 2)."""
        return client.g_vjp(1, x, p, client.draw(1))

    def outer_steps(self, client: Client, x: torch.Tensor, h: torch.Tensor, lr: float) -> torch.Tensor:
        """Take outer steps along the global h (Algorithm 2)."""
        out: torch.Tensor = client.repeat(self.steps, lambda client, x, h: x - lr * h, x, h)
        return out
