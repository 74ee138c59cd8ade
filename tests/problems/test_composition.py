"""The composition with a known solution: it is the minimiser, whichever mean is inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.training.metrics.evaluation import gradient_norm, objective

OPTIONS = {"clients": 4, "dimension": 3, "inner": 5, "samples": 6}


def by_hand(q: fs.problems.Quadratic, x: np.ndarray) -> float:
    """The objective in NumPy."""
    pairs = [[a.numpy() for a in q.data.train.of_client(k)] for k in range(q.data.clients)]
    inner = [a.mean(0) @ x for a, _ in pairs]
    if q.problem.inner_mean == "global":
        inner = [np.mean(inner, axis=0)] * len(pairs)
    return float(np.mean([0.5 * ((u - b) ** 2).sum(1).mean() for u, (_, b) in zip(inner, pairs, strict=True)]))


@pytest.mark.parametrize("inner_mean", ["local", "global"])
@pytest.mark.parametrize("seed", [0, 3])
def test_the_solution_is_the_minimiser(inner_mean: Any, seed: int) -> None:
    q = fs.composition(**OPTIONS, inner_mean=inner_mean, seed=seed)
    assert gradient_norm(q.problem, q.data, q.solution) < 1e-12
    assert gradient_norm(q.problem, q.data, q.problem.x0) > 0.1
    best = by_hand(q, q.solution.numpy())
    assert objective(q.problem, q.data, q.solution, None) == pytest.approx(best, rel=1e-12)
    generator = np.random.default_rng(0)
    for size in (1e-3, 0.1, 3.0):
        for _ in range(20):
            assert by_hand(q, q.solution.numpy() + size * generator.normal(size=3)) > best


def test_the_two_means_have_two_solutions() -> None:
    local, inside = (fs.composition(**OPTIONS, inner_mean=mean) for mean in ("local", "global"))
    assert torch.equal(local.data.train.arrays[0], inside.data.train.arrays[0])
    assert (local.solution - inside.solution).norm() > 0.01
    assert gradient_norm(inside.problem, inside.data, local.solution) > 0.01


def test_clients_that_are_alike_have_one_solution() -> None:
    local, inside = (
        fs.composition(**OPTIONS, inner_mean=mean, heterogeneity=0.0, noise=0.0) for mean in ("local", "global")
    )
    torch.testing.assert_close(local.solution, inside.solution, atol=1e-14, rtol=0)


def test_its_sizes_and_its_seed() -> None:
    q = fs.composition(**OPTIONS, dtype=torch.float32)
    assert [tuple(a.shape) for a in q.data.train.arrays] == [(24, 5, 3), (24, 5)]
    assert q.problem.x0.dtype == q.solution.dtype == torch.float32
    assert q.problem.kind == "1 inner level, a local inner mean, no dual"
    assert torch.equal(fs.composition(seed=2).solution, fs.composition(seed=2).solution)
    assert not torch.equal(fs.composition(seed=2).solution, fs.composition(seed=3).solution)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner": 0}, r"The inner of the composition problem must be a whole number of at least 1\. Got 0\."),
        (
            {"inner": 9},
            r"The inner of the composition problem must be at least the dimension, 10",
        ),
        ({"clients": 2.0}, r"The clients of the composition problem must be a whole number"),
        ({"seed": -1}, r"The seed of the composition problem must be a whole number of at least 0"),
        ({"noise": -0.1}, r"The noise of the composition problem must be a number of at least 0\. Got -0\.1\."),
        ({"heterogeneity": "a"}, r"The heterogeneity of the composition problem must be a number"),
        ({"inner_mean": "all"}, r"The inner_mean of the composition problem must be 'local' or 'global'"),
    ],
)
def test_a_bad_composition_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.composition(**options)
