"""Control variates and adaptive methods where they reduce to something simpler, or have a fixed point."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from algorithms.examples import apart
from cases import product
from fedstrata.algorithms import fedlalr, fedopt, scaffold
from fedstrata.training.states import tensors_of
from plain_worlds import PLAIN
from support import (
    drawn,
    make_clients,
    make_setting,
    play,
    shared_oracles,
    sized_data,
    smooth_example,
    softmax_problem,
)
from worlds import SIZES, N

pytestmark = pytest.mark.untraced


def rounds_from(
    algorithm: fs.Algorithm, state: Any, problem: fs.Problem, data: fs.FederatedData, rounds: int, **options: Any
) -> Any:
    """Rounds from a given state of the server, or with None from the algorithm's own start."""
    engine = {k: options.pop(k) for k in ("participation", "weighting", "chunk") if k in options}
    setting = make_setting(problem, data, oracles=shared_oracles(problem), **options)
    clients = make_clients(setting, rounds=rounds, **engine)
    with torch.no_grad():
        state = algorithm.start(problem.x0, problem.x0[:0], clients) if state is None else state
        for r in range(rounds):
            clients.begin(r)
            state = algorithm.round(state, clients)
    return state


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


# --- SCAFFOLD weighted by samples has no paper; it has a fixed point -------------------------------------------------


SHARE = np.array(SIZES) / sum(SIZES)


def variates(setting: Any, dimension: int) -> np.ndarray:
    """What every client keeps as its control variate, zeros where it keeps none."""
    return setting.state.recall(np.arange(N), "c", torch.zeros(N, dimension, dtype=torch.float64)).numpy()


@product("option, participation", ["I", "II"], [1.0, 2])
def test_weighted_scaffold_rests_at_the_weighted_minimiser(option: str, participation: int | float) -> None:
    world, weight_decay = PLAIN["quadratic"](), 0.3
    h, b = (a.numpy() for a in world.data.train.arrays)  # the pooled mean is the mean weighted by samples
    minimiser = (h * b).mean(0) / (h.mean(0) + weight_decay)
    of_clients = [tuple(a.numpy() for a in world.data.train.of_client(k)) for k in range(N)]
    gradients = np.stack([world.gradient(batch, minimiser) + weight_decay * minimiser for batch in of_clients])
    np.testing.assert_allclose(SHARE @ gradients, 0, atol=1e-12)
    assert np.abs(gradients.mean(0)).max() > 0.1, "uniform and weighted minimisers must differ"

    setting = make_setting(world.problem, world.data, batch_size=None, oracles=world.oracles)
    setting.state.keep(np.arange(N), {"c": torch.from_numpy(gradients)})
    clients = make_clients(setting, participation=participation, weighting="samples", chunk=2)
    algorithm = fs.Scaffold(lr=0.05, steps=4, option=option, weight_decay=weight_decay)
    x = torch.from_numpy(minimiser)
    state = scaffold.State(x, torch.zeros_like(x))
    for r in range(3):
        clients.begin(r)
        state = algorithm.round(state, clients)
    assert (state.x - x).abs().max() < 1e-12
    assert state.c.abs().max() < 1e-12
    np.testing.assert_allclose(variates(setting, len(x)), gradients, atol=1e-11)


def test_weighted_scaffold_keeps_c_the_weighted_mean_of_the_variates() -> None:
    world = PLAIN["quadratic"]()
    setting = make_setting(world.problem, world.data, batch_size=3, oracles=world.oracles)
    clients = make_clients(setting, participation=2, weighting="samples", chunk=2)
    algorithm, x = fs.Scaffold(lr=0.05, steps=3), world.problem.x0
    state = algorithm.start(x, x[:0], clients)
    for r in range(6):
        clients.begin(r)
        state = algorithm.round(state, clients)
        np.testing.assert_allclose(state.c.numpy(), SHARE @ variates(setting, len(x)), atol=1e-12)
    assert state.c.abs().max() > 0.1


# --- FedLALR ---------------------------------------------------------------------------------------------------------


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


def test_without_memory_fedlalr_steps_along_signs() -> None:
    """beta1 = beta2 = 0: the step is lr g / max(sqrt(vhat), |g|), which is lr where the gradient is the larger."""
    problem, data = one_client()
    g = gradient_at(problem, data)(problem.x0)
    size = g.abs()
    root = torch.where(torch.arange(len(g)) % 2 == 0, 0.1 * size, 3.0 * size)
    state = fedlalr.State(problem.x0, root**2, torch.full_like(g, 5.0))
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


@product("aggregate, restart", ["mean", "max"], [False, True])
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
    assert len(with_m.m) and not len(without.m)
    assert more.bytes_up > less.bytes_up and more.bytes_down > less.bytes_down
    options["beta1"] = 0.5
    kept, _ = play(fs.FedLALR(**options), *smooth_example(), 4, **run)
    restarted, _ = play(fs.FedLALR(restart=True, **options), *smooth_example(), 4, **run)
    assert far(kept.x, restarted.x) > 1e-4


def test_the_maximum_is_nowhere_below_the_mean() -> None:
    mean, largest = (
        rounds_from(fs.FedLALR(lr=0.02, steps=5, aggregate=aggregate), None, *smooth_example(), 1, batch_size=4)
        for aggregate in ("mean", "max")
    )
    assert (largest.vhat >= mean.vhat).all()
    assert (largest.vhat > 1.1 * mean.vhat).any()
    assert torch.equal(largest.x, mean.x) and torch.equal(largest.m, mean.m), "it is of vhat only"


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


@pytest.mark.slow
@product("aggregate, weighting", ["mean", "max"], ["uniform", "samples"])
def test_vhat_never_falls_below_eps_squared(aggregate: str, weighting: str) -> None:
    """In float32 a mean of equal numbers may come out smaller than they are, round after round."""
    sizes = {"uniform": ((10, 0.02, False), (18, 3e-4, True)), "samples": ((4, 0.02, True), (6, 1e-8, False))}
    for clients, eps, restart in sizes[weighting]:
        floor = torch.full((), eps**2, dtype=torch.float32)
        problem, data = half_idle(clients)
        algorithm = fs.FedLALR(lr=0.01, steps=2, eps=eps, restart=restart, aggregate=aggregate)
        engine = make_clients(make_setting(problem, data, batch_size=2), rounds=30, weighting=weighting, chunk=4)
        state = algorithm.start(problem.x0, problem.x0[:0], engine)
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

    def combine(self, how: tuple[str, ...], work: Any, x: torch.Tensor, vhat: torch.Tensor, m: torch.Tensor) -> Any:
        return torch.zeros_like(x), self.vhat - vhat, torch.zeros_like(m)


@pytest.mark.parametrize("restart", [False, True])
def test_a_mean_that_was_rounded_down_is_lifted_to_eps_squared_and_others_are_left_alone(restart: bool) -> None:
    x = torch.zeros(6)
    algorithm = fs.FedLALR(eps=0.5, restart=restart)
    found: Any = RoundedDown(torch.tensor([0.25, 0.2499999, 0.24, 0.2500001, 3.0, 0.0]))
    state = algorithm.round(algorithm.start(x, x[:0], found), found)
    assert torch.equal(state.vhat, torch.tensor([0.25, 0.25, 0.25, 0.2500001, 3.0, 0.25]))


@product("eps, aggregate", [2.0**-20, 2.0**-3, 1.0], ["mean", "max"])
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


# --- FedAMS and LaFedOPT ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [{}, {"batch_size": 4, "participation": 3, "weighting": "samples"}])
def test_fedams_without_its_maximum_is_fedadam(run: dict[str, Any]) -> None:
    """From the same start, which is not its own: FedAMS starts v at 0."""
    problem, data = smooth_example()
    shared = {"lr": 0.2, "steps": 3, "server_lr": 0.05, "beta1": 0.8, "beta2": 0.9}
    adam, ams = fs.FedAdam(tau=0.01, **shared), fs.FedAMS(option=2, maximum=False, eps=0.01, **shared)
    zero = torch.zeros_like(problem.x0)
    start = fedopt.State(problem.x0, zero, torch.full_like(zero, 0.01**2), zero)
    theirs = rounds_from(adam, None, problem, data, 4, **run)
    ours = rounds_from(ams, start, problem, data, 4, **run)
    assert apart(tensors_of(ams, ours), tensors_of(adam, theirs), "x m v") < 1e-14
    assert torch.equal(ours.vhat, ours.v)
    assert far(rounds_from(ams, None, problem, data, 4, **run).x, theirs.x) > 1e-6


@pytest.mark.parametrize("option", [1, 2])
def test_the_maximum_of_fedams_never_falls(option: int) -> None:
    problem, data = smooth_example()
    algorithm = fs.FedAMS(lr=0.2, steps=3, server_lr=0.05, beta2=0.5, option=option, eps=1e-8)
    state, fell = rounds_from(algorithm, None, problem, data, 0), False
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


@product("optimizer, correction", OPTIMIZERS, ["none", "joint"])
def test_with_clients_that_are_hardly_adaptive_lafedopt_is_fedavg(optimizer: str, correction: str) -> None:
    """P is almost 1 / eps: with the rate lr * eps every client does SGD, up to something that falls like 1 / eps."""
    run = {"batch_size": 4, "participation": 4}
    plain = play(fs.FedAvg(lr=0.1, steps=4), *smooth_example(), 3, **run)[0].x
    moved = far(plain, smooth_example()[0].x0)
    errors = []
    for eps in (1e2, 1e4, 1e6):
        options: dict[str, Any] = {"lr": 0.1 * eps, "eps": eps, "optimizer": optimizer}
        options |= {} if optimizer == "adagrad" else {"beta1": 0.0}
        ours = play(fs.LaFedOPT(steps=4, correction=correction, **options), *smooth_example(), 3, **run)[0].x
        errors.append(far(ours, plain) / moved)
    assert errors[0] < 0.1 and errors[1] < 0.03 * errors[0] and errors[2] < 0.03 * errors[1]


ADAPTIVE: list[fs.Algorithm] = [
    *(fs.FedLALR(lr=0.02, steps=3, aggregate=a, restart=r) for a in ("mean", "max") for r in (False, True)),
    *(fs.FedAMS(lr=0.1, steps=3, server_lr=0.1, option=v) for v in (1, 2)),
    *(fs.LaFedOPT(lr=0.02, steps=3, correction=c) for c in ("joint", "none")),
    fs.LaFedOPT(lr=0.02, steps=3, correction="local", server_lr=50.0),
    fs.LaFedOPT(lr=0.02, steps=3, server="adam", server_lr=0.1),
    fs.LocalAMSGrad(lr=0.02, steps=3, eps=1e-3),
    fs.LocalAdaAlter(lr=0.2, steps=3),
]


@product("algorithm, chunk", ADAPTIVE, [1, 2, 5])
def test_equal_clients_act_as_one(algorithm: fs.Algorithm, chunk: int) -> None:
    problem, single = one_client()
    inputs, targets = (a.numpy() for a in single.train.of_client(0))
    several = fs.FederatedData.from_arrays([(inputs, targets)] * 5, classes=2)
    alone, _ = play(algorithm, problem, single, 3)
    together, _ = play(algorithm, problem, several, 3, chunk=chunk)
    for value, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-13)
    assert far(alone.x, problem.x0) > 1e-2
