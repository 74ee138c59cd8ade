"""Models after gradient steps on a client's own data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedstrata.core.errors import InputError
from fedstrata.core.rng import key_of, permutations
from fedstrata.data.federated import FederatedData, Part
from fedstrata.problems.problem import Arrays, Problem
from fedstrata.training.metrics.measures import ROWS


@torch.no_grad()
def adapt(problem: Problem, x: torch.Tensor, parts: Sequence[Arrays], steps: int, lr: float) -> torch.Tensor:
    """Return ``x`` after gradient steps x <- x - lr grad(mean loss of the model over the rows of all parts)."""
    assert problem.predict is not None and problem.losses is not None
    rows = sum(len(part[-1]) for part in parts)
    for _ in range(steps):
        gradient = torch.zeros_like(x)
        for *inputs, targets in parts:
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                loss = problem.losses(problem.predict(leaf, *inputs), targets).sum() / rows
            gradient += torch.autograd.grad(loss, leaf)[0]
        x = x - lr * gradient
    return x


def adapted_point(
    problem: Problem,
    data: FederatedData,
    x: torch.Tensor,
    steps: int | None = None,
    lr: float | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """Return G(x), the uniform mean over clients of ``x`` after each client's own full-batch gradient steps.

    ``run.problem.model(adapted_point(run.problem, data, run.x))`` is the model of a run after its inner steps.
    ``steps`` and ``lr`` default to those of the problem; if ``lr`` is a schedule, ``run.problem`` has the rate of the
    last round. ``rows`` is the largest number of rows that a client uses; by default all.
    """
    own = problem.adapt or (None, None)
    steps, lr = own[0] if steps is None else steps, own[1] if lr is None else lr
    if steps is None or lr is None or problem.predict is None:
        raise InputError(f"The problem {problem.name} has no inner gradient steps of a model: pass steps and lr.")
    ends = (adapt(problem, x, pieces(data.part(1), client, rows), steps, lr) for client in range(data.clients))
    total = torch.zeros_like(x)
    for end in ends:
        total += end
    return total / data.clients


def pieces(part: Part, client: int, limit: int | None) -> list[Arrays]:
    """Return a client's rows, at most ``limit`` of them, in pieces that bound the memory of a gradient."""
    positions = np.arange(part.sizes[client])
    if limit is not None and limit < len(positions):
        # Rows are ordered by class, so the first ones would all be of one class.
        order = permutations(key_of("adapt"), np.array([client]), np.zeros(1), np.array([len(positions)]))
        positions = order[0, :limit]
    cut = [positions[None, start : start + ROWS] for start in range(0, len(positions), ROWS)]
    return [tuple(a[0] for a in part.gather(np.array([client]), c, None, False).parts[0]) for c in cut]
