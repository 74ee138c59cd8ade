"""Queries: what a problem must learn from the clients before the first round, declared as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    then:   what to ask after this one, if anything.
    optional: whether a run may do without the answer: it is not asked for if a channel adds noise to protect clients,
            or if the data have no classes.
    """

    ask: Literal["class_counts", "first_loss"]
    learn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    inform: Callable[[Problem, torch.Tensor], Problem]
    then: Query | None = None
    optional: bool = False

    def informed(self, problem: Problem, vector: torch.Tensor | None) -> Problem:
        """Return the problem that knows the answer, with the next query; without an answer it stays as it is."""
        return replace(problem if vector is None else self.inform(problem, vector), query=self.then)


def unanswered(message: str) -> Callable[..., torch.Tensor]:
    """Return the outer function of a problem whose query has not been answered: it raises this message."""

    def outer(*args: object) -> torch.Tensor:
        raise InputError(message)

    return outer


def class_shares(counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the frequency of each class over all clients, weighted as the run weights clients.

    A client with a table and few rows may tell of none; if no client tells of any, the classes are equally frequent.
    """
    rows, weights = counts.sum(1, keepdim=True), weights.to(counts)
    told = rows[:, 0] > 0
    if not told.any():
        return torch.full_like(counts[0], 1 / counts.shape[1])
    if not told.all():
        counts, rows, weights = counts[told], rows[told], weights[told] / weights[told].sum()
    return weights @ (counts / rows)


def after(first: Query | None, query: Query | None) -> Query | None:
    """Return both queries, one after the other."""
    return query if first is None else replace(first, then=after(first.then, query))
