"""FedNest in its compositional mode: the inner mean is over all clients.

Tarzanagh, Li, Thrampoulidis, Oymak: "FedNest: federated bilevel, minimax, and compositional optimization", ICML 2022,
Algorithms 1 to 4 with the inner problem g_k(x, y) = ||y - r_k(x)||^2 / 2.

Problem: min_x M_k[ f_k( M_j[ r_j(x) ] ) ], one level, a global inner mean, no dual; every client in every round.

    T times (FedInn):  q = M_k[u - r_k(x)];   u_k <- u;   tau times:  u_k <- u_k - (beta / tau) (u_k - u + q);
                       u <- M_k[u_k]
    then (FedOut):     p = M_k[grad f_k(u)],  h = M_k[J_k(x)^T p]
                       x_k <- x;   tau times:  x_k <- x_k - (alpha / tau) h;   x <- M_k[x_k]

Sent: up 2*T*r + r + 2*d, down T*d + 3*T*r + 3*d + 2*r. In 2T + 3 exchanges; before the first round: up r, down d.

Departures from the paper: only this mode. Its inner Hessian is the identity, so p needs no Neumann series.
The variance-reduced corrections of the local steps cancel exactly: in FedInn both inner gradients see the same batch
and the same x, in FedOut f does not see x. So clients draw no data in their local steps and all take the same ones;
they are kept, with their messages, because the method is counted by them. u starts at the mean of r_k(x_0) on a batch.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.base import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.clients import Client, Clients
from fedstrata.schedules import Rate


class FedNest(Algorithm):
    """Inner rounds that track the mean inner value, then an outer round through the mean Jacobian."""

    name = "fednest"
    levels = range(1, 2)
    inner_mean = "global"
    full_participation = True

    alpha: Rate = param(0.1, "outer step size", above=0, search=RATES)
    beta: Rate = param(0.5, "inner step size", above=0, search=(0.05, 1))
    inner_rounds: int = param(1, "T, inner rounds before each outer one", least=1)
    steps: int = param(5, "tau, local steps", least=1)

    @property
    def up(self) -> str:
        """What a client sends in an epoch."""
        return f"2*{self.inner_rounds}*r + r + 2*d"

    @property
    def down(self) -> str:
        """What the server sends in an epoch."""
        return f"{self.inner_rounds}*d + 3*{self.inner_rounds}*r + 3*d + 2*r"

    def start(self, s: State, clients: Clients) -> State:
        """Start the inner variable at the mean of r_k."""
        return s.replace(u=clients.mean(self.inner, s.x))

    def round(self, s: State, clients: Clients) -> State:
        """Do one epoch (Algorithm 1)."""
        x, u = s.x, s.u
        for _ in range(self.inner_rounds):
            q = clients.mean(self.residual, x, u)
            u = clients.mean(self.inner_steps, u, q, clients.rate(self.beta) / self.steps)
        p = clients.mean(self.outer, u)
        h = clients.mean(self.pull, x, p)
        x = clients.mean(self.outer_steps, x, h, clients.rate(self.alpha) / self.steps)
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
