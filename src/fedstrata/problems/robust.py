"""Robust federated learning: clients with a high loss get a higher weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from fedstrata.core.options import param
from fedstrata.models.flat import BatchNormRule
from fedstrata.models.random import DropoutRule
from fedstrata.problems.erm import BATCHNORM, DROPOUT, LOSS, Losses, erm
from fedstrata.problems.prior import PRIOR
from fedstrata.problems.problem import INNER_MEAN, Arrays, InnerMean, Level, Outer, Problem, builder
from fedstrata.problems.queries import Query, after

Link = Callable[[torch.Tensor], torch.Tensor]

CAP = 30.0


def exponential(u: torch.Tensor, cap: float = CAP) -> torch.Tensor:
    """Return exp(u), continued beyond ``cap`` by its tangent, so that it increases but does not overflow."""
    return u.clamp(max=cap).exp() + math.exp(cap) * (u - cap).relu()


def square(u: torch.Tensor) -> torch.Tensor:
    """Return u^2 / 2, as q-FFL with q = 1; for non-negative losses."""
    return 0.5 * u * u


LINKS: dict[str, Link] = {"exp": exponential, "square": square}

GAMMA = param(0.5, "a smaller gamma gives clients with a high loss more weight", above=0)
SHIFT = param(None, "subtracted from the losses before exp; by default computed from the clients' initial losses")


@builder
def robust(
    model: nn.Module,
    gamma: float = GAMMA,
    link: str | Link = param(
        "exp", "outer function; in Python also any increasing function of a tensor", choices=LINKS
    ),
    loss: str | Losses = LOSS,
    shift: float | None = SHIFT,
    inner_mean: InnerMean = INNER_MEAN,
    batchnorm: BatchNormRule = BATCHNORM,
    dropout: DropoutRule = DROPOUT,
    prior: bool = PRIOR,
) -> Problem:
    """Build distributionally robust learning: min_x M_k[ gamma * link((loss_k(x) - shift) / gamma) ].

    The inner function is the client's mean loss, a single number. The outer function ``link`` is increasing, so clients
    with a high loss get a higher weight, more so for a smaller ``gamma``. ``link`` is "exp" (KL-regularised
    robustness), "square", or your own increasing function of a tensor. With "exp", a client whose loss equals the shift
    has weight 1 for any gamma; gamma -> infinity is standard learning.

    ``shift`` is a constant shared by all clients. With "exp" it rescales the objective and does not change the
    solution. By default it is gamma log M_k[ exp(loss_k(x0) / gamma) ], computed from the clients' losses before the
    first round (M_k is the uniform mean here, whatever the weighting of the run), so that the weights average to 1 at
    the start; above a weight equal to the number of clients, exp is continued by its tangent. If you pass a shift, the
    tangent starts at exp(30), so choose it close to the losses. For other links the default is 0.
    """
    base = erm(model, loss, batchnorm, dropout, prior)
    problem = replace(base, levels=(as_level(base.outer),), inner_mean=inner_mean)
    return linked(problem, gamma, link, shift)


def as_level(loss: Outer) -> Level:
    """Return a loss as a level, whose value is a vector of length 1."""

    def level(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return loss(u, batch).reshape(1)

    return level


def linked(problem: Problem, gamma: float, link: str | Link, shift: float | None) -> Problem:
    """Return the problem, whose last level is a loss, with outer function gamma * link((. - shift) / gamma)."""
    function = LINKS[link] if isinstance(link, str) else link

    def with_outer(problem: Problem, function: Link, constant: float) -> Problem:
        def outer(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
            return (gamma * function((u - constant) / gamma)).sum()

        return replace(problem, outer=outer)

    def learn(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        log_count = math.log(len(losses))
        return torch.stack([gamma * (torch.logsumexp(losses / gamma, 0) - log_count), losses.new_tensor(log_count)])

    def inform(problem: Problem, learned: torch.Tensor) -> Problem:
        constant, cap = learned.tolist()
        return with_outer(problem, partial(exponential, cap=cap), constant)

    query = Query("first_loss", learn, inform) if shift is None and link == "exp" else None
    return replace(
        with_outer(problem, function, shift or 0.0), outer_draws=False, weighs=True, query=after(problem.query, query)
    )
