"""Quadratics whose minimiser is known: for tests, and for seeing what an algorithm does."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedstrata.data.federated import FederatedData
from fedstrata.errors import invalid
from fedstrata.problem import Arrays, Problem


@dataclass(frozen=True)
class Quadratic:
    """A quadratic problem, its data, and its solution: ``problem``, ``data``, ``solution``."""

    problem: Problem
    data: FederatedData
    solution: torch.Tensor


def quadratic(
    clients: int = 10,
    dimension: int = 10,
    samples: int = 20,
    heterogeneity: float = 1.0,
    noise: float = 0.1,
    condition: float = 10.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Quadratic:
    """Build f_k(x) = mean over the client's samples of 1/2 sum_j h_j (x_j - b_j)^2, with different h, b everywhere.

    ``heterogeneity`` is the spread of the clients' minimisers, ``noise`` the spread of samples around them,
    ``condition`` the largest curvature h (the smallest is 1). The solution is that of the uniform mean over clients.
    """
    for what, count, least in (
        ("clients", clients, 1),
        ("dimension", dimension, 1),
        ("samples", samples, 1),
        ("seed", seed, 0),
    ):
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise invalid(f"{what} of the quadratic", count, f"a whole number of at least {least}")
    for what, value, low in (("heterogeneity", heterogeneity, 0), ("noise", noise, 0), ("condition", condition, 1)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= low:
            raise invalid(f"{what} of the quadratic", value, f"a number of at least {low}")
    generator = torch.Generator().manual_seed(seed)
    shape = (clients, samples, dimension)
    h = 1 + (condition - 1) * torch.rand(shape, generator=generator, dtype=dtype)
    centre = heterogeneity * torch.randn(clients, 1, dimension, generator=generator, dtype=dtype)
    b = centre + noise * torch.randn(shape, generator=generator, dtype=dtype)
    start = torch.randn(dimension, generator=generator, dtype=dtype)

    def outer(x: torch.Tensor, batch: Arrays) -> torch.Tensor:
        curvature, target = batch
        return 0.5 * (curvature * (x - target) ** 2).sum(1).mean()

    pairs = [(h[k], b[k]) for k in range(clients)]
    data = FederatedData.from_arrays(pairs, name="quadratic")
    solution = (h * b).mean((0, 1)) / h.mean((0, 1))
    return Quadratic(Problem(outer, start, name="quadratic"), data, solution)
