"""Functions of a problem in lower precision, by PyTorch's autocast."""

from __future__ import annotations

from typing import Any

import torch

from fedstrata.problems.derivatives import Function
from fedstrata.problems.problem import Problem

AUTOCASTS: dict[str, torch.dtype | None] = {"none": None, "bfloat16": torch.bfloat16}
"""The precisions by name. float16 would need its losses scaled, or small gradients vanish."""


def with_autocast(problem: Problem, dtype: torch.dtype | None) -> Problem:
    """Return the problem with functions that compute in ``dtype`` where autocast deems it safe; None changes nothing.

    Their values have the dtype of x again, and so have gradients.
    """
    device, own = problem.x0.device.type, problem.x0.dtype

    def cast(function: Function) -> Function:
        def run(*args: Any) -> torch.Tensor:
            with torch.autocast(device, dtype=dtype, cache_enabled=False):
                return function(*args).to(own)

        return run

    return problem if dtype is None else problem.mapped(cast)
