"""Checks of the local steps and samples that nodes report: schedules and budgets of the whole run count them."""

from __future__ import annotations

import math

import numpy as np

from fedstrata.clients.engine import Request
from fedstrata.core.options import options_of
from fedstrata.core.schedules import Epochs
from fedstrata.data.sampling import steps_per_epoch
from fedstrata.federation.server.claims import FEW_SAMPLES, FEW_STEPS, far_above
from fedstrata.federation.server.inbox import MOST_ROWS, CheckedAnswer
from fedstrata.federation.wire import Refused

LOOPS = 4
"""How many local loops, each over all its epochs, the work of one exchange may have."""


def check_steps(
    request: Request, checked: dict[int, CheckedAnswer], sizes: np.ndarray, batch_size: int | None
) -> dict[int, Refused]:
    """Return the clients that cannot have taken as many steps, or drawn as many samples, as they report.

    All clients take the same number of steps: the most frequent one, or the smallest if several are equally frequent.
    If steps are given in epochs, clients differ: each may take as many as its samples allow, or as most clients take.

    sizes: the declared numbers of samples of all clients, all 1 if they were not declared.
    """
    drawn = far_above({client: answer.samples for client, answer in checked.items()}, FEW_SAMPLES)
    refused = {
        client: Refused("type", f"reported {checked[client].samples} samples, but no other node more than {most}")
        for client, most in drawn.items()
    }
    counts = sorted(answer.steps for answer in checked.values())
    usual = max(counts, key=counts.count, default=0)
    epochs = _epochs(request)
    if not epochs:
        return refused | {
            client: Refused("type", f"reported {answer.steps} local steps, but other nodes reported {usual}")
            for client, answer in checked.items()
            if answer.steps != usual
        }
    confirmed = 2 * counts.count(usual) > max(2, len(counts))  # a loop without epochs: most nodes report its steps
    declared = bool((sizes > 1).any())
    likely = {} if declared else far_above({client: answer.steps for client, answer in checked.items()}, FEW_STEPS)
    for client, most in likely.items():
        more = "weighting = 'samples' in [train] lets nodes declare their rows, and allows what these explain"
        detail = f"reported {checked[client].steps} local steps, but no other node more than {most}: {more}"
        refused[client] = Refused("type", detail)
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
