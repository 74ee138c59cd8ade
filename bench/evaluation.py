"""The cost of an evaluation of 1,000 clients, against the training between two evaluations.

    python bench/evaluation.py [--threads 1] [--repeats 10] [--clients 1000]

Every client has 20 rows of the shape of the digits, or 10 to 30. Prints the processor time of an evaluation, and its
ratio to that of the five rounds that a run of 100 rounds trains between two evaluations, in which 50 clients take part
(lower is better): FedAvg and, on `maml`, ComFedL, with their own settings and batches of 10. With two classes, the AUC
of every client is measured as well. The two sides take turns, and the shortest time of each counts.
"""

from __future__ import annotations

import time

import numpy as np
import torch

import fedstrata as fs
from common import best_of_each, parser, rounds_of, start

ROUNDS = 5


def digits_like(clients: int, equal: bool, classes: int) -> fs.FederatedData:
    """Return clients with 20 images of 8 x 8 pixels on average."""
    numbers = np.random.default_rng(0)
    sizes = np.full(clients, 20) if equal else numbers.integers(10, 31, clients)
    inputs = torch.from_numpy(numbers.random((sizes.sum(), 1, 8, 8), np.float32))
    targets = torch.from_numpy(numbers.integers(0, classes, sizes.sum()))
    pairs = list(zip(inputs.split(sizes.tolist()), targets.split(sizes.tolist()), strict=True))
    return fs.FederatedData.from_arrays(pairs, name="like the digits", classes=classes)


def compare(name: str, adapted: bool, data: fs.FederatedData, sizes: str, repeats: int) -> float:
    """Print and return the cost of an evaluation relative to that of the rounds between two."""
    model = fs.models.model(name, (1, 8, 8), data.classes)
    problem = fs.maml(model, inner_lr=0.1) if adapted else fs.erm(model)
    algorithm = fs.ComFedL(lr=0.01) if adapted else fs.FedAvg(lr=0.01)
    rounds = rounds_of(problem, data, algorithm, batch_size=10, participation=min(50, data.clients))
    evaluation = fs.Evaluation()
    rounds(2)
    works = (lambda: rounds(ROUNDS), lambda: evaluation(problem, data, problem.x0, None))
    trained, measured = best_of_each(repeats, *works, clock=time.process_time)
    about = f"{'maml' if adapted else 'erm'}, {name}, {data.classes} classes, {data.clients:,} clients of {sizes} rows"
    times = f"evaluation {measured:.4f} s, {ROUNDS} rounds {trained:.4f} s"
    print(f"{about}: {times}, ratio {measured / trained:.2f} (target < 1)", flush=True)
    return measured / trained


def main() -> None:
    """Run and print every comparison."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=10)
    options.add_argument("--clients", type=int, default=1000)
    arguments = start(options)
    for equal, sizes in ((True, "20"), (False, "10 to 30")):
        for classes in (10, 2):
            data = digits_like(arguments.clients, equal, classes)
            for adapted in (False, True):
                for name in ("logreg", "mlp"):
                    compare(name, adapted, data, sizes, arguments.repeats)


if __name__ == "__main__":
    main()
