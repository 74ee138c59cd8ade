"""Shares of the classes over all clients, for problems that need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fedstrata.problems.queries import class_counts

if TYPE_CHECKING:
    from fedstrata.clients import Clients


def class_shares(clients: Clients) -> torch.Tensor:
    """Ask all clients for their class counts; return the share of each class as the run weights clients."""
    counts: torch.Tensor = clients.gather(class_counts).double()
    return clients.weights.to(counts) @ (counts / counts.sum(1, keepdim=True))
