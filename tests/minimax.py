"""What the tests of minimax problems share: means over clients, numeric gradients, and the duals of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fedstrata as fs
from support import make_clients, make_setting, started


def prepared(problem: fs.Problem, data: fs.FederatedData, weighting: str = "uniform") -> fs.Problem:
    """Return the problem after its query, which asks all clients, in chunks of two, whatever the cohort's size."""
    clients = make_clients(make_setting(problem, data), participation=1, chunk=2, weighting=weighting)
    with torch.no_grad():
        started(fs.LocalSGDA(), clients)
    return clients.problem


def batch_of(problem: fs.Problem, data: fs.FederatedData, client: int) -> tuple[torch.Tensor, ...]:
    """Return a client's whole data, as the outer function takes them."""
    arrays = data.train.of_client(client)
    return (*arrays, torch.tensor(client)) if problem.numbered else arrays


def client_weights(data: fs.FederatedData, weighting: str) -> list[float]:
    """Return the weight of each client in a mean over clients."""
    sizes = data.sizes if weighting == "samples" else data.sizes * 0 + 1
    return (sizes / sizes.sum()).tolist()


def mean_over_clients(
    problem: fs.Problem, data: fs.FederatedData, x: torch.Tensor, y: torch.Tensor, weighting: str = "uniform"
) -> torch.Tensor:
    """Return M_k[ f_k(x, y) ] on all data, differentiable."""
    values = [problem.outer(x, y, batch_of(problem, data, k)) for k in range(data.clients)]
    weights = torch.tensor(client_weights(data, weighting), dtype=torch.float64)
    return weights @ torch.stack(values)


def slopes(f: Callable[..., torch.Tensor], *at: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of f in all its arguments, by autograd."""
    leaves = [v.detach().clone().requires_grad_() for v in at]
    return list(torch.autograd.grad(f(*leaves), leaves, materialize_grads=True))


def numeric_slopes(f: Callable[..., torch.Tensor], *at: torch.Tensor, h: float = 1e-5) -> list[torch.Tensor]:
    """Return the gradients of f in all its arguments, by central differences."""
    found = []
    for place, v in enumerate(at):
        gradient = torch.zeros_like(v)
        for i in range(len(v)):
            step = torch.zeros_like(v)
            step[i] = h
            ends = [f(*at[:place], v + side * step, *at[place + 1 :]) for side in (1, -1)]
            gradient[i] = (ends[0] - ends[1]) / (2 * h)
        found.append(gradient)
    return found


class Duals(fs.Callback):
    """Remembers y after every round."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_round(self, round: int, state: Any) -> None:
        self.seen.append(state.y.clone())
