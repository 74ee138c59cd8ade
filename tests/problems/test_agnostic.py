"""The worst mixture of clients: the dual, its projection, and data that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.metrics import gradient_norm, objective
from fedstrata.problems.agnostic import project_simplex
from support import sized_data, smooth_example, softmax_problem

PLAIN, DATA = smooth_example()
N = DATA.clients


def problem(clients: int = N) -> fs.Problem:
    assert PLAIN.flat is not None
    return fs.agnostic(PLAIN.flat.module, clients)


def test_y_starts_uniform_and_there_the_objective_is_ordinary() -> None:
    mixed = problem()
    assert mixed.kind == "no inner level, a dual that weighs the clients"
    assert mixed.mixture
    assert torch.equal(mixed.y0, torch.full((N,), 1 / N, dtype=torch.float64))
    x = PLAIN.x0
    assert objective(mixed, DATA, x, mixed.y0) == pytest.approx(objective(PLAIN, DATA, x, None), rel=1e-12)
    assert gradient_norm(mixed, DATA, x, mixed.y0) == pytest.approx(gradient_norm(PLAIN, DATA, x), rel=1e-12)


def test_y_weighs_the_clients() -> None:
    mixed, x = problem(), PLAIN.x0
    y = torch.linspace(0.0, 2.0, N, dtype=torch.float64)
    y /= y.sum()
    leaf = x.clone().requires_grad_()
    value = sum(y[k] * PLAIN.outer(leaf, DATA.train.of_client(k)) for k in range(N))
    (gradient,) = torch.autograd.grad(value, leaf)
    assert objective(mixed, DATA, x, y) == pytest.approx(float(value.detach()), rel=1e-12)
    assert gradient_norm(mixed, DATA, x, y) == pytest.approx(float(gradient.norm()), rel=1e-12)


def test_the_dual_of_one_client_is_one() -> None:
    data = sized_data([6], features=4, classes=3)
    assert objective(problem(1), data, PLAIN.x0, problem(1).y0) == pytest.approx(objective(PLAIN, data, PLAIN.x0, None))


# --- the projection --------------------------------------------------------------------------------------------------


def nearest(y: np.ndarray) -> np.ndarray:
    """The projection by bisection: max(y - t, 0) with t such that it sums to one."""
    low, high = y.min() - 2.0, y.max()
    for _ in range(200):
        t = (low + high) / 2
        low, high = (t, high) if np.maximum(y - t, 0).sum() > 1 else (low, t)
    return np.maximum(y - t, 0)


@pytest.mark.parametrize("p", [1, 2, 5, 40])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_the_projection_is_the_nearest_point_of_the_simplex(p: int, scale: float) -> None:
    generator = np.random.default_rng(p)
    y = scale * generator.normal(size=(6, p))
    ours = project_simplex(torch.from_numpy(y)).numpy()
    np.testing.assert_allclose(ours, [nearest(row) for row in y], atol=1e-10)
    assert (ours >= 0).all()
    np.testing.assert_allclose(ours.sum(1), 1.0, atol=1e-12)
    others = generator.dirichlet(np.ones(p), size=200)
    for row, found in zip(y, ours, strict=True):
        assert ((others - row) ** 2).sum(1).min() >= ((found - row) ** 2).sum() - 1e-12
    alone = torch.stack([project_simplex(torch.from_numpy(row)) for row in y])
    assert torch.equal(alone, torch.from_numpy(ours)), "a vector, or any number of them"


def test_points_of_the_simplex_stay_and_corners_are_found() -> None:
    inside = torch.tensor([0.2, 0.0, 0.8], dtype=torch.float64)
    torch.testing.assert_close(project_simplex(inside), inside)
    assert project_simplex(torch.tensor([5.0, 0.0, 4.0])).tolist() == [1.0, 0.0, 0.0]
    assert project_simplex(torch.tensor([2.0, 2.0])).tolist() == [0.5, 0.5]
    assert problem().project_y is project_simplex


# --- what does not fit -----------------------------------------------------------------------------------------------


def test_the_number_of_clients_must_be_that_of_the_data() -> None:
    with pytest.raises(
        fs.InputError, match=r"clients of the agnostic problem must be 7, as many as the data have\. Got 6"
    ):
        fs.train(problem(6), DATA, fs.AFL(), rounds=1)


def test_the_model_is_checked_too() -> None:
    wide = softmax_problem(features=5, classes=3)
    assert wide.flat is not None
    with pytest.raises(fs.InputError, match="cannot take inputs of shape"):
        fs.train(fs.agnostic(wide.flat.module, N), DATA, fs.AFL(), rounds=1)


@pytest.mark.parametrize("clients", [0, -3, 2.0, True, "7"])
def test_a_bad_number_of_clients_is_refused(clients: Any) -> None:
    with pytest.raises(fs.InputError, match="The clients of the agnostic problem must be a whole number of at least 1"):
        problem(clients)
