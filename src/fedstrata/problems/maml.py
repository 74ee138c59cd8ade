"""Meta-learning: find a starting point from which each client adapts well in a few gradient steps."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedstrata.core.clock import Clock
from fedstrata.core.options import param
from fedstrata.core.schedules import Rate, Schedule, rate_at
from fedstrata.models.flat import BatchNormRule
from fedstrata.models.random import DropoutRule
from fedstrata.problems.erm import BATCHNORM, DROPOUT, LOSS, Losses, erm
from fedstrata.problems.prior import PRIOR
from fedstrata.problems.problem import INNER_MEAN, Arrays, InnerMean, Outer, Problem, builder
from fedstrata.problems.robust import GAMMA, SHIFT, as_level, linked

INNER_LR = param(0.01, "learning rate of the inner gradient steps", above=0)
FIRST_ORDER = param(False, "skip the second derivatives")


@builder
def maml(
    model: nn.Module,
    inner_lr: Rate = INNER_LR,
    steps: int = param(1, "inner gradient steps", least=1),
    first_order: bool = FIRST_ORDER,
    loss: str | Losses = LOSS,
    inner_mean: InnerMean = INNER_MEAN,
    batchnorm: BatchNormRule = BATCHNORM,
    dropout: DropoutRule = DROPOUT,
    prior: bool = PRIOR,
) -> Problem:
    """Build model-agnostic meta-learning: min_x M_k[ loss_k( x after ``steps`` gradient steps on client k's data ) ].

    Each step u -> u - inner_lr * grad loss_k(u) is a level, and the outer function is the loss on an independent batch.
    The derivative needs one Hessian-vector product per step; ``first_order`` skips these (first-order MAML). If the
    data have a support set (``support`` of a split), the steps draw from it and the outer function from the rest.
    ``inner_lr`` may be a schedule over rounds.
    """
    base = erm(model, loss, batchnorm, dropout, prior)
    return with_gradient_steps(replace(base, inner_mean=inner_mean), base.outer, steps, inner_lr, first_order)


@builder
def damaml(
    model: nn.Module,
    inner_lr: float = INNER_LR,
    gamma: float = GAMMA,
    first_order: bool = FIRST_ORDER,
    loss: str | Losses = LOSS,
    shift: float | None = SHIFT,
    batchnorm: BatchNormRule = BATCHNORM,
    dropout: DropoutRule = DROPOUT,
    prior: bool = PRIOR,
) -> Problem:
    """Build distribution-agnostic meta-learning: clients that adapt badly get a higher weight.

    min_x M_k[ gamma * exp((loss_k(x - inner_lr * grad loss_k(x)) - shift) / gamma) ]. The levels are one gradient step
    and the loss after it; ``gamma`` and ``shift`` are as in :func:`robust`.
    """
    base = erm(model, loss, batchnorm, dropout, prior)
    levels = (GradientStep(base.outer, inner_lr, first_order, many_convolutions(base)), as_level(base.outer))
    return linked(replace(base, levels=levels, adapt=(1, inner_lr)), gamma, "exp", shift)


def with_gradient_steps(problem: Problem, loss: Outer, steps: int, lr: Rate, first_order: bool) -> Problem:
    """Return the problem with gradient steps on ``loss`` as its levels; ``lr`` may be a schedule."""
    forward = many_convolutions(problem)

    def at(problem: Problem, clock: Clock) -> Problem:
        rate = rate_at(lr, clock)
        if problem.adapt == (steps, rate):
            return problem
        return replace(problem, levels=(GradientStep(loss, rate, first_order, forward),) * steps, adapt=(steps, rate))

    built = at(problem, Clock(0, 1))
    return replace(built, at=at) if isinstance(lr, Schedule) else built


@dataclass(frozen=True)
class GradientStep:
    """The level u -> u - lr * grad loss(u); ``first_order`` treats its Jacobian as the identity.

    The transposed Jacobian times a vector c is c - lr * H c. With ``forward``, a traced graph computes H c by forward
    mode over reverse mode, otherwise by reverse mode over reverse mode.
    """

    loss: Outer
    lr: float
    first_order: bool
    forward: bool

    def __call__(self, u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        """Take the step."""
        gradient = torch.func.grad(self.loss)
        g: torch.Tensor = gradient(u.detach(), batch).detach() if self.first_order else gradient(u, batch)
        return u.add(g, alpha=-self.lr)

    def pullback(self, u: torch.Tensor, cotangent: torch.Tensor, batch: Arrays) -> torch.Tensor:
        """Return c - lr * H c by the chosen mode."""
        if self.first_order:
            return cotangent
        gradient = torch.func.grad(self.loss)
        if self.forward:
            with warnings.catch_warnings():  # on its first use of forward mode, torch scripts one of its functions
                warnings.simplefilter("ignore", DeprecationWarning)
                product: torch.Tensor = torch.func.jvp(lambda z: gradient(z, batch), (u,), (cotangent,))[1]
        else:
            product = torch.func.vjp(lambda z: gradient(z, batch), u)[1](cotangent)[0]
        return cotangent.add(product, alpha=-self.lr)


def many_convolutions(problem: Problem) -> bool:
    """Whether the model has more than three convolutions, so that forward mode is faster (bench/levels.py)."""
    modules = [] if problem.flat is None else problem.flat.module.modules()
    return sum(isinstance(m, nn.modules.conv._ConvNd) for m in modules) > 3
