"""Robust federated learning: hard clients count more."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from fedstrata.core.options import options, param
from fedstrata.models.flat import BatchNormRule
from fedstrata.problems.erm import BATCHNORM, LOSS, Losses, erm
from fedstrata.problems.problem import INNER_MEAN, Arrays, InnerMean, Level, Outer, Problem
from fedstrata.problems.queries import Query

Link = Callable[[torch.Tensor], torch.Tensor]

CAP = 30.0


def exponential(u: torch.Tensor, cap: float = CAP) -> torch.Tensor:
    """Return exp(u), and beyond ``cap`` its tangent there: increasing, and no loss is so high that it overflows."""
    return u.clamp(max=cap).exp() + math.exp(cap) * (u - cap).relu()


def square(u: torch.Tensor) -> torch.Tensor:
    """Return u^2 / 2: as q-FFL with q = 1; for losses of at least 0."""
    return 0.5 * u * u


LINKS: dict[str, Link] = {"exp": exponential, "square": square}

GAMMA = param(0.5, "the smaller, the more a client with a high loss weighs", above=0)
SHIFT = param(None, "subtracted from the losses before exp; by default found from the clients' first losses")


@options("the robust problem")
def robust(
    model: nn.Module,
    gamma: float = GAMMA,
    link: str | Link = param("exp", "outer function; in Python also an increasing function of tensors", choices=LINKS),
    loss: str | Losses = LOSS,
    shift: float | None = SHIFT,
    inner_mean: InnerMean = INNER_MEAN,
    batchnorm: BatchNormRule = BATCHNORM,
) -> Problem:
    """Build distributionally robust learning: min_x M_k[ gamma * link((loss_k(x) - shift) / gamma) ].

    The inner function is the client's mean loss, a single number; the outer one is an increasing ``link``, so a client
    with a high loss weighs more, the more so the smaller ``gamma``. ``link`` is "exp" (KL-regularised robustness),
    "square", or an increasing function of your own on tensors. The factor gamma makes a weight 1 where the loss equals
    the shift, whatever gamma: gamma -> infinity is ordinary learning.

    ``shift`` is one constant shared by all clients; for "exp" it rescales the objective and moves no solution. With a
    shift of your own, exp goes on as its tangent beyond exp(30), so choose it near the losses. By default, for
    "exp", the clients are asked before the first round: shift = gamma log M_k[ exp(loss_k(x0) / gamma) ], so that the
    weights average to one at the start (M_k is the uniform mean here, whatever the run's weighting); where a weight
    would pass the number of clients, which the weights of that mean cannot, exp goes on as its tangent. The other links
    have the shift 0.
    """
    base = erm(model, loss, batchnorm)

    options = {**base.options, "gamma": gamma, "link": link, "shift": shift, "inner_mean": inner_mean}
    problem = replace(base, levels=(as_level(base.outer),), inner_mean=inner_mean, name="robust", options=options)
    return linked(problem, gamma, link, shift)


def as_level(loss: Outer) -> Level:
    """Return a loss as a level: a vector of one number."""

    def level(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return loss(u, batch).reshape(1)

    return level


def linked(problem: Problem, gamma: float, link: str | Link, shift: float | None) -> Problem:
    """Return the problem with gamma * link((. - shift) / gamma) as its outer function; its last level is a loss."""
    function = LINKS[link] if isinstance(link, str) else link

    def with_outer(problem: Problem, function: Link, constant: float) -> Problem:
        def outer(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
            return (gamma * function((u - constant) / gamma)).sum()

        return replace(problem, outer=outer)

    def learn(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        number = math.log(len(losses))
        return torch.stack([gamma * (torch.logsumexp(losses / gamma, 0) - number), losses.new_tensor(number)])

    def inform(problem: Problem, learned: torch.Tensor) -> Problem:
        constant, cap = learned.tolist()
        return with_outer(problem, partial(exponential, cap=cap), constant)

    asks = shift is None and link == "exp"
    built = with_outer(problem, function, shift or 0.0)
    built = replace(built, outer_draws=False, weighs=True)
    return replace(built, query=Query("first_loss", learn, inform)) if asks else built
