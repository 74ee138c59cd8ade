"""AFL and DRFA: what the server draws, and where they reduce to something simpler."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from algorithms.equations import Ours
from algorithms.examples import DATA, PLAIN, alone, descent
from cases import product, repeats
from fedstrata.problems.projections import simplex as project_simplex
from plain_worlds import MIXTURES
from reference.drfa import project_simplex as slow_projection
from support import make_clients, make_setting, mixture_of, play, started
from worlds import N

pytestmark = pytest.mark.untraced

RATE = 0.2
ONE = alone(DATA)
MIXTURE = mixture_of(PLAIN, DATA.clients)


@pytest.mark.parametrize("average", [False, True])
def test_afl_with_one_client_is_gradient_descent_and_its_average(average: bool) -> None:
    path = [descent(PLAIN, ONE, steps, lr=RATE)["x"] for steps in range(1, 6)]
    run = fs.train(mixture_of(PLAIN, 1), ONE, fs.AFL(lr=RATE, average=average), rounds=5)
    expected = torch.stack(path).mean(0) if average else path[-1]
    torch.testing.assert_close(run.x, expected, atol=1e-10, rtol=0)
    assert run.y.tolist() == [1.0]


def test_drfa_with_one_client_is_gradient_descent() -> None:
    run = fs.train(mixture_of(PLAIN, 1), ONE, fs.DRFA(lr=RATE, steps=2), rounds=3)
    torch.testing.assert_close(run.x, descent(PLAIN, ONE, 6, lr=RATE)["x"], atol=1e-10, rtol=0)
    assert run.y.tolist() == [1.0]


def test_afl_with_a_frozen_dual_is_gradient_descent_on_the_mean() -> None:
    frozen = fs.AFL(lr=RATE, dual_lr=1e-12, average=False)
    found = play(frozen, MIXTURE, DATA, 4, batch_size=4, seed=2)[0]
    plain = play(fs.FedAvg(lr=RATE, steps=1), PLAIN, DATA, 4, batch_size=4, seed=2)[0]
    torch.testing.assert_close(found.x, plain.x, atol=1e-10, rtol=0)


def test_afl_follows_the_worst_mixture() -> None:
    """Both steps at the old x and y; y leaves the middle, and weights the gradients."""
    x, y = PLAIN.x0, torch.full((7,), 1 / 7, dtype=torch.float64)
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        losses = torch.stack([PLAIN.outer(leaf, DATA.train.of_client(k)) for k in range(7)])
        (gradient,) = torch.autograd.grad(y @ losses, leaf)
        x, y = x - RATE * gradient, project_simplex(y + 0.5 * losses.detach())
    assert y.max() > 2 / 7
    found = play(fs.AFL(lr=RATE, dual_lr=0.5, average=False), MIXTURE, DATA, 3)[0]
    torch.testing.assert_close(found.x, x, atol=1e-11, rtol=0)
    torch.testing.assert_close(found.y, y, atol=1e-11, rtol=0)


def watched(algorithm: fs.Algorithm, problem: fs.Problem, rounds: int, **run: Any) -> tuple[Any, Ours]:
    """Rounds, and what the server drew in them."""
    taking_part = {key: run.pop(key) for key in ("participation", "weighting") if key in run}
    clients = make_clients(make_setting(problem, DATA, **run), rounds=rounds, **taking_part)
    ours = Ours()
    ours.watch(clients)
    with torch.no_grad():
        state = started(algorithm, clients)
        for r in range(rounds):
            clients.begin(r)
            state = algorithm.round(state, clients)
    return state, ours


@pytest.mark.slow
def test_drfa_with_a_frozen_dual_draws_clients_uniformly() -> None:
    rounds, m = 150, 4
    algorithm = fs.DRFA(lr=1e-3, dual_lr=1e-12, steps=1)
    state, ours = watched(algorithm, MIXTURE, rounds, batch_size=2, participation=m)
    assert np.stack(ours.probabilities) == pytest.approx(1 / 7, rel=1e-6)
    assert state.y.tolist() == pytest.approx([1 / 7] * 7, abs=1e-6)
    drawn = ours.cohorts[::2]
    counts = np.bincount(np.concatenate(drawn), minlength=7)
    assert chi_squared(counts, np.full(7, 1 / 7)) < 22.5  # 6 degrees of freedom, 0.1 %
    assert any(len(set(cohort)) < m for cohort in drawn), "with replacement"


@repeats("seed", [0, 1, 2, 3])
def test_a_round_of_drfa_is_fedavg_on_the_clients_that_were_drawn(seed: int) -> None:
    """A client drawn twice counts twice; local steps are the clients' own."""
    y0 = torch.tensor([0.5, 0.3, 0.2, 0, 0, 0, 0], dtype=torch.float64)
    algorithm = fs.DRFA(lr=RATE, dual_lr=0.05, steps=3)
    found, ours = watched(algorithm, replace(MIXTURE, y0=y0), 1, participation=5, weighting="samples", seed=seed)
    drawn, asked = ours.cohorts
    assert set(drawn) <= {0, 1, 2}, "clients of weight 0 are never drawn"
    assert len(drawn) == 5
    paths = [[descent(PLAIN, alone(DATA, k), steps, lr=RATE)["x"] for steps in (1, 2, 3)] for k in drawn]
    torch.testing.assert_close(found.x, torch.stack([path[-1] for path in paths]).mean(0), atol=1e-10, rtol=0)
    # The dual follows the losses at the mean of the models after t' steps, t' from 1 to 3.
    assert len(set(asked)) == 5
    for snapshot in (1, 2, 3):
        z = torch.stack([path[snapshot - 1] for path in paths]).mean(0)
        v = torch.zeros(7, dtype=torch.float64)
        for k in asked:
            v[k] = 7 / 5 * PLAIN.outer(z, DATA.train.of_client(k))
        y = project_simplex(y0 + 3 * 0.05 * v)
        assert torch.allclose(found.y, y, atol=1e-10, rtol=0) == (snapshot == ours.integers[0][2])


# --- the draws follow their distributions ----------------------------------------------------------------------------


def chi_squared(counts: np.ndarray, shares: np.ndarray) -> float:
    expected = counts.sum() * shares
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.slow
def test_draws_follow_their_distributions() -> None:
    """Over 2000 rounds: D follows y with replacement, t' is uniform on 1..tau, U a uniform set, all unrelated.

    The bounds are the 0.999 quantiles of chi-squared with 4 (18.5), 15 (37.7) and 9 (27.9) degrees of freedom; a y of
    0 is never drawn.
    """
    world = MIXTURES["agnostic softmax"]()
    clients = make_clients(make_setting(world.problem, world.data, seed=11), participation=3)
    y, tau = np.array([0.35, 0.0, 0.05, 0.4, 0.2]), 5
    steps, single, pairs, sets = np.zeros(tau), np.zeros(N), np.zeros((N, N)), np.zeros((N, N))
    twice = 0
    for r in range(2000):
        clients.begin(r)
        steps[clients.integer(1, tau) - 1] += 1
        cohort = clients.choose(3, probabilities=y).cohort
        single[cohort[0]] += 1
        pairs[cohort[1], cohort[2]] += 1
        twice += len(set(cohort.tolist())) < 3
        asked = clients.choose(3).cohort
        assert len(set(asked.tolist())) == 3
        left_out = np.setdiff1d(np.arange(N), asked)
        sets[left_out[0], left_out[1]] += 1
    alive = y > 0
    assert single[~alive].sum() == pairs[~alive].sum() == pairs[:, ~alive].sum() == 0
    assert chi_squared(steps, np.full(tau, 1 / tau)) < 18.5
    assert chi_squared(single[alive], y[alive]) < 18.5
    assert chi_squared(pairs[alive][:, alive].ravel(), np.outer(y, y)[alive][:, alive].ravel()) < 37.7
    assert chi_squared(sets[np.triu_indices(N, 1)], np.full(10, 0.1)) < 27.9
    all_different = 6 * sum(y[list(triple)].prod() for triple in combinations(range(N), 3))
    assert twice / 2000 == pytest.approx(1 - all_different, abs=0.03)


@product("size, scale", [1, 2, 5, 40], [0.01, 1.0, 30.0])
def test_the_projection_is_that_of_the_reference(size: int, scale: float) -> None:
    rng = np.random.default_rng(size)
    rows = scale * rng.normal(size=(50, size)) + rng.normal(size=(50, 1))
    rows[:10] = np.round(rows[:10])  # ties
    rows[10] = 1 / size
    ours = project_simplex(torch.from_numpy(rows)).numpy()
    np.testing.assert_allclose(ours, np.stack([slow_projection(row) for row in rows]), atol=1e-12)
    np.testing.assert_allclose(ours[20], project_simplex(torch.from_numpy(rows[20])).numpy(), atol=1e-15)
    np.testing.assert_allclose(ours.sum(1), 1, atol=1e-12)
    for target in np.eye(size):  # no vertex is nearer: <row - projection, vertex - projection> <= 0
        assert (((rows - ours) * (target - ours)).sum(1) < 1e-9).all()
