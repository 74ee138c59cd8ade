"""Checks of numbers that a node reports of itself: nobody else knows them, but the other nodes' say what is likely."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedstrata.clients.engine import Request
from fedstrata.clients.queries import class_counts, score_counts
from fedstrata.core.trees import tree_leaves
from fedstrata.federation.server.inbox import MOST_ROWS, CheckedAnswer
from fedstrata.federation.wire import Refused

FEW_ROWS, FEW_SAMPLES, FEW_STEPS = 100_000, 1_000_000, 1_000
"""A node may always report so many rows, samples drawn in an exchange, and local steps."""

TIMES = 100
"""Beyond that, a node may report this many times as many as any other node."""


def far_above(claims: Mapping[int, int], few: int) -> dict[int, int]:
    """Return the clients that report far more than all others, and the most that any other reports.

    A client alone cannot be compared with others.
    """
    ranked = sorted(claims.values(), reverse=True)
    if len(ranked) < 2 or ranked[0] <= max(few, TIMES * ranked[1]):
        return {}
    return {client: ranked[1] for client, claim in claims.items() if claim == ranked[0]}


def check_counts(request: Request, checked: Mapping[int, CheckedAnswer]) -> dict[int, Refused]:
    """Return the clients that cannot have as many rows as they count for a query."""
    if not request.query or request.name not in (class_counts.__name__, score_counts.__name__):
        return {}
    counts = {k: torch.cat([leaf.flatten().double() for leaf in tree_leaves(a.value)]) for k, a in checked.items()}
    wrong = [k for k, each in counts.items() if not bool((each >= 0).all()) or not each.sum() <= MOST_ROWS]
    refused = {k: Refused("type", "reported counts of rows that are impossible") for k in wrong}
    for k, most in far_above({k: int(n.sum()) for k, n in counts.items() if k not in refused}, FEW_ROWS).items():
        refused[k] = Refused("type", f"counted {int(counts[k].sum())} rows, but no other node more than {most}")
    return refused
