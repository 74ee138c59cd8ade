"""
DRFA and AFL against their NumPy references, written from the papers' lines, and the draws that DRFA makes.

The references are told who was drawn and which step was the snapshot; that these follow their distributions is tested
apart. Gradients and losses are written in NumPy. Agreement is to 1e-9 in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.clients.simulated import SimulatedClients
from fedstrata.problems.oracles import Oracles
from fedstrata.problems.projections import simplex as project_simplex
from reference.afl import afl
from reference.drfa import drfa
from reference.drfa import project_simplex as slow_projection
from support import drawn, make_clients, make_setting

ROUNDS = 3
SEED = 11
SIZES = [7, 12, 4, 20, 9]
N = len(SIZES)
FEATURES, CLASSES = 3, 4
TOLERANCE = 1e-9
Y = np.array([0.3, 0.15, 0.05, 0.4, 0.1])

Vector = np.ndarray


@dataclass(frozen=True)
class World:
    problem: fs.Problem
    data: fs.FederatedData
    oracles: Oracles


@cache
def world() -> World:
    """Agnostic softmax regression with a bias; losses differ much between clients."""
    rng = np.random.default_rng(2)
    pairs = []
    for n in SIZES:
        pairs.append((rng.normal(size=(n, FEATURES)) + rng.normal(size=FEATURES), rng.integers(CLASSES, size=n)))
    problem = fs.agnostic(nn.Linear(FEATURES, CLASSES, dtype=torch.float64), N)
    x0 = torch.from_numpy(0.5 * rng.normal(size=len(problem.x0)))
    problem = replace(problem, x0=x0)
    return World(problem, fs.FederatedData.from_arrays(pairs, classes=CLASSES), Oracles(problem))


def softmax(batch: tuple[Vector, ...], x: Vector) -> tuple[float, Vector]:
    """Loss and gradient."""
    inputs, targets = batch
    cut = CLASSES * FEATURES
    z = inputs @ x[:cut].reshape(CLASSES, FEATURES).T + x[cut:]
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    error = (p - np.eye(CLASSES)[targets]) / len(targets)
    loss = -np.log(p[np.arange(len(targets)), targets]).mean()
    return float(loss), np.concatenate([(error.T @ inputs).ravel(), error.sum(0)])


@dataclass(frozen=True)
class Case:
    """How a run draws and samples clients, and which hyperparameters it has that are not the usual ones."""

    batch_size: int | None = 3
    sampling: str = "uniform"
    participation: int | float = 1.0
    weighting: str = "uniform"
    chunk: int = 2
    options: dict[str, Any] = field(default_factory=dict)


CUBE, DECAY = fs.CubeRoot(0.3, 2.0), fs.RoundDecay(0.3, 0.6)
FULL = {
    "minibatches": Case(),
    "full batches": Case(batch_size=None),
    "one at a time": Case(chunk=1),
    "together": Case(chunk=N),
    "epochs": Case(sampling="epochs", batch_size=4),
    "lr, cube root": Case(options={"lr": CUBE}),
    "lr, round decay": Case(options={"lr": DECAY}),
    "dual lr, cube root": Case(options={"dual_lr": CUBE}),
    "dual lr, round decay": Case(options={"dual_lr": DECAY}),
    "out of the simplex": Case(options={"dual_lr": 3.0}),
}
CASES = {
    "drfa": {
        **FULL,
        "partial": Case(participation=3),
        "partial, weighted": Case(participation=2, weighting="samples", chunk=1),
        "partial, epochs": Case(participation=4, sampling="epochs", batch_size=4, chunk=N),
        "one step": Case(options={"steps": 1}, participation=3),
        "seven steps": Case(options={"steps": 7}, participation=3),
        "weight decay": Case(options={"weight_decay": 0.2}, participation=3),
    },
    "afl": {**FULL, "weighted": Case(weighting="samples")},
}
BUILD = {"drfa": fs.DRFA, "afl": fs.AFL}
OPTIONS: dict[str, dict[str, Any]] = {
    "drfa": {"lr": 0.2, "dual_lr": 0.05, "steps": 4, "weight_decay": 0.0},
    "afl": {"lr": 0.3, "dual_lr": 0.1},
}


@dataclass
class Draws:
    """What DRFA's server drew in each round, with what it was asked for: t', D and U."""

    steps: list[tuple[int, int, int]] = field(default_factory=list)
    drawn: list[tuple[list[int], Vector]] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)

    def watch(self, clients: SimulatedClients, monkeypatch: pytest.MonkeyPatch) -> None:
        choose, integer = clients.choose, clients.integer

        def choosing(number: int | None = None, probabilities: Any = None) -> Any:
            out = choose(number, probabilities)
            if probabilities is None:
                self.asked.append(out.cohort.tolist())
            else:
                self.drawn.append((out.cohort.tolist(), np.asarray(probabilities).copy()))
            return out

        def counting(low: int, high: int) -> int:
            self.steps.append((low, high, integer(low, high)))
            return self.steps[-1][2]

        monkeypatch.setattr(clients, "choose", choosing)
        monkeypatch.setattr(clients, "integer", counting)


def run_library(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Vector], Draws]:
    """Rounds of the library from a mixture put in by hand."""
    w = world()
    drawing: dict[str, Any] = {"batch_size": case.batch_size, "sampling": case.sampling, "seed": SEED}
    setting = make_setting(w.problem, w.data, oracles=w.oracles, **drawing)
    taking_part: dict[str, Any] = {"participation": case.participation, "weighting": case.weighting}
    clients = make_clients(setting, rounds=ROUNDS, chunk=case.chunk, **taking_part)
    draws = Draws()
    draws.watch(clients, monkeypatch)
    algorithm = BUILD[name](**{**OPTIONS[name], **case.options})
    state = algorithm.init(w.problem).replace(y=torch.from_numpy(Y))
    with torch.no_grad():
        for r in range(ROUNDS):
            clients.begin(r)
            state = algorithm.round(state, clients)
    if name == "afl":
        solution = algorithm.solution(state)
        assert torch.equal(solution.x, state.x_mean) and torch.equal(solution.y, state.y_mean)
        assert replace(algorithm, average=False).solution(state) is state
    return {key: value.numpy() for key, value in state.items()}, draws


def rate_of(value: Any, r: int, iteration: int) -> float:
    """A rate at a time, from its formula."""
    if isinstance(value, fs.CubeRoot):
        return float(value.k / (value.n + iteration) ** (1 / 3))
    return float(value.value * value.factor**r if isinstance(value, fs.RoundDecay) else value)


def run_reference(
    name: str, case: Case, draws: Draws, seed: int = SEED, rounds: int = ROUNDS, **change: Any
) -> dict[str, Vector]:
    """The same rounds by the paper; ``change`` makes it a slightly different paper."""
    options = {**OPTIONS[name], **case.options, **change}
    x0, steps = world().problem.x0.numpy(), options.get("steps", 1)

    def batch(k: int, r: int, t: int, exchange: int = 0) -> tuple[Vector, ...]:
        drawing: dict[str, Any] = {"batch_size": case.batch_size, "sampling": case.sampling}
        return drawn(world().data, k, (seed, r, exchange, 0, 0), t, **drawing)

    def gradient(k: int, r: int, t: int, x: Vector) -> Vector:
        return softmax(batch(k, r, t), x)[1] + options.get("weight_decay", 0.0) * x

    def loss(k: int, r: int, x: Vector, exchange: int = 0) -> float:
        return softmax(batch(k, r, 0, exchange), x)[0]

    def dual_lr(r: int) -> float:
        return rate_of(options["dual_lr"], r, r * steps)

    if name == "afl":
        out = afl(x0, Y, rounds, gradient, loss, lr=lambda r: rate_of(options["lr"], r, r), lr_lambda=dual_lr)
        return {"x": out["x"], "y": out["lam"], "x_mean": out["x_mean"], "y_mean": out["lam_mean"]}
    snapshots = [min(t, steps) for _, _, t in draws.steps]
    out = drfa(
        x0,
        Y,
        [cohort for cohort, _ in draws.drawn[:rounds]],
        options.get("snapshots", snapshots)[:rounds],
        draws.asked[:rounds],
        gradient,
        lambda k, r, x: loss(k, r, x, exchange=1),
        steps,
        lr=lambda r, t: rate_of(options["lr"], r, r * steps + t),
        lr_lambda=dual_lr,
    )
    return {"x": out["x"], "y": out["lam"]}


def distance(ours: dict[str, Vector], theirs: dict[str, Vector]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[key] - theirs[key]).max()) for key in ours)


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in CASES for case in CASES[name]])
def test_rounds_agree_with_the_reference(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = CASES[name][case]
    ours, draws = run_library(name, chosen, monkeypatch)
    theirs = run_reference(name, chosen, draws)
    assert distance(ours, theirs) < TOLERANCE
    assert np.abs(theirs["x"] - world().problem.x0.numpy()).max() > 0.03
    assert np.abs(theirs["y"] - Y).max() > 0.01
    if name == "drfa":
        steps = chosen.options.get("steps", OPTIONS[name]["steps"])
        number = N if chosen.participation == 1.0 else chosen.participation
        assert [(low, high) for low, high, _ in draws.steps] == [(1, steps)] * ROUNDS
        for r, (cohort, probabilities) in enumerate(draws.drawn):
            mixture = run_reference(name, chosen, draws, rounds=r)["y"]
            np.testing.assert_allclose(probabilities, mixture, atol=TOLERANCE)
            assert len(cohort) == len(draws.asked[r]) == len(set(draws.asked[r])) == number


def test_cases_are_what_they_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients are drawn twice, snapshots lie inside, some y becomes 0, and f_k(x, y) is N y_k times the loss."""
    _, draws = run_library("drfa", CASES["drfa"]["minibatches"], monkeypatch)
    assert any(len(set(cohort)) < len(cohort) for cohort, _ in draws.drawn)
    assert any(t < OPTIONS["drfa"]["steps"] for _, _, t in draws.steps)
    for name in CASES:
        ours, _ = run_library(name, CASES[name]["out of the simplex"], monkeypatch)
        assert (ours["y"] == 0).any() and ours["y"].sum() == pytest.approx(1, abs=1e-12)
    problem = world().problem
    arrays = tuple(torch.from_numpy(a) for a in drawn(world().data, 3, (SEED, 0, 0, 0, 0), 0, batch_size=5))
    batch = (*arrays, torch.tensor(3))
    in_x, in_y = torch.func.grad(problem.outer, argnums=(0, 1))(problem.x0, torch.from_numpy(Y), batch)
    loss, gradient = softmax(tuple(a.numpy() for a in arrays), problem.x0.numpy())
    assert float(problem.outer(problem.x0, torch.from_numpy(Y), batch)) == pytest.approx(N * Y[3] * loss, rel=1e-12)
    np.testing.assert_allclose(in_x.numpy(), N * Y[3] * gradient, atol=1e-12)
    np.testing.assert_allclose(in_y.numpy(), N * loss * np.eye(N)[3], atol=1e-12)


# --- the comparison has power ----------------------------------------------------------------------------------------


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}, {key}": (name, {key: OPTIONS[name][key] * 1.01}) for name in OPTIONS for key in ("lr", "dual_lr")},
    **{f"{name}, seed": (name, {"seed": SEED + 1}) for name in OPTIONS},
    **{f"{name}, batch": (name, {"sampling": "stratified"}) for name in OPTIONS},
    "drfa, steps": ("drfa", {"steps": 5}),
    "drfa, weight decay": ("drfa", {"weight_decay": 1e-3}),
    "drfa, snapshots": ("drfa", {"snapshots": [4] * ROUNDS}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reference_breaks_the_agreement(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = WRONG[wrong]
    case = Case(participation=3 if name == "drfa" else 1.0)
    ours, draws = run_library(name, case, monkeypatch)
    assert distance(ours, run_reference(name, case, draws)) < TOLERANCE
    options = {key: value for key, value in change.items() if key != "sampling"}
    theirs = run_reference(name, replace(case, sampling=change.get("sampling", case.sampling)), draws, **options)
    assert distance(ours, theirs) > 1e4 * TOLERANCE


# --- the draws follow their distributions ----------------------------------------------------------------------------


def chi_squared(counts: Vector, shares: Vector) -> float:
    expected = counts.sum() * shares
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_their_distributions() -> None:
    """Over 2000 rounds: D follows y with replacement, t' is uniform on 1..tau, U a uniform set, all unrelated.

    The bounds are the 0.999 quantiles of chi-squared with 4 (18.5), 15 (37.7) and 9 (27.9) degrees of freedom; a y of
    0 is never drawn.
    """
    w = world()
    clients = make_clients(make_setting(w.problem, w.data, seed=SEED, oracles=w.oracles), participation=3)
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
    assert twice / 2000 == pytest.approx(1 - 6 * sum(y[i] * y[j] * y[k] for i, j, k in _triples()), abs=0.03)


def _triples() -> list[tuple[int, int, int]]:
    return [(i, j, k) for i in range(N) for j in range(i) for k in range(j)]


# --- the projection --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5, 40])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
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
