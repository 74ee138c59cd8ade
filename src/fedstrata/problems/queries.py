"""Queries: what a problem must learn from the clients before the first round, declared as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from fedstrata.core.errors import InputError

if TYPE_CHECKING:
    from fedstrata.problems.problem import Problem


@dataclass(frozen=True)
class Query:
    """A question that the engine asks every client, and how the answers change the problem.

    ask:    "class_counts": the client's number of samples per class, [classes]; "first_loss": its loss at the starting
            point, a single number.
    learn:  ``learn(answers, weights) -> vector`` computes a vector from all clients' answers [N, ...] and their weights
            in a mean [N]. The vector is stored in every checkpoint and sent to remote clients.
    inform: ``inform(problem, vector) -> problem`` returns the problem that uses this vector.
    """

    ask: Literal["class_counts", "first_loss"]
    learn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    inform: Callable[[Problem, torch.Tensor], Problem]


def unanswered(message: str) -> Callable[..., torch.Tensor]:
    """Return the outer function of a problem whose query has not been answered: it raises this message."""

    def outer(*args: object) -> torch.Tensor:
        raise InputError(message)

    return outer


def class_shares(counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the frequency of each class over all clients, weighted as the run weights clients."""
    return weights.to(counts) @ (counts / counts.sum(1, keepdim=True))
