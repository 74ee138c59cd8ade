"""Small smooth problems of every class, on clients of unequal sizes, and rounds on them without a training loop."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.clients import Clients
from fedstrata.clients.engine import Usage
from fedstrata.data.federated import FederatedData
from fedstrata.problems.agnostic import agnostic
from fedstrata.problems.erm import erm
from fedstrata.problems.oracles import Oracles
from fedstrata.problems.problem import Arrays, Problem
from fedstrata.training.rounds import one_round, prepare, start
from fedstrata.training.settings import Settings
from fedstrata.training.train import make_clients

Example = tuple[Problem, FederatedData]


def sized_data(sizes: list[int], features: int = 3, classes: int = 2, seed: int = 0) -> FederatedData:
    """Return classification data (float64) whose clients have these numbers of samples; every class occurs."""
    generator = np.random.default_rng(seed)
    pairs = []
    for k, size in enumerate(sizes):
        inputs = generator.normal(size=(size, features)) + 0.5 * generator.normal(size=features)
        pairs.append((inputs, (np.arange(size) + k) % classes))
    return FederatedData.from_arrays(pairs, classes=classes, name="sized")


def softmax_problem(features: int = 3, classes: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0) -> Problem:
    """Return softmax regression from a random starting point."""
    model = nn.Linear(features, classes).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            weights.copy_(0.3 * torch.randn(weights.shape, generator=generator, dtype=dtype))
    return erm(model, prior=False)


@cache
def smooth_example(dtype: torch.dtype = torch.float64, clients: int = 7) -> Example:
    """Return softmax regression on clients of unequal sizes."""
    data = sized_data([5 + 3 * k for k in range(clients)], features=4, classes=3)
    return softmax_problem(features=4, classes=3, dtype=dtype), data


@cache
def example_for(kind: type[Algorithm], dtype: torch.dtype = torch.float64, levels: int | None = None) -> Example:
    """Return a small smooth problem that an algorithm solves, and data; with a dual if it may have one.

    levels: the number of levels, if the algorithm solves several classes; by default the smallest.
    """
    problem, data = smooth_example(dtype)
    if kind.auxiliary:
        data = with_server_samples(data)
    if kind.solves(problem):
        return problem, data
    if kind.mixture:
        return mixture_of(problem, data.clients), data
    count = kind.levels.start if levels is None else levels
    mean = kind.inner_mean if count else "local"
    for dual in (True, False):
        if kind.solves(layered(count, dual, mean, dtype)):
            return layered(count, dual, mean, dtype), data
    raise AssertionError(
        f"{kind.__name__} solves no problem with {count} levels: levels, dual, inner_mean and mixture say which "
        "problems it solves."
    )


def with_server_samples(data: FederatedData, per_class: int = 3) -> FederatedData:
    """Return the same clients with random samples of each class on the server."""
    inputs = data.train.arrays[0]
    targets = np.arange(per_class * data.classes) % data.classes
    shape = len(targets), *inputs.shape[1:]
    return data.with_auxiliary(np.random.default_rng(1).normal(size=shape), targets)


@cache
def layered(levels: int, dual: bool, inner_mean: str, dtype: torch.dtype) -> Problem:
    """Return a small smooth problem with levels, or a dual, or both."""
    problem, _ = smooth_example(dtype)
    mix = torch.linspace(0.5, 1.5, len(problem.x0), dtype=dtype)

    def level(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return u * mix + 0.1 * torch.tanh(u) * batch[0].mean()

    def outer(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return problem.outer(u, batch)

    def saddle(u: torch.Tensor, y: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return problem.outer(u, batch) + y @ (u[:2] - batch[0].mean()) - 0.5 * y @ y

    return Problem(
        saddle if dual else outer,
        problem.x0,
        levels=(level,) * levels,
        y0=torch.tensor([0.3, -0.2], dtype=dtype) if dual else None,
        inner_mean="global" if inner_mean == "global" else "local",
        name="layered",
    )


def mixture_of(problem: Problem, clients: int) -> Problem:
    """Return the agnostic problem on the loss of ``problem``."""
    assert problem.flat is not None
    return agnostic(problem.flat.module, clients, prior=False)


def sized_example(kind: type[Algorithm], dtype: torch.dtype = torch.float64, levels: int | None = None) -> Example:
    """Return an example in which x, y, the classes and the value of each level have different sizes."""
    problem, data = example_for(kind, dtype, levels)
    if not problem.levels:
        return problem, data

    def outer(u: torch.Tensor, *rest: Any) -> torch.Tensor:
        *y, batch = rest
        value: torch.Tensor = (u**2).sum() * batch[0].mean() + sum(v @ u[: len(v)] - 0.5 * v @ v for v in y)
        return value

    def level(size: int) -> Any:
        return lambda u, batch: torch.tanh(torch.cat([u, u])[:size] + batch[0].mean())

    sizes = (4, 6, 7) if 3 in kind.levels else (4,)
    return replace(problem, outer=outer, levels=tuple(level(size) for size in sizes)), data


# --- rounds ----------------------------------------------------------------------------------------------------------


def shared_oracles(problem: Problem) -> Oracles:
    """Return the oracles of a problem, the same ones in every call, so that all runs share traced graphs."""
    shared: Oracles = vars(problem).setdefault("_oracles", Oracles(problem))  # they live as long as the problem
    return shared


def simulated_clients(problem: Problem, data: FederatedData, rounds: int, **settings: Any) -> Clients:
    """Return simulated clients; ``settings`` are those of a run. Graphs are shared by all clients of a problem."""
    clients = make_clients(problem, data, Settings(rounds=max(1, rounds), **{"chunk": 100, **settings}))
    clients.engine.side = replace(clients.engine.side, oracles=shared_oracles(problem))
    return clients


def started(algorithm: Algorithm, clients: Clients) -> Any:
    """Return the algorithm's state before the first round, as in training."""
    prepare(clients)
    return start(algorithm, clients)


@torch.no_grad()
def run_rounds(algorithm: Algorithm, clients: Clients, rounds: int) -> tuple[Any, Usage]:
    """Run rounds without evaluation or checkpoints; return the state, and what was used before the first round."""
    state = started(algorithm, clients)
    before = replace(clients.usage)
    for number in range(rounds):
        state = one_round(algorithm, state, clients, number)
        clients.faults.clear()
    return state, before


def play(
    algorithm: Algorithm, problem: Problem, data: FederatedData, rounds: int, **settings: Any
) -> tuple[Any, Usage]:
    """Run rounds without evaluation or checkpoints; return the state, and what was used in total."""
    clients = simulated_clients(problem, data, rounds, **settings)
    return run_rounds(algorithm, clients, rounds)[0], clients.usage
