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

Sent, per client and round, with T = inner_rounds:
    fednest (minimax)                                  up 2*T*p + 2*d        down 2*T*d + 3*T*p + 3*d + 2*p
    fednest (compositional)                            up 2*T*r + r + 2*d    down T*d + 3*T*r + 3*d + 2*r
    fednest (compositional), before the first round    up r                  down d
In 2T + 2 exchanges (minimax) or 2T + 3.

Departures from the paper: the general bilevel mode is missing. In these two modes the inner Hessian needs no Neumann
series: at the maximum the indirect part of the gradient vanishes, and in the compositional mode the Hessian is the
identity. There the variance-reduced corrections of the local steps also cancel exactly: in FedInn both inner gradients
use the same batch and the same x, in FedOut f does not depend on x. So clients draw no data in their local steps and
all take the same ones; these steps and their messages are kept, so that the costs are those of the method. u starts at
the mean of r_k(x_0) on a batch. The projection of y, after each local step, is not in the paper.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedstrata.algorithms.algorithm import Algorithm, param
from fedstrata.algorithms.descent import RATES, gradients
from fedstrata.clients import Client, Clients, remote
from fedstrata.core.schedules import EqualSteps, Rate
from fedstrata.problems.problem import Problem


class State(NamedTuple):
    """The point, and the mean inner value of a composition, empty for a minimax problem."""

    x: torch.Tensor
    y: torch.Tensor
    u: torch.Tensor


class FedNest(Algorithm):
    """Inner rounds for y, or for the mean inner value, then an outer round for x."""

    name = "fednest"
    levels = range(2)
    dual = True
    inner_mean = "global"
    full_participation = True

    alpha: Rate = param(0.1, "outer step size", above=0, search=RATES)
    beta: Rate = param(0.5, "inner step size", above=0, search=(0.05, 1))
    inner_rounds: int = param(1, "T, inner rounds before each outer one", least=1)
    steps: EqualSteps = param(5, "tau, local steps, or an Interval")

    @classmethod
    def solves(cls, problem: Problem) -> bool:
        """Whether the problem has a dual and no levels, or one level with a global mean and no dual."""
        if problem.dual:
            return not problem.levels
        return len(problem.levels) == 1 and problem.inner_mean == "global"

    def start(self, x: torch.Tensor, y: torch.Tensor, clients: Clients) -> State:
        """Start the inner variable of a composition at the mean of r_k."""
        return State(x, y, x[:0] if clients.problem.dual else clients.mean(self.inner, x))

    def round(self, s: State, clients: Clients) -> State:
        """Run one epoch (Algorithm 1)."""
        return self.minimax(s, clients) if clients.problem.dual else self.compositional(s, clients)

    # --- minimax ------------------------------------------------------------------------------------------------

    def minimax(self, s: State, clients: Clients) -> State:
        """Ascend in y, then descend in x."""
        x, y, tau = s.x, s.y, clients.steps_now(self.steps)
        for _ in range(self.inner_rounds):
            q = clients.mean(self.grad_y, x, y)
            y = clients.project_y(y + clients.mean(self.climb, x, y, q, clients.rate(self.beta) / tau))
        h = clients.mean(self.grad_x, x, y)
        return s._replace(x=x + clients.mean(self.descend, x, y, h, clients.rate(self.alpha) / tau), y=y)

    @remote
    def grad_y(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the gradient in y on a batch (Algorithm 3)."""
        return gradients(client, x, y, client.draw())[1]

    @remote
    def grad_x(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the gradient in x on a batch (Algorithm 2)."""
        return gradients(client, x, y, client.draw())[0]

    @remote
    def climb(self, client: Client, x: torch.Tensor, y: torch.Tensor, q: torch.Tensor, lr: float) -> torch.Tensor:
        """Take corrected ascent steps in y (Algorithm 3)."""
        k = client.variables(y=y)
        for _ in client.loop(self.steps, k):
            batch = client.draw()
            change = gradients(client, x, k.y, batch)[1] - gradients(client, x, y, batch)[1]
            k.y = client.project_y(k.y + lr * (change + q))
        return k.y - y

    @remote
    def descend(self, client: Client, x: torch.Tensor, y: torch.Tensor, h: torch.Tensor, lr: float) -> torch.Tensor:
        """Take corrected descent steps in x (Algorithm 2)."""
        k = client.variables(x=x)
        for _ in client.loop(self.steps, k):
            batch = client.draw()
            change = gradients(client, k.x, y, batch)[0] - gradients(client, x, y, batch)[0]
            k.x = k.x - lr * (change + h)
        return k.x - x

    # --- compositional ------------------------------------------------------------------------------------------

    def compositional(self, s: State, clients: Clients) -> State:
        """Update the mean inner value, then descend in x."""
        x, u, tau = s.x, s.u, clients.steps_now(self.steps)
        for _ in range(self.inner_rounds):
            q = clients.mean(self.residual, x, u)
            u = u + clients.mean(self.inner_steps, u, q, clients.rate(self.beta) / tau)
        p = clients.mean(self.outer, u)
        h = clients.mean(self.pull, x, p)
        return s._replace(x=x + clients.mean(self.outer_steps, x, h, clients.rate(self.alpha) / tau), u=u)

    @remote
    def inner(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Return r_k(x)."""
        return client.g(1, x, client.draw(1))

    @remote
    def residual(self, client: Client, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Return the inner gradient u - r_k(x) (Algorithm 3)."""
        return u - client.g(1, x, client.draw(1))

    @remote
    def inner_steps(self, client: Client, u: torch.Tensor, q: torch.Tensor, lr: float) -> torch.Tensor:
        """Take corrected inner steps (Algorithm 3)."""
        k = client.variables(u=u)
        for _ in client.loop(self.steps, k):
            k.u = k.u - lr * (k.u - u + q)
        return k.u - u

    @remote
    def outer(self, client: Client, u: torch.Tensor) -> torch.Tensor:
        """Return grad f_k(u) (Algorithm 4)."""
        return client.f_grads(u, client.draw())[0]

    @remote
    def pull(self, client: Client, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Return J_k(x)^T p (Algorithm 2)."""
        return client.g_vjp(1, x, p, client.draw(1))

    @remote
    def outer_steps(self, client: Client, x: torch.Tensor, h: torch.Tensor, lr: float) -> torch.Tensor:
        """Take outer steps along the global h (Algorithm 2)."""
        k = client.variables(x=x)
        for _ in client.loop(self.steps, k):
            k.x = k.x - lr * h
        return k.x - x
