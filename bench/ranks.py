"""Rounds of FedAvg divided between two processes, against one process with one thread and with two.

    python bench/ranks.py [--jobs lenet5 logreg logreg30 ...] [--repeats 5] [--divide always]

The jobs are LeNet-5 with 100 clients, batch 32 and 10 steps, and smaller ones: logistic regression with 10, 30 or 100
clients, batch 10 and 6 steps. With --divide always, the ranks divide small jobs too. All processes start at once, and
the ranks of a setting wait for their turn. Prints milliseconds per round and how many times as fast two ranks are
(higher is better). The settings take turns, and the shortest time of each counts, since other work on the machine can
only add to it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import fedstrata as fs
from common import random_images, rounds_of, timed
from fedstrata.core.machine import keep_memory


class Job(NamedTuple):
    """A model, how many clients train it, and how long a turn is."""

    model: str
    clients: int
    batch: int
    steps: int
    rounds: int


JOBS = {
    "lenet5": Job("lenet5", 100, 32, 10, 1),
    "logreg": Job("logreg", 10, 10, 6, 200),
    "logreg30": Job("logreg", 30, 10, 6, 100),
    "logreg100": Job("logreg", 100, 10, 6, 50),
}
SETTINGS = {"two ranks of one thread": (2, 1), "one rank of one thread": (1, 1), "one rank of two threads": (1, 2)}


def serve(rank: int, size: int, threads: int, store: str, job: Job, divide: str, pipe: Connection) -> None:
    """Run one rank of a setting: receive a number of rounds, run them, and send the seconds they took."""
    torch.set_num_threads(threads)
    keep_memory()
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(hours=1)
        )
    problem = fs.erm(fs.models.model(job.model, (1, 28, 28), 10))
    algorithm = fs.FedAvg(lr=0.01, steps=job.steps)
    run = rounds_of(problem, random_images(job.clients), algorithm, batch_size=job.batch, divide=divide)
    run(1)
    pipe.send(0.0)
    while rounds := pipe.recv():
        pipe.send(timed(lambda: run(rounds)))
    if size > 1:
        dist.destroy_process_group()


def compare(job: Job, repeats: int, divide: str) -> dict[str, float]:
    """Return the shortest time per round of each setting, in seconds; the settings take turns."""
    context = multiprocessing.get_context("spawn")
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[str, list[Connection]] = {}
        processes = []
        for name, (size, threads) in SETTINGS.items():
            for rank in range(size):
                ours, theirs = context.Pipe()
                store = str(Path(folder) / name.replace(" ", "-"))
                process = context.Process(
                    target=serve, args=(rank, size, threads, store, job, divide, theirs), daemon=True
                )
                process.start()
                processes.append(process)
                pipes.setdefault(name, []).append(ours)
            for pipe in pipes[name]:
                pipe.recv()  # the first round is over
        for _ in range(repeats):
            for name, ends in pipes.items():
                for pipe in ends:
                    pipe.send(job.rounds)
                best[name] = min(best.get(name, float("inf")), max(pipe.recv() for pipe in ends) / job.rounds)
        for pipe in (p for ends in pipes.values() for p in ends):
            pipe.send(0)
        for process in processes:
            process.join()
    return best


def main() -> None:
    """Run and print every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=["lenet5", "logreg"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--divide", choices=("auto", "always", "never"), default="auto")
    arguments = parser.parse_args()
    for job in map(JOBS.__getitem__, arguments.jobs):
        print(f"torch {torch.__version__}, {job.model}, {job.clients} clients, batch {job.batch}, {job.steps} steps")
        best = compare(job, arguments.repeats, arguments.divide)
        ours = best["two ranks of one thread"]
        for name, seconds in best.items():
            ratio = "" if name == "two ranks of one thread" else f", two ranks are {seconds / ours:.2f} times as fast"
            print(f"{name}: {1e3 * seconds:.3g} ms per round{ratio}")


if __name__ == "__main__":
    main()
