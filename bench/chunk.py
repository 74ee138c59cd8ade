"""Calibrate ``chunk="auto"``: time a client-step for several chunk sizes and models, next to the choice of the rule.

    python bench/chunk.py [--threads 1]

Convolutional models should be fastest at 1, dense models within ten percent of their best at the rule's choice.
"""

from __future__ import annotations

from functools import partial

import torch

import fedstrata as fs
from common import best_of_each, parser, random_images, rounds_of
from fedstrata.clients.chunk import choose_chunk

CASES = (
    ("logreg", {}, (1, 28, 28), 32),
    ("logreg", {}, (123,), 32),
    ("mlp", {"hidden": [64]}, (1, 8, 8), 16),
    ("mlp", {"hidden": [200, 200]}, (1, 28, 28), 32),
    ("lenet5", {}, (1, 28, 28), 32),
    ("cnn4", {}, (3, 32, 32), 32),
)
CHUNKS = (1, 5, 10, 20, 50, 100, 200)
CLIENTS = 200


def main() -> None:
    """Print a table: for each model the milliseconds per client-step at each chunk."""
    torch.set_num_threads(parser(__doc__).parse_args().threads)
    print(f"{'model':28}{'d':>8}{'rule':>6} | " + "".join(f"{c:>8}" for c in CHUNKS) + "   ms per client-step, chunk C")
    for name, options, shape, batch_size in CASES:
        problem = fs.erm(fs.models.model(name, shape, 10, **options))
        conv = problem.flat.layers() == "convolutional"
        clients, steps = (10, 2) if conv else (CLIENTS, 5)
        data = random_images(clients, shape=shape)
        rule = choose_chunk("auto", problem, data, batch_size, torch.device("cpu"))
        cells = []
        for chunk in (c for c in CHUNKS if c <= clients):
            run = rounds_of(problem, data, fs.FedAvg(lr=0.01, steps=steps), batch_size=batch_size, chunk=chunk)
            run(1)
            (best,) = best_of_each(5, partial(run, 1))
            cells.append(f"{best / (clients * steps) * 1e3:8.3f}")
        label = f"{name} {'x'.join(map(str, shape))} batch {batch_size}"
        print(f"{label:28}{problem.flat.size:>8}{min(rule, clients):>6} | " + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
