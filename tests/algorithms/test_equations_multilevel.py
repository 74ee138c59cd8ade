"""
The algorithms for several levels, and the one for rare classes, against their NumPy references.

The references see values, pullbacks, gradients and projections written in NumPy too, so nothing of the library stands
on both sides but the rule that names a batch. All vectors of the server agree to 1e-9 in float64.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.algorithms import ALGORITHMS
from fedstrata.algorithms.layered import chain_rule, first_levels
from fedstrata.algorithms.local_sgdm_rl import change_ratios
from fedstrata.clients import Client
from fedstrata.core.options import options_of
from fedstrata.core.schedules import Rate
from fedstrata.problems import oracles
from fedstrata.problems.oracles import Oracles
from fedstrata.problems.trace import trace
from reference import local_scgdam, local_sgdm_rl, local_smcgdam
from saddle_worlds import SIZES, Arrays, N, Vector, binary_data, class_data, softmax, start
from support import drawn, make_client, make_clients, make_setting, play, started
from towers import BEND, HOME, INNER_LR, SHARE, SMOOTHING, TOWERS, WEIGHT, Slopes, Tower, turned_tower
from worlds import start as start_without_dual

SEED = 11
TOLERANCE = 1e-9
COMMON = math.gcd(*SIZES)


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions run as they are: to trace them costs more than these few rounds."""
    monkeypatch.setattr(oracles, "trace", lambda *_: None)


# --- cases, and how each side is run ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """How a run draws, samples clients and weighs; with ``first_round`` it begins there, from a random state."""

    batch_size: int | None = 3
    sampling: str = "uniform"
    participation: int | float = 1.0
    weighting: str = "uniform"
    chunk: int = N
    first_round: int = 0
    rounds: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return self.first_round + self.rounds

    @property
    def copies(self) -> list[int]:
        """The library's number of each of the reference's clients: as many copies of a client as it weighs."""
        weigh = self.weighting == "samples"
        return [k for k in range(N) for _ in range(SIZES[k] // COMMON if weigh else 1)]


def run_library(
    algorithm: fs.Algorithm, world: Tower | Labelled, case: Case, given: dict[str, Vector]
) -> tuple[dict[str, Vector], list[list[int]]]:
    """Rounds of the library: the server's vectors, and the cohorts."""
    drawing: dict[str, Any] = {"batch_size": case.batch_size, "sampling": case.sampling, "seed": SEED}
    setting = make_setting(world.problem, world.data, oracles=world.oracles, **drawing)
    taking_part: dict[str, Any] = {"participation": case.participation, "weighting": case.weighting}
    clients = make_clients(setting, rounds=case.last, chunk=case.chunk, **taking_part)
    cohorts = []
    with torch.no_grad():
        state = started(algorithm, clients)
        if case.first_round:
            assert {key: len(value) for key, value in given.items()} == {key: len(v) for key, v in state.items()}
            state = fs.State(**{key: torch.from_numpy(value) for key, value in given.items()})
            clients.counts.steps = case.first_round * algorithm.steps  # type: ignore[attr-defined]
        for r in range(case.first_round, case.last):
            clients.begin(r)
            cohorts.append(clients.cohort.tolist())
            state = algorithm.round(state, clients)
    return {key: value.numpy() for key, value in state.items()}, cohorts


DRAWN: dict[tuple[Any, ...], Arrays] = {}
"""Batches drawn before: most tests ask for the same ones."""


def batch_of(data: fs.FederatedData, k: int, names: tuple[int, int, int, int, int], t: int, **options: Any) -> Arrays:
    key = (id(data), k, names, t, *options.values())
    if key not in DRAWN:
        DRAWN[key] = drawn(data, k, names, t, **options)
    return DRAWN[key]


def rate_at(value: Any, rounds: int, r: int, iteration: int) -> float:
    """A rate at a time, from its formula."""
    if isinstance(value, fs.CubeRoot):
        return float(value.k / (value.n + iteration) ** (1 / 3))
    if isinstance(value, fs.StepDecay):
        passed = [r >= (at if at >= 1 else at * rounds) for at in value.at]
        return float(value.value * value.factor ** sum(passed))
    return float(value)


@cache
def edited(module: ModuleType, *edits: tuple[str, str]) -> Callable[..., dict[str, Any]]:
    """A reference with some of its lines written otherwise."""
    source = inspect.getsource(module)
    for line, other in edits:
        assert source.count(line) == 1, line
        source = source.replace(line, other)
    space: dict[str, Any] = {}
    exec(source, space)
    method: Callable[..., dict[str, Any]] = space[module.__name__.split(".")[-1]]
    return method


@dataclass(frozen=True)
class Paper:
    """What a reference is to do: the same rounds, with the same names for batches.

    ``first_stream`` names the batches before the first step, ``cuts`` says whether weights above 1 count as 1.
    ``edits`` are lines of the reference that are written otherwise, ``more`` other arguments of it.
    """

    tower: Tower
    name: str
    case: Case
    options: dict[str, Any]
    drawn_cohorts: list[list[int]]
    seed: int = SEED
    first_stream: int = 1
    cuts: bool = True
    edits: tuple[tuple[str, str], ...] = ()
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def cohorts(self) -> list[list[int]]:
        return [[c for c, k in enumerate(self.case.copies) if k in cohort] for cohort in self.drawn_cohorts]

    def batch(self, c: int, r: int, t: int, level: int, stream: int) -> Arrays:
        """A client's batch in local step t, -1 being the first estimates."""
        times = self.options.get("first_batches", 1) if t < 0 else 1
        size = None if self.case.batch_size is None else times * self.case.batch_size
        names = (self.seed, r, 0, level, stream + (self.first_stream if t < 0 else 0))
        options: dict[str, Any] = {"batch_size": size, "sampling": self.case.sampling}
        return batch_of(self.tower.data, self.case.copies[c], names, max(t, 0), **options)

    def level(self, c: int, r: int, t: int, j: int, u: Vector) -> Vector:
        return self.tower.level(j, self.batch(c, r, t, j, 0), u)

    def level_vjp(self, c: int, r: int, t: int, j: int, u: Vector, v: Vector, stream: int = 0) -> Vector:
        """The penalty's gradient is added at the end, to that in x."""
        found = self.tower.pullback(j, self.batch(c, r, t, j, 10 * stream), u, v)
        return found + self.options.get("weight_decay", 0.0) * u if j == 1 else found

    def outer(self, c: int, r: int, t: int, u: Vector, y: Vector | None) -> Slopes:
        return self.tower.outer(self.batch(c, r, t, 0, 0), u, y)

    def rate(self, key: str) -> Callable[[int, int], float]:
        steps = self.options["steps"]
        return lambda r, t: rate_at(self.options[key], self.case.last, r, r * steps + t)

    def weight(self, key: str, power: int) -> Callable[[int, int], float]:
        """A weight that, times eta^power, is at most 1."""
        own, eta = self.rate(key), self.rate("eta")
        return lambda r, t: min(own(r, t), 1 / eta(r, t) ** power) if self.cuts else own(r, t)

    def arguments(self) -> dict[str, Any]:
        """What both references take."""
        out = {key: self.rate(key) for key in ("eta", "gamma_x", "gamma_y")}
        power = 2 if self.name == "local_smcgdam" else 1
        return {
            **out,
            "alpha": self.weight("alpha", power),
            "project_y": self.tower.project,
            "first_round": self.case.first_round,
        }


def given(world: Tower) -> dict[str, Vector]:
    """A server in the middle of things."""
    rng = np.random.default_rng(4)
    out = {"x": world.x0, **{f"h{j}": rng.normal(size=size) for j, size in enumerate(world.sizes, 1)}}
    out["p"] = rng.normal(size=len(world.x0))
    return out if world.y0 is None else {**out, "y": world.y0, "q": rng.normal(size=len(world.y0))}


def several_levels(paper: Paper) -> dict[str, Vector]:
    tower, state = paper.tower, given(paper.tower)
    arguments = paper.arguments() | {"rho_x": paper.weight("rho_x", 1), "rho_y": paper.weight("rho_y", 1)}
    if paper.case.first_round:
        arguments |= {"h": [state[f"h{j}"] for j in range(1, tower.levels + 1)], "p": state["p"], "q": state.get("q")}
    method = edited(local_smcgdam, *paper.edits)
    functions = paper.level, paper.level_vjp, paper.outer, paper.options["steps"]
    out = method(tower.x0, tower.y0, paper.cohorts, *functions, levels=tower.levels, **{**arguments, **paper.more})
    found = {"x": out["x"], "y": out["y"], "p": out["p"], "q": out["q"]}
    found |= {f"h{j}": value for j, value in enumerate(out["h"], 1)}
    return {key: value for key, value in found.items() if value is not None}


def one_level(paper: Paper) -> dict[str, Vector]:
    tower, state = paper.tower, given(paper.tower)
    arguments = paper.arguments() | {"beta_x": paper.weight("rho_x", 1), "beta_y": paper.weight("rho_y", 1)}
    if paper.case.first_round:
        arguments |= {"h": state["h1"], "m": state["p"], "s": state.get("q")}

    def inner(c: int, r: int, t: int, x: Vector) -> Vector:
        return paper.level(c, r, t, 1, x)

    def inner_vjp(c: int, r: int, t: int, x: Vector, v: Vector, stream: int = 0) -> Vector:
        return paper.level_vjp(c, r, t, 1, x, v, stream)

    method = edited(local_scgdam, *paper.edits)
    functions = inner, inner_vjp, paper.outer, paper.options["steps"]
    out = method(tower.x0, tower.y0, paper.cohorts, *functions, **{**arguments, **paper.more})
    found = {"x": out["x"], "y": out["y"], "p": out["m"], "q": out["s"], "h1": out["h"]}
    return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class Method:
    """An algorithm, its reference, and its hyperparameters here."""

    build: Callable[..., fs.Algorithm]
    reference: Callable[[Paper], dict[str, Vector]]
    options: dict[str, Any]


SHARED = {"eta": 0.6, "gamma_x": 0.3, "gamma_y": 0.4, "rho_x": 1.1, "rho_y": 0.9, "steps": 3}
METHODS = {
    "local_smcgdam": Method(fs.LocalSMCGDAM, several_levels, {**SHARED, "alpha": 1.3}),
    "local_scgdam": Method(fs.LocalSCGDAM, one_level, {**SHARED, "alpha": 0.8}),
}
RATES = ["eta", "gamma_x", "gamma_y", "rho_x", "rho_y", "alpha"]


def run_reference(
    world: Tower, name: str, case: Case, cohorts: list[list[int]], options: dict[str, Any] | None = None, **change: Any
) -> dict[str, Vector]:
    """The same rounds by the paper; ``options`` and ``change`` make it a slightly different paper."""
    every = {**METHODS[name].options, **case.options, **(options or {})}
    tower = world if world.prepare is None else world.prepare(case.weighting)
    return METHODS[name].reference(Paper(tower, name, case, every, cohorts, **change))


# --- which method meets which world in which case --------------------------------------------------------------------


SCHEDULES = {"cube root": fs.CubeRoot(0.9, 2.0), "step": fs.StepDecay(0.8, (0.3, 2), 0.6)}
CASES = {
    "one at a time": Case(chunk=1),
    "two at a time": Case(chunk=2),
    "full batches": Case(batch_size=None),
    "epochs": Case(sampling="epochs", batch_size=4),
    "weighted": Case(weighting="samples", chunk=2),
    "three rounds": Case(rounds=3),
    "given state": Case(first_round=3),
    "given state, partial": Case(first_round=2, participation=2, rounds=3),
    "one step": Case(options={"steps": 1}, rounds=3),
    "two steps": Case(options={"steps": 2}),
    "partial": Case(participation=3, rounds=3),
    "partial, weighted, epochs": Case(participation=2, weighting="samples", sampling="epochs", chunk=1, rounds=3),
    "first batches": Case(options={"first_batches": 4}),
    "first batches, epochs": Case(options={"first_batches": 2}, sampling="epochs"),
    "weight decay": Case(options={"weight_decay": 0.2}),
    "weight decay, given state": Case(options={"weight_decay": 0.2}, first_round=3),
    "weights above 1": Case(options={"alpha": 4.0, "rho_x": 1.9, "rho_y": 2.5}),
    "weights above 1 at first": Case(options={"eta": fs.CubeRoot(1.6, 1.0)}, rounds=3),
}
OTHERS = {
    "5-3": Case(first_round=3),
    "5-1-1, no dual": Case(first_round=3, options={"steps": 2}),
    "4-6-2-5": Case(first_round=2, participation=3, options={"steps": 1}),
    "4-6-2-5, no dual": Case(chunk=1, options={"weight_decay": 0.1}),
    "simplex": Case(chunk=2, rounds=3),
    "auc, prepared, scaled": Case(weighting="samples"),
    "auc, 3": Case(sampling="epochs", batch_size=4, options={"steps": 2}),
    "auc, network": Case(chunk=1, participation=3),
    "risk averse": Case(sampling="stratified", chunk=2, options={"weight_decay": 0.1}),
    "tower, 3": Case(first_round=1, options={"eta": SCHEDULES["cube root"]}),
}


def home_of(name: str) -> str:
    return "5-3" if name == "local_scgdam" else HOME


def scheduled_home_of(name: str) -> str:
    return "5-3" if name == "local_scgdam" else "5-3-7"


def combinations() -> list[Any]:
    """Every method in each of its worlds, and in one world in every case."""
    out = []

    def add(name: str, world: str, label: str, case: Case) -> None:
        out.append(pytest.param(world, name, case, id="-".join([name, world, label])))

    for name in METHODS:
        for world, build in TOWERS.items():
            if name == "local_smcgdam" or build().levels == 1:
                add(name, world, "minibatches", Case())
        for label, case in CASES.items():
            add(name, home_of(name), label, case)
        for rate in RATES:
            for kind, schedule in SCHEDULES.items():
                add(name, scheduled_home_of(name), f"{rate}, {kind}", Case(options={rate: schedule}, rounds=3))
    for world, case in OTHERS.items():
        add("local_smcgdam", world, "another case", case)
    add("local_scgdam", "5-3, no dual", "given state", Case(first_round=3))
    add("local_scgdam", "5-3, no dual", "partial", Case(participation=2, rounds=3, options={"weight_decay": 0.1}))
    return out


def distance(ours: dict[str, Vector], theirs: dict[str, Vector]) -> float:
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert ours[key].shape == theirs[key].shape, key
    return max(float(np.abs(ours[key] - theirs[key]).max()) for key in ours)


OURS: dict[str, tuple[dict[str, Vector], list[list[int]]]] = {}


def ours_of(world: str, name: str, case: Case) -> tuple[dict[str, Vector], list[list[int]]]:
    """What the library does; the tests below ask for some of it again."""
    key = f"{world} {name} {case}"
    if key not in OURS:
        tower, method = TOWERS[world](), METHODS[name]
        OURS[key] = run_library(method.build(**{**method.options, **case.options}), tower, case, given(tower))
    return OURS[key]


@pytest.mark.parametrize(("world", "name", "case"), combinations())
def test_rounds_agree_with_the_reference(world: str, name: str, case: Case) -> None:
    tower = TOWERS[world]()
    ours, cohorts = ours_of(world, name, case)
    theirs = run_reference(tower, name, case, cohorts)
    assert distance(ours, theirs) < TOLERANCE
    for key, at in (("x", tower.x0), ("y", tower.y0)):
        if at is not None:
            assert 1e-3 < np.abs(theirs[key] - at).max() < 20, f"the rounds hardly moved {key}, or far away"


@pytest.mark.parametrize(("world", "name"), [("5-3", "local_smcgdam"), ("5-3", "local_scgdam")])
def test_traced_functions_agree_with_the_reference(world: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles, "trace", trace)
    tower, method, case = replace(TOWERS[world]()), METHODS[name], Case()
    ours, cohorts = run_library(method.build(**method.options), tower, case, {})
    assert any(tower.oracles._graphs.values())
    assert distance(ours, run_reference(tower, name, case, cohorts)) < TOLERANCE


def test_every_rate_is_scheduled_here() -> None:
    for name in METHODS:
        assert [o.name for o in options_of(ALGORITHMS[name]).values() if o.annotation == Rate] == RATES
    assert {n for n, a in ALGORITHMS.items() if a.dual is None and a.inner_mean == "global"} == set(METHODS)


@pytest.mark.parametrize("name", TOWERS)
def test_towers_are_what_they_claim(name: str) -> None:
    """Values, pullbacks, gradients and projections in NumPy are those of the library's functions."""
    tower, rng = TOWERS[name](), np.random.default_rng(6)
    problem = tower.problem
    if problem.asks is not None:
        clients = make_clients(make_setting(problem, tower.data, seed=SEED), weighting="samples")
        clients.begin(-1)
        assert tower.prepare is not None
        problem, tower = problem.given(problem, problem.asks(problem, clients)), tower.prepare("samples")
    for k in (0, 1):
        u = tower.x0 + 0.3 * rng.normal(size=len(tower.x0))
        for j, level in enumerate(problem.levels, 1):
            arrays = drawn(tower.data, k, (SEED, 5, 0, j, 0), 1, batch_size=4)
            batch = tuple(map(torch.from_numpy, arrays))
            value, pull = torch.func.vjp(lambda u, g=level, batch=batch: g(u, batch), torch.from_numpy(u))
            c = rng.normal(size=len(value))
            np.testing.assert_allclose(tower.level(j, arrays, u), value.numpy(), atol=1e-12)
            found = pull(torch.from_numpy(c))[0].numpy()
            np.testing.assert_allclose(tower.pullback(j, arrays, u, c), found, atol=1e-12)
            u = value.numpy() + 0.3 * rng.normal(size=len(value))
        y = None if tower.y0 is None else tower.y0 + rng.normal(size=len(tower.y0))
        at = [torch.from_numpy(v) for v in (u, y) if v is not None]
        arrays = drawn(tower.data, k, (SEED, 5, 0, 0, 0), 1, batch_size=4)
        batch = tuple(map(torch.from_numpy, arrays))
        slopes = torch.func.grad(problem.outer, argnums=tuple(range(len(at))))(*at, batch)
        for found, expected in zip(slopes, tower.outer(arrays, u, y), strict=False):
            assert expected is not None
            np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
        assert (problem.project_y is None) == (tower.project is None)
        if tower.project is not None and y is not None:
            np.testing.assert_allclose(problem.projected(torch.from_numpy(y)).numpy(), tower.project(y), atol=1e-12)


@pytest.mark.parametrize("world", ["ball", "box", "simplex"])
def test_duals_stay_in_their_sets(world: str) -> None:
    project = TOWERS[world]().project
    assert project is not None
    y = ours_of(world, "local_smcgdam", Case())[0]["y"]
    np.testing.assert_allclose(project(y), y, atol=1e-12)


# --- the comparison has power: a slightly wrong reference is told apart ----------------------------------------------


LINES = {
    "local_smcgdam": {
        "old values at new points": ("at_old = g.value(r, t, j, old[j - 1])", "at_old = g.value(r, t, j, new[j - 1])"),
        "new values at old points": ("at_new = g.value(r, t, j, new[j - 1])", "at_new = g.value(r, t, j, old[j - 1])"),
        "a fresh batch for new values": (
            "at_new = g.value(r, t, j, new[j - 1])",
            "at_new = g.value(r, t + 7, j, new[j - 1])",
        ),
        "a fresh batch for old values": (
            "at_old = g.value(r, t, j, old[j - 1])",
            "at_old = g.value(r, t + 7, j, old[j - 1])",
        ),
        "moving averages": ("keep * (old[j] - at_old) + at_new", "keep * old[j] + (1 - keep) * at_new"),
        "eta, not squared": ("rate**2", "rate"),
        "f at the old level": ("g.gradients(r, t, new, y_k)", "g.gradients(r, t, [*new[:-1], old[-1]], y_k)"),
        "Jacobians at old points": ("g.gradients(r, t, new, y_k)", "g.gradients(r, t, [*old[:-1], new[-1]], y_k)"),
        "the first Jacobian at the old x": (
            "g.gradients(r, t, new, y_k)",
            "g.gradients(r, t, [old[0], *new[1:]], y_k)",
        ),
        "gradients at the server's y": ("g.gradients(r, t, new, y_k)", "g.gradients(r, t, new, y)"),
        "one client's x": ("x = _mean([state[0] for state in states])", "x = states[0][0]"),
        "one client's y": ("_mean([state[1] for state in states])", "states[0][1]"),
        "one client's h": ("_mean([state[2][j] for state in states])", "states[0][2][j]"),
        "one client's p": ("p = _mean([state[3] for state in states])", "p = states[0][3]"),
        "one client's q": ("_mean([state[4] for state in states])", "states[0][4]"),
        "old momenta last": ("p_k = (1.0 - weight) * p_k + weight * u", "p_k = (1.0 - weight) * u + weight * p_k"),
        "old dual momenta last": (
            "q_k = (1.0 - weight) * q_k + weight * v",
            "q_k = (1.0 - weight) * v + weight * q_k",
        ),
        "descent in y": (
            "y_k + _at(gamma_y, r, t) * rate * q_k",
            "y_k - _at(gamma_y, r, t) * rate * q_k",
        ),
    },
    "local_scgdam": {
        "f at the fresh value": ("outer(k, r, t, h_k.copy(),", "outer(k, r, t, value.copy(),"),
        "the Jacobian at the server's x": ("inner_vjp(k, r, t, x_k.copy(),", "inner_vjp(k, r, t, x.copy(),"),
        "alpha alone": ("1.0 if first else _at(alpha, r, t) * _at(eta, r, t)", "1.0 if first else _at(alpha, r, t)"),
        "eta squared": (
            "1.0 if first else _at(alpha, r, t) * _at(eta, r, t)",
            "1.0 if first else _at(alpha, r, t) * _at(eta, r, t) ** 2",
        ),
        "descent in y": (
            "y_k + _at(gamma_y, r, t) * _at(eta, r, t) * s_k",
            "y_k - _at(gamma_y, r, t) * _at(eta, r, t) * s_k",
        ),
    },
}


OF_THE_DUAL = {
    "gradients at the server's y",
    "one client's y",
    "one client's q",
    "old dual momenta last",
    "descent in y",
}
OTHER: dict[str, dict[str, Any]] = {"cube root": {"n": 2.02}, "step": {"at": (0.3, 1)}}


def wrong() -> list[Any]:
    """Method, its world, the case, and what the reference has otherwise."""
    out = []

    def add(name: str, label: str, case: Case | None = None, world: str = "", **change: Any) -> None:
        out.append(pytest.param(name, world or home_of(name), case or Case(), change, id=f"{name}, {label}"))

    for name, method in METHODS.items():
        home, plain = home_of(name), f"{home_of(name)}, no dual"
        for key in RATES:
            add(name, key, options={key: method.options[key] * 1.01})
            if key not in ("gamma_y", "rho_y"):
                add(name, f"{key}, no dual", world=plain, options={key: method.options[key] * 1.01})
            for kind, schedule in SCHEDULES.items():
                case, other = Case(options={key: schedule}, rounds=3), replace(schedule, **OTHER[kind])
                add(name, f"{key}, another {kind}", case, scheduled_home_of(name), options={key: other})
        add(name, "steps", options={"steps": 4})
        add(name, "first batches", CASES["first batches"], options={"first_batches": 3})
        for decay in ("weight decay", "weight decay, given state"):
            add(name, decay, CASES[decay], options={"weight_decay": 0.202})
        add(name, "another seed", seed=SEED + 1)
        add(name, "first batches are those of the first step", first_stream=0)
        add(name, "weights of their own", CASES["weights above 1"], cuts=False)
        for label, line in LINES[name].items():
            add(name, label, edits=(line,))
            if label not in OF_THE_DUAL:
                add(name, f"{label}, no dual", world=plain, edits=(line,))
        for world in (home, plain):
            add(name, f"first estimates averaged, {world}", world=world, more={"average_initial": True})
            add(name, f"Jacobians on other batches, {world}", world=world, more={"stream_jacobian": 1})
            add(name, f"other batches, {world}", world=world, of_case={"sampling": "stratified"})
            add(name, f"clients that weigh otherwise, {world}", world=world, of_case={"weighting": "samples"})
        for world in ("ball, one level",) if name == "local_scgdam" else ("ball", "box", "simplex"):
            add(name, f"no projection, {world}", world=world, more={"project_y": None})
    for world in ("5-3", "5-1-1", HOME, f"{HOME}, no dual"):
        add("local_smcgdam", f"own points after an averaging, {world}", world=world, more={"base": "own"})
    add("local_scgdam", "estimates first", more={"order": "estimate_first"})
    return out


@pytest.mark.parametrize(("name", "world", "case", "change"), wrong())
def test_a_wrong_reference_breaks_the_agreement(name: str, world: str, case: Case, change: dict[str, Any]) -> None:
    ours, cohorts = ours_of(world, name, case)
    change = dict(change)
    other = replace(case, **change.pop("of_case", {}))
    theirs = run_reference(TOWERS[world](), name, other, cohorts, **change)
    assert distance(ours, theirs) > 1e4 * TOLERANCE


# --- what a step asks for --------------------------------------------------------------------------------------------


@dataclass
class Spy:
    """Remembers, for each local step, what the clients were asked: the level, the point, the batch, the answer."""

    steps: list[dict[str, list[tuple[Any, ...]]]] = field(default_factory=list)
    before: list[tuple[Any, ...]] = field(default_factory=list)
    after: list[tuple[Any, ...]] = field(default_factory=list)
    inside: bool = False

    def watch(self, patch: pytest.MonkeyPatch, kind: type[fs.Algorithm]) -> None:
        step = kind.step  # type: ignore[attr-defined]

        def copied(*values: Any) -> tuple[Any, ...]:
            return torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, values)

        def watched(algorithm: fs.Algorithm, client: Client, *state: Any) -> Any:
            self.steps.append({"g": [], "g_vjp": [], "f_grads": [], "chain": []})
            self.before.append(copied(*state))
            self.inside = True
            out = step(algorithm, client, *state)
            self.inside = False
            self.after.append(copied(*out))
            return out

        def asked(name: str) -> None:
            method = getattr(Client, name)

            def noted(client: Client, *args: Any, **options: Any) -> Any:
                out = method(client, *args, **options)
                if self.inside:
                    self.steps[-1][name].append((*copied(*args), *copied(out), args))
                return out

            patch.setattr(Client, name, noted)

        patch.setattr(kind, "step", watched)
        for name in ("g", "g_vjp", "f_grads", "chain"):
            asked(name)


@pytest.mark.parametrize("world", ["5-3", "5-1-1, no dual", "5-3-7", HOME, "4-6-2-5, no dual", "auc, 3"])
def test_levels_are_renewed_from_the_old_and_the_new_level_below_on_one_batch(
    world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two values of each level in a step, on the very same batch: below it the old h (or x), and the new one.

    The Jacobian is at the new one, on that batch too; f, on a batch of its own, is at the new h_K.
    """
    tower, spy = TOWERS[world](), Spy()
    spy.watch(monkeypatch, fs.LocalSMCGDAM)
    options = METHODS["local_smcgdam"].options
    case = Case(chunk=3)
    run_library(fs.LocalSMCGDAM(**options), tower, case, {})
    assert len(spy.steps) == 2 * 2 * options["steps"]  # rounds, chunks
    keep = 1 - options["alpha"] * options["eta"] ** 2
    for before, calls, after in zip(spy.before, spy.steps, spy.after, strict=True):
        (x_old, y_old, h_old, p_old, q_old), (x_new, y_new, h_new, *_) = before, after
        assert len(calls["g"]) == 2 * tower.levels and not calls["chain"]
        torch.testing.assert_close(x_new, x_old - options["gamma_x"] * options["eta"] * p_old, rtol=0, atol=1e-14)
        batches = []
        for j in range(1, tower.levels + 1):
            (_, u_old, _, g_old, args_old), (_, u_new, _, g_new, args_new) = [c for c in calls["g"] if c[0] == j]
            below_old, below_new = ((x_old, *h_old)[j - 1], (x_new, *h_new)[j - 1])
            assert torch.equal(u_old, below_old) and torch.equal(u_new, below_new)
            assert not torch.equal(u_old, u_new)
            assert args_old[2] is args_new[2]
            torch.testing.assert_close(h_new[j - 1], keep * (h_old[j - 1] - g_old) + g_new, rtol=0, atol=1e-12)
            ((_, u, _, _, _, args),) = [c for c in calls["g_vjp"] if c[0] == j]
            assert torch.equal(u, below_new) and args[3] is args_new[2]
            batches.append(args_new[2])
        ((u, _, *_, args),) = calls["f_grads"]
        assert torch.equal(u, h_new[-1])
        assert len({id(batch) for batch in (*batches, args[1])}) == tower.levels + 1
        if tower.y0 is not None:
            assert torch.equal(args[2], y_new[0])
            torch.testing.assert_close(
                y_new[0], y_old[0] + options["gamma_y"] * options["eta"] * q_old[0], rtol=0, atol=1e-14
            )


@pytest.mark.parametrize("world", ["5-3", "5-1, no dual"])
def test_the_moving_average_asks_once_at_the_new_point(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, spy = TOWERS[world](), Spy()
    spy.watch(monkeypatch, fs.LocalSCGDAM)
    run_library(fs.LocalSCGDAM(**METHODS["local_scgdam"].options), tower, Case(chunk=3), {})
    for calls, after in zip(spy.steps, spy.after, strict=True):
        ((x, *_),) = calls["chain"]
        assert torch.equal(x, after[0])
        assert not calls["g"] and not calls["g_vjp"] and not calls["f_grads"]


# --- with all data and exact estimates the gradient is that of the composition ---------------------------------------


Composition = Callable[..., torch.Tensor]
"""f(G(x), y) on the samples of one client, differentiable."""


def auc_after_steps(levels: int, x: torch.Tensor, y: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    inputs, targets = batch
    rows = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], 1)
    w, a, b = x[:4], x[4], x[5]
    for _ in range(levels):
        w = w - INNER_LR * rows.T @ (torch.sigmoid(rows @ w) - targets) / len(rows)
    s, positive = torch.sigmoid(rows @ w), targets == 1
    p = SHARE
    of_positives = (1 - p) * (s - a) ** 2 - 2 * (1 + y[0]) * (1 - p) * s
    of_negatives = p * (s - b) ** 2 + 2 * (1 + y[0]) * p * s
    return torch.where(positive, of_positives, of_negatives).mean() - p * (1 - p) * y[0] ** 2


def height_of(turns: Sequence[torch.Tensor], goal: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Without noise: that of a client's samples is 0 on average."""
    for turn in turns:
        x = turn @ (x + BEND * x.sin())
    return y @ (x - goal) - 0.5 * y @ y


def semideviation(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    inputs, targets = batch
    z = inputs @ x[:3] + x[3]
    losses = nn.functional.softplus(z) - targets * z
    above = (losses - losses.mean()).clamp(min=0)
    return losses.mean() + WEIGHT * (above.square().mean() + SMOOTHING**2).sqrt()


def composition(name: str) -> tuple[fs.Problem, fs.FederatedData, Composition]:
    kind, levels = name.split(", ")[0], int(name[-1])
    if kind == "risk averse":
        tower = TOWERS["risk averse"]()
        return tower.problem, tower.data, lambda x, batch: semideviation(x, batch)
    if kind == "tower":
        tower = turned_tower(levels)
        at, rows = torch.eye(4, dtype=torch.float64), torch.zeros(1, levels, 5, dtype=torch.float64)
        turns = [torch.stack([g(torch.pi * e, (rows,)) / torch.pi for e in at], 1) for g in tower.problem.levels]
        return tower.problem, tower.data, lambda x, y, batch: height_of(turns, batch[1].mean(0), x, y)
    linear = nn.Linear(3, 1, dtype=torch.float64)
    problem = start(fs.compositional_auc(linear, levels=levels, inner_lr=INNER_LR, p=SHARE), 0.3)
    return problem, binary_data(), lambda x, y, batch: auc_after_steps(levels, x, y, batch)


COMPOSITIONS = [*(f"{kind}, {k}" for kind in ("auc", "tower") for k in range(1, 6)), "risk averse, 2"]


def slopes_of(f: Composition, at: Sequence[torch.Tensor], batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    leaves = [v.detach().clone().requires_grad_() for v in at]
    with torch.enable_grad():
        return list(torch.autograd.grad(f(*leaves, batch), leaves))


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_first_estimates_from_all_data_are_the_gradient_of_the_composition(name: str) -> None:
    """Of each client's own, all clients at once; several batches' worth of all data is all data."""
    problem, data, f = composition(name)
    client = make_client(make_setting(problem, data, batch_size=None), list(range(data.clients)))
    at = [v for v in (problem.x0, problem.y0) if v is not None]
    x, *y = (v.expand(data.clients, -1) for v in at)
    with torch.no_grad():
        h, p, q = first_levels(client, x, tuple(y), 3, 0.0)
        decayed = first_levels(client, x, tuple(y), 1, 0.3)[1]
        direct = chain_rule(client, (x, *h), tuple(y), client.draw_all(), 0.0)
    assert len(h) == len(problem.levels)
    for k in range(data.clients):
        expected = slopes_of(f, at, data.train.of_client(k))
        for found, value in zip((p, *q), expected, strict=True):
            torch.testing.assert_close(found[k], value, rtol=0, atol=TOLERANCE)
            assert value.abs().max() > 1e-3
    torch.testing.assert_close(decayed, p + 0.3 * x, rtol=0, atol=1e-14)
    for found, value in zip((direct[0], *direct[1]), (p, *q), strict=True):
        assert torch.equal(found, value)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_exact_estimates_stay_exact_along_a_path(name: str) -> None:
    """One client with all its data: h_K is G(x), whatever its weight, and momenta of one gradient are the gradient."""
    problem, data, f = composition(name)
    alone = fs.FederatedData.from_arrays([data.train.of_client(1)])
    algorithm = fs.LocalSMCGDAM(eta=0.5, gamma_x=0.4, gamma_y=0.3, rho_x=2.0, rho_y=2.0, alpha=0.7, steps=3)
    state, _ = play(algorithm, problem, alone, 2)
    at = [state[key] for key in ("x", "y") if key in state]
    batch = alone.train.of_client(0)
    for key, value in zip(("p", "q"), slopes_of(f, at, batch), strict=False):
        torch.testing.assert_close(state[key], value, rtol=0, atol=TOLERANCE)
    u = state.x
    for j, level in enumerate(problem.levels, 1):
        u = level(u, batch)
        torch.testing.assert_close(state[f"h{j}"], u, rtol=0, atol=TOLERANCE)
    assert (state.x - problem.x0).abs().max() > 1e-2


# --- rare classes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labelled:
    """A model's loss and data with samples on the server; in NumPy the gradient of its weighted loss.

    ``matrix`` is where the last layer's matrix is, ``server`` the server's samples, of a class each as of a client.
    """

    problem: fs.Problem
    data: fs.FederatedData
    gradient: Callable[[Arrays, Vector, Vector], Vector]
    matrix: slice
    server: fs.FederatedData = field(init=False)
    oracles: Oracles = field(init=False)

    def __post_init__(self) -> None:
        assert self.data.auxiliary is not None
        object.__setattr__(self, "server", replace(self.data, train=self.data.auxiliary))
        object.__setattr__(self, "oracles", Oracles(self.problem))

    @property
    def x0(self) -> Vector:
        return self.problem.x0.numpy()


def with_samples(data: fs.FederatedData, *counts: int) -> fs.FederatedData:
    """The same clients, and so many samples of each class on the server."""
    rng, classes = np.random.default_rng(8), len(counts)
    targets = rng.permutation(np.repeat(np.arange(classes), counts))
    features = data.train.arrays[0].shape[1]
    centres = rng.normal(size=(classes, features))
    return data.with_auxiliary(centres[targets] + 0.7 * rng.normal(size=(len(targets), features)), targets)


def one_logit() -> Labelled:
    def gradient(batch: Arrays, x: Vector, weights: Vector) -> Vector:
        inputs, targets = batch
        error = weights * (1 / (1 + np.exp(-(inputs @ x[:3] + x[3]))) - targets) / len(targets)
        return np.append(error @ inputs, error.sum())

    problem = start_without_dual(fs.erm(nn.Linear(3, 1, dtype=torch.float64), "binary_cross_entropy"))
    return Labelled(problem, with_samples(binary_data(), 7, 3), gradient, slice(0, 3))


def three_logits() -> Labelled:
    problem = start_without_dual(fs.erm(nn.Linear(2, 3, dtype=torch.float64)))
    return Labelled(problem, with_samples(class_data(), 6, 3, 5), lambda b, x, w: softmax(b, x, w)[1], slice(0, 6))


def hidden_layer() -> Labelled:
    """Two features, four hidden units, three logits; the last layer's matrix is in the middle of x."""

    def gradient(batch: Arrays, x: Vector, weights: Vector) -> Vector:
        inputs, targets = batch
        first, second = x[:8].reshape(4, 2), x[12:24].reshape(3, 4)
        hidden = np.tanh(inputs @ first.T + x[8:12])
        z = hidden @ second.T + x[24:]
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        error = weights[:, None] * (p - np.eye(3)[targets]) / len(targets)
        below = (error @ second) * (1 - hidden**2)
        parts = (below.T @ inputs).ravel(), below.sum(0), (error.T @ hidden).ravel(), error.sum(0)
        return np.concatenate(parts)

    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    problem = start_without_dual(fs.erm(network))
    return Labelled(problem, with_samples(class_data(), 6, 3, 5), gradient, slice(12, 24))


LABELLED: dict[str, Callable[[], Labelled]] = {
    "one logit": cache(one_logit),
    "three logits": cache(three_logits),
    "hidden layer": cache(hidden_layer),
}


def server_state(world: Labelled) -> dict[str, Vector]:
    return {"x": world.x0, "w": np.random.default_rng(4).uniform(0.5, 3.0, size=world.data.classes)}


def rare_classes(
    world: Labelled,
    case: Case,
    cohorts: list[list[int]],
    options: dict[str, Any] | None = None,
    edits: tuple[tuple[str, str], ...] = (),
    divide: str = "batch",
    bias: bool = False,
    exchange: int = 1,
    **more: Any,
) -> dict[str, Vector]:
    """The rounds by the reference: the server draws in the first exchange, the clients in the second one.

    With epochs clients take different numbers of steps, and so do the server's classes: then from its parts.
    """
    options = {**RARE, **case.options, **(options or {})}
    copies, classes = case.copies, world.data.classes
    matrix = slice(world.matrix.start, None) if bias else world.matrix
    drawing: dict[str, Any] = {"batch_size": case.batch_size, "sampling": case.sampling}
    steps, rounds = options["steps"], case.last
    done = [case.first_round * steps if isinstance(steps, int) else 0]

    def weights_of(batch: Arrays, k: int, w: Vector) -> Vector:
        """Of each sample: its class's, times what makes up for a batch of equally many of each class."""
        targets = batch[1]
        own = w[targets]
        if case.sampling == "balanced":
            own_targets = world.data.train.of_client(k)[1].numpy()
            there, here = (np.bincount(t, minlength=classes) for t in (own_targets, targets))
            own = own * (there / len(own_targets))[targets] / (here / len(targets))[targets]
        return own

    def gradient(c: int, r: int, t: int, x: Vector, w: Vector) -> Vector:
        batch = batch_of(world.data, copies[c], (SEED, r, exchange, 0, 0), t, **drawing)[:2]
        of_samples = weights_of(batch, copies[c], w)
        found = world.gradient(batch, x, of_samples)
        return found if divide == "batch" else found * len(of_samples) / of_samples.sum()

    def auxiliary(c: int, r: int, t: int, x: Vector) -> Vector:
        batch = batch_of(world.server, c, (SEED, r, 0, 0, 0), t, **drawing)[:2]
        return world.gradient(batch, x, np.ones(len(batch[1])))

    def lr(r: int, t: int) -> float:
        return rate_at(options["lr"], rounds, r, done[0] + t)

    def last_layer(x: Vector) -> Vector:
        return x[matrix]

    state = server_state(world) if case.first_round else {"x": world.x0, "w": np.ones(classes)}
    own = [[c for c, k in enumerate(copies) if k in cohort] for cohort in cohorts]
    rule = {key: options[key] for key in ("momentum", "weight_decay")}
    ratio = {key: options[key] for key in ("share", "slope")}
    kept: Any = None
    for r, cohort in enumerate(own, case.first_round):
        if isinstance(steps, int):
            out = edited(local_sgdm_rl, *edits)(
                state["x"],
                [cohort],
                gradient,
                auxiliary,
                last_layer,
                steps,
                classes=classes,
                lr=lr,
                loss_weights=state["w"],
                first_round=r,
                buffer=kept,
                **{**rule, **ratio, **more},
            )
            state, kept = {"x": out["x"], "w": out["loss_weights"]}, out["buffer"]
            done[0] += steps
            continue
        ends, changes = [], []
        for c in range(classes):
            number = steps_of(steps, len(world.server.train.of_client(c)[1]), case.batch_size)
            end, _ = local_sgdm_rl.sgdm(
                state["x"], lambda t, z, c=c, r=r: auxiliary(c, r, t, z), number, lr=lambda t, r=r: lr(r, t), **rule
            )
            changes.append(end[matrix] - state["x"][matrix])
        numbers = [steps_of(steps, SIZES[copies[c]], case.batch_size) for c in cohort]
        for c, number in zip(cohort, numbers, strict=True):
            end, _ = local_sgdm_rl.sgdm(
                state["x"],
                lambda t, z, c=c, r=r, w=state["w"]: gradient(c, r, t, z, w),
                number,
                lr=lambda t, r=r: lr(r, t),
                **rule,
            )
            ends.append(end)
        found = local_sgdm_rl.ratios(np.array(changes), share=options["share"])
        state = {"x": np.mean(ends, axis=0), "w": 1 + options["slope"] * found}
        done[0] += max(numbers)
    return state


def steps_of(epochs: fs.Epochs, size: int, batch_size: int | None) -> int:
    return math.ceil(epochs.epochs * (1 if batch_size is None else math.ceil(size / batch_size)))


RARE: dict[str, Any] = {
    "lr": 0.2,
    "steps": 3,
    "momentum": 0.7,
    "slope": 0.15,
    "share": 0.8,
    "weight_decay": 0.0,
}
RARE_CASES = {
    "minibatches": Case(),
    "three rounds": Case(rounds=3),
    "one at a time": Case(chunk=1),
    "two at a time": Case(chunk=2),
    "full batches": Case(batch_size=None),
    "epochs": Case(sampling="epochs", batch_size=4),
    "weighted": Case(weighting="samples", chunk=2),
    "given state": Case(first_round=3),
    "one step": Case(options={"steps": 1}, rounds=3),
    "partial": Case(participation=3, rounds=3),
    "partial, weighted, epochs": Case(participation=2, weighting="samples", sampling="epochs", chunk=1),
    "passes": Case(options={"steps": fs.Epochs(1.5)}, sampling="epochs", batch_size=4, rounds=3),
    "passes, partial": Case(options={"steps": fs.Epochs(0.7), "lr": fs.CubeRoot(0.4, 2.0)}, participation=4, rounds=3),
    "passes, full batches": Case(options={"steps": fs.Epochs(2)}, batch_size=None),
    "weight decay": Case(options={"weight_decay": 0.2}),
    "no momentum": Case(options={"momentum": 0.0}),
    "cube root": Case(options={"lr": fs.CubeRoot(0.4, 2.0)}, rounds=3),
    "step": Case(options={"lr": fs.StepDecay(0.3, (0.3, 2), 0.6)}, rounds=3),
    "another share": Case(options={"share": 0.3}, rounds=3),
    "a share above 1": Case(options={"share": 1.5}, rounds=3),
    "another slope": Case(options={"slope": 0.6}),
    "balanced": Case(sampling="balanced", batch_size=4, rounds=3),
}


def rare(world: str, case: Case) -> tuple[dict[str, Vector], list[list[int]]]:
    key = f"{world} local_sgdm_rl {case}"
    if key not in OURS:
        built = LABELLED[world]()
        OURS[key] = run_library(fs.LocalSGDMRL(**{**RARE, **case.options}), built, case, server_state(built))
    return OURS[key]


EVERYWHERE = ["three rounds", "one at a time", "full batches", "given state", "passes, partial", "balanced"]
EVERYWHERE += ["another share", "a share above 1"]
HIDDEN = "hidden layer"


@pytest.mark.parametrize(
    ("world", "case"),
    [*((HIDDEN, c) for c in RARE_CASES), *((w, c) for w in ("one logit", "three logits") for c in EVERYWHERE)],
)
def test_rare_classes_agree_with_the_reference(world: str, case: str) -> None:
    ours, cohorts = rare(world, RARE_CASES[case])
    theirs = rare_classes(LABELLED[world](), RARE_CASES[case], cohorts)
    assert distance(ours, theirs) < TOLERANCE
    assert 1e-2 < np.abs(theirs["x"] - LABELLED[world]().x0).max() < 20


@pytest.mark.parametrize("world", LABELLED)
def test_the_weights_here_are_not_those_of_classes_without_positions(world: str) -> None:
    w = rare(world, Case(rounds=3))[0]["w"]
    assert np.abs(w - (1 + RARE["slope"] * 10)).max() > 0.1 and np.ptp(w) > 0.1


AS_CLIENTS = """            lr=lambda t: _at(lr, r, t),
            momentum=momentum,
            weight_decay=weight_decay,"""
WITHOUT_DECAY = AS_CLIENTS.replace("=weight_decay", "=0.0")
RARE_WRONG: dict[str, tuple[Case, dict[str, Any]]] = {
    "lr": (Case(), {"options": {"lr": RARE["lr"] * 1.01}}),
    "momentum": (Case(), {"options": {"momentum": RARE["momentum"] * 1.01}}),
    "slope": (Case(), {"options": {"slope": RARE["slope"] * 1.01}}),
    "weight decay": (RARE_CASES["weight decay"], {"options": {"weight_decay": 0.202}}),
    "steps": (Case(), {"options": {"steps": 4}}),
    "cube root": (RARE_CASES["cube root"], {"options": {"lr": fs.CubeRoot(0.4, 2.02)}}),
    "step": (RARE_CASES["step"], {"options": {"lr": fs.StepDecay(0.3, (0.3, 1), 0.6)}}),
    "passes": (RARE_CASES["passes"], {"options": {"steps": fs.Epochs(1.2)}}),
    "weights at once": (Case(), {"delay": False}),
    "dampened": (Case(), {"dampening": 0.3}),
    "more steps on the server": (Case(), {"auxiliary_steps": 4}),
    "another rate on the server": (Case(), {"auxiliary_lr": 0.22}),
    "a mean over weights": (Case(), {"divide": "weights"}),
    "kept momenta": (Case(), {"momentum_state": "keep"}),
    "averaged momenta": (Case(), {"momentum_state": "average"}),
    "another base": (Case(), {"base": 1.01}),
    "no decay on the server": (RARE_CASES["weight decay"], {"edits": ((AS_CLIENTS, WITHOUT_DECAY),)}),
    "another share": (RARE_CASES["another share"], {"options": {"share": 0.8}}),
    "the bias too": (RARE_CASES["a share above 1"], {"bias": True}),
    "the first exchange's batches": (Case(), {"exchange": 0}),
}


@pytest.mark.parametrize("label", RARE_WRONG)
@pytest.mark.parametrize("world", LABELLED)
def test_wrong_rules_for_rare_classes_break_the_agreement(world: str, label: str) -> None:
    case, change = RARE_WRONG[label]
    ours, cohorts = rare(world, case)
    theirs = rare_classes(LABELLED[world](), case, cohorts, **change)
    assert distance(ours, theirs) > 1e4 * TOLERANCE


# --- ratios ----------------------------------------------------------------------------------------------------------


def changes_of(kind: str, classes: int, positions: int, rng: np.random.Generator) -> Vector:
    """Changes of a matrix; all but normal ones are fractions whose sums and products with a share are exact."""
    shape = classes, positions
    if kind == "normal":
        return rng.normal(size=shape)
    if kind == "ties":
        return rng.integers(-4, 5, size=shape) / 8
    if kind == "zeros":
        return rng.integers(-1, 2, size=shape) * rng.choice([0.0, 0.0, 0.5, 1.0], size=positions)
    if kind == "one class alone":
        return np.where(np.arange(classes)[:, None] == rng.integers(classes), rng.integers(-4, 5, size=shape) / 4, 0.0)
    if kind == "not positive":
        return -rng.integers(0, 4, size=shape) / 4.0
    assert kind == "far apart"
    return np.where(rng.uniform(size=shape) < 0.5, 1.0, 2.0**-14) * rng.integers(-3, 4, size=shape)


KINDS = ["normal", "ties", "zeros", "one class alone", "not positive", "far apart"]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0, 1.5])
@pytest.mark.parametrize("kind", KINDS)
def test_ratios_agree_with_the_reference(kind: str, share: float) -> None:
    """With shares that are not below 1 a tie is the first class's, and a largest change below 0 may be a class's."""
    rng = np.random.default_rng([3, KINDS.index(kind)])
    for classes in (2, 3, 5):
        for positions in (1, 4, 12):
            for _ in range(3):
                changes = changes_of(kind, classes, positions, rng)
                found = change_ratios(torch.from_numpy(changes), share).numpy()
                expected = local_sgdm_rl.ratios(changes, share=share)
                np.testing.assert_allclose(found, expected, rtol=TOLERANCE, err_msg=str(changes))


def test_ratios_of_changes_that_cancel() -> None:
    """The others' changes add up to exactly 0, also where those of all classes round."""
    changes = torch.tensor([[0.8], [0.4], [-0.4]]).double()
    np.testing.assert_allclose(change_ratios(changes, 0.8), [10.0, 10.0, 10.0])
    np.testing.assert_allclose(change_ratios(torch.tensor([[1.0], [1e-3]]), 0.8), [1000.0, 10.0], rtol=1e-6)


def test_ratios_by_hand() -> None:
    """Positions: the first is class 0's; the second nobody's, -0.9 being more than 80 %; the third is class 1's.

    The fourth, largest at exactly 0, is class 2's if no other change is 0 there.
    """
    changes = torch.tensor([[2.0, 1.0, -0.5, -1.0], [0.5, 0.1, 1.0, -2.0], [-1.0, -0.9, 0.25, 0.0]]).double()
    found = change_ratios(changes, 0.8)
    np.testing.assert_allclose(found, [2.0 / 0.25, 1.0 / 0.125, 0.0])
    changes[0, 3] = 0.0
    np.testing.assert_allclose(change_ratios(changes, 0.8), [8.0, 8.0, 10.0])
    changes[1:, 0] = 0.0
    np.testing.assert_allclose(change_ratios(changes, 0.8), [10.0, 8.0, 10.0])
    changes[2, 0] = 2.0**-14
    np.testing.assert_allclose(change_ratios(changes, 0.8), [5000.0, 8.0, 10.0])
    np.testing.assert_allclose(change_ratios(changes, 0.8, empty=3.0, cap=7.0), [7.0, 7.0, 3.0])
