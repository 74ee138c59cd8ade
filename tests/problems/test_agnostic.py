"""The worst mixture of clients: the dual, and data that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.problems.projections import simplex
from fedstrata.training.metrics.evaluation import gradient_norm, objective
from support import sized_data, smooth_example, softmax_problem

PLAIN, DATA = smooth_example()
N = DATA.clients


def problem(clients: int = N) -> fs.Problem:
    assert PLAIN.flat is not None
    return fs.agnostic(PLAIN.flat.module, clients)


def test_y_starts_uniform_and_there_the_objective_is_ordinary() -> None:
    mixed = problem()
    assert mixed.kind == "no inner level, a dual that weights the clients"
    assert mixed.mixture
    assert mixed.project_y is simplex
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


# --- what does not fit -----------------------------------------------------------------------------------------------


def test_the_number_of_clients_must_be_that_of_the_data() -> None:
    with pytest.raises(
        fs.InputError, match=r"clients of the problem must be 7, the number of clients of the data\. Got 6"
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
