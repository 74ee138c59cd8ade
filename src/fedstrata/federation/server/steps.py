"""Checks of the local steps that nodes report: schedules count them, so a wrong number changes every client's rates."""

from __future__ import annotations

import math

import numpy as np

from fedstrata.clients.engine import Request
from fedstrata.core.options import options_of
from fedstrata.core.schedules import Epochs
from fedstrata.data.sampling import steps_per_epoch
from fedstrata.federation.server.inbox import MOST_ROWS, CheckedAnswer
from fedstrata.federation.wire import Refused

LOOPS = 4
"""How many local loops, each over all its epochs, the work of one exchange may have."""


def check_steps(
    request: Request, checked: dict[int, CheckedAnswer], sizes: np.ndarray, batch_size: int | None
) -> dict[int, Refused]:
    """Return the clients that cannot have taken as many steps as they report.

    All clients take the same number of steps: the most frequent one, or the smallest if several are equally frequent.
    If steps are given in epochs, clients differ: each may take as many as its samples allow, or as most clients take.

    sizes: the declared numbers of samples of all clients, all 1 if they were not declared.
    """
    counts = sorted(answer.steps for answer in checked.values())
    usual = max(counts, key=counts.count, default=0)
    epochs = _epochs(request)
    if not epochs:
        return {
            client: Refused("type", f"reported {answer.steps} local steps, but other nodes reported {usual}")
            for client, answer in checked.items()
            if answer.steps != usual
        }
    refused: dict[int, Refused] = {}
    confirmed = 2 * counts.count(usual) > max(2, len(counts))  # a loop without epochs: most nodes report its steps
    declared = bool((sizes > 1).any())
    for client, answer in checked.items():
        rows = int(sizes[client]) if declared else MOST_ROWS
        most = LOOPS * math.ceil(epochs * int(steps_per_epoch(np.array([rows]), batch_size)[0]))
        if answer.steps > most and not (confirmed and answer.steps == usual):
            refused[client] = Refused("type", f"reported {answer.steps} local steps, more than {most}")
    return refused


def _epochs(request: Request) -> float:
    """Return the sum of the algorithm's options that are numbers of epochs."""
    algorithm = getattr(request.work, "__self__", None)
    values = [getattr(algorithm, name) for name in options_of(algorithm)]
    return sum(value.epochs for value in values if isinstance(value, Epochs))
