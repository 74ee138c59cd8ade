"""Empirical risk minimisation: the mean over clients of a model's mean loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import param
from fedstrata.data.batch import stored
from fedstrata.data.federated import FederatedData
from fedstrata.data.intake import are_labels
from fedstrata.models.flat import BatchNormRule, Flat
from fedstrata.models.random import DropoutRule
from fedstrata.problems.prior import PRIOR, find_output_bias, with_prior
from fedstrata.problems.problem import Arrays, Problem, builder
from fedstrata.problems.samples import split

Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return -log softmax(outputs)[target] of each sample."""
    # A third faster than log_softmax for many clients with few classes.
    shifted = outputs - outputs.detach().amax(1, keepdim=True)
    return shifted.exp().sum(1).log() - shifted.gather(1, targets.long().unsqueeze(1)).squeeze(1)


def binary_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the logistic loss of each sample; the model's one output is the logit of class 1."""
    logits = outputs.reshape(targets.shape)
    return F.binary_cross_entropy_with_logits(logits, targets.to(outputs.dtype), reduction="none")


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the squared error of each sample, averaged over its outputs."""
    errors = (outputs.reshape(targets.shape) - targets.to(outputs.dtype)) ** 2
    return errors.reshape(len(errors), -1).mean(1)


def weighted_mean(values: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of one value per sample, times the samples' weights if the batch has them."""
    return (values * weights[0]).mean() if weights else values.mean()


def scores(outputs: torch.Tensor) -> torch.Tensor:
    """Return one score per sample, larger for class 1: the logit, or the difference of two."""
    flat = outputs.reshape(len(outputs), -1)
    return flat[:, 0] if flat.shape[1] == 1 else flat[:, 1] - flat[:, 0]


LOSSES: dict[str, Losses] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "squared": squared,
}

LOSS = param(
    "cross_entropy", "loss of a sample; in Python also a function (outputs, targets) -> losses", choices=LOSSES
)
BATCHNORM = param("refuse", "BatchNorm layers: refuse them, replace them with GroupNorm, or use batch statistics only")
DROPOUT = param("on", "dropout of the model in training; off trains without any")


@builder
def erm(
    model: nn.Module,
    loss: str | Losses = LOSS,
    batchnorm: BatchNormRule = BATCHNORM,
    dropout: DropoutRule = DROPOUT,
    prior: bool = PRIOR,
) -> Problem:
    """Build standard federated learning: min_x M_k[ mean loss of the model with weights x on client k's data ].

    ``loss`` is a name or a function (outputs, targets) -> one loss per sample. For ``batchnorm`` and
    ``dropout`` see :class:`fedstrata.models.flat.Flat`. With ``prior`` and a cross-entropy, the bias of the model's
    outputs starts at the log-odds of the classes. A model without such a bias, or from ``run.model()``, starts as it
    is; pass ``prior=False`` for other models that are already trained.
    """
    losses = LOSSES[loss] if isinstance(loss, str) else loss
    flat = Flat(model, batchnorm, dropout)

    def outer(x: torch.Tensor, batch: Arrays) -> torch.Tensor:
        inputs, targets, weights = split(batch)
        return weighted_mean(losses(flat(x, *inputs), targets), weights)

    def check(data: FederatedData) -> None:
        outputs, targets = try_model(flat, data)
        check_targets(flat, outputs, data, loss if isinstance(loss, str) else "")
        flat.output_bias = find_output_bias(flat, outputs, *samples_for(flat, data)[0]) if prior else None
        values = losses(outputs, targets)
        if values.shape != (2,):
            shape = "a single number" if values.dim() == 0 else f"shape {tuple(values.shape)}"
            raise invalid("loss", shape, "one number per sample: pass reduction='none' to torch losses")

    problem = Problem(outer, flat.initial, takes_weights=True, flat=flat, predict=flat, losses=losses, check=check)
    fresh = prior and not flat.trained and losses in (cross_entropy, binary_cross_entropy)
    return with_prior(problem, flat) if fresh else problem


def samples_for(flat: Flat, data: FederatedData) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the first sample twice, in the model's dtype: its inputs and targets. Batch statistics need two."""
    twice = [torch.cat([a[:1], a[:1]]).to(flat.initial.device) for a in data.train.arrays]
    *inputs, targets = (a.to(flat.initial.dtype) if a.is_floating_point() else stored(a) for a in twice)
    return inputs, targets


def try_model(flat: Flat, data: FederatedData) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model's outputs for two samples, and their targets; raise if it cannot take the inputs."""
    inputs, targets = samples_for(flat, data)
    try:
        return flat.pure(*inputs), targets
    except InputError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        model, shapes = type(flat.module).__name__, " and ".join(str(tuple(a.shape[1:])) for a in inputs)
        taken = f"inputs of shape {shapes}" if len(inputs) == 1 else f"{len(inputs)} inputs of shapes {shapes}"
        reason = f"The model {model} cannot take {taken} ({data.name}): {error}."
        whole = len(inputs) == 1 and not inputs[0].is_floating_point()
        remedy = " Integer inputs, e.g. characters, need a model such as lstm." if whole else ""
        raise InputError(reason + remedy) from None


def check_targets(flat: Flat, outputs: torch.Tensor, data: FederatedData, loss: str) -> None:
    """Raise if the targets do not fit the loss and the model's ``outputs`` for two samples."""
    model, shape = f"the model {type(flat.module).__name__}", tuple(outputs.shape)
    all_targets = [data.train.arrays[-1]]
    all_targets += [data.client_test.arrays[-1]] if data.client_test is not None else []
    all_targets += [data.test[-1]] if data.test is not None else []
    if loss == "cross_entropy":
        if outputs.dim() != 2:
            raise invalid(f"output of {model}", shape, "[samples, classes] for cross-entropy")
        for labels in all_targets:
            if not are_labels(labels):
                got = f"{labels.dtype} of shape {tuple(labels.shape[1:])} per sample ({data.name})"
                wants = "one class number per sample: integers, or floats with classes= given for the data"
                raise invalid("targets of cross_entropy", got, wants)
        _check_labels(all_targets, shape[1], f"{model} has {shape[1]} outputs")
    elif loss == "binary_cross_entropy":
        if outputs.numel() != 2:
            raise invalid(f"output of {model}", shape, "one number per sample")
        _check_labels(all_targets, 2, "the loss is binary_cross_entropy")
    elif loss == "squared":
        expected = (2, *all_targets[0].shape[1:])
        if outputs.numel() != math.prod(expected):
            raise invalid(f"output of {model}", shape, f"of the shape of the targets, {expected}")


def _check_labels(all_targets: list[torch.Tensor], classes: int, why: str) -> None:
    for labels in all_targets:
        low, high = labels.min().item(), labels.max().item()
        if low < 0 or high > classes - 1:
            raise invalid("labels of the data", f"{low:g} to {high:g}", f"between 0 and {classes - 1}: {why}")
