"""Three rounds of every algorithm and variant, with a record of the exchanges."""

from __future__ import annotations

from functools import cache

import torch

import fedstrata as fs
from clients.distributed_worker import VARIANTS, Case
from clients.squares import Recording, engine
from fedstrata.algorithms import ALGORITHMS
from fedstrata.clients import Answer
from fedstrata.clients.engine import Request
from fedstrata.training.states import tensors_of
from support import started

MORE = [
    Case("fednest", {}, "composition"),
    Case("comfedl", {}, "robust"),
    Case("mfcgd", {}, "robust"),
    Case("coda", {"stage_steps": 4, "average": False}, "auc, prepared, scaled", clients=5),
    Case("codasca", {"stage_rounds": 2}, "auc, prepared, scaled", clients=5),
]
"""Problems on which algorithms make more exchanges."""
CASES = {c.id: c for c in [*(Case(n, o) for n, o in VARIANTS), *MORE]}
SINGLE = ("afl", "drfa")
"""Algorithms that see the answers of single clients."""
MEANS = [i for i, c in CASES.items() if c.name not in SINGLE and c.options.get("aggregate") != "max"]
"""Algorithms that take means and nothing else."""


def play(case: Case, channel: fs.Channel, chunk: int = 7) -> tuple[dict[str, torch.Tensor], Recording]:
    """Three rounds: the server's vectors, and the clients with all exchanges."""
    problem, data = case.build()
    share = 1.0 if ALGORITHMS[case.name].full_participation else 5
    clients = engine(problem, data, channel, batch_size=4, participation=share, chunk=chunk, rounds=3)
    with torch.no_grad():
        state = started(case.algorithm, clients)
        for r in range(3):
            clients.begin(r)
            state = case.algorithm.round(state, clients)
    return tensors_of(case.algorithm, state), clients


@cache
def plainly(name: str) -> tuple[dict[str, torch.Tensor], Recording]:
    return play(CASES[name], fs.Channel())


def exchanges(clients: Recording) -> list[tuple[Request, Answer]]:
    """Return the exchanges of the algorithm, without the problem's queries."""
    return [(request, answer) for request, answer in clients.seen if not request.query]
