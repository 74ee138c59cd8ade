"""Shared code of the benchmarks: arguments, random data, bare rounds, and timing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

import fedstrata as fs
from fedstrata.clients.ranks import ALONE, ranks_here
from fedstrata.core.machine import keep_memory
from fedstrata.training.settings import Settings
from fedstrata.training.train import make_clients
from fedstrata.training.waiting import divides

Work = Callable[[], object]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option --threads; its help is the docstring of the benchmark."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--threads", type=int, default=1)
    return options


def start(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments, set up PyTorch as a run does, and print the versions."""
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_memory()
    print(f"torch {torch.__version__}, numpy {np.__version__}, {arguments.threads} thread(s)")
    return arguments


def random_images(clients: int, rows: int = 60, shape: tuple[int, ...] = (1, 28, 28)) -> fs.FederatedData:
    """Return clients with ``rows`` random images each, of ten classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(clients, rows, *shape, generator=generator)
    targets = torch.randint(0, 10, (clients, rows), generator=generator)
    return fs.FederatedData.from_arrays(list(zip(inputs, targets, strict=True)), name="random", classes=10)


def rounds_of(
    problem: fs.Problem, data: fs.FederatedData, algorithm: fs.Algorithm, **options: object
) -> Callable[[int], None]:
    """Return a function that runs a number of rounds, without evaluation or checkpoints."""
    settings = Settings(rounds=1000, **options)
    divided = divides(problem, data, algorithm, settings)
    if not divided and not ranks_here().first:
        return lambda rounds: None  # the first rank computes all clients
    clients = make_clients(problem, data, settings, ranks=ranks_here() if divided else ALONE)
    clients.begin(-1)
    y = problem.x0[:0] if problem.y0 is None else problem.y0
    state = algorithm.start(problem.x0, y, clients)
    done = 0

    @torch.no_grad()
    def run(rounds: int) -> None:
        nonlocal state, done
        for _ in range(rounds):
            clients.begin(done)
            state = algorithm.round(state, clients)
            done += 1

    return run


def timed(work: Work, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that one call takes."""
    begun = clock()
    work()
    return clock() - begun


def best_of_each(repeats: int, *works: Work, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Return the shortest time of each work; the works take turns."""
    times = [[timed(work, clock) for work in works] for _ in range(repeats)]
    return [min(column) for column in zip(*times, strict=True)]
