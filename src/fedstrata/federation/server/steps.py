"""Checks of the local steps that nodes report: schedules count them, so a wrong number changes every client's rates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedstrata.clients.engine import Request
from fedstrata.core.options import options_of
from fedstrata.core.schedules import Epochs, Interval
from fedstrata.data.sampling import steps_per_epoch
from fedstrata.federation.server.inbox import MOST_ROWS, CheckedAnswer
from fedstrata.federation.wire import Refused

LOOPS = 4
"""How many local loops, each over all its steps, the work of one exchange may have."""


def check_steps(
    request: Request, checked: dict[int, CheckedAnswer], sizes: np.ndarray, batch_size: int | None
) -> dict[int, Refused]:
    """Return the clients that cannot have taken as many steps as they report.

    No client takes more than the algorithm's options allow. Unless steps are given in epochs, all clients take the same
    number: the most frequent one, or the smallest if several are equally frequent.

    sizes: the declared numbers of samples of all clients, all 1 if they were not declared.
    """
    refused: dict[int, Refused] = {}
    values = _step_options(request)
    declared = bool((sizes > 1).any())
    for client, answer in checked.items():
        most = _most_steps(values, request, int(sizes[client]) if declared else MOST_ROWS, batch_size)
        if answer.steps > most:
            refused[client] = Refused("type", f"reported {answer.steps} local steps, more than {most}")
    if any(isinstance(value, Epochs) for value in values):
        return refused
    counts = sorted(answer.steps for client, answer in checked.items() if client not in refused)
    usual = max(counts, key=counts.count, default=0)
    for client, answer in checked.items():
        if client not in refused and answer.steps != usual:
            refused[client] = Refused("type", f"reported {answer.steps} local steps, but other nodes reported {usual}")
    return refused


def _step_options(request: Request) -> list[Any]:
    """Return the algorithm's options that may be numbers of local steps."""
    algorithm = getattr(request.work, "__self__", None)
    values = [getattr(algorithm, name) for name in options_of(algorithm)]
    return [v for v in values if isinstance(v, int | Interval | Epochs) and not isinstance(v, bool)]


def _most_steps(values: list[Any], request: Request, rows: int, batch_size: int | None) -> int:
    total = 0
    for value in values:
        if isinstance(value, Epochs):
            total += math.ceil(value.epochs * int(steps_per_epoch(np.array([rows]), batch_size)[0]))
        else:
            total += value(max(0, request.clock.round)) if isinstance(value, Interval) else max(0, value)
    return LOOPS * max(1, total)
