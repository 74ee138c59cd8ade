"""
The methods whose clients or server scale every coordinate, against their NumPy references: two rounds.

Most start from a random server (and random kept rows, where clients keep any), some from the algorithm's own start,
which is where eps and b0 come in. Worlds, cases and tolerance are those of the other equations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from algorithms.test_equations import (
    CASES,
    ROUNDS,
    SEED,
    SIZES,
    TOLERANCE,
    WORLDS,
    Case,
    Vector,
    World,
    constant,
    cube_root,
    distance,
    random_state,
)
from fedstrata.clients.client import Setting
from fedstrata.data.sampling import SAMPLINGS
from reference.fedams import fedams
from reference.fedlalr import fedlalr, interval
from reference.lafedopt import lafedopt
from reference.local_adaalter import local_adaalter
from reference.local_amsgrad import local_amsgrad
from support import make_clients, make_setting, play

EVERYONE = range(len(SIZES))

CHOSEN = [
    *("minibatches", "full batches", "one client at a time", "partial participation", "weighted by samples"),
    *("weighted, partial", "two epochs", "two epochs, weighted, partial", "round decay", "cube root"),
    "cube root, unequal steps",
]
GROWING = {
    "interval": Case(steps=fs.Interval(2, 2.0)),
    "interval, rounded up": Case(steps=fs.Interval(2, 3.0, rounding="ceil"), participation=3, weight_decay=0.1),
    "interval, rounded down": Case(steps=fs.Interval(3, 1.5), batch_size=None, weighting="samples"),
    "interval, cube root": Case(steps=fs.Interval(2, 2.0), lr=fs.CubeRoot(0.2, 3.0), expected_lr=cube_root),
}
ALL_CASES = {**{name: CASES[name] for name in CHOSEN}, **GROWING}
IN_WORLD = {
    "quadratic": list(ALL_CASES),
    "softmax": ["minibatches", "partial participation", "weighted by samples", "two epochs", "interval, cube root"],
}


# --- the methods -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """An algorithm, its reference, the hyperparameters that are its own, and the vectors of server and clients."""

    build: Callable[..., fs.Algorithm]
    reference: Callable[..., dict[str, Any]]
    own: dict[str, Any]
    server: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    server_lr: bool = False


LALR = {"beta1": 0.8, "beta2": 0.9, "eps": 0.01}
AMS = {"beta1": 0.8, "beta2": 0.9, "eps": 0.2}
LOCAL = {"beta1": 0.8, "beta2": 0.9, "eps": 0.05}

METHODS = {
    "fedlalr": Method(fs.FedLALR, fedlalr, LALR, ("vhat", "m")),
    "fedlalr, restart": Method(fs.FedLALR, fedlalr, {**LALR, "restart": True}, ("vhat",)),
    "fedlalr, max": Method(fs.FedLALR, fedlalr, {**LALR, "aggregate": "max"}, ("vhat", "m")),
    "fedlalr, restart, max": Method(fs.FedLALR, fedlalr, {**LALR, "restart": True, "aggregate": "max"}, ("vhat",)),
    **{
        f"fedams {option}{'' if maximum else ', no maximum'}": Method(
            fs.FedAMS,
            fedams,
            {**AMS, "option": option, "maximum": maximum},
            ("m", "v", "vhat"),
            server_lr=True,
        )
        for option in (1, 2)
        for maximum in (True, False)
    },
    **{
        f"lafedopt {optimizer} {correction}": Method(
            fs.LaFedOPT, lafedopt, {**LOCAL, "optimizer": optimizer, "correction": correction}, server_lr=True
        )
        for optimizer in ("adagrad", "adam", "yogi")
        for correction in ("joint", "local", "none")
    },
    "lafedopt, v0": Method(fs.LaFedOPT, lafedopt, {**LOCAL, "v0": 0.3}, server_lr=True),
    "lafedopt, server adam": Method(
        fs.LaFedOPT,
        lafedopt,
        {**LOCAL, "server": "adam", "server_beta1": 0.7, "server_beta2": 0.85, "tau": 0.04, "v0": 0.1},
        ("m", "v"),
        server_lr=True,
    ),
    "local_amsgrad": Method(
        fs.LocalAMSGrad, local_amsgrad, {"beta1": 0.8, "beta2": 0.9, "eps": 0.02}, ("vhat",), ("m", "v")
    ),
    "local_adaalter": Method(fs.LocalAdaAlter, local_adaalter, {"eps": 0.4, "b0": 0.7}, ("b",)),
}

IN_REFERENCE = {"b": "b2", "optimizer": "client_optimizer"}
"""What the references call otherwise."""


def steps_of(case: Case, size: int, r: int) -> int:
    """Local steps of a client of this size in round r, from 0."""
    if isinstance(case.steps, fs.Interval):
        return interval(r + 1, case.steps.initial, case.steps.base, case.steps.rounding)
    return case.steps_of(size)


def server_at(dimension: int) -> dict[str, Vector]:
    """A server that is in the middle of things; its scales are spread over the size of squared gradients."""
    generator = np.random.default_rng(5)
    return {
        **random_state(dimension),
        "vhat": np.exp(generator.uniform(np.log(1e-3), np.log(20.0), size=dimension)),
        "b": generator.uniform(0.2, 2.0, size=dimension),
    }


def kept_at(dimension: int) -> dict[str, dict[int, Vector]]:
    """Moments of the clients that took part before; client 1 never did."""
    generator = np.random.default_rng(6)
    met = [k for k in EVERYONE if k != 1]
    m = {k: 0.5 * generator.normal(size=dimension) for k in met}
    return {"m": m, "v": {k: generator.uniform(1e-3, 1.0, size=dimension) for k in met}}


def all_kept(setting: Setting, name: str, dimension: int) -> Vector:
    none = torch.zeros(len(SIZES), dimension, dtype=torch.float64)
    return setting.state.recall(np.arange(len(SIZES)), name, none).numpy()


def run_library(world: World, method: Method, case: Case, own_start: bool) -> tuple[dict[str, Vector], list[list[int]]]:
    """Two rounds of the library: the server's vectors, kept rows, and the cohorts it met."""
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
    start = server_at(dimension)
    state = algorithm.init(world.problem)
    assert set(state) == {"x", *method.server}
    if own_start:
        state = state.replace(x=torch.from_numpy(start["x"]))
    else:
        state = fs.State(**{name: torch.from_numpy(start[name]) for name in state})
        for name in method.kept:
            for k, row in kept_at(dimension)[name].items():
                setting.state.keep(np.array([k]), {name: torch.from_numpy(row)[None]})
    cohorts = []
    with torch.no_grad():
        for r in range(ROUNDS):
            clients.begin(r)
            cohorts.append(clients.cohort.tolist())
            state = algorithm.round(state, clients)
    out = {name: value.numpy() for name, value in state.items()}
    return out | {f"{name}_k": all_kept(setting, name, dimension) for name in method.kept}, cohorts


@cache
def rows_of(k: int, r: int, t: int, seed: int, sampling: str, batch_size: int | None) -> Vector:
    """The rows that a client draws in step t of round r."""
    if batch_size is None:
        return np.arange(SIZES[k])
    sampler = SAMPLINGS[sampling]((seed, "batch", r, 0, 0, 0), np.array([k]), np.array([SIZES[k]]), batch_size)
    return sampler.positions(t, 1)[0][0]


def run_reference(
    world: World, method: Method, case: Case, cohorts: list[list[int]], own_start: bool, seed: int = SEED
) -> dict[str, Vector]:
    """The same two rounds by the paper, one call per round, so that a server's rate may change between them."""
    dimension = len(world.problem.x0)
    start = server_at(dimension)
    carried: dict[str, Any] = {}
    if not own_start:
        carried = {IN_REFERENCE.get(name, name): start[name] for name in method.server}
        carried |= {name: kept_at(dimension)[name] for name in method.kept}
    x = start["x"]
    own = {IN_REFERENCE.get(name, name): value for name, value in method.own.items()}
    weights = dict(enumerate(SIZES if case.weighting == "samples" else [1] * len(SIZES)))
    before = 0  # local iterations of the busiest client in the rounds before
    drawn = seed, case.sampling, case.batch_size
    for r, cohort in enumerate(cohorts):
        options: dict[str, Any] = {"weight_decay": case.weight_decay, "weights": weights, **own, **carried}
        if method.server_lr:
            options["server_lr"] = case.expected_server_lr(r, before)
        out = method.reference(
            x,
            [cohort],
            lambda k, _, t, x, r=r: world.gradient(k, rows_of(k, r, t, *drawn), x),
            lambda k, _, r=r: steps_of(case, SIZES[k], r),
            lr=lambda _, t, r=r, before=before: case.expected_lr(r, before + t),
            **options,
        )
        x = out.pop("x")
        carried = out
        before += max(steps_of(case, SIZES[k], r) for k in cohort)
    found = {name: carried[IN_REFERENCE.get(name, name)] for name in method.server}
    for name in method.kept:
        rows = carried[name]
        found[f"{name}_k"] = np.stack([rows.get(k, np.zeros(dimension)) for k in EVERYONE])
    return {"x": x, **found}


COMBINATIONS = [
    pytest.param(world, method, case, id=f"{method}-{world}-{case}")
    for world in WORLDS
    for method in METHODS
    for case in IN_WORLD[world]
]


@pytest.mark.parametrize(("world", "method", "case"), COMBINATIONS)
def test_two_rounds_agree_with_the_reference(world: str, method: str, case: str) -> None:
    chosen = WORLDS[world](), METHODS[method], ALL_CASES[case]
    ours, cohorts = run_library(*chosen, own_start=False)
    theirs = run_reference(*chosen, cohorts, own_start=False)
    assert distance(ours, theirs) < TOLERANCE
    moved = np.abs(theirs["x"] - server_at(len(theirs["x"]))["x"])
    assert moved.max() > 1e-3, "the two rounds hardly moved, so the comparison would say little"


@pytest.mark.parametrize("case", ["minibatches", "weighted, partial", "interval, rounded up"])
@pytest.mark.parametrize("method", METHODS)
def test_the_first_two_rounds_agree_with_the_reference(method: str, case: str) -> None:
    chosen = WORLDS["softmax"](), METHODS[method], ALL_CASES[case]
    ours, cohorts = run_library(*chosen, own_start=True)
    assert distance(ours, run_reference(*chosen, cohorts, own_start=True)) < TOLERANCE


def test_cases_are_what_they_claim() -> None:
    """Intervals grow, rounding matters, and both sides of every maximum are met."""
    counts = {name: [steps_of(case, 7, r) for r in range(ROUNDS)] for name, case in GROWING.items()}
    assert counts["interval"] == counts["interval, rounded up"] == counts["interval, cube root"] == [2, 3]
    assert counts["interval, rounded down"] == [3, 4]
    rounded_down = replace(GROWING["interval, rounded up"], steps=fs.Interval(2, 3.0))
    assert [steps_of(rounded_down, 7, r) for r in range(ROUNDS)] == [2, 2]
    for method in ("fedlalr", "fedlalr, max", "fedams 1", "fedams 2", "local_amsgrad"):
        grown = []
        for world in WORLDS.values():
            start = server_at(len(world().problem.x0))
            ours, _ = run_library(world(), METHODS[method], CASES["minibatches"], own_start=False)
            grown += (ours["vhat"] > start["vhat"]).tolist()
        assert any(grown) and not all(grown), method
    assert (start["vhat"] > LALR["eps"] ** 2).all(), "FedLALR's vhat is never below eps^2"
    assert (start["vhat"] < AMS["eps"]).any() and (start["vhat"] > AMS["eps"]).any()


# --- the comparison has power: a slightly wrong reference is told apart ----------------------------------------------


def _own(method: str, name: str, value: Any) -> tuple[str, Method, Case]:
    return method, replace(METHODS[method], own={**METHODS[method].own, name: value}), CASES["partial participation"]


def _case(method: str, **changes: Any) -> tuple[str, Method, Case]:
    return method, METHODS[method], replace(CASES["partial participation"], **changes)


def having(name: str) -> list[str]:
    """Methods to which a hyperparameter of their own makes a difference."""
    adagrad = name in ("beta1", "beta2")
    return [m for m, method in METHODS.items() if name in method.own and not (adagrad and "adagrad" in m)]


ONLY_AT_THE_START = ["fedlalr", "fedlalr, restart", "fedlalr, max", "fedlalr, restart, max", "local_amsgrad"]
"""Those whose eps is where vhat starts, and nothing else."""

WRONG = {
    **{f"{m}, lr": _case(m, expected_lr=constant(0.0601)) for m in METHODS},
    **{f"{m}, weight decay": _case(m, weight_decay=0.201) for m in METHODS},
    **{f"{m}, steps": _case(m, steps=4) for m in METHODS},
    **{f"{m}, interval": _case(m, steps=fs.Interval(3, 2.0)) for m in METHODS},
    **{f"{m}, batch": _case(m, sampling="stratified") for m in METHODS},
    **{f"{m}, weights": _case(m, weighting="samples") for m in METHODS},
    **{f"{m}, server lr": _case(m, expected_server_lr=constant(0.7001)) for m in METHODS if METHODS[m].server_lr},
    **{f"{m}, beta1": _own(m, "beta1", 0.801) for m in having("beta1")},
    **{f"{m}, beta2": _own(m, "beta2", 0.91) for m in having("beta2")},
    **{f"{m}, eps": _own(m, "eps", 1.1 * METHODS[m].own["eps"]) for m in having("eps") if m not in ONLY_AT_THE_START},
    **{f"{m}, v0": _own(m, "v0", METHODS[m].own["v0"] + 1e-3) for m in having("v0")},
    "fedlalr, aggregate": _own("fedlalr", "aggregate", "max"),
    "fedlalr, max, aggregate": _own("fedlalr, max", "aggregate", "mean"),
    "fedlalr, restart, aggregate": _own("fedlalr, restart", "aggregate", "max"),
    **{f"fedams {v}, option": _own(f"fedams {v}", "option", 3 - v) for v in (1, 2)},
    **{f"fedams {v}, maximum": _own(f"fedams {v}", "maximum", False) for v in (1, 2)},
    "lafedopt adam joint, optimizer": _own("lafedopt adam joint", "optimizer", "yogi"),
    "lafedopt adagrad none, optimizer": _own("lafedopt adagrad none", "optimizer", "adam"),
    **{
        f"lafedopt {o} {right}, correction {wrong}": _own(f"lafedopt {o} {right}", "correction", wrong)
        for o in ("adagrad", "adam", "yogi")
        for right, wrong in (("joint", "local"), ("joint", "none"), ("local", "none"))
    },
    **{
        f"lafedopt, server adam, {name}": _own("lafedopt, server adam", name, value)
        for name, value in (("server_beta1", 0.701), ("server_beta2", 0.851), ("tau", 0.0401))
    },
}


@cache
def partial(method: str) -> tuple[dict[str, Vector], list[list[int]]]:
    return run_library(WORLDS["quadratic"](), METHODS[method], CASES["partial participation"], own_start=False)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_hyperparameter_breaks_the_agreement(wrong: str) -> None:
    world = WORLDS["quadratic"]()
    right, method, case = WRONG[wrong]
    ours, cohorts = partial(right)
    theirs = run_reference(world, method, case, cohorts, own_start=False)
    assert distance(ours, theirs) > 1e4 * TOLERANCE


WRONG_STARTS = [
    *((m, "eps", 10.0, 10.1) for m in ONLY_AT_THE_START),
    ("local_adaalter", "b0", 0.7, 0.701),
    ("lafedopt, server adam", "tau", 0.04, 0.0401),
]
"""A larger eps than gradients are: where they are larger, vhat forgets where it began."""


@pytest.mark.parametrize(("method", "name", "value", "wrong"), WRONG_STARTS)
def test_a_wrong_start_breaks_the_agreement(method: str, name: str, value: float, wrong: float) -> None:
    world, case = WORLDS["quadratic"](), CASES["minibatches"]
    right, altered = (replace(METHODS[method], own={**METHODS[method].own, name: v}) for v in (value, wrong))
    ours, cohorts = run_library(world, right, case, own_start=True)
    assert distance(ours, run_reference(world, right, case, cohorts, own_start=True)) < TOLERANCE
    assert distance(ours, run_reference(world, altered, case, cohorts, own_start=True)) > 1e4 * TOLERANCE


@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_a_restart_that_was_forgotten_breaks_the_agreement(aggregate: str) -> None:
    """The reference carries m from the first round to the second; all else is the same."""
    world, case = WORLDS["quadratic"](), CASES["minibatches"]
    method = METHODS["fedlalr, restart" if aggregate == "mean" else "fedlalr, restart, max"]
    ours, cohorts = run_library(world, method, case, own_start=False)
    forgotten = replace(method, own={**method.own, "restart": False})
    theirs = run_reference(world, forgotten, case, cohorts, own_start=False)
    assert distance(ours, theirs) > 1e4 * TOLERANCE
    one = run_reference(world, forgotten, case, cohorts[:1], own_start=False)
    same = run_reference(world, method, case, cohorts[:1], own_start=False)
    assert distance(one, same) < TOLERANCE


@pytest.mark.parametrize("method", METHODS)
def test_the_seed_names_the_batches(method: str) -> None:
    world = WORLDS["softmax"]()
    ours, cohorts = run_library(world, METHODS[method], CASES["minibatches"], own_start=False)
    theirs = run_reference(world, METHODS[method], CASES["minibatches"], cohorts, own_start=False, seed=SEED + 1)
    assert distance(ours, theirs) > 1e4 * TOLERANCE


def test_a_moment_that_is_not_kept_breaks_the_agreement() -> None:
    """Local AMSGrad's clients go on with their own moments; zeros in their place are noticed."""
    world, case = WORLDS["quadratic"](), CASES["minibatches"]
    ours, cohorts = run_library(world, METHODS["local_amsgrad"], case, own_start=False)
    no_memory = replace(METHODS["local_amsgrad"], kept=())
    theirs = run_reference(world, no_memory, case, cohorts, own_start=False)
    assert distance({k: ours[k] for k in theirs}, theirs) > 1e4 * TOLERANCE


# --- FedLALR's denominator -------------------------------------------------------------------------------------------


def half_idle(clients: int) -> tuple[fs.Problem, fs.FederatedData]:
    """A quadratic in float32 that does not depend on every other coordinate; clients of unequal sizes."""
    generator = np.random.default_rng(7)
    sizes = [3 + 2 * k for k in range(clients)]
    pairs = [(np.ones((n, 6)), generator.normal(size=(n, 6)) + generator.normal()) for n in sizes]
    active = torch.tensor([1.0, 0, 1, 0, 1, 0])

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        h, b = batch
        return 0.5 * (active * h * (x - b) ** 2).sum(1).mean()

    return fs.Problem(outer, torch.zeros(6), name="idle"), fs.FederatedData.from_arrays(pairs)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_vhat_never_falls_below_eps_squared(aggregate: str, weighting: str) -> None:
    """In float32 a mean of equal numbers may come out smaller than they are, round after round."""
    sizes = {"uniform": ((10, 0.02, False), (18, 3e-4, True)), "samples": ((4, 0.02, True), (6, 1e-8, False))}
    for clients, eps, restart in sizes[weighting]:
        floor = torch.full((), eps**2, dtype=torch.float32)
        problem, data = half_idle(clients)
        algorithm = fs.FedLALR(lr=0.01, steps=2, eps=eps, restart=restart, aggregate=aggregate)
        engine = make_clients(make_setting(problem, data, batch_size=2), rounds=30, weighting=weighting, chunk=4)
        state = algorithm.init(problem)
        with torch.no_grad():
            for r in range(30):
                engine.begin(r)
                state = algorithm.round(state, engine)
                assert state.vhat.dtype == torch.float32
                assert (state.vhat >= floor).all()
        assert torch.equal(state.x[1::2], problem.x0[1::2]), "no gradient, no step"
        assert (state.x[::2] - problem.x0[::2]).abs().max() > 1e-2
        torch.testing.assert_close(state.vhat[1::2], floor.expand(3), rtol=1e-4, atol=0)
        if aggregate == "max":
            assert (state.vhat[1::2] == floor).all()


class RoundedDown:
    """Clients whose mean of vhat is a little smaller than any of theirs."""

    def __init__(self, vhat: torch.Tensor) -> None:
        self.vhat = vhat

    def combine(self, how: tuple[str, ...], work: Any, *message: torch.Tensor) -> list[torch.Tensor]:
        x, _, *moments = message
        return [x, self.vhat, *moments]


@pytest.mark.parametrize("restart", [False, True])
def test_a_mean_that_was_rounded_down_is_lifted_to_eps_squared_and_others_are_left_alone(restart: bool) -> None:
    problem, _ = half_idle(2)
    algorithm = fs.FedLALR(eps=0.5, restart=restart)
    found = torch.tensor([0.25, 0.2499999, 0.24, 0.2500001, 3.0, 0.0])
    state = algorithm.round(algorithm.init(problem), RoundedDown(found))  # type: ignore[arg-type]
    assert torch.equal(state.vhat, torch.tensor([0.25, 0.25, 0.25, 0.2500001, 3.0, 0.25]))


@pytest.mark.parametrize("aggregate", ["mean", "max"])
@pytest.mark.parametrize("eps", [2.0**-20, 2.0**-3, 1.0])
def test_the_denominator_is_the_root_of_vhat_and_nothing_else(eps: float, aggregate: str) -> None:
    """All numbers are powers of two, so the step is exact; eps added to the root would halve it."""
    gradient = torch.tensor([0.5, -0.25, 0.125, -0.0625], dtype=torch.float64) * eps

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x @ gradient + 0 * batch[0].sum()

    problem = fs.Problem(outer, torch.zeros(4, dtype=torch.float64), name="linear")
    data = fs.FederatedData.from_arrays([(np.zeros((2, 1)), np.zeros((2, 1)))] * 2)
    lr, beta1 = 0.25, 0.5
    algorithm = fs.FedLALR(lr=lr, steps=1, beta1=beta1, beta2=0.5, eps=eps, aggregate=aggregate)
    state, _ = play(algorithm, problem, data, 1)
    assert torch.equal(state.vhat, torch.full((4,), eps**2, dtype=torch.float64)), "no gradient is above eps"
    assert torch.equal(state.m, (1 - beta1) * gradient)
    assert torch.equal(state.x, -lr * (1 - beta1) * gradient / eps)
