"""What several tests share: clients without a training loop, small problems, and run histories without the clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import fedstrata as fs
from fedstrata.clients import Clients, Simulated
from fedstrata.clients.client import Client
from fedstrata.clients.client_side import ClientSide
from fedstrata.clients.state import ClientState
from fedstrata.core.clock import Clock
from fedstrata.data.sampling import SAMPLINGS
from fedstrata.problems.oracles import Oracles
from fedstrata.training.examples import example_for as example_for
from fedstrata.training.examples import mixture_of as mixture_of
from fedstrata.training.examples import play as play
from fedstrata.training.examples import shared_oracles as shared_oracles
from fedstrata.training.examples import sized_data as sized_data
from fedstrata.training.examples import smooth_example as smooth_example
from fedstrata.training.examples import softmax_problem as softmax_problem
from fedstrata.training.examples import started as started
from fedstrata.training.examples import with_server_samples as with_server_samples
from fedstrata.training.metrics.catalogue import TIMES


def make_setting(
    problem: fs.Problem,
    data: fs.FederatedData,
    *,
    batch_size: int | None = None,
    sampling: str = "uniform",
    seed: int = 0,
    memory_limit: int = 1 << 30,
    oracles: Oracles | None = None,
) -> ClientSide:
    """Build what every client shares. Pass ``oracles`` to use the graphs that another setting traced."""
    data = data.to(torch.device("cpu"), problem.x0.dtype)
    return ClientSide(
        oracles=Oracles(problem) if oracles is None else oracles,
        data=data,
        sampling=SAMPLINGS[sampling],
        batch_size=batch_size,
        seed=seed,
        state=ClientState(data.clients, memory_limit),
    )


def make_clients(
    setting: ClientSide,
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


def make_client(setting: ClientSide, ids: list[int], round: int = 0, exchange: int = 0) -> Client:
    """Build the client side of one exchange."""
    return Client(setting, np.array(ids), Clock(round, 10), exchange)


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
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def run_scaffold(out: str, rounds: int) -> fs.Run:
    """Train a small run with client state in ``out``, or resume it: for processes that get killed."""
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
