"""Worlds: small problems, each for the library and in NumPy with derivatives by hand; here compositions.

Other worlds are in plain_worlds.py (no levels), saddle_worlds.py (a dual) and towers.py (several levels).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

import fedstrata as fs
from fedstrata.problems.oracles import Oracles

SIZES = [6, 12, 4, 18, 8]
"""How many samples the clients have, in every world."""
N = len(SIZES)
GAMMA, SHIFT, INNER_LR = 0.8, 1.0, 0.8

Vector = np.ndarray
Arrays = tuple[Vector, ...]
"""The samples of a batch."""
Draw = Callable[[int], Arrays]
"""The batch that a client draws for a level; 0 is the outer function."""


@dataclass(frozen=True)
class World:
    """A problem and its data for the library; a subclass has the same functions in NumPy.

    Where the problem has a query, ``prepare(paper)`` is the world that knows the answers to it; ``paper`` knows how the
    clients draw and weigh.
    """

    problem: fs.Problem
    data: fs.FederatedData

    @cached_property
    def oracles(self) -> Oracles:
        return Oracles(self.problem)

    @property
    def x0(self) -> Vector:
        return self.problem.x0.numpy()

    @property
    def y0(self) -> Vector | None:
        return None if self.problem.y0 is None else self.problem.y0.numpy()

    def check(self, problem: fs.Problem, draw: Draw, client: int, rng: np.random.Generator) -> None:
        """Compare the functions in NumPy with those of the problem, on a client's batches."""
        raise NotImplementedError


def near(found: Any, expected: torch.Tensor, rtol: float = 0.0) -> None:
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=rtol, atol=1e-12)


def tensors(arrays: Arrays) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.from_numpy, arrays))


def start(problem: fs.Problem, *y0: float) -> fs.Problem:
    """The same problem from a random x, and from a given y."""
    x0 = 0.7 * np.random.default_rng(3).normal(size=len(problem.x0))
    return replace(problem, x0=torch.from_numpy(x0), y0=torch.tensor(y0, dtype=torch.float64) if y0 else None)


# --- compositions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Composition(World):
    """The inner value [r], its Jacobian [r, d] and grad f [r]."""

    inner: Callable[[Draw, Vector], Vector]
    jacobian: Callable[[Draw, Vector], Vector]
    outer: Callable[[Draw, Vector], Vector]
    prepare: Callable[[Any], Composition] | None = None

    def check(self, problem: fs.Problem, draw: Draw, client: int, rng: np.random.Generator) -> None:
        batches = [tensors(draw(level)) for level in range(len(problem.levels) + 1)]

        def inner(x: torch.Tensor) -> torch.Tensor:
            for k, level in enumerate(problem.levels, 1):
                x = level(x, batches[k])
            return x

        x = problem.x0
        u = inner(x)
        near(self.inner(draw, self.x0), u)
        near(self.jacobian(draw, self.x0), torch.func.jacrev(inner)(x))
        for offset in (0.0, 0.7, 3.0):  # far enough for exp to have become its tangent
            slope = torch.func.grad(problem.outer)(u + offset, batches[0] if problem.outer_draws else ())
            near(self.outer(draw, u.numpy() + offset), slope, rtol=1e-11)


def mixed_world(constant: bool = False) -> Composition:
    """Inner function from R^5 to R^3, both functions nonlinear; ``constant`` gives all batches one linear Jacobian."""
    rng = np.random.default_rng(1)
    d, r = 5, 3
    pairs = [(0.5 * rng.normal(size=(n, r, d)) + 0.4 * rng.normal(), rng.normal(size=(n, r))) for n in SIZES]
    matrix = rng.normal(size=(r, d))

    def level(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        a, b = batch
        z = a @ x
        return torch.from_numpy(matrix) @ x + b.mean(0) if constant else (z.tanh() + 0.1 * b * z**2).mean(0)

    def outer(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        a, b = batch
        return (0.5 * (u - b) ** 2 + 0.1 * a[..., 0] * u**3).sum(1).mean() + 0.3 * u.prod()

    def inner(draw: Draw, x: Vector) -> Vector:
        a, b = draw(1)
        z = a @ x
        return matrix @ x + b.mean(0) if constant else np.mean(np.tanh(z) + 0.1 * b * z**2, axis=0)

    def jacobian(draw: Draw, x: Vector) -> Vector:
        a, b = draw(1)
        z = a @ x
        slope = 1 - np.tanh(z) ** 2 + 0.2 * b * z
        return matrix if constant else np.mean(slope[:, :, None] * a, axis=0)

    def grad_f(draw: Draw, u: Vector) -> Vector:
        a, b = draw(0)
        products = np.array([u[1] * u[2], u[0] * u[2], u[0] * u[1]])
        return np.mean(u - b + 0.3 * a[:, :, 0] * u**2, axis=0) + 0.3 * products

    problem = start(fs.Problem(outer, torch.zeros(d, dtype=torch.float64), levels=(level,), name="mixed"))
    return Composition(problem, fs.FederatedData.from_arrays(pairs), inner, jacobian, grad_f)


def logistic(batch: tuple[Vector, ...], x: Vector) -> tuple[float, Vector, Vector]:
    """Loss, gradient and Hessian of logistic regression with a bias."""
    inputs, targets = batch
    rows = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)
    z = rows @ x
    p = 1 / (1 + np.exp(-z))
    hessian = rows.T @ (rows * (p * (1 - p))[:, None]) / len(rows)
    return float(np.mean(np.log1p(np.exp(-z)) + (1 - targets) * z)), rows.T @ (p - targets) / len(rows), hessian


@cache
def binary_data() -> fs.FederatedData:
    rng = np.random.default_rng(2)
    pairs = [(rng.normal(size=(n, 3)) + rng.normal(size=3), rng.integers(2, size=n)) for n in SIZES]
    return fs.FederatedData.from_arrays(pairs, classes=2)


def model() -> nn.Module:
    return nn.Linear(3, 1, dtype=torch.float64)


def linked(
    build: Callable[..., fs.Problem], world: Composition, slope: Callable[..., Any], most: float = N, **options: Any
) -> Composition:
    """A world whose inner function is a loss, with the outer function gamma link((. - shift) / gamma).

    Without a shift the clients are asked for one, and exp goes on as its tangent from where its slope is ``most``.
    """
    gamma, shift = options.setdefault("gamma", GAMMA), options.setdefault("shift", SHIFT)
    problem = start(build(model(), loss="binary_cross_entropy", **options))

    def with_outer(shift: float, slope: Callable[[Vector], Vector]) -> Composition:
        return replace(world, problem=problem, outer=lambda draw, u: slope((u - shift) / gamma))

    def prepare(paper: Any) -> Composition:
        losses = np.array([world.inner(paper.draw(k, -1, 0), problem.x0.numpy())[0] for k in range(N)])
        asked = gamma * np.log(np.mean(np.exp(losses / gamma)))
        return with_outer(asked, lambda t: np.minimum(np.exp(t), most))

    return with_outer(shift, slope) if shift is not None else replace(with_outer(0.0, slope), prepare=prepare)


def loss_world() -> Composition:
    """The loss itself as the inner function, without an outer function yet."""
    return Composition(
        start(fs.erm(model(), "binary_cross_entropy", prior=False)),
        binary_data(),
        lambda draw, x: np.array([logistic(draw(1), x)[0]]),
        lambda draw, x: logistic(draw(1), x)[1][None],
        lambda draw, u: u,
    )


def robust_world(slope: Callable[[Vector], Vector], **options: Any) -> Composition:
    return linked(fs.robust, loss_world(), slope, prior=False, **options)


def maml_world(first_order: bool = False, support: bool = False) -> Composition:
    build = fs.maml(model(), inner_lr=INNER_LR, first_order=first_order, loss="binary_cross_entropy", prior=False)

    def jacobian(draw: Draw, x: Vector) -> Vector:
        return np.eye(len(x)) - (0 if first_order else INNER_LR) * logistic(draw(1), x)[2]

    return Composition(
        start(build),
        binary_data().with_support(0.4, seed=1) if support else binary_data(),
        lambda draw, x: x - INNER_LR * logistic(draw(1), x)[1],
        jacobian,
        lambda draw, u: logistic(draw(0), u)[1],
    )


def damaml_world(first_order: bool = False, **options: Any) -> Composition:
    """Two levels, a gradient step and the loss after it, chained by hand."""
    step = maml_world(first_order)

    def inner(draw: Draw, x: Vector) -> Vector:
        return np.array([logistic(draw(2), step.inner(draw, x))[0]])

    def jacobian(draw: Draw, x: Vector) -> Vector:
        return logistic(draw(2), step.inner(draw, x))[1][None] @ step.jacobian(draw, x)

    world = replace(loss_world(), inner=inner, jacobian=jacobian)
    return linked(fs.damaml, world, np.exp, inner_lr=INNER_LR, first_order=first_order, prior=False, **options)


def steep(t: torch.Tensor) -> torch.Tensor:
    return nn.functional.softplus(2 * t)


def globally(world: Composition) -> Composition:
    """The same functions with the inner mean over all clients."""
    return replace(world, problem=replace(world.problem, inner_mean="global"))


COMPOSITIONS: dict[str, Callable[[], Composition]] = {
    "mixed": cache(mixed_world),
    "constant Jacobian": cache(lambda: mixed_world(constant=True)),
    "robust, exp": cache(lambda: robust_world(np.exp)),
    "robust, square": cache(lambda: robust_world(lambda t: t, link="square", shift=-0.3)),
    "robust, own link": cache(lambda: robust_world(lambda t: 2 / (1 + np.exp(-2 * t)), link=steep)),
    "robust, prepared": cache(lambda: robust_world(np.exp, shift=None, gamma=0.15)),
    "maml": cache(maml_world),
    "maml, first order": cache(lambda: maml_world(first_order=True)),
    "maml, support": cache(lambda: maml_world(support=True)),
    "damaml": cache(damaml_world),
    "damaml, first order": cache(lambda: damaml_world(first_order=True)),
    "damaml, prepared": cache(lambda: damaml_world(shift=None, gamma=0.2)),
    "mixed, global": cache(lambda: globally(mixed_world())),
    "robust, global": cache(lambda: globally(robust_world(np.exp, shift=None, gamma=0.15))),
    "maml, global": cache(lambda: globally(maml_world())),
}
