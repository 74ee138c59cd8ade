"""What the algorithms for several levels, with a dual or without, share.

y, and q with it, is a tuple: of one vector where there is a dual, empty where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedstrata.algorithms.algorithm import State
from fedstrata.algorithms.descent import decayed
from fedstrata.algorithms.estimators import moving_average, weight_of
from fedstrata.clients import Client, Clients
from fedstrata.core.errors import invalid
from fedstrata.core.schedules import Rate
from fedstrata.data.batch import Batch

Tensors = tuple[torch.Tensor, ...]
Estimates = tuple[Tensors, torch.Tensor, Tensors]
"""h_1..h_K, the momentum p of x, and the momentum q of y."""

Message = tuple[torch.Tensor, Tensors, Estimates]
"""What goes both ways: x, y, and the estimates."""

FIRST = 1
"""The stream of the batches before the first step."""


def room(s: State, clients: Clients) -> State:
    """Return the state with room for the estimates, which the first step of the run fills."""
    h = {f"h{j}": s.x.new_zeros(size) for j, size in enumerate(clients.inner_sizes, 1)}
    dual = {"q": torch.zeros_like(s.y)} if clients.problem.dual else {}
    return s.replace(**h, p=torch.zeros_like(s.x), **dual)


def to_send(s: State, clients: Clients) -> Message:
    """Return what goes to the clients: x, y, and the estimates."""
    found = {name: len(v) for name, v in s.items() if name.startswith("h")}
    wanted = {f"h{j}": size for j, size in enumerate(clients.inner_sizes, 1)}
    if found != wanted:
        raise invalid(f"estimates of the levels of {clients.problem.name}", found, f"{wanted}: this is another problem")
    h = tuple(s[name] for name in wanted)
    return s.x, (s.y,) if "y" in s else (), (h, s.p, (s.q,) if "q" in s else ())


def received(answer: Message) -> State:
    """Return the state that the clients' answer makes: the inverse of :func:`to_send`."""
    x, y, (h, p, q) = answer
    dual = {"y": y[0], "q": q[0]} if y else {}
    return State(x=x, **{f"h{j}": v for j, v in enumerate(h, 1)}, p=p, **dual)


def first_levels(client: Client, x: torch.Tensor, y: Tensors, batches: int, weight_decay: float) -> Estimates:
    """Return g_1(x), g_2(g_1(x)) and so on, and the gradients there, on ``batches`` batches' worth of samples."""
    drawn = client.draw_all(FIRST, client.worth(batches))
    points = [x]
    for j, batch in enumerate(drawn[:-1], 1):
        points.append(client.g(j, points[-1], batch))
    return tuple(points[1:]), *chain_rule(client, points, y, drawn, weight_decay)


def chain_rule(
    client: Client, points: Sequence[torch.Tensor], y: Tensors, batches: Sequence[Batch], weight_decay: float
) -> tuple[torch.Tensor, Tensors]:
    """Return J_1^T ... J_K^T grad f, and the gradient in y; level j at the point before it, f at the last one.

    One level after another, from the last to the first: no more than one level's graph is held.
    """
    u, *v = client.f_grads(points[-1], batches[-1], *y)
    for j in range(len(points) - 1, 0, -1):
        u = client.g_vjp(j, points[j - 1], u, batches[j - 1])
    return decayed(u, points[0], weight_decay), tuple(v)


def moved(
    client: Client, x: torch.Tensor, y: Tensors, p: torch.Tensor, q: Tensors, rates: tuple[float, float]
) -> tuple[torch.Tensor, Tensors]:
    """Step down in x along p and, where there is a dual, up in y along q."""
    up = tuple(client.project_y(a.add(b, alpha=rates[1])) for a, b in zip(y, q, strict=True))
    return x.sub(p, alpha=rates[0]), up


def momenta(
    client: Client,
    old: tuple[torch.Tensor, Tensors],
    new: tuple[torch.Tensor, Tensors],
    rho: Sequence[Rate],
    eta: float,
) -> tuple[torch.Tensor, Tensors]:
    """Return p and q with the fresh gradients in them."""
    weight_x, weight_y = (weight_of(client, r, eta) for r in rho)
    q: Any = (moving_average(a, b, weight_y) for a, b in zip(old[1], new[1], strict=True))
    return moving_average(old[0], new[0], weight_x), tuple(q)
