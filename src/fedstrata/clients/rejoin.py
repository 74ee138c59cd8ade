"""Clients that have lost what they kept: who they are, and when they rejoin.

They rejoin at the end of the round in which they were left out. If a round would have no quorum at its first exchange
without them, they rejoin before it, as if at the end of the previous round. In both cases the algorithm's ``rejoin``
calls ``clients.restore``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedstrata.clients.clients import Clients

LAST_EXCHANGE = 1 << 30
"""The number of the exchange in which clients rejoin before a round: higher than any in the previous round."""


def lost_clients(clients: Clients) -> Clients:
    """Return these clients with another cohort: those that were left out because they lost what they kept."""
    lost = [fault.client for fault in clients.faults if fault.kind == "lost" and fault.left_out]
    return clients.with_cohort(np.unique(lost).astype(np.int64))


def in_previous_round(clients: Clients, cohort: np.ndarray) -> Clients:
    """Return these clients at the end of the previous round, with another cohort and an empty list of faults."""
    other = clients.with_cohort(cohort)
    other.progress = replace(clients.progress, round=clients.progress.round - 1, exchanges=LAST_EXCHANGE)
    other.faults, other.rejoin = [], None
    return other
