"""A fair start: the output bias of a model begins at the log-odds of the classes.

With rare positives, a model that starts at even odds spends its first rounds on learning how rare they are, which looks
like a weakness of the loss or of the algorithm. The clients' class counts are known before the first round, as those of
:func:`fedstrata.auc` are.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedstrata.core.options import param
from fedstrata.models.flat import Flat
from fedstrata.problems.problem import Problem
from fedstrata.problems.queries import Query, class_shares

PRIOR = param(
    True,
    "start the output bias at the log-odds of the classes, from the clients' class counts; not if a channel adds noise",
)

RAREST = 1e-4
"""The smallest share of a class that the bias assumes."""


def find_output_bias(flat: Flat, outputs: torch.Tensor, *inputs: torch.Tensor) -> slice | None:
    """Return where in x the bias of the outputs is: what is added to it, is added to the outputs; None if nowhere.

    outputs: those of the model at its initial weights, for ``inputs``.
    """
    width = outputs.reshape(len(outputs), -1).shape[1]
    added = torch.linspace(1.0, 2.0, width, dtype=outputs.dtype, device=outputs.device)
    end = flat.size
    for size, shape in zip(reversed(flat.sizes), reversed(flat.shapes), strict=True):
        place = slice(end - size, end)
        end -= size
        if tuple(shape) != (width,):
            continue
        x = flat.initial.clone()
        x[place] += added.to(x)
        with torch.no_grad():
            change = (flat(x, *inputs) - outputs).reshape(len(outputs), -1)
        if torch.allclose(change, added.expand_as(change), atol=1e-4):
            return place
    return None


def with_prior(problem: Problem, flat: Flat) -> Problem:
    """Return the problem that asks for the class counts, and then starts with the bias at the log-odds."""

    def inform(problem: Problem, shares: torch.Tensor) -> Problem:
        place = flat.output_bias
        if place is None:
            return problem
        x0 = problem.x0.clone()
        x0[place] = log_odds(shares, place.stop - place.start).to(x0)
        return replace(problem, x0=x0)

    return replace(problem, query=Query("class_counts", class_shares, inform, optional=True))


def log_odds(shares: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return the outputs that predict these shares of the classes: the logit of class 1, or centred logs."""
    logs = shares.clamp(min=RAREST).log()
    if outputs == 1:
        return (logs[1:2] - logs[0:1]) if len(logs) > 1 else logs.new_zeros(1)
    padded = logs.new_full((outputs,), float(torch.tensor(RAREST).log()))
    padded[: len(logs)] = logs[:outputs]
    return padded - padded.mean()
