"""The levels of a problem on data: which batch each of them gets, and how many numbers it returns."""

from __future__ import annotations

import numpy as np
import torch

from fedstrata.core.errors import InputError, invalid
from fedstrata.data.batch import Batch
from fedstrata.data.federated import FederatedData
from fedstrata.data.part import Part
from fedstrata.problems.problem import Outer, Problem
from fedstrata.problems.samples import samples_of


def batch_of(
    problem: Problem,
    level: int,
    part: Part,
    clients: np.ndarray,
    positions: np.ndarray,
    lengths: np.ndarray | None = None,
) -> Batch:
    """Return the batch of a level with the samples at ``positions`` [C, B] of each client; 0 is the outer function.

    With ``lengths`` [C], it has only that many samples of each client.
    """
    drawn = part.gather(clients, positions, lengths, False) if problem.draws(level) else Batch(((),), traced=False)
    return problem.completed(level, drawn, torch.from_numpy(clients).to(problem.x0.device))


@torch.no_grad()
def level_sizes(problem: Problem, data: FederatedData, samples: int = 2, outer: bool = False) -> list[int]:
    """Return how many numbers each level returns for ``samples`` samples; with ``outer``, try the outer function too.

    An error names the function that fails or returns a wrong shape.
    """
    u, sizes = problem.x0, []
    for level in range(1, 1 + len(problem.levels)):
        u = _value(problem, level, u, data, samples)
        sizes.append(len(u))
    if outer:
        _value(problem, 0, u, data, samples)
    return sizes


def _value(problem: Problem, level: int, u: torch.Tensor, data: FederatedData, samples: int) -> torch.Tensor:
    zeros = np.zeros((1, samples), dtype=np.int64)
    drawn = batch_of(problem, level, data.part(level), zeros[:, 0], zeros)
    arrays = [a[0].to(u.dtype) if a.is_floating_point() else a[0] for a in drawn.parts[0]]
    batch = samples_of(arrays, drawn.fields)
    function: Outer = problem.levels[level - 1] if level else problem.outer
    what = f"{f'level {level}' if level else 'outer function'} of the problem {problem.name}"
    dual = () if level or problem.y0 is None else (problem.y0,)
    before = [a.clone() for a in batch]
    try:
        value = function(u, *dual, batch)
    except InputError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        given = f"{'x' if u is problem.x0 else 'u'} of {len(u)} numbers{''.join(f', y of {len(y)}' for y in dual)}"
        shapes = ", ".join(str(tuple(a.shape)) for a in batch)
        got = f"a batch of shapes {shapes}" if shapes else "an empty batch (outer_draws is false)"
        raise InputError(f"The {what} fails, given {given}, and {got}: {str(error).splitlines()[0]}") from error
    if not all(map(_same, batch, before)):
        raise InputError(f"The {what} must not change its batch in place, because others use it too. Make a copy.")
    if not isinstance(value, torch.Tensor) or value.dim() != (1 if level else 0):
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        wants = "a vector (1-d)" if level else "a single number, a tensor of shape ()"
        raise invalid(f"value of {'' if level else 'the '}{what}", got, wants)
    return value


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())
