"""The objective and the exact norm of its gradient, on all data of the clients.

Clients are computed together, as many as the rule of ``clients/chunk.py`` says, each with all of its rows at once,
since levels need not be means over rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fedstrata.clients.chunk import choose_chunk
from fedstrata.data.batch import Batch
from fedstrata.data.federated import FederatedData, Part
from fedstrata.problems.levels import batch_of
from fedstrata.problems.oracles import Oracles
from fedstrata.problems.problem import Problem


@torch.no_grad()
def objective(
    problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None, *, training: bool = False
) -> float:
    """Return M_k[ f_k(G_k(x), y) ], uniform over clients.

    Uses the clients' held-out data if all have some, else (or with ``training``) their training data. With a global
    inner mean, f_k takes M_j[ G_j(x) ].
    """
    held = data.client_test if data.client_test is not None and data.client_test.sizes.all() else None
    layers = Layers(problem, data, x, None if training else held)
    values = []
    with _quietly():
        shared = layers.shared()
        for chunk in layers.chunks():
            inner = layers.values(chunk)[-1] if shared is None else _for_all(shared, chunk)
            dual = None if y is None else _for_all(y, chunk)
            values.append(layers.oracles.outer(inner, dual, layers.batch(chunk, 0)))
    return float(torch.cat(values).double().mean())


@torch.no_grad()
def gradient_norm(problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None = None) -> float:
    """Return || grad_x M_k[ f_k(G_k(x), y) ] ||, uniform over clients, exact on all training data.

    With a global inner mean, f_k takes M_j[ G_j(x) ], and the gradient is M_j[ J_j^T M_k[ grad f_k ] ], with J_j the
    Jacobian of G_j.
    """
    layers = Layers(problem, data, x, None)

    def outer_gradients(chunk: np.ndarray, inner: torch.Tensor) -> torch.Tensor:
        dual = None if y is None else _for_all(y, chunk)
        return layers.oracles.outer_grads(inner, dual, layers.batch(chunk, 0))[0]

    total = torch.zeros_like(x, dtype=torch.float64)
    with _quietly():
        shared = layers.shared()
        if shared is None:
            for chunk in layers.chunks():
                values = layers.values(chunk)
                total += layers.pull_back(chunk, values, outer_gradients(chunk, values[-1])).double().sum(0)
        else:
            sums = [outer_gradients(chunk, _for_all(shared, chunk)).sum(0) for chunk in layers.chunks()]
            mean = torch.stack(sums).sum(0) / data.clients
            for chunk in layers.chunks():
                values = layers.values(chunk, len(problem.levels) - 1)
                total += layers.pull_back(chunk, values, _for_all(mean, chunk)).double().sum(0)
    return float((total / data.clients).norm())


class Layers:
    """The levels of a problem at ``x``, each on all of a client's data for it, or on its ``held``-out data.

    Methods take the numbers of C clients, and vectors are [C, .].
    """

    def __init__(self, problem: Problem, data: FederatedData, x: torch.Tensor, held: Part | None) -> None:
        self.problem, self.data, self.x, self.held = problem, data, x, held
        self.oracles = Oracles(problem)

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield all clients, as many at a time as can be computed together: those with the most rows first."""
        parts = [self.held] if self.held else [self.data.part(k) for k in range(len(self.problem.levels) + 1)]
        sizes = np.maximum.reduce([part.sizes for part in parts])
        rest = np.lexsort((*(-part.sizes for part in parts), -sizes))
        while len(rest):
            most = choose_chunk("auto", self.problem, self.data, max(1, int(sizes[rest[0]])), self.x.device)
            yield rest[:most]
            rest = rest[most:]

    def batch(self, clients: np.ndarray, level: int) -> Batch:
        """Return all data of these clients for a level; 0 is the outer function."""
        part = self.held or self.data.part(level)
        sizes = part.sizes[clients]
        positions = np.minimum(np.arange(sizes.max()), np.maximum(sizes, 1)[:, None] - 1)
        return batch_of(self.problem, level, part, clients, positions, None if np.ptp(sizes) == 0 else sizes)

    def values(self, clients: np.ndarray, levels: int | None = None) -> list[torch.Tensor]:
        """Return x, g_1(x), g_2(g_1(x)), ..., through all levels or the first ``levels``."""
        values = [_for_all(self.x, clients)]
        for k in range(1, 1 + (len(self.problem.levels) if levels is None else levels)):
            values.append(self.oracles.level(k, values[-1], self.batch(clients, k)))
        return values

    def shared(self) -> torch.Tensor | None:
        """Return M_j[ G_j(x) ] if the inner mean is global."""
        if self.problem.inner_mean == "local":
            return None
        return torch.stack([self.values(chunk)[-1].sum(0) for chunk in self.chunks()]).sum(0) / self.data.clients

    def pull_back(self, clients: np.ndarray, values: list[torch.Tensor], cotangents: torch.Tensor) -> torch.Tensor:
        """Return J^T cotangent for each client, [C, d], with J the Jacobian of its composed levels."""
        for k in range(len(self.problem.levels), 0, -1):
            cotangents = self.oracles.level_vjp(k, values[k - 1], cotangents, self.batch(clients, k))
        return cotangents


def _for_all(vector: torch.Tensor, clients: np.ndarray) -> torch.Tensor:
    """Return a vector with a leading axis of the clients, which share it."""
    return vector.expand(len(clients), -1)


@contextmanager
def _quietly() -> Iterator[None]:
    """Do not warn that clients are computed one by one, which only costs time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The problem .* runs one client at a time")
        yield
