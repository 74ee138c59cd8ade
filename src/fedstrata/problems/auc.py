"""AUC maximisation as a minimum with a maximum inside: no pairs of samples, so clients keep their data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import options, param
from fedstrata.data.federated import FederatedData
from fedstrata.data.intake import are_labels
from fedstrata.models.flat import BatchNormRule, Flat
from fedstrata.problems.erm import (
    BATCHNORM,
    binary_cross_entropy,
    check_model,
    cross_entropy,
    scores,
    two_samples,
    weighted_mean,
)
from fedstrata.problems.problem import Arrays, Problem
from fedstrata.problems.projections import box
from fedstrata.problems.queries import Query, class_shares

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {"sigmoid": torch.sigmoid, "none": lambda logits: logits}

Form = Literal["square", "margin"]

FORM = param("square", "the pairwise square loss, or one that spares pairs that are far enough apart")
MARGIN = param(1.0, "how far apart is enough", above=0, only={"form": ("margin",)})
SCORE = param("sigmoid", "what the model's output goes through to become a score", choices=ACTIVATIONS)
SCALE_DUAL = param(False, "take the factor p(1-p) out of the dual's steps")
P = param(None, "share of positives, one for all clients; by default they are asked for it", above=0, below=1)


@options("the auc problem")
def auc(
    model: nn.Module,
    form: Form = FORM,
    margin: float = MARGIN,
    score: str = SCORE,
    scale_dual: bool = SCALE_DUAL,
    p: float | None = P,
    batchnorm: BatchNormRule = BATCHNORM,
) -> Problem:
    """Build AUC maximisation: min over x = (weights, a, b), max over y = alpha, of M_k[ mean of F on client k's data ].

    With s the score of a sample, 1+ and 1- the indicators of its class, p the share of positives:

        square:  F = (1-p)(s-a)^2 1+ + p(s-b)^2 1- + 2(1+alpha)(p s 1- - (1-p) s 1+) - p(1-p) alpha^2
        margin:  F = (1-p)(s-a)^2 1+ + p(s-b)^2 1- + 2 alpha (p(1-p) margin + p s 1- - (1-p) s 1+) - p(1-p) alpha^2

    For "square" alpha is free, and 1 + min max F / (p(1-p)) is the mean of (1 - s+ + s-)^2 over all pairs of a positive
    and a negative, across clients. For "margin" alpha >= 0: pairs that are apart by more than the ``margin`` on average
    cost nothing more. At margin 1 its alpha is that of "square" plus 1: the two forms do not mix.

    ``p`` is one number for all clients. By default they are asked for their counts before the first round; it is then
    the mean of their shares as the run weights clients, uniformly (that of the pooled data when clients are of equal
    size) or by samples (that of the pooled data), so that the mean over clients is the identity above for the mean
    distribution. A client, or a batch, with one class only is legal.

    ``score`` is what the model's output, one logit or the difference of two, goes through: "sigmoid" keeps scores in
    (0, 1), which the theory assumes; "none" takes logits. Metrics use the logits; there is no accuracy, since no
    threshold is learnt, and ``loss`` is the cross-entropy.

    ``scale_dual``: the gradient in alpha is 2p(1-p)(mean s- - mean s+ - alpha), with the margin added inside for
    "margin", so its steps are small when positives are rare. With it y is sqrt(p(1-p)) alpha, so that a step along the
    gradient in y moves alpha by 1 / (p(1-p)) times as much, which is what codes that divide this gradient by p(1-p) do;
    the problem stays the same.
    """
    flat = Flat(model, batchnorm)
    options = {"form": form, "margin": margin, "score": score, "scale_dual": scale_dual, "p": p, "batchnorm": batchnorm}

    def check(data: FederatedData) -> None:
        _check(flat, data)

    problem = Problem(
        _unprepared,
        torch.cat([flat.initial, flat.initial.new_zeros(2)]),
        y0=flat.initial.new_zeros(1),
        project_y=box(low=0.0) if form == "margin" else None,
        name="auc",
        takes_weights=True,
        ranks=True,
        flat=flat,
        predict=lambda x, inputs: flat(x[: flat.size], inputs),
        losses=either_cross_entropy,
        options=options,
        check=check,
    )
    loss = _Loss(flat, form, float(margin), ACTIVATIONS[score], scale_dual)
    if p is not None:
        return loss.given(problem, float(p))
    return replace(problem, query=Query("class_counts", positives, lambda problem, p: loss.given(problem, float(p))))


def positives(counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Ask all clients for their class counts; return the share of class 1 as the run weights clients: [1]."""
    return class_shares(counts, weights)[1:]


class _Loss:
    """F, and the alpha that maximises it, once p is known."""

    def __init__(self, flat: Flat, form: str, margin: float, activation: Activation, scale_dual: bool) -> None:
        self.flat, self.activation, self.scale_dual = flat, activation, scale_dual
        self.shift, self.margin = (1.0, 0.0) if form == "square" else (0.0, margin)

    def given(self, problem: Problem, p: float) -> Problem:
        """Return the problem for this share of positives."""
        strength = p * (1 - p)
        # With p = 0 or 1 nothing bounds alpha, and no scale is better than another.
        scale = math.sqrt(strength) if self.scale_dual and strength > 0 else 1.0

        def outer(x: torch.Tensor, y: torch.Tensor, batch: Arrays) -> torch.Tensor:
            w, a, b = x.split((self.flat.size, 1, 1))  # type: ignore[no-untyped-call]
            s, positive, weights = self.scored(w, batch)
            alpha = y / scale
            share = p + (1 - 2 * p) * positive
            centred = s - (b + (a - b) * positive)
            pull = 2 * (self.shift + alpha) * (1 - 2 * positive) * s
            value = weighted_mean(share * (centred * centred + pull), weights)
            return value + (strength * alpha * (2 * self.margin - alpha)).sum()

        def best_y(x: torch.Tensor, batch: Arrays) -> torch.Tensor:
            s, positive, weights = self.scored(x[: self.flat.size], batch)
            gap = weighted_mean((p + (1 - 2 * p) * positive) * (1 - 2 * positive) * s, weights)
            return scale * (self.margin + gap / (strength or 1.0)).reshape(1)

        return replace(problem, outer=outer, best_y=best_y, query=None)

    def scored(self, w: torch.Tensor, batch: Arrays) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return scores, 1 for positives and 0 for negatives, and the samples' weights if there are any."""
        inputs, targets, *weights = batch
        s = self.activation(scores(self.flat(w, inputs)))
        return s, targets.to(s.dtype), weights


def _unprepared(x: torch.Tensor, y: torch.Tensor, batch: Arrays) -> torch.Tensor:
    raise InputError(
        "The auc problem does not know the share of positives yet: train asks the clients for it, or pass p."
    )


def either_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each sample, of one logit or of two."""
    two = outputs.dim() == 2 and outputs.shape[1] == 2
    return cross_entropy(outputs, targets) if two else binary_cross_entropy(outputs, targets)


def _check(flat: Flat, data: FederatedData) -> None:
    targets = data.train.arrays[1]
    if not are_labels(targets):
        got = f"{targets.dtype} of shape {tuple(targets.shape[1:])} per sample ({data.name})"
        raise invalid("targets of the auc problem", got, "0 and 1, one whole number per sample")
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or (high > 1 and data.classes == 2):
        raise invalid("labels of the auc problem", f"{low} to {high} ({data.name})", "0 and 1")
    if data.classes != 2:
        raise InputError(
            f"The auc problem wants two classes, 0 and 1. Got {data.classes} ({data.name}): label the data 0 and 1, or "
            "take the first half of the classes for 1 with imbalance (data.imbalance in a file)."
        )
    check_model(flat, data, "")
    outputs = flat.pure(two_samples(flat, data)[0])
    if outputs.numel() not in (2, 4):
        name = type(flat.module).__name__
        raise invalid(f"output of the model {name}", tuple(outputs.shape), "one logit per sample, or two, for auc")
    check_model(flat, data, "binary_cross_entropy" if outputs.numel() == 2 else "cross_entropy")
