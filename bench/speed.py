"""Speed against a bare PyTorch FedAvg loop, on the same work, in one run, with the same threads.

    python bench/speed.py [--threads 1] [--repeats 20]

Prints how many times faster fedstrata is (higher is better). The two take turns, and the shortest time of each counts:
other work on the machine only ever adds to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

import fedstrata as fs
from fedstrata.core.machine import keep_memory
from fedstrata.training.settings import Settings
from fedstrata.training.train import make_clients


def bare_fedavg(
    model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, owned: list, rounds: int, steps: int
) -> torch.Tensor:
    """FedAvg as one writes it by hand: a model, an optimiser, a loop over clients."""
    loss = torch.nn.CrossEntropyLoss()
    server = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(rounds):
        total = {k: torch.zeros_like(v) for k, v in server.items()}
        for rows in owned:
            model.load_state_dict(server)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(steps):
                batch = rows[torch.randint(0, len(rows), (32,))]
                optimiser.zero_grad()
                loss(model(inputs[batch]), targets[batch]).backward()
                optimiser.step()
            for k, v in model.state_dict().items():
                total[k] += v / len(owned)
        server = total
    return torch.cat([v.reshape(-1) for v in server.values()])


def rounds_of(problem: fs.Problem, data: fs.FederatedData, algorithm: fs.Algorithm, **options: object) -> Callable:
    """Return a function that runs so many rounds, nothing else: no evaluation, no checkpoint."""
    clients = make_clients(problem, data, Settings(rounds=1000, **options))
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


def timed(work: Callable[[], object]) -> float:
    """Return the seconds one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def best_of_each(repeats: int, *works: Callable[[], object]) -> list[float]:
    """Return the shortest time of each work, the works taking turns."""
    times = [[timed(work) for work in works] for _ in range(repeats)]
    return [min(column) for column in zip(*times, strict=True)]


def versus_bare(name: str, clients: int, rounds: int, repeats: int) -> float:
    """Return how many times faster fedstrata's FedAvg is than the bare loop."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60 * clients, 1, 28, 28, generator=generator)
    targets = torch.randint(0, 10, (60 * clients,), generator=generator)
    owned = list(torch.arange(60 * clients).split(60))
    data = fs.FederatedData.from_arrays([(inputs[o], targets[o]) for o in owned], name="random")
    model = fs.models.model(name, (1, 28, 28), 10)
    ours = rounds_of(fs.erm(model), data, fs.FedAvg(lr=0.01, steps=10), batch_size=32)
    ours(1)
    bare_fedavg(model, inputs, targets, owned[:2], 1, 10)
    mine, bare = best_of_each(
        repeats, lambda: ours(rounds), lambda: bare_fedavg(model, inputs, targets, owned, rounds, 10)
    )
    per_step = 1e3 / (rounds * clients * 10)
    times = f"bare {bare * per_step:.3f} ms, fedstrata {mine * per_step:.3f} ms a client-step"
    print(f"{name:8} {clients} clients: {times}, {bare / mine:.2f} times as fast")
    return bare / mine


def overhead(clients: int, repeats: int) -> float:
    """Return the microseconds a round costs per client when the work itself is next to nothing."""
    pairs = [(torch.ones(1, 1), torch.zeros(1, 1)) for _ in range(clients)]
    data = fs.FederatedData.from_arrays(pairs, name="trivial")
    problem = fs.Problem(lambda x, batch: (batch[0] * x).sum(), torch.zeros(1), name="trivial")
    run = rounds_of(problem, data, fs.FedAvg(lr=0.01, steps=1), batch_size=1)
    run(3)
    (best,) = best_of_each(repeats, lambda: run(20))
    micro = best / 20 / clients * 1e6
    print(f"overhead {clients} clients, one trivial step: {micro:.2f} microseconds per client and round")
    return micro


def main() -> None:
    """Run all, print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_memory()  # as a run does; the bare loop profits too
    print(f"torch {torch.__version__}, numpy {np.__version__}, {arguments.threads} thread(s)")
    versus_bare("logreg", 100, 1, arguments.repeats)
    versus_bare("lenet5", 10, 1, arguments.repeats)
    overhead(1000, arguments.repeats)


if __name__ == "__main__":
    main()
