"""What FedLALR's moments cost beside a gradient, and where the time of a round with many clients goes.

    python bench/adaptive.py [--threads 1] [--repeats 12]

Prints how many times as long as FedAvg's a local step of FedLALR takes (lower is better), and the share of a round of
50 out of 100 clients that is spent inside the model's forward and backward passes (higher is better). It goes by
processor time, because steps are long and others come in between; the two take turns, and the shortest time counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest.mock import patch

import torch

import fedstrata as fs
from fedstrata.core.machine import keep_memory
from fedstrata.problems.oracles import Oracles
from speed import rounds_of

STEPS = 10


def clocked(work: Callable[[], object]) -> float:
    """Return the processor seconds that one call takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def random_images(clients: int, rows: int, shape: tuple[int, int, int]) -> fs.FederatedData:
    """Return clients with random images."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(clients, rows, *shape, generator=generator)
    targets = torch.randint(0, 10, (clients, rows), generator=generator)
    return fs.FederatedData.from_arrays(list(zip(inputs, targets, strict=True)), name="random", classes=10)


def versus_fedavg(name: str, shape: tuple[int, int, int], repeats: int) -> float:
    """Return how many times as long as FedAvg's a round of FedLALR takes, two clients, ten steps each."""
    problem, data = fs.erm(fs.models.model(name, shape, 10)), random_images(2, 100, shape)
    algorithms = fs.FedAvg(lr=1e-4, steps=STEPS), fs.FedLALR(lr=1e-4, steps=STEPS)
    plain, adaptive = (rounds_of(problem, data, a, batch_size=50) for a in algorithms)
    plain(1), adaptive(1)
    times = [(clocked(lambda: plain(1)), clocked(lambda: adaptive(1))) for _ in range(repeats)]
    fedavg, fedlalr = (min(column) / (2 * STEPS) * 1e3 for column in zip(*times, strict=True))
    told = f"FedAvg {fedavg:.2f} ms, FedLALR {fedlalr:.2f} ms a step"
    print(f"{name:10} d = {len(problem.x0)}, batch 50: {told}, {fedlalr / fedavg:.3f} times as long")
    return fedlalr / fedavg


def share_inside(name: str, batch: int, repeats: int, **options: int) -> float:
    """Return the share of a round's time inside the model: FedLALR, 50 of 100 clients, five steps each."""
    shape = (3, 32, 32)
    problem, data = fs.erm(fs.models.model(name, shape, 10, **options)), random_images(100, 50, shape)
    run = rounds_of(problem, data, fs.FedLALR(lr=1e-4, steps=5), batch_size=batch, participation=50)
    run(1)
    inside = 0.0
    gradients = Oracles.outer_grads

    def counted(self: Oracles, *arguments: object) -> tuple[torch.Tensor, ...]:
        nonlocal inside
        start = time.process_time()
        out = gradients(self, *arguments)
        inside += time.process_time() - start
        return out

    rounds = []
    with patch.object(Oracles, "outer_grads", counted):
        for _ in range(repeats):
            inside = 0.0
            whole = clocked(lambda: run(1))
            rounds.append((inside / whole, whole))
    share, whole = sorted(rounds)[repeats // 2]
    told = f"{100 * share:.1f} % of it inside the model (median of {repeats})"
    print(f"{name:10} d = {len(problem.x0)}, batch {batch}: a round takes {whole:.2f} s, {told}")
    return share


def main() -> None:
    """Run all, print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_memory()  # as a run does
    print(f"torch {torch.__version__}, {arguments.threads} thread(s)")
    versus_fedavg("lenet5", (1, 28, 28), arguments.repeats)
    versus_fedavg("cnn4", (3, 32, 32), arguments.repeats)
    narrow = {"width": 32, "depth": 4, "patch": 4}
    for name, batch, options in (("cnn4", 50, {}), ("convmixer", 50, narrow), ("convmixer", 10, narrow)):
        share_inside(name, batch, max(3, arguments.repeats // 4), **options)


if __name__ == "__main__":
    main()
