"""Functions of a problem whose model has random layers: they draw from the words that come with a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node

from fedstrata.problems.derivatives import Function
from fedstrata.problems.problem import Problem


class Randomised(tuple[torch.Tensor, ...]):
    """The arrays of one client's batch, with the words that random layers draw from."""

    words: torch.Tensor

    @staticmethod
    def of(arrays: Sequence[torch.Tensor]) -> Randomised:
        """Return the arrays without the last one, which becomes ``words``."""
        randomised = Randomised(arrays[:-1])
        randomised.words = arrays[-1]
        return randomised


register_pytree_node(
    Randomised, lambda batch: ([*batch, batch.words], None), lambda arrays, _: Randomised.of(list(arrays))
)


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
