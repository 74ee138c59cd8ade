"""Agnostic federated learning: minimise the loss of the worst mixture of clients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fedstrata.core.errors import invalid
from fedstrata.core.options import param
from fedstrata.data.federated import FederatedData
from fedstrata.models.flat import BatchNormRule
from fedstrata.models.random import DropoutRule
from fedstrata.problems.erm import BATCHNORM, DROPOUT, LOSS, Losses, erm, weighted_mean
from fedstrata.problems.prior import PRIOR
from fedstrata.problems.problem import Arrays, Problem, builder
from fedstrata.problems.projections import simplex
from fedstrata.problems.samples import split


@builder
def agnostic(
    model: nn.Module,
    clients: int = param(..., "number of clients", least=1, in_file=False),
    loss: str | Losses = LOSS,
    batchnorm: BatchNormRule = BATCHNORM,
    dropout: DropoutRule = DROPOUT,
    prior: bool = PRIOR,
) -> Problem:
    """Build agnostic learning: min_x max_y sum_k y_k loss_k(x), with y on the simplex, one entry per client.

    Written as a mean over clients, f_k(x, y) = clients * y_k * loss_k(x). y starts uniform, where f_k is the client's
    own loss.
    """
    base = erm(model, loss, batchnorm, dropout, prior)
    flat, losses = base.flat, base.losses
    assert flat is not None and losses is not None

    def outer(x: torch.Tensor, y: torch.Tensor, batch: Arrays) -> torch.Tensor:
        inputs, targets, (*weights, client) = split(batch)
        own = weighted_mean(losses(flat(x, *inputs), targets), weights)
        return clients * y.gather(0, client.reshape(1)).squeeze(0) * own

    def check(data: FederatedData) -> None:
        if data.clients != clients:
            raise invalid("clients of the problem", clients, f"{data.clients}, the number of clients of the data")
        base.check(data)

    y0 = base.x0.new_full((clients,), 1.0 / clients)
    return replace(base, outer=outer, y0=y0, project_y=simplex, mixture=True, check=check)
