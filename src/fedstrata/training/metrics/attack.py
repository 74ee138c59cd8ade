"""The worst shared perturbation of a model's inputs, to measure a model under attack."""

from __future__ import annotations

import numpy as np
import torch

from fedstrata.core.rng import key_of, permutations
from fedstrata.problems.adversarial import perturbed
from fedstrata.problems.problem import Arrays, Problem
from fedstrata.problems.projections import Projection

_ROWS = 2048
_FAR = 1e6


@torch.no_grad()
def worst_perturbation(
    problem: Problem, x: torch.Tensor, start: torch.Tensor, project: Projection, arrays: Arrays, steps: int
) -> torch.Tensor:
    """Search for the shared perturbation [p] of all inputs with the highest mean loss; return the strongest one tried.

    Takes conditional-gradient steps from ``start``: step k moves by 2 / (k + 2) towards the point of the feasible set
    that is farthest along the gradient, computed on a fixed choice of 2,048 rows.
    """
    assert problem.predict is not None and problem.losses is not None
    rows = len(arrays[0])
    chosen = permutations(key_of("attack"), np.zeros(1), np.zeros(1), np.array([rows]))[0, :_ROWS]
    inputs, targets = (a[torch.from_numpy(chosen).to(a.device)] for a in arrays)
    y, best, highest = start, start, -torch.inf
    for k in range(steps + 1):
        leaf = y.detach().requires_grad_()
        with torch.enable_grad():
            loss = problem.losses(problem.predict(x, perturbed(inputs, leaf)), targets).mean()
        if float(loss) > highest:
            best, highest = y, float(loss)
        if k == steps:
            break
        gradient = torch.autograd.grad(loss, leaf)[0]
        norm = torch.linalg.vector_norm(gradient)
        if float(norm) == 0:
            break
        y = y + 2 / (k + 2) * (project(_FAR * gradient / norm) - y)
    return best
