"""AUC maximisation as a min-max problem, whose loss needs no pairs of samples, so data stay with their clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from fedstrata.core.errors import InputError, Unsolvable, invalid
from fedstrata.core.options import param
from fedstrata.data.federated import FederatedData
from fedstrata.data.intake import are_labels
from fedstrata.models.flat import BatchNormRule, Flat
from fedstrata.models.random import DropoutRule
from fedstrata.problems.erm import (
    BATCHNORM,
    DROPOUT,
    binary_cross_entropy,
    check_targets,
    cross_entropy,
    scores,
    try_model,
    weighted_mean,
)
from fedstrata.problems.problem import Arrays, Problem, builder
from fedstrata.problems.projections import box
from fedstrata.problems.queries import Query, class_shares, unanswered
from fedstrata.problems.samples import split

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {"sigmoid": torch.sigmoid, "none": lambda logits: logits}

Form = Literal["square", "margin"]

FORM = param("square", "pairwise square loss, or square loss with a margin")
MARGIN = param(1.0, "gap between mean scores beyond which nothing is gained", above=0, only={"form": ("margin",)})
SCORE = param("sigmoid", "activation that turns the model's output into a score", choices=ACTIVATIONS)
SCALE_DUAL = param(False, "rescale the dual so that its steps do not shrink with p(1-p)")
P = param(None, "fraction of positives, the same for all clients; by default from their class counts", above=0, below=1)


@builder
def auc(
    model: nn.Module,
    form: Form = FORM,
    margin: float = MARGIN,
    score: str = SCORE,
    scale_dual: bool = SCALE_DUAL,
    p: float | None = P,
    batchnorm: BatchNormRule = BATCHNORM,
    dropout: DropoutRule = DROPOUT,
) -> Problem:
    """Build AUC maximisation: min over x = (weights, a, b), max over y = alpha, of M_k[ mean of F on client k's data ].

    With s the score of a sample, 1+ and 1- the indicators of its class, p the fraction of positives:

        square:  F = (1-p)(s-a)^2 1+ + p(s-b)^2 1- + 2(1+alpha)(p s 1- - (1-p) s 1+) - p(1-p) alpha^2
        margin:  F = (1-p)(s-a)^2 1+ + p(s-b)^2 1- + 2 alpha (p(1-p) margin + p s 1- - (1-p) s 1+) - p(1-p) alpha^2

    With "square", alpha is unconstrained, and 1 + min max F / (p(1-p)) is the mean of (1 - s+ + s-)^2 over all pairs of
    a positive and a negative, across clients. With "margin", alpha >= 0: once the mean scores of the two classes differ
    by more than ``margin``, a larger gap brings no further gain. At margin 1, alpha is that of "square" plus 1, so the
    two forms cannot be mixed.

    ``p`` is the same for all clients. By default it is computed before the first round from their class counts, as the
    mean of their fractions under the weighting of the run. If clients are weighted by samples, or have equal sizes,
    this is the fraction in the pooled data. A client or a batch may contain only one class.

    ``score`` is applied to the model's output (one logit, or the difference of two): "sigmoid" keeps scores in (0, 1),
    as the theory assumes; "none" uses the logits. Metrics use the logits and omit accuracy, since no threshold is
    learned; ``loss`` is the cross-entropy.

    The gradient in alpha is 2p(1-p)(mean s- - mean s+ - alpha), plus the margin inside the bracket for "margin", so its
    steps are small when positives are rare. With ``scale_dual``, y = sqrt(p(1-p)) alpha, so a gradient step in y moves
    alpha 1 / (p(1-p)) times as far, as in code that divides this gradient by p(1-p). The solution does not change.
    """
    flat = Flat(model, batchnorm, dropout)
    problem = Problem(
        unanswered(
            "The auc problem does not know the fraction of positives yet: fs.train asks the clients; otherwise pass p."
        ),
        torch.cat([flat.initial, flat.initial.new_zeros(2)]),
        y0=flat.initial.new_zeros(1),
        project_y=box(low=0.0) if form == "margin" else None,
        takes_weights=True,
        ranks_only=True,
        flat=flat,
        predict=lambda x, *inputs: flat(x[: flat.size], *inputs),
        losses=either_cross_entropy,
        check=lambda data: _check(flat, data),
    )
    shift, gap = (1.0, 0.0) if form == "square" else (0.0, float(margin))

    def given(problem: Problem, p: torch.Tensor | float) -> Problem:
        return _with_fraction(problem, flat, float(p), shift, gap, ACTIVATIONS[score], scale_dual)

    return replace(problem, query=Query("class_counts", positives, given)) if p is None else given(problem, p)


def positives(counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the fraction of class 1 over all clients, weighted as the run weights clients: [1]."""
    present = counts.sum(0) > 0
    if not present.all():
        only = f"class {int(present[1])} only" if present.any() else "none"
        error = invalid("classes of the auc problem", f"{only}, on all clients", "both 0 and 1")
        raise Unsolvable(
            f"{error} A site whose table has fewer rows of a class than prepare.minimum may tell of none: then pass p."
        )
    return class_shares(counts, weights)[1:]


def _with_fraction(
    problem: Problem, flat: Flat, p: float, shift: float, margin: float, activation: Activation, scale_dual: bool
) -> Problem:
    """Return the problem for this fraction of positives; ``shift`` is added to alpha in the term that it multiplies."""
    strength = p * (1 - p)
    scale = math.sqrt(strength) if scale_dual else 1.0

    def scored(w: torch.Tensor, batch: Arrays) -> tuple[torch.Tensor, torch.Tensor, Arrays]:
        """Return scores, labels as 0.0 and 1.0, and the samples' weights, if any."""
        inputs, targets, weights = split(batch)
        s = activation(scores(flat(w, *inputs)))
        return s, targets.to(s.dtype), weights

    def outer(x: torch.Tensor, y: torch.Tensor, batch: Arrays) -> torch.Tensor:
        w, a, b = x.split((flat.size, 1, 1))  # type: ignore[no-untyped-call]
        s, positive, weights = scored(w, batch)
        alpha = y / scale
        share = p + (1 - 2 * p) * positive
        centred = s - (b + (a - b) * positive)
        pull = 2 * (shift + alpha) * (1 - 2 * positive) * s
        value = weighted_mean(share * (centred * centred + pull), weights)
        return value + (strength * alpha * (2 * margin - alpha)).sum()

    def best_y(x: torch.Tensor, batch: Arrays) -> torch.Tensor:
        s, positive, weights = scored(x[: flat.size], batch)
        gap = weighted_mean((p + (1 - 2 * p) * positive) * (1 - 2 * positive) * s, weights)
        return scale * (margin + gap / strength).reshape(1)

    return replace(problem, outer=outer, best_y=best_y)


def either_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each sample, for models with one or two logits."""
    two = outputs.dim() == 2 and outputs.shape[1] == 2
    return cross_entropy(outputs, targets) if two else binary_cross_entropy(outputs, targets)


def _check(flat: Flat, data: FederatedData) -> None:
    targets = data.train.arrays[-1]
    if not are_labels(targets):
        got = f"{targets.dtype} of shape {tuple(targets.shape[1:])} per sample ({data.name})"
        raise invalid("targets of the auc problem", got, "one integer per sample, 0 or 1")
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or (high > 1 and data.classes == 2):
        raise invalid("labels of the auc problem", f"{low} to {high} ({data.name})", "0 and 1")
    if data.classes != 2:
        raise InputError(
            f"The auc problem needs two classes, 0 and 1. Got {data.classes} ({data.name}): label the data 0 and 1, or "
            "turn some of the classes into class 1 with imbalance (data.imbalance in a configuration file)."
        )
    outputs, _ = try_model(flat, data)
    if outputs.numel() not in (2, 4):
        name = type(flat.module).__name__
        raise invalid(f"output of the model {name}", tuple(outputs.shape), "one logit per sample, or two, for auc")
    check_targets(flat, outputs, data, "binary_cross_entropy" if outputs.numel() == 2 else "cross_entropy")
