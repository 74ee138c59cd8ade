"""Where an algorithm for several levels, or the one for rare classes, is another: special values, one client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.problems import oracles
from saddle_worlds import SADDLES, N, binary_data, start
from support import make_clients, make_setting, shared_oracles, sized_data, softmax_problem, started
from towers import SHARE, TOWERS, Tower

SEED = 7
SETTINGS: dict[str, dict[str, Any]] = {
    "minibatches": {"batch_size": 3},
    "full batches": {"batch_size": None},
    "weighted": {"batch_size": 3, "weighting": "samples"},
    "epochs": {"batch_size": 4, "sampling": "epochs"},
    "partial": {"batch_size": 3, "participation": 3},
}
STEPS: dict[str, Any] = {"eta": 0.5, "gamma_x": 0.5, "gamma_y": 0.7, "steps": 3}
MOMENTA: dict[str, Any] = {**STEPS, "rho_x": 1.2, "rho_y": 0.9}
WITHOUT: dict[str, Any] = {**STEPS, "rho_x": 2.0, "rho_y": 2.0}
"""rho eta = 1: a momentum is the last gradient."""


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions run as they are: to trace them costs more than these few rounds."""
    monkeypatch.setattr(oracles, "trace", lambda *_: None)


def solve(
    algorithm: fs.Algorithm,
    problem: fs.Problem,
    data: fs.FederatedData,
    rounds: int = 3,
    *,
    first: dict[str, torch.Tensor] | None = None,
    before: Callable[[Any], None] = lambda clients: None,
    weighting: str = "uniform",
    participation: int | float = 1.0,
    **drawing: Any,
) -> fs.State:
    """Rounds without a training loop; with ``first`` from round 1 on, these vectors replaced. ``before`` each round."""
    setting = make_setting(problem, data, seed=SEED, oracles=shared_oracles(problem), **drawing)
    clients = make_clients(setting, rounds=rounds + 1, chunk=3, weighting=weighting, participation=participation)
    with torch.no_grad():
        state = started(algorithm, clients)
        if first is not None:
            assert set(first) <= set(state)
            state = state.replace(**first)
            clients.counts.steps = algorithm.steps  # type: ignore[attr-defined]
        for r in range(rounds):
            clients.begin(r + (first is not None))
            before(clients)
            state = algorithm.round(state, clients)
    return state


def apart(one: fs.State, other: fs.State, *keys: str) -> float:
    """How far two states are apart, in these vectors or in all."""
    assert keys or set(one) == set(other)
    return max(float((one[key] - other[key]).abs().max()) for key in keys or one)


def alone(data: fs.FederatedData, k: int = 1) -> fs.FederatedData:
    """One of the clients, by itself."""
    return fs.FederatedData.from_arrays([data.train.of_client(k)], classes=data.classes)


# --- the two estimators of the inner function ------------------------------------------------------------------------


FORGETFUL = [*(("5-3", setting) for setting in SETTINGS), ("5-3, no dual", "partial"), ("5-1", "minibatches")]
FORGETFUL += [("ball, one level", "minibatches"), ("auc, 1", "minibatches")]


@pytest.mark.parametrize(("world", "setting"), FORGETFUL)
def test_estimators_that_forget_are_one(world: str, setting: str) -> None:
    """alpha eta^2 = 1 there and alpha eta = 1 here: both take the fresh value."""
    tower = TOWERS[world]()
    problem, data, options = tower.problem, tower.data, SETTINGS[setting]
    found = solve(fs.LocalSCGDAM(alpha=2.0, weight_decay=0.1, **MOMENTA), problem, data, **options)
    ours = solve(fs.LocalSMCGDAM(alpha=4.0, weight_decay=0.1, **MOMENTA), problem, data, **options)
    assert apart(ours, found) < 1e-12


def test_estimators_that_remember_differ() -> None:
    """Weights above 1 are no less forgetful; weights below 1, even equal ones, are not the same thing."""
    tower = TOWERS["5-3"]()

    def end(kind: type[fs.Algorithm], alpha: float) -> fs.State:
        return solve(kind(alpha=alpha, **MOMENTA), tower.problem, tower.data, batch_size=3)

    found = end(fs.LocalSCGDAM, 2.0)
    assert apart(found, end(fs.LocalSMCGDAM, 9.0)) < 1e-12
    assert apart(found, end(fs.LocalSCGDAM, 5.0)) == 0
    remembering = end(fs.LocalSMCGDAM, 2.0), end(fs.LocalSCGDAM, 1.0)
    assert min(apart(found, remembering[0]), apart(found, remembering[1]), apart(*remembering)) > 1e-3


# --- levels that are the identity ------------------------------------------------------------------------------------


def identity(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return u


def under_levels(problem: fs.Problem, levels: int) -> fs.Problem:
    """The same saddle under levels that change nothing."""
    return replace(problem, levels=(identity,) * levels, inner_mean="global")


PLAIN = fs.LocalSGDAM(lr=0.5, dual_lr=0.7, alpha=0.5, beta=1.2, steps=3, weight_decay=0.1)
LAYERED: dict[str, Any] = {**MOMENTA, "rho_y": 1.2, "weight_decay": 0.1}


def given(problem: fs.Problem, levels: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Momenta from before, for the method without levels and for the one with."""
    rng = np.random.default_rng(2)
    assert problem.y0 is not None
    p, q = (torch.from_numpy(rng.normal(size=len(v))) for v in (problem.x0, problem.y0))
    return {"d_x": p, "d_y": q}, {"p": p, "q": q, **{f"h{j}": problem.x0 for j in range(1, levels + 1)}}


UNCHANGED = [*(("ball", 2, setting) for setting in SETTINGS), ("ball", 1, "minibatches"), ("free", 3, "minibatches")]


@pytest.mark.parametrize(("world", "levels", "setting"), UNCHANGED)
def test_identities_as_levels_are_none(world: str, levels: int, setting: str) -> None:
    """From the second round on: the same batches, for clients that differ; every h is x, whatever its weight."""
    w, options = SADDLES[world](), SETTINGS[setting]
    plain, layered = given(w.problem, levels)
    expected = solve(PLAIN, w.problem, w.data, first=plain, **options)
    ours = fs.LocalSMCGDAM(alpha=1.1, **LAYERED)
    found = solve(ours, under_levels(w.problem, levels), w.data, first=layered, **options)
    assert apart(found, expected, "x", "y") < 1e-12
    for key, other in {"p": "d_x", "q": "d_y", **{f"h{j}": "x" for j in range(1, levels + 1)}}.items():
        torch.testing.assert_close(found[key], expected[other], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("clients", "levels"), [(1, 1), (4, 2)])
def test_identities_as_levels_are_none_from_the_start(clients: int, levels: int) -> None:
    """For one client, or equal ones, with all their data: first momenta are averaged there, and not here."""
    w = SADDLES["ball"]()
    same = fs.FederatedData.from_arrays([w.data.train.of_client(1)] * clients)
    problem = under_levels(w.problem, levels)
    ours = fs.LocalSMCGDAM(alpha=1.1, **LAYERED)
    assert apart(solve(ours, problem, same), solve(PLAIN, w.problem, same), "x", "y") < 1e-12
    assert apart(solve(ours, problem, w.data), solve(PLAIN, w.problem, w.data), "x", "y") > 1e-4


def test_an_identity_under_a_moving_average_is_none_only_with_weight_one() -> None:
    w = SADDLES["ball"]()
    plain, layered = given(w.problem, 1)
    expected = solve(PLAIN, w.problem, w.data, first=plain, batch_size=3)
    problem = under_levels(w.problem, 1)
    ends = [
        solve(fs.LocalSCGDAM(alpha=alpha, **LAYERED), problem, w.data, first=layered, batch_size=3)
        for alpha in (2.0, 1.9)
    ]
    assert apart(ends[0], expected, "x", "y") < 1e-12
    assert apart(ends[1], expected, "x", "y") > 1e-4


@pytest.mark.parametrize("levels", [1, 2])
def test_compositional_auc_with_tiny_steps_is_auc(levels: int) -> None:
    linear = nn.Linear(3, 1, dtype=torch.float64)
    problem = start(fs.auc(linear, p=SHARE), 0.3)
    plain, layered = given(problem, levels)
    expected = solve(PLAIN, problem, binary_data(), first=plain, batch_size=3)
    for inner_lr, same in ((1e-14, True), (0.1, False)):
        steps = start(fs.compositional_auc(linear, levels=levels, inner_lr=inner_lr, p=SHARE), 0.3)
        found = solve(fs.LocalSMCGDAM(alpha=1.1, **LAYERED), steps, binary_data(), first=layered, batch_size=3)
        assert apart(found, expected, "x", "y") < 1e-11 if same else apart(found, expected, "x", "y") > 1e-4


# --- one client ------------------------------------------------------------------------------------------------------


def whole(tower: Tower) -> Callable[..., torch.Tensor]:
    """f(G(x), y) of one client on a batch."""
    problem = tower.problem

    def value(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        for level in problem.levels:
            x = level(x, rest[-1])
        return problem.outer(x, *rest)

    return value


def descent_ascent(tower: Tower, data: fs.FederatedData, steps: int) -> fs.State:
    """Gradient descent ascent on the composition with all data of one client, through autograd."""
    f, batch = whole(tower), data.train.of_client(0)
    at = [v for v in (tower.problem.x0, tower.problem.y0) if v is not None]
    for _ in range(steps):
        leaves = [v.clone().requires_grad_() for v in at]
        slopes = torch.autograd.grad(f(*leaves, batch), leaves)
        at[0] = at[0] - STEPS["eta"] * STEPS["gamma_x"] * slopes[0]
        if len(at) > 1:
            at[1] = tower.problem.projected(at[1] + STEPS["eta"] * STEPS["gamma_y"] * slopes[1])
    return fs.State(**dict(zip(("x", "y"), at, strict=False)))


@pytest.mark.parametrize("alpha", [0.01, 1.3, 4.0])
@pytest.mark.parametrize("world", ["5-3", "5-3-7", "4-6-2-5", "4-6-2-5, no dual", "simplex", "auc, 3", "risk averse"])
def test_one_client_descends_and_ascends_on_the_composition(world: str, alpha: float) -> None:
    """With momenta of one gradient, and all data: estimates are exact whatever their weight."""
    tower = TOWERS[world]()
    data = alone(tower.data)
    expected = descent_ascent(tower, data, 9)
    found = solve(fs.LocalSMCGDAM(alpha=alpha, **WITHOUT), tower.problem, data)
    assert apart(found, expected, *expected) < 1e-10
    if tower.levels == 1:
        forgetting = solve(fs.LocalSCGDAM(alpha=2.0, **WITHOUT), tower.problem, data)
        assert apart(forgetting, expected, *expected) < 1e-10


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("world", ["5-3-7, no dual", "risk averse"])
def test_without_a_dual_one_client_does_fedavg_on_the_composition(world: str, steps: int) -> None:
    tower = TOWERS[world]()
    data = alone(tower.data)
    problem = fs.Problem(whole(tower), tower.problem.x0, name="whole")
    expected = solve(fs.FedAvg(lr=STEPS["eta"] * STEPS["gamma_x"], steps=steps, weight_decay=0.1), problem, data)
    ours = fs.LocalSMCGDAM(alpha=1.3, weight_decay=0.1, **{**WITHOUT, "steps": steps})
    assert apart(solve(ours, tower.problem, data), expected, "x") < 1e-12


@pytest.mark.parametrize("world", ["5-3-7", "4-6-2-5, no dual"])
def test_for_one_client_rounds_are_only_steps(world: str) -> None:
    """Nothing is lost between rounds: one of six steps, or six of one, with all data."""
    tower = TOWERS[world]()
    data = alone(tower.data)
    ends = [
        solve(fs.LocalSMCGDAM(alpha=1.3, **{**MOMENTA, "steps": steps}), tower.problem, data, 6 // steps)
        for steps in (6, 3, 1)
    ]
    assert max(apart(end, ends[0]) for end in ends) < 1e-12


@pytest.mark.parametrize("kind", [fs.LocalSMCGDAM, fs.LocalSCGDAM])
def test_a_round_leaves_the_state_that_it_began_from_alone(kind: type[fs.Algorithm]) -> None:
    tower = TOWERS["5-3"]()
    algorithm = kind(**MOMENTA)
    clients = make_clients(make_setting(tower.problem, tower.data, batch_size=3), chunk=1)
    with torch.no_grad():
        state = started(algorithm, clients)
        for r in range(3):
            clients.begin(r)
            before = {key: value.clone() for key, value in state.items()}
            after = algorithm.round(state, clients)
            assert all(torch.equal(state[key], value) for key, value in before.items())
            state = after
    assert tower.data.clients == N


# --- rare classes ----------------------------------------------------------------------------------------------------


def rare_data() -> fs.FederatedData:
    rng = np.random.default_rng(1)
    data = sized_data([6, 12, 4, 18, 8], classes=3)
    return data.with_auxiliary(rng.normal(size=(9, 3)), np.arange(9) % 3)


def empty_exchange(clients: Any) -> None:
    """The clients are asked for nothing, in the exchange in which the server has its own work."""
    clients.mean(lambda client, x: x[:, :0], torch.zeros(1))


PROBLEM = softmax_problem(classes=3)
RARE: dict[str, Any] = {"lr": 0.3, "weight_decay": 0.05}


@pytest.mark.parametrize(("setting", "steps"), [*((s, 4) for s in SETTINGS), ("epochs", fs.Epochs(1.5))])
def test_equal_weights_without_momentum_are_fedavg(setting: str, steps: Any) -> None:
    """And so is the first round with any slope, in which all classes weigh 1; the second is not."""
    problem, data, options = PROBLEM, rare_data(), SETTINGS[setting]
    plain = fs.FedAvg(steps=steps, **RARE)
    for slope, rounds, same in ((0.0, 3, True), (0.5, 1, True), (0.5, 2, False)):
        expected = solve(plain, problem, data, rounds, before=empty_exchange, **options)
        found = solve(fs.LocalSGDMRL(steps=steps, momentum=0.0, slope=slope, **RARE), problem, data, rounds, **options)
        assert apart(found, expected, "x") < 1e-12 if same else apart(found, expected, "x") > 1e-4
        assert (found.w == 1).all() == (slope == 0)


def test_with_all_data_equal_weights_without_momentum_are_fedavg_as_it_is() -> None:
    problem, data = PROBLEM, rare_data()
    found = solve(fs.LocalSGDMRL(steps=4, momentum=0.0, slope=0.0, **RARE), problem, data)
    assert apart(found, solve(fs.FedAvg(steps=4, **RARE), problem, data), "x") < 1e-12
    with_momentum = solve(fs.LocalSGDMRL(steps=4, momentum=0.1, slope=0.0, **RARE), problem, data)
    assert apart(found, with_momentum, "x") > 1e-3


def test_the_servers_samples_do_not_matter_where_classes_weigh_the_same() -> None:
    problem, data = PROBLEM, rare_data()
    other = data.with_auxiliary(np.zeros((3, 3)), np.arange(3))
    ends = {
        slope: [solve(fs.LocalSGDMRL(slope=slope, steps=3), problem, d, batch_size=4) for d in (data, other)]
        for slope in (0.0, 0.1)
    }
    assert apart(*ends[0.0]) == 0
    assert apart(*ends[0.1]) > 1e-3
