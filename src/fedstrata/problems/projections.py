"""Euclidean projections of a dual, on tensors [..., p]: onto the simplex, a ball, a box."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fedstrata.core.errors import invalid, is_number

Projection = Callable[[torch.Tensor], torch.Tensor]


def simplex(y: torch.Tensor) -> torch.Tensor:
    """Return the point of {y >= 0, sum y = 1} nearest to y."""
    y = y - y.amax(-1, keepdim=True)  # same projection, but the 1 is not lost in sums of large entries
    ordered = y.sort(-1, descending=True).values
    counts = torch.arange(1, y.shape[-1] + 1, dtype=y.dtype, device=y.device)
    excess = (ordered.cumsum(-1) - 1) / counts
    last = (ordered > excess).sum(-1, keepdim=True).clamp(min=1) - 1  # the sum is 0 if y is not finite
    return (y - excess.gather(-1, last)).clamp(min=0)


def ball(radius: float) -> Projection:
    """Return the projection onto {||y|| <= radius}."""
    if not is_number(radius) or not 0 < radius < math.inf:
        raise invalid("radius of the ball", radius, "a positive number")

    def project(y: torch.Tensor) -> torch.Tensor:
        largest = y.abs().amax(-1, keepdim=True).clamp(min=1)  # dividing by it keeps squares from overflowing
        small = y / largest
        norms: torch.Tensor = torch.linalg.vector_norm(small, dim=-1, keepdim=True)
        return torch.where(norms * largest <= radius, y, small * (radius / norms))

    return project


def box(low: float = -math.inf, high: float = math.inf) -> Projection:
    """Return the projection onto {low <= y <= high}, with the same bounds for every entry."""
    bounds = (low, high)
    if any(not is_number(b) for b in bounds) or not low <= high:
        raise invalid("bounds of the box", bounds, "two numbers, the lower one first")

    def project(y: torch.Tensor) -> torch.Tensor:
        return y.clamp(low, high)

    return project
