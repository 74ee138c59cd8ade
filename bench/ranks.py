"""Rounds of FedAvg shared out over two processes, against one process, with one thread and with two.

    python bench/ranks.py [--clients 100] [--rounds 1] [--repeats 5]

LeNet-5, batch 32, 10 steps. Starts the processes itself, and keeps them: the ranks of a setting wait for their turn.
Prints seconds per round and how many times as fast two ranks are (higher is better). The settings take turns, and the
shortest time of each counts: other work on the machine only ever adds to it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

import fedstrata as fs
from fedstrata.clients.ranks import ranks_here
from fedstrata.core.machine import keep_memory
from fedstrata.training.settings import Settings
from fedstrata.training.train import make_clients
from speed import timed

SETTINGS = {"two ranks of one thread": (2, 1), "one rank of one thread": (1, 1), "one rank of two threads": (1, 2)}


def rounds_of(clients: int) -> Callable[[int], None]:
    """Return a function that runs so many rounds with the ranks there are, nothing else."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60 * clients, 1, 28, 28, generator=generator)
    targets = torch.randint(0, 10, (60 * clients,), generator=generator)
    owned = torch.arange(60 * clients).split(60)
    data = fs.FederatedData.from_arrays([(inputs[o], targets[o]) for o in owned], name="random")
    problem, algorithm = fs.erm(fs.models.model("lenet5", (1, 28, 28), 10)), fs.FedAvg(lr=0.01, steps=10)
    engine = make_clients(problem, data, Settings(rounds=1000, batch_size=32), ranks=ranks_here())
    state, done = algorithm.start(problem.x0, problem.x0[:0], engine), 0

    @torch.no_grad()
    def run(rounds: int) -> None:
        nonlocal state, done
        for _ in range(rounds):
            engine.begin(done)
            state = algorithm.round(state, engine)
            done += 1

    return run


def serve(rank: int, size: int, threads: int, store: str, clients: int, pipe: Connection) -> None:
    """Be one rank of a setting: run rounds whenever told how many, and tell how long they took."""
    torch.set_num_threads(threads)
    keep_memory()
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(hours=1)
        )
    run = rounds_of(clients)
    run(1)
    pipe.send(0.0)
    while rounds := pipe.recv():
        pipe.send(timed(lambda: run(rounds)))
    if size > 1:
        dist.destroy_process_group()


def compare(clients: int, rounds: int, repeats: int) -> dict[str, float]:
    """Return the shortest seconds per round of each setting, the settings taking turns."""
    context = multiprocessing.get_context("spawn")
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[str, list[Connection]] = {}
        processes = []
        for name, (size, threads) in SETTINGS.items():
            for rank in range(size):
                ours, theirs = context.Pipe()
                store = str(Path(folder) / name.replace(" ", "-"))
                process = context.Process(target=serve, args=(rank, size, threads, store, clients, theirs), daemon=True)
                process.start()
                processes.append(process)
                pipes.setdefault(name, []).append(ours)
            for pipe in pipes[name]:
                pipe.recv()  # the first round is over
        for _ in range(repeats):
            for name, ends in pipes.items():
                for pipe in ends:
                    pipe.send(rounds)
                best[name] = min(best.get(name, float("inf")), max(pipe.recv() for pipe in ends) / rounds)
        for pipe in (p for ends in pipes.values() for p in ends):
            pipe.send(0)
        for process in processes:
            process.join()
    return best


def main() -> None:
    """Run all, print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, lenet5, {arguments.clients} clients, batch 32, 10 steps a round")
    best = compare(arguments.clients, arguments.rounds, arguments.repeats)
    ours = best["two ranks of one thread"]
    for name, seconds in best.items():
        ratio = "" if name == "two ranks of one thread" else f", two ranks are {seconds / ours:.2f} times as fast"
        print(f"{name}: {seconds:.2f} s a round{ratio}")


if __name__ == "__main__":
    main()
