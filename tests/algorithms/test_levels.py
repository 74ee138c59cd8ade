"""The algorithms for several levels: what a step asks for, exact estimates, and levels that change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from algorithms.examples import apart
from algorithms.examples import example as example_of
from cases import table
from fedstrata.algorithms.layered import chain_rule, estimate_levels
from fedstrata.clients import Client, Variables
from fedstrata.training.states import state_of, tensors_of
from saddle_worlds import SADDLES, binary_data
from support import make_client, make_clients, make_setting, play, shared_oracles, started
from towers import BEND, HOME, INNER_LR, SHARE, SMOOTHING, TOWERS, WEIGHT, turned_tower
from worlds import N, start

pytestmark = pytest.mark.untraced

TOLERANCE = 1e-9
OPTIONS: dict[str, Any] = {"eta": 0.6, "gamma_x": 0.3, "gamma_y": 0.4, "rho_x": 1.1, "rho_y": 0.9, "steps": 3}


# --- what a step asks for --------------------------------------------------------------------------------------------


@dataclass
class Spy:
    """Remembers each local step: the variables before and after it, and what the clients were asked.

    Of each call: its arguments, as they are, and copies of the arguments and the answer.
    """

    before: list[Variables] = field(default_factory=list)
    after: list[Variables] = field(default_factory=list)
    steps: list[dict[str, list[tuple[Any, Any, Any]]]] = field(default_factory=list)
    inside: bool = False

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        loop = Client.loop

        def watched(client: Client, steps: Any, k: Variables) -> Iterator[int]:
            for step in loop(client, steps, k):
                self.steps.append({name: [] for name in ("g", "g_vjp", "f_grads", "chain")})
                self.before.append(copy.deepcopy(k))
                self.inside = True
                yield step
                self.inside = False
                self.after.append(copy.deepcopy(k))

        def asked(name: str) -> None:
            method = getattr(Client, name)

            def noted(client: Client, *args: Any, **options: Any) -> Any:
                copied = torch.utils._pytree.tree_map(_cloned, args)
                out = method(client, *args, **options)
                if self.inside:
                    self.steps[-1][name].append((args, copied, torch.utils._pytree.tree_map(_cloned, out)))
                return out

            patch.setattr(Client, name, noted)

        patch.setattr(Client, "loop", watched)
        for name in ("g", "g_vjp", "f_grads", "chain"):
            asked(name)


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def watched_rounds(algorithm: fs.Algorithm, world: str, patch: pytest.MonkeyPatch) -> Spy:
    """Two rounds of minibatches, in two chunks."""
    spy, tower = Spy(), TOWERS[world]()
    spy.watch(patch)
    play(algorithm, tower.problem, tower.data, 2, batch_size=3, chunk=3)
    assert len(spy.steps) == 2 * 2 * OPTIONS["steps"]
    return spy


@pytest.mark.parametrize("world", ["5-3", "5-1-1, no dual", "5-3-7", HOME, "4-6-2-5, no dual", "auc, 3"])
def test_levels_are_renewed_from_the_old_and_the_new_level_below_on_one_batch(
    world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two values of each level in a step, on the very same batch: below it the old h (or x), and the new one.

    The Jacobian is at the new one, on that batch too; f, on a batch of its own, is at the new h_K.
    """
    spy, tower = watched_rounds(fs.LocalSMCGDAM(alpha=1.3, **OPTIONS), world, monkeypatch), TOWERS[world]()
    rates = {key: OPTIONS[key] * OPTIONS["eta"] for key in ("gamma_x", "gamma_y")}
    keep = 1 - 1.3 * OPTIONS["eta"] ** 2
    for old, calls, new in zip(spy.before, spy.steps, spy.after, strict=True):
        assert len(calls["g"]) == 2 * tower.levels and not calls["chain"]
        torch.testing.assert_close(new.h[0], old.h[0] - rates["gamma_x"] * old.p, rtol=0, atol=1e-14)
        batches = []
        for j in range(1, tower.levels + 1):
            of_level = [call for call in calls["g"] if call[0][0] == j]
            (args_old, (_, u_old, _), g_old), (args_new, (_, u_new, _), g_new) = of_level
            assert torch.equal(u_old, old.h[j - 1]) and torch.equal(u_new, new.h[j - 1])
            assert not torch.equal(u_old, u_new)
            assert args_old[2] is args_new[2]
            torch.testing.assert_close(new.h[j], keep * (old.h[j] - g_old) + g_new, rtol=0, atol=1e-12)
            ((args, copied, _),) = [call for call in calls["g_vjp"] if call[0][0] == j]
            assert torch.equal(copied[1], new.h[j - 1]) and args[3] is args_new[2]
            batches.append(args_new[2])
        ((args, copied, _),) = calls["f_grads"]
        assert torch.equal(copied[0], new.h[-1])
        assert len({id(batch) for batch in (*batches, args[1])}) == tower.levels + 1
        if tower.y0 is not None:
            assert torch.equal(copied[2], new.y)
            torch.testing.assert_close(new.y, old.y + rates["gamma_y"] * old.q, rtol=0, atol=1e-14)


@pytest.mark.parametrize("world", ["5-3", "5-1, no dual"])
def test_the_moving_average_asks_once_at_the_new_point(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = watched_rounds(fs.LocalSCGDAM(alpha=0.8, **OPTIONS), world, monkeypatch)
    for calls, new in zip(spy.steps, spy.after, strict=True):
        ((_, copied, _),) = calls["chain"]
        assert torch.equal(copied[0], new.h[0])
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


def composition(kind: str, levels: int) -> tuple[fs.Problem, fs.FederatedData, Composition]:
    if kind == "risk averse":
        tower = TOWERS["risk averse"]()
        return tower.problem, tower.data, semideviation
    if kind == "tower":
        tower = turned_tower(levels)
        at, rows = torch.eye(4, dtype=torch.float64), torch.zeros(1, levels, 5, dtype=torch.float64)
        turns = [torch.stack([g(torch.pi * e, (rows,)) / torch.pi for e in at], 1) for g in tower.problem.levels]
        return tower.problem, tower.data, lambda x, y, batch: height_of(turns, batch[1].mean(0), x, y)
    linear = nn.Linear(3, 1, dtype=torch.float64)
    problem = start(fs.compositional_auc(linear, levels=levels, inner_lr=INNER_LR, p=SHARE), 0.3)
    return problem, binary_data(), lambda x, y, batch: auc_after_steps(levels, x, y, batch)


COMPOSITIONS = [*((kind, k) for kind in ("auc", "tower") for k in (3, 1, 2, 4, 5)), ("risk averse", 2)]


def slopes_of(f: Composition, at: Sequence[torch.Tensor], batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    leaves = [v.detach().clone().requires_grad_() for v in at]
    with torch.enable_grad():
        return list(torch.autograd.grad(f(*leaves, batch), leaves))


@table("kind, levels", COMPOSITIONS, key=lambda kind, _: [kind], name=lambda *row: row)
def test_the_first_estimates_from_all_data_are_the_gradient_of_the_composition(kind: str, levels: int) -> None:
    """Of each client's own, all clients at once; several batches' worth of all data is all data."""
    problem, data, f = composition(kind, levels)
    client = make_client(make_setting(problem, data, batch_size=None), list(range(data.clients)))
    at = [v for v in (problem.x0, problem.y0) if v is not None]
    x, *y = (v.expand(data.clients, -1) for v in at)

    def first(batches: int, weight_decay: float) -> Variables:
        k = client.variables(h=(x, *[x] * len(problem.levels)), y=y[0] if y else x[:, :0], p=x, q=x)
        estimate_levels(client, k, batches, weight_decay)
        return k

    with torch.no_grad():
        k = first(3, 0.0)
        direct = chain_rule(client, k, client.draw_all(), 0.0)
        torch.testing.assert_close(first(1, 0.3).p, k.p + 0.3 * x, rtol=0, atol=1e-14)
    assert len(k.h) == len(problem.levels) + 1
    for c in range(data.clients):
        expected = slopes_of(f, at, data.train.of_client(c))
        for found, value in zip((k.p, k.q), expected, strict=False):
            torch.testing.assert_close(found[c], value, rtol=0, atol=TOLERANCE)
            assert value.abs().max() > 1e-3
    assert torch.equal(direct[0], k.p) and torch.equal(direct[1], k.q)


@table("kind, levels", COMPOSITIONS, key=lambda kind, _: [kind], name=lambda *row: row)
def test_exact_estimates_stay_exact_along_a_path(kind: str, levels: int) -> None:
    """One client with all its data: h_K is G(x), whatever its weight, and momenta of one gradient are the gradient."""
    problem, data, f = composition(kind, levels)
    alone = fs.FederatedData.from_arrays([data.train.of_client(1)])
    algorithm = fs.LocalSMCGDAM(eta=0.5, gamma_x=0.4, gamma_y=0.3, rho_x=2.0, rho_y=2.0, alpha=0.7, steps=3)
    state, _ = play(algorithm, problem, alone, 2)
    at = [v for v in (state.x, state.y) if len(v)]
    batch = alone.train.of_client(0)
    for found, value in zip((state.p, state.q), slopes_of(f, at, batch), strict=False):
        torch.testing.assert_close(found, value, rtol=0, atol=TOLERANCE)
    u = state.x
    for h, level in zip(state.h[1:], problem.levels, strict=True):
        u = level(u, batch)
        torch.testing.assert_close(h, u, rtol=0, atol=TOLERANCE)
    assert (state.x - problem.x0).abs().max() > 1e-2


# --- levels that are the identity ------------------------------------------------------------------------------------


SETTINGS: dict[str, dict[str, Any]] = {
    "minibatches": {"batch_size": 3},
    "full batches": {"batch_size": None},
    "weighted": {"batch_size": 3, "weighting": "samples"},
    "epochs": {"batch_size": 4, "sampling": "epochs"},
    "partial": {"batch_size": 3, "participation": 3},
}
PLAIN = fs.LocalSGDAM(lr=0.5, dual_lr=0.7, alpha=0.5, beta=1.2, steps=3, weight_decay=0.1)
LAYERED: dict[str, Any] = {"eta": 0.5, "gamma_x": 0.5, "gamma_y": 0.7, "steps": 3, "rho_x": 1.2, "rho_y": 1.2}
LAYERED["weight_decay"] = 0.1


def identity(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return u


def under_levels(problem: fs.Problem, levels: int) -> fs.Problem:
    """The same saddle under levels that change nothing."""
    return replace(problem, levels=(identity,) * levels, inner_mean="global")


def rounds_with_momenta(
    algorithm: fs.Algorithm, problem: fs.Problem, data: fs.FederatedData, weighting: str = "uniform", **run: Any
) -> dict[str, torch.Tensor]:
    """Three rounds from the second one on, with random momenta from before; every h starts at x."""
    setting = make_setting(
        problem, data, seed=7, oracles=shared_oracles(problem), **{k: v for k, v in run.items() if k != "participation"}
    )
    clients = make_clients(setting, rounds=4, chunk=3, weighting=weighting, participation=run.get("participation", 1.0))
    rng = np.random.default_rng(2)
    p, q = (torch.from_numpy(rng.normal(size=len(v))) for v in (problem.x0, problem.y0))
    with torch.no_grad():
        first = tensors_of(algorithm, started(algorithm, clients))
        given = {"d_x": p, "d_y": q, "p": p, "q": q, **{key: problem.x0 for key in first if key.startswith("h.")}}
        state = state_of(algorithm, {key: given.get(key, value) for key, value in first.items()})
        clients.progress.iteration = 3
        for r in range(1, 4):
            clients.begin(r)
            state = algorithm.round(state, clients)
    return {"x": state.x, **tensors_of(algorithm, state)}


UNCHANGED = [*(("ball", 2, setting) for setting in SETTINGS), ("ball", 1, "minibatches"), ("free", 3, "minibatches")]


@pytest.mark.parametrize(("world", "levels", "setting"), UNCHANGED)
def test_identity_levels_change_nothing(world: str, levels: int, setting: str) -> None:
    """From the second round on: the same batches, for clients that differ; every h is x, whatever its weight."""
    problem, data = example_of(world)
    expected = rounds_with_momenta(PLAIN, problem, data, **SETTINGS[setting])
    ours = fs.LocalSMCGDAM(alpha=1.1, **LAYERED)
    found = rounds_with_momenta(ours, under_levels(problem, levels), data, **SETTINGS[setting])
    names = {"y": "y", "p": "d_x", "q": "d_y", **{f"h.{j}": "x" for j in range(levels + 1)}}
    for key, other in names.items():
        torch.testing.assert_close(found[key], expected[other], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("clients", "levels"), [(1, 1), (4, 2)])
def test_identity_levels_change_nothing_from_the_start(clients: int, levels: int) -> None:
    """For one client, or equal ones, with all their data: first momenta are averaged there, and not here."""
    problem, data = example_of("ball")
    same = fs.FederatedData.from_arrays([data.train.of_client(1)] * clients)
    ours = fs.LocalSMCGDAM(alpha=1.1, **LAYERED)

    def end(algorithm: fs.Algorithm, problem: fs.Problem, data: fs.FederatedData) -> dict[str, torch.Tensor]:
        state, _ = play(algorithm, problem, data, 3)
        return {"x": state.x, "y": state.y}

    layered = under_levels(problem, levels)
    assert apart(end(ours, layered, same), end(PLAIN, problem, same)) < 1e-12
    assert apart(end(ours, layered, data), end(PLAIN, problem, data)) > 1e-4


def test_an_identity_under_a_moving_average_changes_nothing_only_with_weight_one() -> None:
    problem, data = example_of("ball")
    expected = rounds_with_momenta(PLAIN, problem, data, batch_size=3)
    one, less = (
        rounds_with_momenta(fs.LocalSCGDAM(alpha=alpha, **LAYERED), under_levels(problem, 1), data, batch_size=3)
        for alpha in (2.0, 1.9)
    )
    assert apart(one, expected) < 1e-12
    assert apart(less, expected) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("levels", [1, 2])
def test_compositional_auc_with_tiny_steps_is_auc(levels: int) -> None:
    linear = nn.Linear(3, 1, dtype=torch.float64)
    expected = rounds_with_momenta(PLAIN, start(fs.auc(linear, p=SHARE), 0.3), binary_data(), batch_size=3)
    for inner_lr, same in ((1e-14, True), (0.1, False)):
        problem = start(fs.compositional_auc(linear, levels=levels, inner_lr=inner_lr, p=SHARE), 0.3)
        found = rounds_with_momenta(fs.LocalSMCGDAM(alpha=1.1, **LAYERED), problem, binary_data(), batch_size=3)
        assert apart(found, expected) < 1e-11 if same else apart(found, expected) > 1e-4


@pytest.mark.parametrize("kind", [fs.LocalSMCGDAM, fs.LocalSCGDAM])
def test_a_round_leaves_the_state_that_it_began_from_alone(kind: type[fs.Algorithm]) -> None:
    tower = TOWERS["5-3"]()
    algorithm = kind(**OPTIONS)
    clients = make_clients(make_setting(tower.problem, tower.data, batch_size=3), chunk=1)
    with torch.no_grad():
        state = started(algorithm, clients)
        for r in range(3):
            clients.begin(r)
            before = {key: value.clone() for key, value in tensors_of(algorithm, state).items()}
            after = algorithm.round(state, clients)
            assert all(torch.equal(value, before[key]) for key, value in tensors_of(algorithm, state).items())
            state = after
    assert tower.data.clients == N and SADDLES["ball"]().data.clients == N
