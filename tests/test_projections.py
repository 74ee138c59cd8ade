"""Projections of a dual: the nearest point of the simplex, of a ball and of a box, for one vector or many."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.problems.projections import Projection, ball, box, simplex


def dirichlet(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Points of the simplex, some of them on its boundary."""
    points = rng.dirichlet(np.full(shape[-1], 0.3), size=shape[:-1])
    return points / points.sum(-1, keepdims=True)


def within(low: float, high: float) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    """Points of a box, including corners and faces; an infinite bound is far away."""
    return lambda rng, shape: np.clip(rng.uniform(-3, 3, size=shape), low, high)


def round_zero(radius: float) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    """Points of a ball, including its centre and some very close to the boundary."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        directions = rng.normal(size=shape)
        directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
        lengths = rng.choice([0.0, 0.3, 0.9, 1 - 1e-14], size=(*shape[:-1], 1))
        return np.asarray(radius * lengths * directions)

    return draw


@dataclass(frozen=True)
class Case:
    """A projection, the tolerated distance from its set, and random points of the set."""

    project: Projection
    excess: Callable[[np.ndarray], np.ndarray]
    inside: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


CASES = {
    "simplex": Case(simplex, lambda y: np.maximum(np.abs(y.sum(-1) - 1), -y.min(-1)), dirichlet),
    **{
        f"ball({radius:g})": Case(ball(radius), lambda y, r=radius: np.linalg.norm(y, axis=-1) - r, round_zero(radius))
        for radius in (1e-3, 0.7, 50)
    },
    **{
        f"box{bounds}": Case(
            box(*bounds),
            lambda y, low=bounds[0], high=bounds[1]: np.maximum(low - y, y - high).max(-1),
            within(*bounds),
        )
        for bounds in ((-0.2, 0.5), (0, math.inf), (-math.inf, -1.5), (0.3, 0.3), (-math.inf, math.inf))
    },
}

ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
SIZES = pytest.mark.parametrize("p", [1, 2, 5, 40])


def points(p: int, dtype: type = np.float64) -> np.ndarray:
    """Vectors of very different lengths, [5, 6, p], some of them with equal entries or zeros."""
    rng = np.random.default_rng(p)
    y = np.array([1e-12, 0.01, 1.0, 30.0, 1e6])[:, None, None] * rng.normal(size=(5, 6, p))
    y[:, 1] = y[:, 1, :1]
    y[:, 2, p // 2 :] = 0
    return y.astype(dtype)


# --- properties of a projection --------------------------------------------------------------------------------------


@ALL
@SIZES
def test_the_result_is_the_nearest_point_of_the_set(case: Case, p: int) -> None:
    """P is the projection on a convex set if and only if <y - P(y), z - P(y)> <= 0 for every z of the set."""
    y = points(p)
    found = case.project(torch.from_numpy(y)).numpy()
    rounding = 1e-14 * (50 + np.linalg.norm(y, axis=-1))
    assert (case.excess(found) <= rounding).all()
    others = case.inside(np.random.default_rng(0), (200, p))
    for row, point, slack in zip(y.reshape(-1, p), found.reshape(-1, p), rounding.reshape(-1), strict=True):
        products = (others - point) @ (row - point)
        lengths = 1 + np.linalg.norm(others - point, axis=1)
        assert (products <= slack * lengths * np.linalg.norm(row - point)).all()


@ALL
@SIZES
def test_points_of_the_set_stay(case: Case, p: int) -> None:
    inside = case.inside(np.random.default_rng(1), (60, p))
    found = case.project(torch.from_numpy(inside)).numpy()
    if case.project is simplex:
        np.testing.assert_allclose(found, inside, atol=1e-12, rtol=0)
    else:
        assert (found == inside).all()


@ALL
@SIZES
def test_projecting_twice_is_projecting_once(case: Case, p: int) -> None:
    once = case.project(torch.from_numpy(points(p)[:4]))
    torch.testing.assert_close(case.project(once), once, atol=1e-13, rtol=1e-14)


@ALL
@SIZES
def test_many_vectors_are_projected_one_by_one(case: Case, p: int) -> None:
    y = torch.from_numpy(points(p))
    before = y.clone()
    found = case.project(y)
    assert torch.equal(y, before), "the input is left alone"
    assert found.shape == y.shape
    assert torch.equal(found[2], case.project(y[2]))
    for a in range(5):
        for b in range(6):
            alone = case.project(y[a, b])
            assert alone.shape == (p,)
            assert torch.equal(found[a, b], alone)
    torch.testing.assert_close(torch.func.vmap(case.project)(y), found, atol=0, rtol=0)


@ALL
@SIZES
def test_single_precision_is_kept_and_accurate(case: Case, p: int) -> None:
    y = points(p, np.float32)[:4]
    found = case.project(torch.from_numpy(y))
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    exact = case.project(torch.from_numpy(y.astype(np.float64))).float()
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-6)


# --- the simplex against a slow solution -----------------------------------------------------------------------------


def nearest(y: np.ndarray) -> np.ndarray:
    """The projection by bisection: max(y - t, 0) with t such that it sums to one."""
    low, high = y.min() - 2.0, y.max()
    for _ in range(200):
        t = (low + high) / 2
        low, high = (t, high) if np.maximum(y - t, 0).sum() > 1 else (low, t)
    return np.maximum(y - t, 0)


@SIZES
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_the_simplex_is_that_of_bisection(p: int, scale: float) -> None:
    rng = np.random.default_rng(p)
    y = scale * rng.normal(size=(20, p)) + rng.choice([-5.0, 0.0, 1 / p, 5.0], size=(20, 1))
    ours = simplex(torch.from_numpy(y)).numpy()
    np.testing.assert_allclose(ours, [nearest(row) for row in y], atol=1e-10)
    np.testing.assert_allclose(ours.sum(1), 1.0, atol=1e-12)


# --- by hand ---------------------------------------------------------------------------------------------------------

HALF = math.sqrt(0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("project", "y", "expected"),
    [
        (simplex, [5.0, 0.0, 4.0], [1.0, 0.0, 0.0]),
        (simplex, [2.0, 2.0], [0.5, 0.5]),
        (simplex, [-3.0, -3.0, -4.5], [0.5, 0.5, 0.0]),
        (simplex, [0.0, 0.0, 0.0, 0.0], [0.25] * 4),
        (simplex, [1e-30, 0.0], [0.5, 0.5]),
        (simplex, [-7.0], [1.0]),
        (simplex, [1e9, 0.0], [1.0, 0.0]),
        (simplex, [1e30, -1e30, 3.0], [1.0, 0.0, 0.0]),
        (simplex, [-1e30, -1e30], [0.5, 0.5]),
        (simplex, [1e20], [1.0]),
        (ball(1.0), [3.0, -4.0], [0.6, -0.8]),
        (ball(2), [0.0, 0.0], [0.0, 0.0]),
        (ball(2), [1e-30, 0.0], [1e-30, 0.0]),
        (ball(5.0), [3.0, -4.0], [3.0, -4.0]),
        (ball(0.5), [-8.0], [-0.5]),
        (ball(1.0), [1e15, 1e15], [HALF, HALF]),
        (ball(1.0), [1e30, -1e30], [HALF, -HALF]),
        (box(-1, 2), [-3.0, 0.5, 7.0], [-1.0, 0.5, 2.0]),
        (box(low=0.0), [-1e30, 1e30, -1e-30], [0.0, 1e30, 0.0]),
        (box(high=0), [-1e30, 1e-30], [-1e30, 0.0]),
    ],
)
def test_by_hand(project: Projection, y: list[float], expected: list[float], dtype: torch.dtype) -> None:
    found = project(torch.tensor(y, dtype=dtype))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=dtype), atol=1e-35, rtol=1e-6)


@pytest.mark.parametrize("name", ["simplex", "ball(0.7)", "box(-0.2, 0.5)"])
def test_nan_stays_nan(name: str) -> None:
    """Training then stops and says that it diverged."""
    project = CASES[name].project
    y = torch.tensor([[0.2, math.nan, 0.3], [0.2, 0.3, 0.5]])
    found = project(y)
    assert found[0].isnan().any()
    assert torch.equal(found[1], project(y[1]))


@pytest.mark.parametrize(
    ("build", "values", "message"),
    [
        *((ball, (bad,), "The radius of the ball must be a positive number") for bad in (0, -1.0, math.nan, math.inf)),
        *((ball, (bad,), "The radius of the ball must be a positive number") for bad in (True, "1", None)),
        (box, (1, 0), r"The bounds of the box must be two numbers, the lower one first\. Got \(1, 0\)\."),
        *((box, bad, "The bounds of the box must be") for bad in ((math.nan, 1), (0, math.nan), (False, True))),
        *((box, bad, "The bounds of the box must be") for bad in (("0", 1), (None, 1), (0, None))),
    ],
)
def test_bad_sets_are_refused(build: Any, values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        build(*values)
