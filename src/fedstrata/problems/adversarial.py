"""Adversarial training against one worst-case perturbation, shared by all inputs of all clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import param
from fedstrata.data.federated import FederatedData
from fedstrata.models.flat import BatchNormRule
from fedstrata.models.random import DropoutRule
from fedstrata.problems.erm import BATCHNORM, DROPOUT, LOSS, Losses, erm
from fedstrata.problems.prior import PRIOR
from fedstrata.problems.problem import Arrays, Problem, builder
from fedstrata.problems.projections import ball


@builder
def adversarial(
    model: nn.Module,
    shape: Sequence[int] = param(..., "shape of one input, e.g. (1, 28, 28)", least=1, in_file=False),
    radius: float = param(1.0, "largest norm of the perturbation", above=0),
    loss: str | Losses = LOSS,
    batchnorm: BatchNormRule = BATCHNORM,
    dropout: DropoutRule = DROPOUT,
    prior: bool = PRIOR,
) -> Problem:
    """Build adversarial training: min_x max_{||y|| <= radius} M_k[ mean loss of the model on inputs + y ].

    The dual y is added to every input: it has the ``shape`` of one input, e.g. (1, 28, 28), and starts at 0. In a
    configuration file the shape is inferred from the data. Metrics report the model on clean inputs and under attack
    (:class:`fedstrata.Evaluation`).
    """
    if not shape:
        raise invalid("shape of the adversarial problem", shape, "the shape of one input, e.g. (1, 28, 28)")
    base = erm(model, loss, batchnorm, dropout, prior)

    def outer(x: torch.Tensor, y: torch.Tensor, batch: Arrays) -> torch.Tensor:
        inputs, *rest = batch
        return base.outer(x, (perturbed(inputs, y), *rest))

    def check(data: FederatedData) -> None:
        inputs, *others, _ = data.train.arrays
        if others:
            raise InputError(
                f"The adversarial problem perturbs the one input of a sample, but samples of {data.name} have "
                f"{len(others) + 1} inputs."
            )
        if tuple(inputs.shape[1:]) != tuple(shape) or not inputs.is_floating_point():
            kind = "" if inputs.is_floating_point() else " and are integers, which cannot be perturbed"
            got = f"{tuple(shape)}, but the inputs of {data.name} have shape {tuple(inputs.shape[1:])}{kind}"
            raise invalid("shape of the adversarial problem", got, "the shape of one floating-point input")
        base.check(data)

    y0 = base.x0.new_zeros(math.prod(shape))
    return replace(base, outer=outer, y0=y0, project_y=ball(radius), perturbs=True, check=check)


def perturbed(inputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add one perturbation [p] to each of the inputs [n, ...]."""
    return inputs + y.view(inputs.shape[1:])
