"""A tower of levels with a known solution, for tests and for studying how algorithms scale with K."""

from __future__ import annotations

import torch

from fedstrata.core.options import options, param
from fedstrata.problems.problem import Arrays, Level, Problem
from fedstrata.problems.quadratic import DIMENSION, SEED, Quadratic, check_noise, generators


@options("the tower problem")
def tower(
    clients: int = param(8, "number of clients", least=1),
    dimension: int = DIMENSION,
    levels: int = param(3, "number of levels, K", least=1),
    samples: int = param(200, "samples of each client", least=1),
    bend: float = param(0.3, "how far a level is from a rotation", least=0, below=1),
    noise: float = param(0.5, "standard deviation of the noise of a sample", least=0),
    dual: bool = param(True, "whether the problem has a dual"),
    distance: float = param(1.0, "distance of the starting point from the solution", least=0),
    seed: int = SEED,
    dtype: torch.dtype = torch.float64,
) -> Quadratic:
    """Build K nested levels g^(j)(u) = Q_j (u + bend sin(u)), with Q_j orthogonal, and a quadratic outer function.

    f(u, y) = y^T (u - b) - ||y||^2 / 2, so that max_y f = ||u - b||^2 / 2; without ``dual``, f is ||u - b||^2 / 2. b is
    the value of the levels at the solution; x starts at ``distance`` from the solution, y at 0. Clients have the same
    distribution, with noisy samples: a sample's level is Q_j (u + (bend + noise e) sin(u)) + noise e', its b is b +
    noise e'', with normal e drawn for each level and centred over each client's samples. With ``bend`` 0 the levels are
    rotations; below 1 the minimiser is unique.
    """
    check_noise("tower", noise, samples)
    _, normal = generators(seed, dtype)

    def centred(*shape: int) -> torch.Tensor:
        e = noise * normal(clients, samples, *shape)
        return e - e.mean(1, keepdim=True)

    turns = [torch.linalg.qr(normal(dimension, dimension))[0] for _ in range(levels)]
    solution = normal(dimension)
    direction = normal(dimension)
    slopes, shifts, targets = centred(levels), centred(levels, dimension), centred(dimension)

    def level(j: int) -> Level:
        def value(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
            slope, shift = batch[0][:, j, 0].mean(), batch[0][:, j, 1:].mean(0)
            bent: torch.Tensor = turns[j].to(u) @ (u + (bend + slope) * u.sin())
            return bent + shift

        return value

    goal = solution
    for turn in turns:
        goal = turn @ (goal + bend * goal.sin())

    def outer(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return 0.5 * ((u - batch[1]) ** 2).sum(1).mean()

    def outer_dual(u: torch.Tensor, y: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return y @ (u - batch[1].mean(0)) - 0.5 * (y @ y)

    rows = torch.cat([slopes[..., None], shifts], -1)
    zero = torch.zeros(dimension, dtype=dtype)
    problem = Problem(
        outer_dual if dual else outer,
        solution + distance * direction / direction.norm(),
        levels=tuple(map(level, range(levels))),
        y0=zero.clone() if dual else None,
        inner_mean="global",
        name="tower",
        known=(solution, zero if dual else None),
        options={"levels": levels, "bend": bend, "dual": dual},
    )
    return Quadratic.of(problem, rows, goal + targets)
