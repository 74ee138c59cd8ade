"""A finished run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fedstrata.core.files import Row
from fedstrata.problems.problem import Problem
from fedstrata.training.metrics.catalogue import PER_CLIENT


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run.

    x, y:     the solution (y is None without a dual).
    history:  one row per evaluation: round, steps, samples, bytes_up, bytes_down, seconds, measures.
    summary:  the last row, what it was measured on, and what was chosen automatically.
    """

    x: torch.Tensor
    y: torch.Tensor | None
    history: list[Row]
    summary: Row
    problem: Problem

    def __repr__(self) -> str:
        measures = [f"{k} {v:.4g}" for k, v in self.history[-1].items() if k in PER_CLIENT]
        return f"<Run of {self.summary['algorithm']} on {self.summary['data']}: {', '.join(measures)}>"

    @property
    def final(self) -> Row:
        """The measures of the solution and what the run used, as a row: the last of the history, or with early stopping
        the measures of the best one.
        """
        return {name: self.summary[name] for name in self.history[-1]}

    def model(self) -> nn.Module:
        """Return the trained model as an ordinary module, in evaluation mode: the one at ``x``.

        That is the model before any steps inside the problem.
        For the model after those steps, see :func:`fedstrata.training.metrics.adaptation.adapted_point`.
        """
        return self.problem.model(self.x).eval()
