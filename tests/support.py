"""What several tests share: clients without a training loop, small problems, and run histories without the clock."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

import fedstrata as fs
from fedstrata.algorithms import Algorithm
from fedstrata.clients import Clients, Simulated, Usage
from fedstrata.clients.client import Client
from fedstrata.clients.queries import learn
from fedstrata.clients.setting import Setting
from fedstrata.clients.state import ClientState
from fedstrata.core.schedules import Clock
from fedstrata.data.sampling import SAMPLINGS
from fedstrata.problems.oracles import Oracles


def make_setting(
    problem: fs.Problem,
    data: fs.FederatedData,
    *,
    batch_size: int | None = None,
    sampling: str = "uniform",
    seed: int = 0,
    memory_limit: int = 1 << 30,
    oracles: Oracles | None = None,
) -> Setting:
    """Build what every client shares. Pass ``oracles`` to use the graphs that another setting traced."""
    data = data.to(torch.device("cpu"), problem.x0.dtype)
    return Setting(
        oracles=Oracles(problem) if oracles is None else oracles,
        data=data,
        sampling=SAMPLINGS[sampling],
        batch_size=batch_size,
        seed=seed,
        state=ClientState(data.clients, memory_limit),
    )


def make_clients(
    setting: Setting,
    *,
    rounds: int = 10,
    participation: int | float = 1.0,
    weighting: str = "uniform",
    chunk: int = 100,
) -> Clients:
    """Build simulated clients that stand at the start of round 0."""
    clients = Clients(Simulated(setting, chunk), rounds, participation, weighting)  # type: ignore[arg-type]
    clients.begin(0)
    return clients


def make_client(setting: Setting, ids: list[int], round: int = 0, exchange: int = 0) -> Client:
    """Build the client side of one exchange."""
    return Client(setting, np.array(ids), Clock(round, 10), exchange)


def sized_data(sizes: list[int], features: int = 3, classes: int = 2, seed: int = 0) -> fs.FederatedData:
    """Build classification data (float64) whose clients have these numbers of samples; every class occurs."""
    generator = np.random.default_rng(seed)
    pairs = []
    for k, size in enumerate(sizes):
        inputs = generator.normal(size=(size, features)) + 0.5 * generator.normal(size=features)
        pairs.append((inputs, (np.arange(size) + k) % classes))
    return fs.FederatedData.from_arrays(pairs, classes=classes, name="sized")


def softmax_problem(
    features: int = 3, classes: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0
) -> fs.Problem:
    """Build softmax regression from a random starting point."""
    model = nn.Linear(features, classes).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            weights.copy_(0.3 * torch.randn(weights.shape, generator=generator, dtype=dtype))
    return fs.erm(model)


@cache
def smooth_example(dtype: torch.dtype = torch.float64, clients: int = 7) -> tuple[fs.Problem, fs.FederatedData]:
    """Build a small smooth problem with clients of unequal sizes."""
    return softmax_problem(features=4, classes=3, dtype=dtype), sized_data(
        [5 + 3 * k for k in range(clients)], features=4, classes=3
    )


@cache
def example_for(
    kind: type[Algorithm], dtype: torch.dtype = torch.float64, levels: int | None = None
) -> tuple[fs.Problem, fs.FederatedData]:
    """Build a small smooth problem that an algorithm solves; ``levels`` chooses where it solves several classes."""
    problem, data = smooth_example(dtype)
    if kind is fs.LocalSGDMRL:
        return problem, with_server_samples(data)
    if kind.solves(problem):
        return problem, data
    if kind.mixture:
        return mixture_of(problem, data.clients), data
    count = kind.levels.start if levels is None else levels
    mean = kind.inner_mean if count else "local"
    # Where there may be a dual there is one.
    fitting = [p for p in (layered(count, dual, mean, dtype) for dual in (True, False)) if kind.solves(p)]
    return fitting[0], data


def with_server_samples(data: fs.FederatedData, per_class: int = 3) -> fs.FederatedData:
    """Return the same clients with random samples of each class on the server."""
    inputs = data.train.arrays[0]
    targets = np.arange(per_class * data.classes) % data.classes
    shape = len(targets), *inputs.shape[1:]
    return data.with_auxiliary(np.random.default_rng(1).normal(size=shape), targets)


@cache
def layered(levels: int, dual: bool, inner_mean: str, dtype: torch.dtype) -> fs.Problem:
    """Build a small smooth problem of a class: one for all algorithms of it, which share its traced graphs."""
    problem, _ = smooth_example(dtype)
    mix = torch.linspace(0.5, 1.5, len(problem.x0), dtype=dtype)

    def level(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return u * mix + 0.1 * torch.tanh(u) * batch[0].mean()

    def outer(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return problem.outer(u, batch)

    def saddle(u: torch.Tensor, y: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return problem.outer(u, batch) + y @ (u[:2] - batch[0].mean()) - 0.5 * y @ y

    return fs.Problem(
        saddle if dual else outer,
        problem.x0,
        levels=(level,) * levels,
        y0=torch.tensor([0.3, -0.2], dtype=dtype) if dual else None,
        inner_mean="global" if inner_mean == "global" else "local",
        name="layered",
    )


def mixture_of(problem: fs.Problem, clients: int) -> fs.Problem:
    """Build the agnostic problem on the loss of ``problem``."""
    assert problem.flat is not None
    return fs.agnostic(problem.flat.module, clients)


_SHARED: dict[int, Oracles] = {}


def shared_oracles(problem: fs.Problem) -> Oracles:
    """Return the oracles of a problem, the same ones every time: graphs traced for one run are used by all."""
    return _SHARED.setdefault(id(problem), Oracles(problem))


def play(
    algorithm: Algorithm,
    problem: fs.Problem,
    data: fs.FederatedData,
    rounds: int,
    *,
    participation: int | float = 1.0,
    weighting: str = "uniform",
    chunk: int = 100,
    **options: Any,
) -> tuple[Any, Usage]:
    """Run rounds without a training loop around them; graphs traced for a problem are used by all its runs."""
    setting = make_setting(problem, data, oracles=shared_oracles(problem), **options)
    clients = make_clients(setting, rounds=rounds, participation=participation, weighting=weighting, chunk=chunk)
    with torch.no_grad():
        state = started(algorithm, clients)
        for r in range(rounds):
            clients.begin(r)
            state = algorithm.round(state, clients)
    return state, clients.usage


def started(algorithm: Algorithm, clients: Clients) -> Any:
    """Let problem and algorithm prepare themselves, as training does before the first round."""
    clients.begin(-1)
    query = clients.problem.query
    if query is not None:
        clients.engine.adopt(query.inform(clients.problem, learn(query, clients)))
    x, y = clients.problem.x0.clone(), clients.problem.y0
    return algorithm.start(x, x[:0] if y is None else y.clone(), clients)


def drawn(
    data: fs.FederatedData,
    client: int,
    names: tuple[int, int, int, int, int],
    step: int,
    *,
    batch_size: int | None,
    sampling: str = "uniform",
) -> tuple[np.ndarray, ...]:
    """Return the arrays that one client draws in NumPy; ``names`` are seed, round, exchange, level and stream."""
    seed, round, exchange, level, stream = names
    part = data.part(level)
    arrays = tuple(a.numpy() for a in part.of_client(client))
    if batch_size is None:
        return arrays
    key = (seed, "batch", round, exchange, level, stream)
    kind = SAMPLINGS[sampling]
    counts = part.class_counts[[client]] if kind.weighted else None
    sampler = kind(key, np.array([client]), part.sizes[[client]], batch_size, counts)
    rows = sampler.positions(step, 1)[0][0]
    return tuple(a[rows] for a in arrays)


def without_seconds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of a history without what depends on the clock."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def run_scaffold(out: str, rounds: int) -> fs.Run:
    """Train a small run with client state in ``out``, going on with what is there: for processes that get killed."""
    torch.set_num_threads(1)
    problem, data = smooth_example()
    return fs.train(
        problem,
        data,
        fs.Scaffold(lr=0.2, steps=3),
        rounds=rounds,
        batch_size=4,
        participation=3,
        chunk=2,
        eval_every=1,
        out=out,
        resume=True,
    )
