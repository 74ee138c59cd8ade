"""Memory: 10,000 clients with SCAFFOLD's state on the logistic model, 100 sampled a round, within 2 GiB.

    python bench/memory.py [--rounds 300] [--state-memory BYTES]

Prints the peak resident memory of the whole process, Python, PyTorch and checkpoints (every ten rounds) included. A
small --state-memory puts the clients' state into a memory-mapped file.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time

import torch

import fedstrata as fs


def main() -> None:
    """Train, and print the peak memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--state-memory", type=int, default=4 << 30)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    rows = torch.arange(6 * arguments.clients)
    part = fs.data.Part.of(
        (torch.randn(len(rows), 784), torch.randint(0, 10, (len(rows),))), [r.numpy() for r in rows.split(6)]
    )
    data = fs.FederatedData(part, classes=10, name="random")
    problem = fs.erm(fs.models.model("logreg", (784,), 10))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        fs.train(
            problem,
            data,
            fs.Scaffold(lr=0.01, steps=10),
            rounds=arguments.rounds,
            batch_size=6,
            participation=100,
            threads=arguments.threads,
            evaluate=fs.Evaluation("none"),
            eval_every=arguments.rounds,
            out=f"{folder}/run",
            checkpoint_every=10,
            state_memory=arguments.state_memory,
        )
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(f"{arguments.clients} clients, {arguments.rounds} rounds of 100: {seconds:.1f} s, peak memory {peak:.2f} GiB")


if __name__ == "__main__":
    main()
