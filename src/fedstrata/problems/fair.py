"""Fair learning: minimise the loss of the worst class or of the worst client."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from fedstrata.core.errors import invalid
from fedstrata.core.options import param
from fedstrata.data.federated import FederatedData
from fedstrata.models.flat import BatchNormRule
from fedstrata.models.random import DropoutRule
from fedstrata.problems.agnostic import agnostic
from fedstrata.problems.erm import BATCHNORM, DROPOUT, LOSS, Losses, erm, weighted_mean
from fedstrata.problems.prior import PRIOR
from fedstrata.problems.problem import Arrays, Problem, builder
from fedstrata.problems.projections import simplex
from fedstrata.problems.queries import Query, after, class_shares, unanswered
from fedstrata.problems.samples import split


@builder
def fair(
    model: nn.Module,
    over: Literal["classes", "clients"] = param("classes", "groups whose largest loss is minimised"),
    classes: int | None = param(None, "number of classes", least=1, in_file=False),
    clients: int | None = param(None, "number of clients", least=1, in_file=False),
    regularise: float = param(
        0.0, "weight of the penalty on y; above 0, the objective is strongly concave in y", least=0
    ),
    loss: str | Losses = LOSS,
    batchnorm: BatchNormRule = BATCHNORM,
    dropout: DropoutRule = DROPOUT,
    prior: bool = PRIOR,
) -> Problem:
    """Build fair learning: min_x max_y sum_c y_c loss_c(x) - regularise / 2 ||y||^2, y on the simplex.

    With ``over`` = "classes", loss_c is the mean loss on class c over all clients, weighted as the run weights them,
    and y has ``classes`` entries. A sample of class c then has the weight y_c divided by the frequency of its class,
    computed from the clients' class counts before the first round. With ``over`` = "clients", loss_c is the mean loss
    of client c, and y has ``clients`` entries; without a regulariser this is :func:`agnostic`. y starts uniform. In a
    configuration file both numbers are inferred from the data.
    """
    number = classes if over == "classes" else clients
    if number is None:
        raise invalid(f"{over} of the fair problem", number, "a whole number of at least 1")
    if over == "classes":
        return _over_classes(erm(model, loss, batchnorm, dropout, prior), number, regularise)
    return _over_clients(agnostic(model, number, loss, batchnorm, dropout, prior), regularise)


def _over_clients(base: Problem, regularise: float) -> Problem:
    if not regularise:
        return base

    def outer(x: torch.Tensor, y: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return base.outer(x, y, batch) - 0.5 * regularise * (y @ y)

    return replace(base, outer=outer, mixture=False, numbered=True)


def _over_classes(base: Problem, classes: int, regularise: float) -> Problem:
    def given(problem: Problem, shares: torch.Tensor) -> Problem:
        shares = shares.to(problem.x0)
        # A class that no client has gets the weight 0.
        factor = torch.where(shares > 0, 1 / shares.clamp(min=torch.finfo(shares.dtype).tiny), 0)

        def outer(x: torch.Tensor, y: torch.Tensor, batch: Arrays) -> torch.Tensor:
            inputs, targets, weights = split(batch)
            assert base.losses is not None and base.predict is not None
            losses = base.losses(base.predict(x, *inputs), targets)
            own = (y * factor).gather(0, targets.long())
            return weighted_mean(own * losses, weights) - 0.5 * regularise * (y @ y)

        return replace(problem, outer=outer)

    def check(data: FederatedData) -> None:
        if data.classes != classes:
            raise invalid("classes of the fair problem", classes, f"{data.classes}, the number of classes of the data")
        base.check(data)

    y0 = base.x0.new_full((classes,), 1.0 / classes)
    outer = unanswered("The fair problem does not know the class frequencies yet: fs.train asks the clients for them.")
    query = after(base.query, Query("class_counts", class_shares, given))
    return replace(base, outer=outer, y0=y0, project_y=simplex, check=check, query=query)
