"""The objective and the exact norm of its gradient, on all data of the clients."""

from __future__ import annotations

import numpy as np
import torch

from fedstrata.data.batch import Batch
from fedstrata.data.federated import FederatedData, Part
from fedstrata.problems.levels import batch_of
from fedstrata.problems.oracles import Oracles
from fedstrata.problems.problem import Problem


@torch.no_grad()
def objective(
    problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None, *, training: bool = False
) -> float:
    """Return M_k[ f_k(G_k(x), y) ], uniform over clients, one client at a time.

    Uses the clients' held-out data if all have some, else (or with ``training``) their training data. With a global
    inner mean, f_k takes M_j[ G_j(x) ].
    """
    held = data.client_test if data.client_test is not None and data.client_test.sizes.all() else None
    layers = Layers(problem, data, x, None if training else held)
    shared = layers.shared()
    dual = None if y is None else y.unsqueeze(0)
    values = []
    for c in range(data.clients):
        inner = layers.values(c)[-1] if shared is None else shared
        values.append(layers.oracles.outer(inner, dual, layers.batch(c, 0)))
    return float(torch.cat(values).double().mean())


@torch.no_grad()
def gradient_norm(problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None = None) -> float:
    """Return || grad_x M_k[ f_k(G_k(x), y) ] ||, uniform over clients, exact on all training data.

    With a global inner mean, f_k takes M_j[ G_j(x) ], and the gradient is M_j[ J_j^T M_k[ grad f_k ] ], with J_j the
    Jacobian of G_j. Runs one client at a time, with all of its rows at once, since levels need not be means over rows.
    """
    layers = Layers(problem, data, x, None)
    shared = layers.shared()
    dual = None if y is None else y.unsqueeze(0)

    def outer_gradient(c: int, inner: torch.Tensor) -> torch.Tensor:
        return layers.oracles.outer_grads(inner, dual, layers.batch(c, 0))[0]

    total = torch.zeros_like(x, dtype=torch.float64)
    if shared is None:
        for c in range(data.clients):
            values = layers.values(c)
            total += layers.pull_back(c, values, outer_gradient(c, values[-1])).double()
    else:
        mean = torch.stack([outer_gradient(c, shared) for c in range(data.clients)]).mean(0)
        for c in range(data.clients):
            total += layers.pull_back(c, layers.values(c, len(problem.levels) - 1), mean).double()
    return float((total / data.clients).norm())


class Layers:
    """The levels of a problem at ``x``, each on all of a client's data for it, or on its ``held``-out data."""

    def __init__(self, problem: Problem, data: FederatedData, x: torch.Tensor, held: Part | None) -> None:
        self.problem, self.data, self.x, self.held = problem, data, x, held
        self.oracles = Oracles(problem)

    def batch(self, client: int, level: int) -> Batch:
        """Return all of a client's data for a level; 0 is the outer function."""
        part = self.held or self.data.part(level)
        return batch_of(self.problem, level, part, np.array([client]), np.arange(part.sizes[client])[None])

    def values(self, client: int, levels: int | None = None) -> list[torch.Tensor]:
        """Return x, g_1(x), g_2(g_1(x)), ..., through all levels or the first ``levels``, each [1, .]."""
        values = [self.x.unsqueeze(0)]
        for k in range(1, 1 + (len(self.problem.levels) if levels is None else levels)):
            values.append(self.oracles.level(k, values[-1], self.batch(client, k)))
        return values

    def shared(self) -> torch.Tensor | None:
        """Return M_j[ G_j(x) ], [1, .], if the inner mean is global."""
        if self.problem.inner_mean == "local":
            return None
        return torch.stack([self.values(c)[-1] for c in range(self.data.clients)]).mean(0)

    def pull_back(self, client: int, values: list[torch.Tensor], cotangent: torch.Tensor) -> torch.Tensor:
        """Return J^T cotangent, [d], with J the Jacobian of the client's composed levels."""
        for k in range(len(self.problem.levels), 0, -1):
            cotangent = self.oracles.level_vjp(k, values[k - 1], cotangent, self.batch(client, k))
        return cotangent[0]
