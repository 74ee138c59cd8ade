"""The clients' answers to queries, by name, so that remote clients can be asked too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fedstrata.clients.client import Client


def class_counts(client: Client) -> torch.Tensor:
    """Return how many samples of each class each client has: [C, classes]."""
    return client.class_counts


def column_statistics(client: Client) -> torch.Tensor:
    """Return what each client tells of the columns of its table, for the preparation: [C, s]."""
    return client.column_statistics


def first_loss(client: Client, x: torch.Tensor) -> torch.Tensor:
    """Return each client's loss at the starting point x, on one batch per level: [C]."""
    u = x
    for k in range(1, len(client.problem.levels) + 1):
        u = client.g(k, u, client.draw(k))
    return u.squeeze(1)


QUERIES: dict[str, Callable[..., Any]] = {f.__name__: f for f in (class_counts, column_statistics, first_loss)}
