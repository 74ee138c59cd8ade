"""The tower of levels: gradients vanish at its solution, noise averages out, and algorithms find the solution."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.experiments import build, config
from fedstrata.training.metrics.evaluation import gradient_norm, objective
from minimax import slopes

SMALL: dict[str, Any] = {"clients": 3, "dimension": 4, "samples": 6}


def value(q: fs.Quadratic, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    """The objective from the problem's functions on all data, differentiable."""
    inner = []
    for k in range(q.data.clients):
        u = x
        for level in q.problem.levels:
            u = level(u, q.data.train.of_client(k))
        inner.append(u)
    mean, dual = torch.stack(inner).mean(0), () if y is None else (y,)
    return torch.stack([q.problem.outer(mean, *dual, q.data.train.of_client(k)) for k in range(len(inner))]).mean()


# --- the solution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dual", [True, False], ids=["dual", "no dual"])
@pytest.mark.parametrize("levels", [1, 2, 3, 4, 5])
def test_the_known_point_is_stationary(levels: int, dual: bool) -> None:
    q = fs.tower(**SMALL, levels=levels, dual=dual, seed=levels)
    assert q.problem.known is not None
    x, y = q.problem.known
    assert q.solution is x and q.dual is y and (y is not None) == dual == q.problem.dual
    assert (len(q.problem.levels), q.problem.inner_mean, x.dtype) == (levels, "global", torch.float64)
    assert gradient_norm(q.problem, q.data, x, y) < 1e-9
    assert gradient_norm(q.problem, q.data, q.problem.x0, None if y is None else y + 1) > 0.1
    if y is not None:
        in_x, in_y = slopes(lambda x, y: value(q, x, y), x, y)
        assert in_x.norm() < 1e-9 and in_y.norm() < 1e-9
    assert objective(q.problem, q.data, x, y) == pytest.approx(0 if dual else noise_alone(q), abs=1e-12)


def noise_alone(q: fs.Quadratic) -> float:
    """||u - b||^2 / 2 at the solution: the spread of the targets."""
    targets = q.data.train.arrays[1]
    return float(0.5 * ((targets - targets.mean(0)) ** 2).sum(1).mean())


@pytest.mark.parametrize("levels", [1, 3])
def test_the_best_dual_leaves_the_squared_distance(levels: int) -> None:
    """max_y f = ||u - b||^2 / 2: the problem without a dual, up to the noise of the targets."""
    with_dual, without = (fs.tower(**SMALL, levels=levels, dual=dual) for dual in (True, False))
    assert torch.equal(with_dual.solution, without.solution)
    assert torch.equal(with_dual.data.train.arrays[1], without.data.train.arrays[1])
    x = with_dual.problem.x0
    zero = torch.zeros(4, dtype=torch.float64)
    (best,) = slopes(lambda y: value(with_dual, x, y), zero)  # f is y^T (u - b) - ||y||^2 / 2
    assert slopes(lambda y: value(with_dual, x, y), best)[0].norm() < 1e-12
    squared = objective(without.problem, without.data, x, None) - noise_alone(without)
    assert objective(with_dual.problem, with_dual.data, x, best) == pytest.approx(squared, rel=1e-10)
    assert squared == pytest.approx(0.5 * float(best @ best), rel=1e-10)


@pytest.mark.parametrize("levels", [1, 4])
def test_levels_are_rotations_of_a_bent_vector(levels: int) -> None:
    q = fs.tower(**SMALL, levels=levels, bend=0.6, noise=0.0)
    u = torch.linspace(-2, 2, 4, dtype=torch.float64)
    batch = q.data.train.of_client(0)
    zero = torch.zeros_like(u)
    turns = []
    for level in q.problem.levels:
        bent = u + 0.6 * u.sin()
        assert level(u, batch).norm() == pytest.approx(float(bent.norm()), rel=1e-12)
        assert level(zero, batch).norm() < 1e-14
        turn = torch.autograd.functional.jacobian(lambda v, level=level: level(v, batch), zero) / 1.6
        torch.testing.assert_close(turn @ turn.T, torch.eye(4).double(), atol=1e-12, rtol=0)
        torch.testing.assert_close(level(u, batch), turn @ bent, atol=1e-12, rtol=0)
        turns.append(turn)
    assert all((a - b).abs().max() > 0.1 for a, b in pairwise(turns))
    flat = fs.tower(**SMALL, levels=levels, bend=0.0, noise=0.0)
    for level in flat.problem.levels:
        torch.testing.assert_close(level(2 * u, batch), 2 * level(u, batch), atol=1e-12, rtol=0)


# --- the noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_noise_averages_to_zero_on_every_client(noise: float) -> None:
    noisy, exact = (fs.tower(clients=3, dimension=4, levels=2, samples=50, noise=n) for n in (noise, 0.0))
    u = torch.linspace(-2, 2, 4, dtype=torch.float64)
    for k in range(3):
        rows, targets = noisy.data.train.of_client(k)
        assert rows.shape == (50, 2, 5)
        assert rows.mean(0).abs().max() < 1e-14
        torch.testing.assert_close(targets.mean(0), exact.data.train.of_client(k)[1][0], atol=1e-13, rtol=0)
        spread = float(torch.cat([rows.ravel(), (targets - targets.mean(0)).ravel()]).std())
        assert spread == pytest.approx(noise, rel=0.15)
        for ours, plain in zip(noisy.problem.levels, exact.problem.levels, strict=True):
            whole = ours(u, (rows, targets))
            torch.testing.assert_close(whole, plain(u, exact.data.train.of_client(k)), atol=1e-12, rtol=0)
            half = ours(u, (rows[:25], targets[:25]))
            assert ((half - whole).norm() > 1e-3) == (noise > 0)


def test_a_sample_has_a_slope_and_a_shift_of_its_own_for_each_level() -> None:
    noisy, exact = (fs.tower(**SMALL, levels=3, noise=n) for n in (0.5, 0.0))
    u, zero = torch.linspace(-2, 2, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    rows, targets = noisy.data.train.of_client(1)
    for j, (level, plain) in enumerate(zip(noisy.problem.levels, exact.problem.levels, strict=True)):
        batch = exact.data.train.of_client(1)
        turn = torch.autograd.functional.jacobian(lambda v, plain=plain, batch=batch: plain(v, batch), zero) / 1.3
        for i in range(6):
            bent = u + (0.3 + rows[i, j, 0]) * u.sin()
            found = level(u, (rows[i : i + 1], targets[i : i + 1]))
            torch.testing.assert_close(found, turn @ bent + rows[i, j, 1:], atol=1e-12, rtol=0)


def test_the_noise_of_a_sample_differs_from_level_to_level_and_client_to_client() -> None:
    rows = fs.tower(clients=2, dimension=4, levels=2, samples=500).data.train.arrays[0].reshape(2, 500, 10)
    correlation = np.corrcoef(torch.cat([rows[0], rows[1]], dim=1).T.numpy())
    assert np.abs(correlation - np.eye(20)).max() < 0.25


# --- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("levels", "dual", "alpha"), [(1, True, 4.0), (1, False, 1.0), (3, True, 1.0), (2, False, 4.0), (5, True, 4.0)]
)
def test_a_method_finds_the_solution(levels: int, dual: bool, alpha: float) -> None:
    """On full batches, with estimates that are fresh in every step (alpha eta^2 = 1) or carried over."""
    q = fs.tower(**SMALL, levels=levels, dual=dual)
    algorithm = fs.LocalSMCGDAM(eta=0.5, gamma_x=0.2, gamma_y=1.0, rho_x=2.0, rho_y=2.0, alpha=alpha, steps=2)
    run = fs.train(q.problem, q.data, algorithm, rounds=150 if levels < 5 else 90, eval_every=150)
    first, last = run.history[0], run.history[-1]
    assert first["distance"] == pytest.approx(1.0, rel=1e-12)
    assert last["distance"] < 1e-6
    assert ("distance_dual" in last) == dual
    assert (run.x - q.solution).norm() < 1e-6
    assert first["loss"] == pytest.approx(objective(q.problem, q.data, q.problem.x0, q.problem.y0), rel=1e-12)


def test_it_can_be_run_from_a_file() -> None:
    tables = {"problem": {"name": "tower", **SMALL, "levels": 2, "dual": False}, "algorithm": {"name": "local_smcgdam"}}
    experiment = build.Experiment(config.parse({**tables, "train": {"seed": 7}}, "here"))
    expected = fs.tower(**SMALL, levels=2, dual=False, seed=7)
    assert torch.equal(experiment.problem.x0, expected.problem.x0)
    assert torch.equal(experiment.data.train.arrays[0], expected.data.train.arrays[0])
    assert experiment.problem.options == {"levels": 2, "bend": 0.3, "dual": False}


# --- its options -----------------------------------------------------------------------------------------------------


def test_its_sizes_its_start_and_its_seed() -> None:
    q = fs.tower(clients=3, dimension=4, levels=2, samples=6, distance=2.5, dtype=torch.float32)
    assert [tuple(a.shape) for a in q.data.train.arrays] == [(18, 2, 5), (18, 4)]
    assert (q.data.clients, q.data.name, q.problem.name) == (3, "tower", "tower")
    assert q.problem.x0.dtype == q.solution.dtype == torch.float32
    assert float((q.problem.x0 - q.solution).norm()) == pytest.approx(2.5, rel=1e-6)
    assert q.problem.y0 is not None and torch.equal(q.problem.y0, torch.zeros(4))
    assert q.problem.kind == "2 inner levels, a global inner mean, a dual"
    assert torch.equal(fs.tower(distance=0.0).problem.x0, fs.tower().solution)
    assert torch.equal(fs.tower(seed=2).solution, fs.tower(seed=2).solution)
    assert not torch.equal(fs.tower(seed=2).solution, fs.tower(seed=3).solution)
    assert fs.tower(samples=1, noise=0.0).data.sizes.tolist() == [1] * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: bad}, rf"The {name} of the tower problem must be a whole number of at least 1\. Got")
            for name in ("clients", "dimension", "levels", "samples")
            for bad in (0, 1.5, True, "2")
        ),
        ({"seed": -1}, r"The seed of the tower problem must be a whole number of at least 0\. Got -1\."),
        ({"bend": -0.1}, r"The bend of the tower problem must be a number of at least 0 and below 1\. Got -0\.1\."),
        ({"bend": 1}, r"The bend of the tower problem must be a number of at least 0 and below 1\. Got 1\."),
        ({"bend": math.nan}, r"The bend of the tower problem must be a number"),
        ({"noise": "a"}, r"The noise of the tower problem must be a number of at least 0\. Got 'a'\."),
        ({"distance": -1.0}, r"The distance of the tower problem must be a number of at least 0\. Got -1\.0\."),
        ({"samples": 1}, r"The samples of the tower problem must be at least 2 if there is noise\. Got 1"),
    ],
    ids=str,
)
def test_a_bad_tower_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.tower(**options)
