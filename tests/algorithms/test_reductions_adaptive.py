"""Adaptive methods where they are something simpler, what they send, and local steps that grow with the rounds."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.core.options import options_of
from fedstrata.core.schedules import EqualSteps, Steps, steps_at
from fedstrata.experiments.config import parse
from fedstrata.experiments.tune import fitting
from reference.fedlalr import interval
from support import (
    drawn,
    example_for,
    make_clients,
    make_setting,
    play,
    shared_oracles,
    sized_data,
    smooth_example,
    softmax_problem,
    started,
)


@cache
def one_client() -> tuple[fs.Problem, fs.FederatedData]:
    return softmax_problem(), sized_data([12])


def gradient_at(problem: fs.Problem, data: fs.FederatedData, client: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gradient of a client's loss on all of its data, by autograd."""
    batch = tuple(a.double() if a.is_floating_point() else a for a in data.train.of_client(client))

    def gradient(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(problem.outer(x, batch), x)[0]

    return gradient


def rounds_from(
    algorithm: fs.Algorithm, state: fs.State, problem: fs.Problem, data: fs.FederatedData, rounds: int, **options: Any
) -> fs.State:
    """Rounds from a given state of the server."""
    engine = {k: options.pop(k) for k in ("participation", "weighting", "chunk") if k in options}
    setting = make_setting(problem, data, oracles=shared_oracles(problem), **options)
    clients = make_clients(setting, rounds=rounds, **engine)
    with torch.no_grad():
        for r in range(rounds):
            clients.begin(r)
            state = algorithm.round(state, clients)
    return state


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


# --- FedLALR ---------------------------------------------------------------------------------------------------------


def test_without_memory_fedlalr_steps_along_signs() -> None:
    """beta1 = beta2 = 0: the step is lr g / max(sqrt(vhat), |g|), which is lr where the gradient is the larger."""
    problem, data = one_client()
    g = gradient_at(problem, data)(problem.x0)
    size = g.abs()
    root = torch.where(torch.arange(len(g)) % 2 == 0, 0.1 * size, 3.0 * size)
    state = fs.State(x=problem.x0, m=torch.full_like(g, 5.0), vhat=root**2)
    algorithm = fs.FedLALR(lr=0.03, steps=1, beta1=0.0, beta2=0.0, eps=1e-12)
    found = rounds_from(algorithm, state, problem, data, 1)
    step = found.x - problem.x0
    torch.testing.assert_close(step, -0.03 * g / torch.maximum(root, size), rtol=1e-12, atol=0)
    torch.testing.assert_close(step[::2], -0.03 * g.sign()[::2], rtol=1e-12, atol=0)
    torch.testing.assert_close(step[1::2], -0.01 * g.sign()[1::2], rtol=1e-12, atol=0)
    torch.testing.assert_close(found.vhat, torch.maximum(root, size) ** 2, rtol=1e-12, atol=0)
    assert far(found.m, g) < 1e-14


def test_a_fresh_start_without_memory_moves_every_coordinate_by_the_rate() -> None:
    problem, data = one_client()
    state, _ = play(fs.FedLALR(lr=0.03, steps=1, beta1=0.0, beta2=0.0), problem, data, 1)
    torch.testing.assert_close((state.x - problem.x0).abs(), torch.full_like(state.x, 0.03), rtol=1e-12, atol=0)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_one_round_of_one_client_is_amsgrad_without_bias_correction(aggregate: str, restart: bool) -> None:
    problem, data = one_client()
    gradient = gradient_at(problem, data)
    lr, beta1, beta2, eps, decay = 0.02, 0.9, 0.99, 1e-4, 0.1
    x, m = problem.x0.clone(), torch.zeros_like(problem.x0)
    v = vhat = torch.full_like(x, eps**2)
    for _ in range(25):
        g = gradient(x) + decay * x
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        vhat = torch.maximum(vhat, v)
        x = x - lr * m / vhat.sqrt()
    options = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay}
    algorithm = fs.FedLALR(steps=25, aggregate=aggregate, restart=restart, **options)
    state, _ = play(algorithm, problem, data, 1)
    assert far(state.x, x) < 1e-12 and far(state.vhat, vhat) < 1e-14
    assert restart or far(state.m, m) < 1e-14
    assert (vhat - v).max() > 1e-6, "where v falls again, the maximum matters"


def test_a_round_of_one_client_starts_v_at_vhat() -> None:
    """Several rounds of one client are AMSGrad whose v is lifted to vhat between rounds, and not plain AMSGrad."""
    problem, data = one_client()

    def amsgrad(lifted: bool) -> torch.Tensor:
        x, m = problem.x0.clone(), torch.zeros_like(problem.x0)
        v = vhat = torch.full_like(x, 1e-8)
        for k in range(32):
            v = vhat if lifted and k % 8 == 0 else v
            batch = drawn(data, 0, (3, k // 8, 0, 0, 0), k % 8, batch_size=1)
            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(problem.outer(x, tuple(map(torch.from_numpy, batch))), x)
            m, v = 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * g * g
            vhat = torch.maximum(vhat, v)
            x = x - 0.02 * m / vhat.sqrt()
        return x.detach()

    algorithm = fs.FedLALR(lr=0.02, steps=8, beta2=0.9, eps=1e-4)
    state, _ = play(algorithm, problem, data, 4, batch_size=1, seed=3)
    assert far(state.x, amsgrad(lifted=True)) < 1e-12
    assert far(state.x, amsgrad(lifted=False)) > 1e-5


@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_without_momentum_a_restart_changes_nothing_but_what_is_sent(aggregate: str) -> None:
    options = {"lr": 0.02, "steps": 4, "beta1": 0.0, "aggregate": aggregate}
    run = {"batch_size": 4, "participation": 3}
    with_m, more = play(fs.FedLALR(**options), *smooth_example(), 4, **run)
    without, less = play(fs.FedLALR(restart=True, **options), *smooth_example(), 4, **run)
    assert torch.equal(with_m.x, without.x) and torch.equal(with_m.vhat, without.vhat)
    assert "m" in with_m and "m" not in without
    assert more.bytes_up > less.bytes_up and more.bytes_down > less.bytes_down
    options["beta1"] = 0.5
    kept, _ = play(fs.FedLALR(**options), *smooth_example(), 4, **run)
    restarted, _ = play(fs.FedLALR(restart=True, **options), *smooth_example(), 4, **run)
    assert far(kept.x, restarted.x) > 1e-4


def test_the_maximum_is_nowhere_below_the_mean() -> None:
    problem, data = smooth_example()
    start = fs.FedLALR().init(problem)
    found = {}
    for aggregate in ("mean", "max"):
        algorithm = fs.FedLALR(lr=0.02, steps=5, aggregate=aggregate)
        found[aggregate] = rounds_from(algorithm, start, problem, data, 1, batch_size=4)
    assert (found["max"].vhat >= found["mean"].vhat).all()
    assert (found["max"].vhat > 1.1 * found["mean"].vhat).any()
    for vector in ("x", "m"):
        assert torch.equal(found["max"][vector], found["mean"][vector]), "it is of vhat only"


# --- FedAMS and LaFedOPT ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [{}, {"batch_size": 4, "participation": 3, "weighting": "samples"}])
def test_fedams_without_its_maximum_is_fedadam(run: dict[str, Any]) -> None:
    problem, data = smooth_example()
    shared = {"lr": 0.2, "steps": 3, "server_lr": 0.05, "beta1": 0.8, "beta2": 0.9}
    adam, ams = fs.FedAdam(tau=0.01, **shared), fs.FedAMS(option=2, maximum=False, eps=0.01, **shared)
    start = adam.init(problem)
    theirs = rounds_from(adam, start, problem, data, 4, **run)
    ours = rounds_from(ams, start.replace(vhat=torch.zeros_like(start.x)), problem, data, 4, **run)
    for vector in ("x", "m", "v"):
        assert far(ours[vector], theirs[vector]) < 1e-14
    assert torch.equal(ours.vhat, ours.v)
    started_at_zero = rounds_from(ams, ams.init(problem), problem, data, 4, **run)
    assert far(started_at_zero.x, theirs.x) > 1e-6


@pytest.mark.parametrize("option", [1, 2])
def test_the_maximum_of_fedams_never_falls(option: int) -> None:
    problem, data = smooth_example()
    algorithm = fs.FedAMS(lr=0.2, steps=3, server_lr=0.05, beta2=0.5, option=option, eps=1e-8)
    state, fell = algorithm.init(problem), False
    for _ in range(6):
        after = rounds_from(algorithm, state, problem, data, 1, batch_size=4)
        assert (after.vhat >= state.vhat).all() and (after.vhat >= after.v).all()
        fell |= bool((after.v < state.v).any())
        state = after
    assert fell, "v never fell, so the maximum had nothing to hold"


OPTIMIZERS = ("adagrad", "adam", "yogi")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_client_needs_no_joint_correction(optimizer: str) -> None:
    """Its C_k cancels; with several clients it does not."""
    options = {"lr": 0.02, "steps": 4, "optimizer": optimizer, "eps": 0.01}
    algorithms = [fs.LaFedOPT(correction=c, **options) for c in ("joint", "none", "local")]
    joint, none, local = (play(a, *one_client(), 4, batch_size=5)[0].x for a in algorithms)
    assert far(joint, none) < 1e-13 < 1e-4 < far(local, none)
    joint, none, _ = (play(a, *smooth_example(), 4, batch_size=5)[0].x for a in algorithms)
    assert far(joint, none) > 1e-4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_clients_that_are_hardly_adaptive_lafedopt_is_fedavg(optimizer: str) -> None:
    """P is almost 1 / eps: with the rate lr * eps every client does SGD, up to something that falls like 1 / eps."""
    run = {"batch_size": 4, "participation": 4}
    plain = play(fs.FedAvg(lr=0.1, steps=4), *smooth_example(), 3, **run)[0].x
    moved = far(plain, smooth_example()[0].x0)
    for correction in ("none", "joint"):
        errors = []
        for eps in (1e2, 1e4, 1e6):
            options = {"lr": 0.1 * eps, "eps": eps, "beta1": 0.0, "optimizer": optimizer}
            ours = play(fs.LaFedOPT(steps=4, correction=correction, **options), *smooth_example(), 3, **run)[0].x
            errors.append(far(ours, plain) / moved)
        assert errors[0] < 0.1 and errors[1] < 0.03 * errors[0] and errors[2] < 0.03 * errors[1], correction


# --- clients that are all the same -----------------------------------------------------------------------------------


ADAPTIVE: list[fs.Algorithm] = [
    *(fs.FedLALR(lr=0.02, steps=3, aggregate=a, restart=r) for a in ("mean", "max") for r in (False, True)),
    *(fs.FedAMS(lr=0.1, steps=3, server_lr=0.1, option=v) for v in (1, 2)),
    *(fs.LaFedOPT(lr=0.02, steps=3, correction=c) for c in ("joint", "none")),
    fs.LaFedOPT(lr=0.02, steps=3, correction="local", server_lr=50.0),
    fs.LaFedOPT(lr=0.02, steps=3, server="adam", server_lr=0.1),
    fs.LocalAMSGrad(lr=0.02, steps=3, eps=1e-3),
    fs.LocalAdaAlter(lr=0.2, steps=3),
]


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("algorithm", ADAPTIVE, ids=str)
def test_clients_that_are_all_the_same_are_one(algorithm: fs.Algorithm, chunk: int) -> None:
    problem, single = one_client()
    inputs, targets = (a.numpy() for a in single.train.of_client(0))
    several = fs.FederatedData.from_arrays([(inputs, targets)] * 5, classes=2)
    alone, _ = play(algorithm, problem, single, 3)
    together, _ = play(algorithm, problem, several, 3, chunk=chunk)
    for vector, expected in alone.items():
        torch.testing.assert_close(together[vector], expected, rtol=1e-11, atol=1e-13)
    assert far(alone.x, problem.x0) > 1e-2


# --- what is sent ----------------------------------------------------------------------------------------------------


SENT: list[tuple[fs.Algorithm, int, int]] = [
    *((fs.FedLALR(aggregate=a), 3, 3) for a in ("mean", "max")),
    *((fs.FedLALR(aggregate=a, restart=True), 2, 2) for a in ("mean", "max")),
    *((fs.FedAMS(option=v, maximum=m), 1, 1) for v in (1, 2) for m in (True, False)),
    *((fs.LaFedOPT(optimizer=o), 2, 1) for o in OPTIMIZERS),
    *((fs.LaFedOPT(correction=c, server=s), 1, 1) for c in ("local", "none") for s in ("sgd", "adam")),
    (fs.LaFedOPT(server="adam"), 2, 1),
    (fs.LocalAMSGrad(), 3, 2),
    (fs.LocalAdaAlter(), 2, 2),
]


@pytest.mark.parametrize("run", [{}, {"participation": 3, "chunk": 2, "weighting": "samples"}])
@pytest.mark.parametrize(("algorithm", "up", "down"), SENT, ids=[str(a) for a, *_ in SENT])
def test_vectors_sent_for_each_client_and_round(
    algorithm: fs.Algorithm, up: int, down: int, run: dict[str, Any]
) -> None:
    problem, data = smooth_example()
    _, counts = play(algorithm, problem, data, 2, batch_size=4, **run)
    vector = 8 * len(problem.x0)
    messages = 2 * run.get("participation", data.clients)
    assert (counts.bytes_up, counts.bytes_down) == (up * messages * vector, down * messages * vector)


# --- local steps that grow -------------------------------------------------------------------------------------------


def test_four_steps_to_base_two_are_ten_from_round_64_to_127() -> None:
    """As the paper tells of rounds 64 to 100; its printed ceiling would be 11 from round 65 on."""
    down, up = fs.Interval(4, 2.0), fs.Interval(4, 2.0, rounding="ceil")
    assert [down(t - 1) for t in (1, 2, 3, 4, 7, 8, 63)] == [4, 5, 5, 6, 6, 7, 9]
    assert {down(t - 1) for t in range(64, 128)} == {10}
    assert max(down(t - 1) for t in range(1, 128)) == 10 and down(128 - 1) == 11
    assert up(64 - 1) == 10
    assert {up(t - 1) for t in range(65, 129)} == {11} and up(129 - 1) == 12


def test_three_steps_to_base_four() -> None:
    down, up = fs.Interval(3, 4.0), fs.Interval(3, 4.0, rounding="ceil")
    assert [down(t - 1) for t in (1, 3, 4, 15, 16, 63, 64, 255, 256)] == [3, 3, 4, 4, 5, 5, 6, 6, 7]
    assert [up(t - 1) for t in (1, 2, 4, 5, 16, 17, 64, 65)] == [3, 4, 4, 5, 5, 6, 6, 7]


@pytest.mark.parametrize("rounding", ["floor", "ceil"])
@pytest.mark.parametrize("base", [2, 3, 4, 10])
def test_an_interval_is_exact_at_powers_and_beside_them(base: int, rounding: str) -> None:
    steps = fs.Interval(1, float(base), rounding)
    power, exponent = base, 1
    while power <= 10**6:
        below, above = (exponent - 1, exponent) if rounding == "floor" else (exponent, exponent + 1)
        if power - 1 == base ** (exponent - 1):
            below = exponent - 1
        assert [steps(t - 1) for t in (power - 1, power, power + 1)] == [1 + below, 1 + exponent, 1 + above]
        power, exponent = power * base, exponent + 1
    assert exponent > 6


@pytest.mark.parametrize("rounding", ["floor", "ceil"])
@pytest.mark.parametrize("base", [1.1, 1.5, 2, 2.718281828, 3.0, 4.0, 7.5, 10, 4999.0])
def test_an_interval_is_the_references(base: float, rounding: str) -> None:
    steps = fs.Interval(6, base, rounding)
    rounds = range(1, 5001) if base >= 2 else range(1, 5001, 13)  # exact powers of such a base are long fractions
    assert [steps(t - 1) for t in rounds] == [interval(t, 6, base, rounding) for t in rounds]


BAD_INTERVALS: list[tuple[dict[str, Any], str]] = [
    ({"initial": 0, "base": 2.0}, "initial of an interval must be a whole number of at least 1. Got 0"),
    ({"initial": 2.5, "base": 2.0}, "initial of an interval must be a whole number of at least 1. Got 2.5"),
    ({"initial": True, "base": 2.0}, "initial of an interval"),
    ({"initial": 4, "base": 1.0}, "base of an interval must be a number of at least 1.001. Got 1.0"),
    ({"initial": 4, "base": float("inf")}, "base of an interval"),
    ({"initial": 4, "base": float("nan")}, "base of an interval"),
    ({"initial": 4, "base": "2"}, "base of an interval"),
    ({"initial": 4, "base": 2.0, "rounding": "round"}, "rounding of an interval must be 'floor' or 'ceil'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_INTERVALS, ids=[str(o) for o, _ in BAD_INTERVALS])
def test_a_wrong_interval_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        fs.Interval(**options)
    assert message in str(refused.value)
    with pytest.raises(fs.InputError):
        fs.algorithm("fedlalr", steps=options)


INTERVALS = [
    ("{initial = 4, base = 2.0}", fs.Interval(4, 2.0)),
    ('{initial = 3, base = 4, rounding = "ceil"}', fs.Interval(3, 4, "ceil")),
]


@pytest.mark.parametrize("name", ["fedlalr", "fedavg", "fgda"])
@pytest.mark.parametrize(("text", "expected"), INTERVALS, ids=[t for t, _ in INTERVALS])
def test_an_interval_is_a_table_of_a_configuration(text: str, expected: fs.Interval, name: str) -> None:
    table = tomllib.loads(f"steps = {text}")
    built = fs.algorithm(name, table)
    assert built.steps == expected  # type: ignore[attr-defined]
    described = built.to_table()
    assert described["steps"] == {"rounding": "floor", **table["steps"]}
    assert fs.algorithm(described.pop("name"), described) == built


@pytest.mark.parametrize(
    ("name", "table", "wanted"),
    [
        ("fedlalr", {"initial": 4}, "An interval needs base. (steps of fedlalr)"),
        ("fedlalr", {"initial": 4, "base": 2.0, "epochs": 1}, "Unknown option of the local work 'initial'."),
        ("fedlalr", {"epoch": 1}, "of at least 1, epochs such as {epochs = 2}, or an interval such as {initial = 4, "),
        ("fgda", {"epochs": 2}, "The steps of fgda must be a whole number of at least 1, or an interval such as"),
    ],
)
def test_a_table_that_is_no_interval_is_refused(name: str, table: dict[str, Any], wanted: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        fs.algorithm(name, steps=table)
    assert wanted in str(refused.value) and f"steps of {name}" in str(refused.value)


def takes_intervals(name: str) -> bool:
    options = options_of(ALGORITHMS[name])
    return "steps" in options and options["steps"].annotation in (Steps, EqualSteps)


TAKING = [n for n in sorted(ALGORITHMS) if takes_intervals(n)]
RUNS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    **{name: (name, None, {}) for name in TAKING},
    "fednest, composition": ("fednest", 1, {}),
    **{f"{name}, single": (name, None, {"synchronisation": "single"}) for name in ("fgda", "adafgda")},
}
"""Which algorithm, with how many levels of a problem where it solves several, and other options."""


def test_nearly_every_algorithm_takes_an_interval() -> None:
    """AFL has no local steps; those with a snapshot every S steps have a period that steps must divide."""
    assert set(ALGORITHMS) - set(TAKING) == {"afl", "local_sgda_plus", "local_sgdam_plus"}
    for name in ("local_sgda_plus", "local_sgdam_plus"):
        with pytest.raises(fs.InputError, match=f"steps of {name} must be a whole number"):
            ALGORITHMS[name](steps=fs.Interval(2, 2.0))


def rounds_with(name: str, *steps: int | fs.Interval) -> tuple[fs.State, int]:
    """Rounds with these local steps, one algorithm for each: the server's state, and the steps counted."""
    known, levels, options = RUNS[name]
    kind = ALGORITHMS[known]
    problem, data = example_for(kind, torch.float64, levels)
    setting = make_setting(problem, data, batch_size=4, oracles=shared_oracles(problem))
    share = 1.0 if kind.full_participation else 4
    clients = make_clients(setting, rounds=len(steps), participation=share, chunk=4)
    with torch.no_grad():
        state = started(kind(steps=steps[0], **options), clients)
        for r, here in enumerate(steps):
            clients.begin(r)
            state = kind(steps=here, **options).round(state, clients)
    return state, clients.counts.steps


@pytest.mark.parametrize("name", RUNS)
def test_a_round_with_an_interval_is_one_with_as_many_steps(name: str) -> None:
    """Whatever an algorithm does with the number of steps, it does with this round's."""
    growing = fs.Interval(2, 2.0)
    assert [steps_at(growing, r) for r in range(3)] == [2, 3, 3]
    ours, counted = rounds_with(name, growing, growing, growing)
    theirs, expected = rounds_with(name, 2, 3, 3)
    two, counted_two = rounds_with(name, 2, 2, 2)
    three, counted_three = rounds_with(name, 3, 3, 3)
    assert counted == expected
    assert 3 * counted == counted_two + 2 * counted_three
    for vector, value in ours.items():
        assert torch.equal(value, theirs[vector]), vector
    assert far(ours.x, two.x) > 1e-6 and far(ours.x, three.x) > 1e-6


def test_a_search_of_steps_tries_whole_numbers_of_every_algorithm() -> None:
    wrong = {}
    for name in ALGORITHMS:
        if name != "afl":
            options = fitting(parse({"algorithm": {"name": name}}, "here"), {"steps": 3.7})
            wrong |= {} if options == {"steps": 4} and type(options["steps"]) is int else {name: options}
    assert not wrong


def sliding() -> tuple[fs.Problem, fs.FederatedData, torch.Tensor]:
    """A saddle that falls evenly in x, so that local steps go straight on; its slope."""
    slope = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def outer(x: torch.Tensor, y: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x @ slope - 0.5 * y @ y + 0 * batch[0].sum()

    zeros = {"x0": torch.zeros(3, dtype=torch.float64), "y0": torch.zeros(1, dtype=torch.float64)}
    data = fs.FederatedData.from_arrays([(np.zeros((2, 1)), np.zeros((2, 1)))] * 2)
    return fs.Problem(outer, **zeros, name="sliding"), data, slope


def test_codasca_averages_over_the_steps_that_a_stage_had() -> None:
    """A stage of 2 and 3 steps ends in the middle of 1, 2, ..., 5."""
    problem, data, slope = sliding()
    algorithm = fs.CODASCA(
        lr=0.25, steps=fs.Interval(2, 2.0), stage_rounds=2, control=False, gamma=1e30, weight_decay=0.0, clip=0.0
    )
    setting = make_setting(problem, data)
    clients = make_clients(setting, rounds=2)
    with torch.no_grad():
        state = started(algorithm, clients)
        for r in range(2):
            clients.begin(r)
            state = algorithm.round(state, clients)
    centre = setting.state.recall(np.arange(2), "x_ref", torch.full((2, 3), torch.nan, dtype=torch.float64))
    assert far(state.x, -0.25 * 5 * slope) < 1e-14
    assert far(centre, (-0.25 * 3 * slope).expand(2, 3)) < 1e-14


def test_coda_cuts_a_growing_round_short_at_the_end_of_a_stage() -> None:
    """Stages of 4, 12 and 36 steps; the interval alone would be 2, 3, 3, 4, 4, 4, 4, 5 steps."""
    problem, data, _ = sliding()
    algorithm = fs.CoDA(lr=0.1, steps=fs.Interval(2, 2.0), stage_steps=4, factor=3.0)
    counted = [0, *(play(algorithm, problem, data, rounds)[1].steps for rounds in range(1, 9))]
    assert np.diff(counted).tolist() == [2, 2, 3, 4, 4, 1, 4, 5]
