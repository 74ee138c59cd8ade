"""Compositional AUC maximisation: gradient steps on cross-entropy inside, the AUC loss outside."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fedstrata.core.options import options, param
from fedstrata.core.schedules import Rate
from fedstrata.models.flat import BatchNormRule, Flat
from fedstrata.problems.auc import FORM, MARGIN, SCALE_DUAL, SCORE, Form, P, auc, either_cross_entropy
from fedstrata.problems.erm import BATCHNORM, weighted_mean
from fedstrata.problems.maml import FIRST_ORDER, with_gradient_steps
from fedstrata.problems.problem import Arrays, Outer, Problem


@options("the compositional_auc problem")
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
) -> Problem:
    """Build compositional AUC maximisation: the AUC loss of a model after ``levels`` gradient steps on cross-entropy.

    min over x = (weights, a, b), max over y = alpha, of M_k[ F_k(G(x), alpha) ]: F_k is that of :func:`auc`, with the
    same options, and G(x) the mean over clients of where their own steps u -> u - inner_lr * grad cross-entropy(u) lead
    from x. Each step is a level; a and b go through unchanged. ``inner_lr`` may follow a schedule, round by round.

    The derivative takes a Hessian-vector product for each step. ``first_order`` leaves those out, which takes every
    step's Jacobian for the identity: cheaper, and a departure from the papers.

    There are two models to look at. ``auc`` is measured at x, where the steps begin, and so is the model of a run;
    ``adapted_auc`` is measured at G(x), where they lead, which is what the objective is about.
    """
    base = auc(model, form, margin, score, scale_dual, p, batchnorm)
    assert base.flat is not None
    own = {"levels": levels, "inner_lr": inner_lr, "first_order": first_order}
    problem = replace(base, inner_mean="global", name="compositional_auc", options={**base.options, **own})
    return with_gradient_steps(problem, _cross_entropy(base.flat), levels, inner_lr, first_order)


def _cross_entropy(flat: Flat) -> Outer:
    """Return the mean cross-entropy of the model whose weights are the first entries of a vector."""

    def loss(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        inputs, targets, *weights = batch
        return weighted_mean(either_cross_entropy(flat(u, inputs), targets), weights)

    return loss
