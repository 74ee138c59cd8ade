"""Least squares for tests of channels: the same local steps in the library and in NumPy, and a record of exchanges."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

import fedstrata as fs
from fedstrata.clients import Answer, Clients, Simulated
from fedstrata.clients.engine import Request
from fedstrata.clients.exchange import Exchange
from support import make_setting, shared_oracles

D, LR, STEPS = 15, 0.1, 3
SIZES = [5, 8, 4, 11, 6, 9]
FEDAVG = fs.FedAvg(lr=LR, steps=STEPS, server_lr=0.8)


@cache
def squares(clients: int) -> tuple[fs.Problem, fs.FederatedData]:
    """Least squares whose clients disagree: some go far in a round and some do not."""
    draw = np.random.default_rng(0)
    pairs = [
        (draw.normal(size=(n, D)), draw.normal(size=n) + 2 * k * draw.normal()) for k, n in enumerate(SIZES[:clients])
    ]

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return 0.5 * ((batch[0] @ x - batch[1]) ** 2).mean()

    x0 = torch.from_numpy(draw.normal(size=D))
    return fs.Problem(outer, x0, name="squares"), fs.FederatedData.from_arrays(pairs, name="squares")


def train(channel: fs.Channel, rounds: int = 3, clients: int = 5, **options: Any) -> fs.Run:
    problem, data = squares(clients)
    how = {"algorithm": FEDAVG, "evaluate": lambda *_: {}, "seed": 3, **options}
    return fs.train(problem, data, rounds=rounds, channel=channel, **how)


def sparse(compress: str, top: float) -> dict[str, Any]:
    """Return the options of a channel for a compression, with ``top`` where it applies."""
    return {"compress": compress, **({"top": top} if compress == "top_k" else {})}


def own_change(client: int, clients: int, x: np.ndarray) -> np.ndarray:
    """What a client's steps add to x."""
    a, b = (t.numpy().astype(np.float64) for t in squares(clients)[1].train.of_client(client))
    point = x.copy()
    for _ in range(STEPS):
        point = point - LR * a.T @ (a @ point - b) / len(b)
    return point - x


class Recording(Clients):
    """Clients that record their exchanges: the request, and the answers as the server takes them."""

    def __init__(self, *args: Any) -> None:
        self.seen: list[tuple[Request, Answer]] = []
        super().__init__(*args)

    def _exchange(self, work: Any, message: tuple[Any, ...], **options: Any) -> Exchange:
        request = super()._exchange(work, message, **options).request
        return _Recorded(self.engine, request, self.usage, self.faults, self.seen)


class _Recorded(Exchange):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args[:-1])
        self._seen = args[-1]

    def __iter__(self) -> Iterator[Answer]:
        for answer in super().__iter__():
            self._seen.append((self.request, answer))
            yield answer


def engine(problem: fs.Problem, data: fs.FederatedData, channel: fs.Channel, **options: Any) -> Recording:
    """Clients at the start of round 0."""
    how = {"rounds": 10, "participation": 1.0, "weighting": "uniform", "chunk": 7, "batch_size": None, "seed": 0}
    unknown = options.keys() - how.keys() - {"faults"}
    assert not unknown, unknown
    how |= options
    setting = make_setting(
        problem, data, batch_size=how["batch_size"], seed=how["seed"], oracles=shared_oracles(problem)
    )
    simulated = Simulated(setting, how["chunk"], channel, options.get("faults"))
    clients = Recording(simulated, how["rounds"], how["participation"], how["weighting"])
    clients.begin(0)
    return clients
