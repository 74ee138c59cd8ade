"""
Every algorithm against its NumPy reference, written from the paper's lines: two rounds from a random state.

The references see gradients written in NumPy too, so nothing of the library stands on both sides but the rule that
names a batch. Agreement to 1e-9 in float64 leaves no room for a different equation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.clients.client import Setting
from fedstrata.core.schedules import Clock
from fedstrata.data.sampling import SAMPLINGS
from fedstrata.problems.oracles import Oracles
from reference.fedavg import fedavg
from reference.fedopt import fedadagrad, fedadam, fedyogi
from reference.fedprox import fedprox
from reference.qfedavg import qfedavg
from reference.scaffold import scaffold
from support import make_clients, make_setting

ROUNDS = 2
SEED = 11
SIZES = [7, 12, 4, 20, 9]
TOLERANCE = 1e-9

Vector = np.ndarray


# --- two worlds: the library's problem, and the same thing in NumPy --------------------------------------------------


@dataclass(frozen=True)
class World:
    """A problem and its data for the library; loss and gradient of given rows of a client in NumPy."""

    problem: fs.Problem
    data: fs.FederatedData
    oracles: Oracles
    loss: Callable[[int, Vector, Vector], float]
    gradient: Callable[[int, Vector, Vector], Vector]


def quadratic_world() -> World:
    """f_k(x) = mean of 1/2 sum_j h_j (x_j - b_j)^2 over the client's rows."""
    generator = np.random.default_rng(1)
    dimension = 6
    pairs = [
        (generator.uniform(0.3, 3.0, (n, dimension)), generator.normal(size=(n, dimension)) + 2 * generator.normal())
        for n in SIZES
    ]

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        h, b = batch
        return 0.5 * (h * (x - b) ** 2).sum(1).mean()

    def loss(k: int, rows: Vector, x: Vector) -> float:
        h, b = pairs[k][0][rows], pairs[k][1][rows]
        return float(0.5 * np.mean(np.sum(h * (x - b) ** 2, axis=1)))

    def gradient(k: int, rows: Vector, x: Vector) -> Vector:
        h, b = pairs[k][0][rows], pairs[k][1][rows]
        return np.mean(h * (x - b), axis=0)

    problem = fs.Problem(outer, torch.zeros(dimension, dtype=torch.float64), name="quadratic")
    return World(problem, fs.FederatedData.from_arrays(pairs), Oracles(problem), loss, gradient)


def softmax_world() -> World:
    """Softmax regression with a bias; within a client, the library keeps rows in class order."""
    generator = np.random.default_rng(2)
    features, classes = 3, 4
    pairs = []
    for k, n in enumerate(SIZES):
        inputs = generator.normal(size=(n, features)) + generator.normal(size=features)
        pairs.append((inputs, generator.integers(classes, size=n) if k else np.arange(n) % classes))
    ordered = [(x[np.argsort(t, kind="stable")], np.sort(t)) for x, t in pairs]

    def logits(k: int, rows: Vector, x: Vector) -> tuple[Vector, Vector, Vector]:
        inputs, targets = ordered[k][0][rows], ordered[k][1][rows]
        weight, bias = x[: classes * features].reshape(classes, features), x[classes * features :]
        z = inputs @ weight.T + bias
        return inputs, targets, z - np.log(np.exp(z).sum(1, keepdims=True))

    def loss(k: int, rows: Vector, x: Vector) -> float:
        _, targets, log_p = logits(k, rows, x)
        return float(-log_p[np.arange(len(rows)), targets].mean())

    def gradient(k: int, rows: Vector, x: Vector) -> Vector:
        inputs, targets, log_p = logits(k, rows, x)
        error = (np.exp(log_p) - np.eye(classes)[targets]) / len(rows)
        return np.concatenate([(error.T @ inputs).ravel(), error.sum(0)])

    problem = fs.erm(nn.Linear(features, classes, dtype=torch.float64))
    data = fs.FederatedData.from_arrays(pairs, classes=classes)
    return World(problem, data, Oracles(problem), loss, gradient)


WORLDS = {"quadratic": cache(quadratic_world), "softmax": cache(softmax_world)}


# --- rates, written again from their formulas ------------------------------------------------------------------------


Rate = Callable[[int, int], float]


def constant(value: float) -> Rate:
    return lambda r, iteration: value


def step_decay(r: int, iteration: int) -> float:
    """StepDecay(0.08, at=(0.5,), factor=0.3) over two rounds: the second round is at half of training."""
    return 0.08 if r < 1 else 0.08 * 0.3


def round_decay(r: int, iteration: int) -> float:
    return 0.07 * 0.6**r


def cube_root(r: int, iteration: int) -> float:
    return 0.2 / (3.0 + iteration) ** (1.0 / 3.0)


@dataclass(frozen=True)
class Case:
    """How a run draws, samples clients, weighs and steps; rates for the library and as (round, iteration) -> rate."""

    batch_size: int | None = 3
    sampling: str = "uniform"
    participation: int | float = 1.0
    weighting: str = "uniform"
    steps: int | fs.Epochs = 3
    lr: Any = 0.06
    expected_lr: Rate = lambda r, iteration: 0.06
    server_lr: Any = 0.7
    expected_server_lr: Rate = lambda r, iteration: 0.7
    weight_decay: float = 0.0
    chunk: int = 3

    def steps_of(self, size: int) -> int:
        if isinstance(self.steps, int):
            return self.steps
        per_epoch = 1 if self.batch_size is None else math.ceil(size / self.batch_size)
        return math.ceil(self.steps.epochs * per_epoch)


CASES = {
    "minibatches": Case(),
    "full batches": Case(batch_size=None, weight_decay=0.1),
    "one client at a time": Case(chunk=1, weight_decay=0.05),
    "all clients together": Case(chunk=len(SIZES), steps=20),
    "partial participation": Case(participation=3, weight_decay=0.2),
    "weighted by samples": Case(weighting="samples"),
    "weighted, partial": Case(weighting="samples", participation=2, batch_size=None),
    "two epochs": Case(steps=fs.Epochs(2), sampling="epochs", batch_size=4, chunk=5, weight_decay=0.1),
    "two epochs, weighted, partial": Case(
        steps=fs.Epochs(2), sampling="epochs", participation=4, weighting="samples", chunk=2
    ),
    "a part of an epoch": Case(steps=fs.Epochs(0.6), sampling="epochs", chunk=4),
    "an epoch and a half, uniform draws": Case(steps=fs.Epochs(1.5), batch_size=5),
    "stratified": Case(sampling="stratified", batch_size=4),
    "step decay": Case(lr=fs.StepDecay(0.08, at=(0.5,), factor=0.3), expected_lr=step_decay),
    "round decay": Case(
        lr=fs.RoundDecay(0.07, 0.6),
        expected_lr=round_decay,
        server_lr=fs.StepDecay(0.08, at=(1,), factor=0.3),
        expected_server_lr=step_decay,
    ),
    "cube root": Case(lr=fs.CubeRoot(0.2, 3.0), expected_lr=cube_root, participation=3),
    "cube root, unequal steps": Case(
        lr=fs.CubeRoot(0.2, 3.0),
        expected_lr=cube_root,
        steps=fs.Epochs(1.5),
        sampling="epochs",
        participation=3,
        chunk=2,
    ),
    "cube root on the server": Case(server_lr=fs.CubeRoot(0.2, 3.0), expected_server_lr=cube_root),
}


# --- the methods: how each side is called ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """An algorithm, its reference, and the hyperparameters that are its own."""

    build: Callable[..., fs.Algorithm]
    reference: Callable[..., dict[str, Any]]
    own: dict[str, Any]
    server: tuple[str, ...] = ()
    server_lr: bool = True


ADAPTIVE = {"beta1": 0.8, "beta2": 0.9, "tau": 0.05}

METHODS = {
    "fedavg": Method(fs.FedAvg, fedavg, {}),
    "fedprox": Method(fs.FedProx, fedprox, {"mu": 0.9}),
    "scaffold I": Method(fs.Scaffold, scaffold, {"option": "I"}, ("c",)),
    "scaffold II": Method(fs.Scaffold, scaffold, {"option": "II"}, ("c",)),
    "fedadam": Method(fs.FedAdam, fedadam, ADAPTIVE, ("m", "v")),
    "fedyogi": Method(fs.FedYogi, fedyogi, ADAPTIVE, ("m", "v")),
    "fedadagrad": Method(fs.FedAdagrad, fedadagrad, {"beta1": 0.8, "tau": 0.05}, ("m", "v")),
    "qfedavg": Method(fs.QFedAvg, qfedavg, {"q": 0.7}, server_lr=False),
    "qfedavg, large q": Method(fs.QFedAvg, qfedavg, {"q": 2.5}, server_lr=False),
}

COMBINATIONS = [
    pytest.param(world, method, case, id=f"{method}-{world}-{case}")
    for world in WORLDS
    for method in METHODS
    for case in CASES
    if not (method.startswith("scaffold") and CASES[case].weighting == "samples")
]


def random_state(dimension: int) -> dict[str, Vector]:
    """A server that is in the middle of things; v is spread over the size of Delta^2, where Yogi changes sign."""
    generator = np.random.default_rng(3)
    return {
        "x": generator.normal(size=dimension),
        "m": 0.2 * generator.normal(size=dimension),
        "v": generator.uniform(1e-3, 0.2, size=dimension),
        "c": 0.3 * generator.normal(size=dimension),
    }


def kept_variates(dimension: int) -> dict[int, Vector]:
    """Control variates of the clients that took part before; client 1 never did."""
    generator = np.random.default_rng(4)
    return {k: 0.5 * generator.normal(size=dimension) for k in range(len(SIZES)) if k != 1}


def all_variates(setting: Setting, dimension: int) -> Vector:
    """What every client keeps as its control variate, zeros where it keeps none."""
    none = torch.zeros(len(SIZES), dimension, dtype=torch.float64)
    return setting.state.recall(np.arange(len(SIZES)), "c", none).numpy()


def run_library(world: World, method: Method, case: Case) -> tuple[dict[str, Vector], list[list[int]]]:
    """Two rounds of the library from the random state: the server's vectors, kept rows, and the cohorts it met."""
    options: dict[str, Any] = {"lr": case.lr, "steps": case.steps, "weight_decay": case.weight_decay, **method.own}
    if method.server_lr:
        options["server_lr"] = case.server_lr
    algorithm = method.build(**options)
    setting = make_setting(
        world.problem,
        world.data,
        batch_size=case.batch_size,
        sampling=case.sampling,
        seed=SEED,
        oracles=world.oracles,
    )
    clients = make_clients(
        setting, rounds=ROUNDS, participation=case.participation, weighting=case.weighting, chunk=case.chunk
    )
    dimension = len(world.problem.x0)
    start = random_state(dimension)
    state = fs.State(**{name: torch.from_numpy(start[name]) for name in ("x", *method.server)})
    assert set(state) == set(algorithm.init(world.problem))
    if "c" in method.server:
        for k, row in kept_variates(dimension).items():
            setting.state.keep(np.array([k]), {"c": torch.from_numpy(row)[None]})
    cohorts = []
    with torch.no_grad():
        for r in range(ROUNDS):
            clients.begin(r)
            cohorts.append(clients.cohort.tolist())
            state = algorithm.round(state, clients)
    out = {name: value.numpy() for name, value in state.items()}
    if "c" in method.server:
        out["c_k"] = all_variates(setting, dimension)
    return out, cohorts


def run_reference(
    world: World, method: Method, case: Case, cohorts: list[list[int]], seed: int = SEED
) -> dict[str, Vector]:
    """The same two rounds by the paper, one call per round, so that a rate may change from round to round."""
    dimension = len(world.problem.x0)
    start = random_state(dimension)
    carried: dict[str, Any] = {name: start[name] for name in method.server}
    if "c" in method.server:
        carried["c_k"] = kept_variates(dimension)
    x = start["x"]
    before = 0  # local iterations of the busiest client in the rounds before

    def rows_of(k: int, r: int, t: int, stream: int = 0) -> Vector:
        if case.batch_size is None:
            return np.arange(SIZES[k])
        names = (seed, "batch", r, 0, 0, stream)
        sampler = SAMPLINGS[case.sampling](names, np.array([k]), np.array([SIZES[k]]), case.batch_size)
        return sampler.positions(t, 1)[0][0]

    for r, cohort in enumerate(cohorts):
        options: dict[str, Any] = {"weight_decay": case.weight_decay, **method.own, **carried}
        if method.server_lr:
            options["server_lr"] = case.expected_server_lr(r, before)
        if method.reference in (scaffold, qfedavg):
            options["lr"] = case.expected_lr(r, before)
        else:
            options["lr"] = lambda _, t, r=r, before=before: case.expected_lr(r, before + t)
        weights = dict(enumerate(SIZES if case.weighting == "samples" else [1] * len(SIZES)))
        if method.reference is qfedavg:
            options["loss"] = lambda k, x: world.loss(k, np.arange(SIZES[k]), x)
            # The paper's sums know no weights; a client that is there n_k times weighs n_k.
            cohort = [k for k in cohort for _ in range(weights[k])]
        else:
            options["weights"] = weights
        if method.reference is scaffold:
            options["clients"] = len(SIZES)
            options["anchor_gradient"] = lambda k, _, x, r=r: world.gradient(k, rows_of(k, r, 0, stream=1), x)
        out = method.reference(
            x,
            [cohort],
            lambda k, _, t, x, r=r: world.gradient(k, rows_of(k, r, t), x),
            lambda k: case.steps_of(SIZES[k]),
            **options,
        )
        x = out.pop("x")
        carried = out
        before += max(case.steps_of(SIZES[k]) for k in cohort)
    if "c_k" in carried:
        carried["c_k"] = np.stack([carried["c_k"].get(k, np.zeros(dimension)) for k in range(len(SIZES))])
    return {"x": x, **carried}


def distance(ours: dict[str, Vector], theirs: dict[str, Vector]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)


@pytest.mark.parametrize(("world", "method", "case"), COMBINATIONS)
def test_two_rounds_agree_with_the_reference(world: str, method: str, case: str) -> None:
    chosen = WORLDS[world](), METHODS[method], CASES[case]
    ours, cohorts = run_library(*chosen)
    theirs = run_reference(*chosen, cohorts)
    assert distance(ours, theirs) < TOLERANCE
    moved = np.abs(theirs["x"] - random_state(len(theirs["x"]))["x"])
    assert moved.max() > 1e-3, "the two rounds hardly moved, so the comparison would say little"


@pytest.mark.parametrize("world", WORLDS)
def test_cases_are_what_they_claim(world: str) -> None:
    """Partial cohorts differ between rounds, step counts between clients, and one gradient agrees with autograd."""
    w = WORLDS[world]()
    _, cohorts = run_library(w, METHODS["fedavg"], CASES["partial participation"])
    assert [len(c) for c in cohorts] == [3, 3]
    assert cohorts[0] != cohorts[1]
    counts = {CASES["two epochs"].steps_of(n) for n in SIZES}
    assert counts == {2 * 2, 2 * 3, 2 * 1, 2 * 5}
    x = torch.from_numpy(random_state(len(w.problem.x0))["x"]).requires_grad_()
    rows = np.array([3, 0, 3])
    value = w.problem.outer(x, tuple(a[rows] for a in w.data.train.of_client(0)))
    assert float(value.detach()) == pytest.approx(w.loss(0, rows, x.detach().numpy()), rel=1e-12)
    (autograd,) = torch.autograd.grad(value, x)
    np.testing.assert_allclose(w.gradient(0, rows, x.detach().numpy()), autograd.numpy(), atol=1e-12)


# --- the comparison has power: a slightly wrong reference is told apart ----------------------------------------------


def _own(method: str, name: str, value: Any) -> tuple[str, Method, Case]:
    return method, replace(METHODS[method], own={**METHODS[method].own, name: value}), CASES["partial participation"]


def _case(method: str, **changes: Any) -> tuple[str, Method, Case]:
    return method, METHODS[method], replace(CASES["partial participation"], **changes)


WRONG = {
    **{f"{m}, lr": _case(m, expected_lr=constant(0.0601)) for m in METHODS},
    **{f"{m}, weight decay": _case(m, weight_decay=0.201) for m in METHODS},
    **{f"{m}, steps": _case(m, steps=4) for m in METHODS},
    **{f"{m}, batch": _case(m, sampling="stratified") for m in METHODS},
    **{f"{m}, server lr": _case(m, expected_server_lr=constant(0.7001)) for m in METHODS if METHODS[m].server_lr},
    **{f"{m}, weights": _case(m, weighting="samples") for m in METHODS},
    "fedprox, mu": _own("fedprox", "mu", 0.9 * 1.01),
    "scaffold, option": _own("scaffold II", "option", "I"),
    "qfedavg, q": _own("qfedavg", "q", 0.701),
    "fedadam, another method": ("fedadam", METHODS["fedyogi"], CASES["partial participation"]),
    **{f"{m}, beta1": _own(m, "beta1", 0.801) for m in ("fedadam", "fedyogi", "fedadagrad")},
    **{f"{m}, beta2": _own(m, "beta2", 0.901) for m in ("fedadam", "fedyogi")},
    **{f"{m}, tau": _own(m, "tau", 0.0501) for m in ("fedadam", "fedyogi", "fedadagrad")},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_hyperparameter_breaks_the_agreement(wrong: str) -> None:
    world = WORLDS["quadratic"]()
    right, method, case = WRONG[wrong]
    ours, cohorts = run_library(world, METHODS[right], CASES["partial participation"])
    theirs = run_reference(world, method, case, cohorts)
    assert distance(ours, theirs) > 1e4 * TOLERANCE


@pytest.mark.parametrize("method", METHODS)
def test_the_seed_names_the_batches(method: str) -> None:
    world = WORLDS["softmax"]()
    ours, cohorts = run_library(world, METHODS[method], CASES["minibatches"])
    theirs = run_reference(world, METHODS[method], CASES["minibatches"], cohorts, seed=SEED + 1)
    assert distance(ours, theirs) > 1e4 * TOLERANCE


# --- weighted SCAFFOLD has no paper; it has a fixed point ------------------------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 2])
@pytest.mark.parametrize("option", ["I", "II"])
def test_weighted_scaffold_rests_at_the_weighted_minimiser(option: str, participation: int | float) -> None:
    world = WORLDS["quadratic"]()
    weight_decay = 0.3
    share = np.array(SIZES) / sum(SIZES)
    h, b = (a.numpy() for a in world.data.train.arrays)  # the pooled mean is the mean weighted by samples
    minimiser = (h * b).mean(0) / (h.mean(0) + weight_decay)
    gradients = np.stack(
        [world.gradient(k, np.arange(n), minimiser) + weight_decay * minimiser for k, n in enumerate(SIZES)]
    )
    np.testing.assert_allclose(share @ gradients, 0, atol=1e-12)
    assert np.abs(gradients.mean(0)).max() > 0.1, "uniform and weighted minimisers must differ"

    setting = make_setting(world.problem, world.data, batch_size=None, seed=SEED, oracles=world.oracles)
    setting.state.keep(np.arange(len(SIZES)), {"c": torch.from_numpy(gradients)})
    clients = make_clients(setting, participation=participation, weighting="samples", chunk=2)
    algorithm = fs.Scaffold(lr=0.05, steps=4, option=option, weight_decay=weight_decay)
    x = torch.from_numpy(minimiser)
    state = fs.State(x=x, c=torch.zeros_like(x))
    for r in range(3):
        clients.begin(r)
        state = algorithm.round(state, clients)
    assert (state.x - x).abs().max() < 1e-12
    assert state.c.abs().max() < 1e-12
    np.testing.assert_allclose(all_variates(setting, len(x)), gradients, atol=1e-11)


def test_weighted_scaffold_keeps_c_the_weighted_mean_of_the_variates() -> None:
    world = WORLDS["quadratic"]()
    share = np.array(SIZES) / sum(SIZES)
    setting = make_setting(world.problem, world.data, batch_size=3, seed=SEED, oracles=world.oracles)
    clients = make_clients(setting, participation=2, weighting="samples", chunk=2)
    algorithm = fs.Scaffold(lr=0.05, steps=3)
    state = algorithm.init(world.problem)
    for r in range(6):
        clients.begin(r)
        state = algorithm.round(state, clients)
        np.testing.assert_allclose(state.c.numpy(), share @ all_variates(setting, len(state.x)), atol=1e-12)
    assert state.c.abs().max() > 0.1


# --- schedules, alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "clock", "expected"),
    [
        (fs.StepDecay(0.1), Clock(0, 8), 0.1),
        (fs.StepDecay(0.1), Clock(3, 8), 0.1),
        (fs.StepDecay(0.1), Clock(4, 8), 0.1 * 0.1),
        (fs.StepDecay(0.1), Clock(6, 8), 0.1 * 0.1 * 0.1),
        (fs.StepDecay(1.0, at=(2, 5), factor=0.5), Clock(1, 100), 1.0),
        (fs.StepDecay(1.0, at=(2, 5), factor=0.5), Clock(2, 100), 0.5),
        (fs.StepDecay(1.0, at=(2, 5), factor=0.5), Clock(99, 100), 0.25),
        (fs.RoundDecay(2.0, 0.9), Clock(3, 100, step=7, iteration=50), 2.0 * 0.729),
        (fs.CubeRoot(3.0, 8.0), Clock(3, 100, step=7, iteration=0), 1.5),
        (fs.CubeRoot(3.0, 8.0), Clock(0, 100, step=0, iteration=19), 1.0),
    ],
)
def test_schedules_follow_their_formulas(schedule: fs.schedules.Schedule, clock: Clock, expected: float) -> None:
    assert schedule(clock) == pytest.approx(expected, rel=1e-12)
