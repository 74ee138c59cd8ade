"""The clients' answers to queries, by name, so that remote clients can be asked too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedstrata.data.tables.statistics import below, moments

if TYPE_CHECKING:
    from fedstrata.clients.client import Client


def class_counts(client: Client) -> torch.Tensor:
    """Return how many samples of each class each client has: [C, classes]."""
    return client.class_counts


def class_shares(client: Client) -> torch.Tensor:
    """Return the frequency of each class in each client's samples: [C, classes]."""
    counts = client.class_counts.double()
    return counts / counts.sum(1, keepdim=True).clamp(min=1)


def column_statistics(client: Client) -> torch.Tensor:
    """Return what each client tells of the columns of its table, for the preparation: [C, s]."""
    return client.column_statistics


def first_loss(client: Client, x: torch.Tensor) -> torch.Tensor:
    """Return each client's loss at the starting point x, on one batch per level: [C]."""
    u = x
    for k in range(1, len(client.problem.levels) + 1):
        u = client.g(k, u, client.draw(k))
    return u.squeeze(1)


def score_moments(client: Client, x: torch.Tensor, held_out: bool) -> torch.Tensor:
    """Return the number, mean and sum of squared deviations of each client's scores: [C, 1, 3]."""
    told = [moments(scores[:, None], client.minimum) for scores, _ in client.scored(x, held_out)]
    return torch.from_numpy(np.stack(told))


def score_counts(client: Client, x: torch.Tensor, edges: torch.Tensor, held_out: bool) -> torch.Tensor:
    """Return how many of each client's rows of class 0 and 1 have a score in each cell of a grid: [C, 2, b].

    Rows of the other class count as missing, so that a few of them are not the difference to all rows.
    """
    points = np.append(edges[0].double().cpu().numpy(), np.inf)
    told = [
        [below(np.where(targets == c, scores, np.nan), points, client.minimum, np.append(targets, c)) for c in (0, 1)]
        for scores, targets in client.scored(x, held_out)
    ]
    return torch.from_numpy(np.diff(np.array(told), prepend=0.0))


QUERIES: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (class_counts, class_shares, column_statistics, first_loss, score_moments, score_counts)
}
