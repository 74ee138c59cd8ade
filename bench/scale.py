"""How cost grows: with the clients of a run, and of a round with clients, steps, weights and levels.

    python bench/scale.py [--threads 1] [--clients 1000000]

Prints start-up, memory and time per round of runs in which 50 of many clients take part, and what a checkpoint costs
when 50 of them have changed their state. Then the exponents of the cost of a round, fitted over a factor of 100: 1 is
proportional.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

import fedstrata as fs
from common import best_of_each, parser, rounds_of, start
from fedstrata.clients.state import ClientState
from fedstrata.training.checkpoint import Checkpoint, Checkpoints


def many_clients(clients: int) -> fs.FederatedData:
    """Return clients with four samples of eight numbers each."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(clients, 4, 8, generator=generator)
    targets = torch.randint(0, 3, (clients, 4), generator=generator)
    return fs.FederatedData.from_arrays(list(zip(inputs, targets, strict=True)), name="many", classes=3)


def population(clients: int) -> None:
    """Print what a run of SCAFFOLD costs in which 50 of ``clients`` clients take part."""
    begun = time.perf_counter()
    data = many_clients(clients)
    loaded = time.perf_counter() - begun
    model = fs.models.model("logreg", (8,), 3)
    run = rounds_of(fs.erm(model), data, fs.Scaffold(lr=0.1, steps=3), batch_size=2, participation=50)
    run(20)
    (best,) = best_of_each(5, lambda: run(20))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{clients:9,} clients: data in {loaded:5.2f} s, {best * 50:6.2f} ms per round, peak memory {memory:.2f} GiB")


def checkpoints(clients: int, before: int = 1000, rounds: int = 100) -> None:
    """Print what a checkpoint costs after 50 of ``clients`` clients have changed their state, 27 numbers each."""
    numbers, state, x = np.random.default_rng(0), ClientState(clients, 4 << 30), torch.zeros(27)
    state.keep(np.arange(clients), {"c": torch.randn(clients, 27)})
    with tempfile.TemporaryDirectory() as folder:
        saved = Checkpoints(Path(folder))

        def save(round: int) -> tuple[float, int]:
            begun, written = time.perf_counter(), _written()
            whole = saved.wants_all(state.count())
            saved.save(Checkpoint(round, {"x": x}, {}, 0.0, state.take_all() if whole else state.take_changes()), whole)
            return time.perf_counter() - begun, _written() - written

        costs = [save(0)]
        for round in range(1, before + rounds):
            cohort = np.sort(numbers.choice(clients, 50, replace=False))
            state.keep(cohort, {"c": torch.randn(50, 27)})
            costs.append(save(round))
    (first, all_bytes), *others = costs
    shown = f"{clients:9,} clients: checkpoint of all in {first:.2f} s, {all_bytes / 2**20:6.2f} MiB; of 50 changed"
    for name, some in (("at first", others[:rounds]), (f"after {before:,}", others[-rounds:])):
        seconds, written = np.mean(some, axis=0)
        shown += f" {1e3 * seconds:5.2f} ms, {written / 2**10:5.1f} KiB {name};"
    print(shown.rstrip(";"))


def _written() -> int:
    """Return how many bytes this process has written."""
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


def exponent(name: str, sizes: Sequence[int], cost: Callable[[int], Callable[[int], None]]) -> None:
    """Print the exponent of the time of a round in some size."""
    times = []
    for size in sizes:
        run = cost(size)
        run(2)
        times.append(best_of_each(5, lambda run=run: run(2), clock=time.process_time)[0])
    slope = np.polyfit(np.log(sizes), np.log(times), 1)[0]
    last = np.log(times[-1] / times[-2]) / np.log(sizes[-1] / sizes[-2])
    shown = ", ".join(f"{size:,}: {1e3 * t / 2:.2f} ms" for size, t in zip(sizes, times, strict=True))
    factor = sizes[-1] // sizes[0]
    print(f"cost in {name}: exponent {slope:.2f} over a factor of {factor}, {last:.2f} at the end ({shown})")


def of_clients(clients: int) -> Callable[[int], None]:
    """Return rounds in which this many clients take three steps."""
    model = fs.models.model("logreg", (8,), 3)
    return rounds_of(fs.erm(model), many_clients(clients), fs.FedAvg(lr=0.1, steps=3), batch_size=2)


def of_steps(steps: int) -> Callable[[int], None]:
    """Return rounds of ten clients with this many steps."""
    model = fs.models.model("logreg", (8,), 3)
    return rounds_of(fs.erm(model), many_clients(10), fs.FedAvg(lr=0.01, steps=steps), batch_size=2)


def of_weights(width: int) -> Callable[[int], None]:
    """Return rounds of ten clients whose model has ten times ``width`` weights."""
    data = fs.FederatedData.from_arrays([(torch.randn(8, width), torch.randint(0, 10, (8,))) for _ in range(10)])
    model = torch.nn.Linear(width, 10, bias=False)
    return rounds_of(fs.erm(model), data, fs.FedAvg(lr=0.01, steps=3), batch_size=4)


def of_levels(levels: int) -> Callable[[int], None]:
    """Return rounds of LocalSMCGDAM on a tower of this many levels."""
    example = fs.tower(clients=4, levels=levels, dimension=50)
    return rounds_of(example.problem, example.data, fs.LocalSMCGDAM(steps=2), batch_size=4)


def main() -> None:
    """Run and print every measurement."""
    options = parser(__doc__)
    options.add_argument("--clients", type=int, default=1_000_000, help="largest number of clients")
    arguments = start(options)
    sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000) if size <= arguments.clients]
    for size in sizes:
        population(size)
    for size in sizes:
        checkpoints(size)
    exponent("clients", (100, 1_000, 10_000), of_clients)
    exponent("steps", (10, 100, 1_000), of_steps)
    exponent("weights", (1_000, 10_000, 100_000), of_weights)
    exponent("levels", (1, 10, 100), of_levels)


if __name__ == "__main__":
    main()
