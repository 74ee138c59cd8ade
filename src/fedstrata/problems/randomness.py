"""Functions of a problem whose model has random layers: they draw from the words that come with a batch."""

from __future__ import annotations

from typing import Any

import torch

from fedstrata.problems.derivatives import Function
from fedstrata.problems.problem import Problem


def with_random_layers(problem: Problem) -> Problem:
    """Return the problem with random layers that draw from the words of a batch, or change nothing without words."""
    flat = problem.flat
    if flat is None or not flat.random:
        return problem

    def drawing(function: Function) -> Function:
        def draws(*args: Any) -> torch.Tensor:
            with flat.drawing_from(getattr(args[-1], "words", None)):
                return function(*args)

        return draws

    return problem.mapped(drawing)
