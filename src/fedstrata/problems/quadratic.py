"""Quadratic problems with known solutions, for tests and for studying algorithms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from fedstrata.core.errors import invalid
from fedstrata.core.options import options, param
from fedstrata.data.federated import FederatedData
from fedstrata.problems.problem import INNER_MEAN, Arrays, InnerMean, Problem

Random = Callable[..., torch.Tensor]

DIMENSION = param(10, "number of entries of x", least=1)
SEED = param(0, "random seed of the problem", least=0)


@dataclass(frozen=True)
class Quadratic:
    """A problem with its data and its known solution x; ``dual`` is the solution's y, if there is a dual."""

    problem: Problem
    data: FederatedData
    solution: torch.Tensor
    dual: torch.Tensor | None = None

    @staticmethod
    def of(problem: Problem, inputs: torch.Tensor, targets: torch.Tensor) -> Quadratic:
        """Return a problem whose solution is ``known``, with inputs and targets [clients, samples, ...] as its data."""
        assert problem.known is not None
        data = FederatedData.from_arrays(list(zip(inputs, targets, strict=True)), name=problem.name)
        return Quadratic(problem, data, *problem.known)


@options("the quadratic problem")
def quadratic(
    clients: int = param(10, "number of clients", least=1),
    dimension: int = DIMENSION,
    samples: int = param(20, "samples of each client", least=1),
    heterogeneity: float = param(1.0, "spread of the clients' minimisers", least=0),
    noise: float = param(0.1, "spread of a client's samples around its minimiser", least=0),
    condition: float = param(10.0, "largest curvature; the smallest is 1", least=1),
    seed: int = SEED,
    dtype: torch.dtype = torch.float64,
) -> Quadratic:
    """Build f_k(x) = mean over the client's samples of 1/2 sum_j h_j (x_j - b_j)^2; each sample has its own h and b.

    The curvatures h lie between 1 and ``condition``. The solution minimises the uniform mean over clients.
    """
    uniform, normal = generators(seed, dtype)
    h = 1 + (condition - 1) * uniform(clients, samples, dimension)
    b = heterogeneity * normal(clients, 1, dimension) + noise * normal(clients, samples, dimension)
    start = normal(dimension)

    def outer(x: torch.Tensor, batch: Arrays) -> torch.Tensor:
        curvature, target = batch
        return 0.5 * (curvature * (x - target) ** 2).sum(1).mean()

    solution = (h * b).mean((0, 1)) / h.mean((0, 1))
    return Quadratic.of(Problem(outer, start, name="quadratic", known=(solution, None)), h, b)


@options("the composition problem")
def composition(
    clients: int = param(10, "number of clients", least=1),
    dimension: int = DIMENSION,
    inner: int = param(12, "number of rows of A, at least the dimension", least=1),
    samples: int = param(50, "samples of each client", least=1),
    heterogeneity: float = param(1.0, "spread of the clients' A and b", least=0),
    noise: float = param(0.5, "spread of a client's samples around its A and b", least=0),
    inner_mean: InnerMean = INNER_MEAN,
    seed: int = SEED,
    dtype: torch.dtype = torch.float64,
) -> Quadratic:
    """Build a composition with a known minimiser: g_k(x) = A_k x and f_k(u) = 1/2 ||u - b_k||^2.

    A_k and b_k are means over the client's samples. An algorithm that computes the value and the Jacobian of g on the
    same small batch is biased here, since their noise is correlated.
    """
    if inner < dimension:
        raise invalid(
            "inner of the composition problem", inner, f"at least the dimension, {dimension}, for a unique minimiser"
        )
    _, normal = generators(seed, dtype)
    scale = dimension**-0.5
    common = torch.eye(inner, dimension, dtype=dtype)
    own = common + 0.3 * heterogeneity * scale * normal(clients, 1, inner, dimension)
    a = own + noise * scale * normal(clients, samples, inner, dimension)
    b = heterogeneity * normal(clients, 1, inner) + noise * normal(clients, samples, inner)
    start = normal(dimension)

    def level(x: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return batch[0].mean(0) @ x

    def outer(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return 0.5 * ((u - batch[1]) ** 2).sum(1).mean()

    means, targets = a.mean(1), b.mean(1)
    if inner_mean == "global":
        means = means.mean(0, keepdim=True).expand_as(means)
    left = torch.einsum("krd,kre->de", means, means)
    solution = torch.linalg.solve(left, torch.einsum("krd,kr->d", means, targets))
    problem = Problem(
        outer,
        start,
        levels=(level,),
        inner_mean=inner_mean,
        name="composition",
        known=(solution, None),
        options={"inner_mean": inner_mean},
    )
    return Quadratic.of(problem, a, b)


@options("the quadratic_saddle problem")
def quadratic_saddle(
    clients: int = param(50, "number of clients", least=1),
    dimension: int = DIMENSION,
    samples: int = param(1, "samples of each client", least=1),
    spread: float = param(1.0, "standard deviation of the clients' b", least=0),
    coupling: float = param(0.1, "largest t: how strongly x and y are coupled", least=0),
    curvature: float = param(10.0, "curvature in x", least=0),
    noise: float = param(0.0, "spread of a client's samples around its b", least=0),
    seed: int = SEED,
    dtype: torch.dtype = torch.float64,
) -> Quadratic:
    """Build f_k(x, y) = curvature/2 ||x||^2 - (1/2 ||y||^2 - b_k^T y + t_k y^T x), whose saddle point is x = y = 0.

    t_k is drawn from U(0, ``coupling``) and b_k from N(0, ``spread``^2 I), centred over the clients so that their mean
    is 0. x and y start at random. With ``noise``, each of a client's ``samples`` has its own b, with mean b_k; without,
    every batch is exact. (Section 6.1 of the FGDA paper: curvature 10, coupling 0.1, spread 1 and 10.)
    """
    check_noise("quadratic_saddle", noise, samples)
    uniform, normal = generators(seed, dtype)
    t = coupling * uniform(clients, 1, 1)
    b = spread * normal(clients, dimension)
    b = b - b.mean(0)
    x0, y0 = normal(dimension), normal(dimension)
    own = noise * normal(clients, samples, dimension)
    b = b[:, None] + own - own.mean(1, keepdim=True)

    def outer(x: torch.Tensor, y: torch.Tensor, batch: Arrays) -> torch.Tensor:
        t, b = batch[0].mean(), batch[1].mean(0)
        return 0.5 * curvature * (x @ x) - (0.5 * (y @ y) - b @ y + t * (y @ x))

    def best_y(x: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return batch[1].mean(0) - batch[0].mean() * x

    zero = torch.zeros(dimension, dtype=dtype)
    problem = Problem(
        outer, x0, y0=y0, name="quadratic_saddle", best_y=best_y, known=(zero, zero), options={"curvature": curvature}
    )
    return Quadratic.of(problem, t.expand(-1, samples, 1), b)


def generators(seed: int, dtype: torch.dtype) -> tuple[Random, Random]:
    """Return functions that draw tensors of a shape, uniform in [0, 1) and standard normal, from one generator."""
    generator = torch.Generator().manual_seed(seed)
    return partial(torch.rand, generator=generator, dtype=dtype), partial(torch.randn, generator=generator, dtype=dtype)


def check_noise(name: str, noise: float, samples: int) -> None:
    """Raise if there is noise but only one sample: centring would remove its noise."""
    if noise and samples == 1:
        raise invalid(f"samples of the {name} problem", samples, "at least 2 if there is noise")
