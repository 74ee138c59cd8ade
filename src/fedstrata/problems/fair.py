"""Fair learning: the worst class, or the worst client."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import options, param
from fedstrata.data.federated import FederatedData
from fedstrata.models.flat import BatchNormRule
from fedstrata.problems.agnostic import agnostic
from fedstrata.problems.erm import BATCHNORM, LOSS, Losses, erm, weighted_mean
from fedstrata.problems.problem import Arrays, Problem
from fedstrata.problems.projections import simplex
from fedstrata.problems.queries import Query, class_shares


@options("the fair problem")
def fair(
    model: nn.Module,
    over: Literal["classes", "clients"] = param("classes", "what the worst one is sought of"),
    classes: int | None = param(None, "number of classes", least=1, in_file=False),
    clients: int | None = param(None, "number of clients", least=1, in_file=False),
    regularise: float = param(0.0, "weight of the penalty on y; above 0 the maximum is strongly concave", least=0),
    loss: str | Losses = LOSS,
    batchnorm: BatchNormRule = BATCHNORM,
) -> Problem:
    """Build fair learning: min_x max_y sum_c y_c loss_c(x) - regularise / 2 ||y||^2, y on the simplex.

    ``over`` = "classes": loss_c is the mean loss on class c, of the data of all clients as the run weights them, and
    there are ``classes`` entries of y. As a mean over clients, a sample of class c weighs y_c divided by the share of
    its class; the clients are asked for their class counts before the first round. ``over`` = "clients": loss_c is the
    mean loss of client c, and there are ``clients`` entries (without a regulariser this is :func:`agnostic`). y starts
    uniform. A configuration file takes both numbers from the data.
    """
    number = classes if over == "classes" else clients
    if number is None:
        raise invalid(f"{over} of the fair problem", number, "a whole number of at least 1")
    build = _over_classes if over == "classes" else _over_clients
    problem = build(model, number, regularise, loss, batchnorm)
    return replace(problem, name="fair", options={**problem.options, "over": over, "regularise": regularise})


def _over_clients(
    model: nn.Module, clients: int, regularise: float, loss: str | Losses, rule: BatchNormRule
) -> Problem:
    base = agnostic(model, clients, loss, rule)
    if not regularise:
        return base

    def outer(x: torch.Tensor, y: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return base.outer(x, y, batch) - 0.5 * regularise * (y @ y)

    return replace(base, outer=outer, mixture=False, numbered=True)


def _over_classes(
    model: nn.Module, classes: int, regularise: float, loss: str | Losses, rule: BatchNormRule
) -> Problem:
    base = erm(model, loss, rule)

    def given(problem: Problem, shares: torch.Tensor) -> Problem:
        shares = shares.to(problem.x0)
        # A class that nobody has weighs nothing.
        factor = torch.where(shares > 0, 1 / shares.clamp(min=torch.finfo(shares.dtype).tiny), 0)

        def outer(x: torch.Tensor, y: torch.Tensor, batch: Arrays) -> torch.Tensor:
            inputs, targets, *weights = batch
            assert base.losses is not None and base.predict is not None
            losses = base.losses(base.predict(x, inputs), targets)
            own = (y * factor).gather(0, targets.long())
            return weighted_mean(own * losses, weights) - 0.5 * regularise * (y @ y)

        return replace(problem, outer=outer, query=None)

    def check(data: FederatedData) -> None:
        if data.classes != classes:
            raise invalid("classes of the fair problem", classes, f"{data.classes}, as many as the data have")
        if base.check is not None:
            base.check(data)

    y0 = base.x0.new_full((classes,), 1.0 / classes)
    built = replace(base, outer=_unprepared, y0=y0, project_y=simplex, check=check)
    return replace(built, query=Query("class_counts", class_shares, given))


def _unprepared(x: torch.Tensor, y: torch.Tensor, batch: Arrays) -> torch.Tensor:
    raise InputError("The fair problem does not know the shares of the classes yet: train asks the clients for them.")
