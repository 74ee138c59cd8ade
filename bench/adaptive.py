"""The cost of FedLALR's moments relative to a gradient, and where the time of a round with many clients goes.

    python bench/adaptive.py [--threads 1] [--repeats 12]

Prints the time of a local step of FedLALR relative to one of FedAvg (lower is better), and the share of a round with 50
of 100 clients that is spent inside the model's forward and backward passes (higher is better). It measures processor
time, because steps are long and other processes interrupt them; the two algorithms take turns, and the shortest time
counts.
"""

from __future__ import annotations

import time
from unittest.mock import patch

import torch

import fedstrata as fs
from common import best_of_each, parser, random_images, rounds_of, start, timed
from fedstrata.problems.oracles import Oracles

STEPS = 10


def versus_fedavg(name: str, shape: tuple[int, int, int], repeats: int) -> float:
    """Return the time of a round of FedLALR relative to one of FedAvg: two clients, ten steps each."""
    problem, data = fs.erm(fs.models.model(name, shape, 10)), random_images(2, 100, shape)
    algorithms = fs.FedAvg(lr=1e-4, steps=STEPS), fs.FedLALR(lr=1e-4, steps=STEPS)
    plain, adaptive = (rounds_of(problem, data, a, batch_size=50) for a in algorithms)
    plain(1), adaptive(1)
    best = best_of_each(repeats, lambda: plain(1), lambda: adaptive(1), clock=time.process_time)
    fedavg, fedlalr = (seconds / (2 * STEPS) * 1e3 for seconds in best)
    times = f"FedAvg {fedavg:.2f} ms, FedLALR {fedlalr:.2f} ms per step"
    print(f"{name:10} d = {len(problem.x0)}, batch 50: {times}, {fedlalr / fedavg:.3f} times as long")
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
            whole = timed(lambda: run(1), time.process_time)
            rounds.append((inside / whole, whole))
    share, whole = sorted(rounds)[repeats // 2]
    inside_model = f"{100 * share:.1f} % of it inside the model (median of {repeats})"
    print(f"{name:10} d = {len(problem.x0)}, batch {batch}: a round takes {whole:.2f} s, {inside_model}")
    return share


def main() -> None:
    """Run and print every comparison."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=12)
    arguments = start(options)
    versus_fedavg("lenet5", (1, 28, 28), arguments.repeats)
    versus_fedavg("cnn4", (3, 32, 32), arguments.repeats)
    narrow = {"width": 32, "depth": 4, "patch": 4}
    for name, batch, options in (("cnn4", 50, {}), ("convmixer", 50, narrow), ("convmixer", 10, narrow)):
        share_inside(name, batch, max(3, arguments.repeats // 4), **options)


if __name__ == "__main__":
    main()
