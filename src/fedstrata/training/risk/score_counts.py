"""How the clients' scores are distributed, from counts: what calibration, thresholds and curves are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fedstrata.clients.clients import Clients
from fedstrata.clients.queries import QUERIES
from fedstrata.core.errors import InputError, Unsolvable
from fedstrata.data.tables import statistics

CELLS = 1024
"""How many cells the grid of scores has."""

SPREAD = 6.0
"""How many standard deviations the grid reaches to both sides of the mean; scores beyond are in the outer cells."""


@dataclass(frozen=True)
class ScoreCounts:
    """How many rows of class 0 and 1 each client has in each cell of a grid of scores.

    edges:  the upper ends of all cells but the last, increasing: [b - 1].
    counts: [clients, 2, b].
    """

    edges: np.ndarray
    counts: np.ndarray

    @cached_property
    def middles(self) -> np.ndarray:
        """The scores that stand for the cells: their middles, and for the outer ones the nearest edge."""
        inner = 0.5 * (self.edges[1:] + self.edges[:-1])
        return np.concatenate([self.edges[:1], inner, self.edges[-1:]])

    @cached_property
    def together(self) -> np.ndarray:
        """The counts of all clients together: [2, b]."""
        total: np.ndarray = self.counts.sum(0)
        return total

    def check_classes(self, what: str) -> None:
        """Raise unless there are rows of both classes."""
        negatives, positives = self.together.sum(1)
        if not (negatives and positives):
            raise Unsolvable(
                f"{what} needs rows of both classes. The clients told of {positives:.0f} positive and {negatives:.0f} "
                "negative ones: a client with few rows of a class tells of none (minimum)."
            )


def count_scores(clients: Clients, x: torch.Tensor, held_out: bool) -> ScoreCounts:
    """Ask all clients how the scores of their rows are distributed, in two exchanges.

    held_out: whether to count held-out rows, not training rows.
    """
    data, problem = clients.engine.side.data, clients.problem
    if data.classes != 2 or problem.predict is None:
        raise InputError(f"Scores are counted for models of two classes; the data {data.name!r} have {data.classes}.")
    answers = clients.gather(QUERIES["score_moments"], x, held_out).double().cpu().numpy()
    count, mean, squares = statistics.merged(answers)[0]
    if not count:
        raise Unsolvable("No client has enough rows to tell how its scores are distributed.")
    width = SPREAD * max(np.sqrt(squares / count), 1e-6 * max(1.0, abs(mean)))
    edges = np.linspace(mean - width, mean + width, CELLS - 1)
    grid = torch.from_numpy(edges).to(x.device)
    counts = clients.gather(QUERIES["score_counts"], x, grid, held_out).double().cpu().numpy()
    return ScoreCounts(edges, counts)
