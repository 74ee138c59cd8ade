"""Compositional AUC maximisation: gradient steps on cross-entropy inside, the AUC loss outside."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fedstrata.core.options import param
from fedstrata.core.schedules import Rate
from fedstrata.models.flat import BatchNormRule, Flat
from fedstrata.models.random import DropoutRule
from fedstrata.problems.auc import FORM, MARGIN, SCALE_DUAL, SCORE, Form, P, auc, either_cross_entropy
from fedstrata.problems.erm import BATCHNORM, DROPOUT, weighted_mean
from fedstrata.problems.maml import FIRST_ORDER, with_gradient_steps
from fedstrata.problems.problem import Arrays, Outer, Problem, builder
from fedstrata.problems.samples import split


@builder
def compositional_auc(
    model: nn.Module,
    levels: int = param(3, "inner gradient steps, each a level", least=1),
    inner_lr: Rate = param(0.1, "learning rate of the inner gradient steps", above=0),
    first_order: bool = FIRST_ORDER,
    form: Form = FORM,
    margin: float = MARGIN,
    score: str = SCORE,
    scale_dual: bool = SCALE_DUAL,
    p: float | None = P,
    batchnorm: BatchNormRule = BATCHNORM,
    dropout: DropoutRule = DROPOUT,
) -> Problem:
    """Build compositional AUC maximisation: the AUC loss of a model after ``levels`` gradient steps on cross-entropy.

    min over x = (weights, a, b), max over y = alpha, of M_k[ F_k(G(x), alpha) ]. F_k is the loss of :func:`auc`, with
    the same options. G(x) is the mean over clients of the model after their own steps u -> u - inner_lr * grad
    cross-entropy(u) from x. Each step is a level that leaves a and b unchanged. ``inner_lr`` may be a schedule over
    rounds.

    The derivative needs one Hessian-vector product per step. ``first_order`` skips these and treats the Jacobian of
    each step as the identity: cheaper, but a departure from the papers.

    The metric ``auc`` is measured at x, before the steps, which is also the model that a run returns; ``adapted_auc``
    is measured at G(x), after them, which is what the objective optimises.
    """
    base = auc(model, form, margin, score, scale_dual, p, batchnorm, dropout)
    assert base.flat is not None
    problem = replace(base, inner_mean="global")
    return with_gradient_steps(problem, _cross_entropy(base.flat), levels, inner_lr, first_order)


def _cross_entropy(flat: Flat) -> Outer:
    """Return the mean cross-entropy as a function of a vector that starts with the model's weights."""

    def loss(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        inputs, targets, weights = split(batch)
        return weighted_mean(either_cross_entropy(flat(u, *inputs), targets), weights)

    return loss
