"""Problems with several inner levels: your own, and risk-averse learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from fedstrata.core.errors import invalid
from fedstrata.core.options import options, param
from fedstrata.models.flat import BatchNormRule
from fedstrata.models.random import DropoutRule
from fedstrata.problems.erm import BATCHNORM, DROPOUT, LOSS, Losses, erm, weighted_mean
from fedstrata.problems.prior import PRIOR
from fedstrata.problems.problem import INNER_MEAN, Arrays, InnerMean, Level, Outer, Problem, builder
from fedstrata.problems.samples import split

GLOBAL_MEAN = replace(INNER_MEAN, default="global")


@options("the multilevel problem")
def multilevel(
    levels: Sequence[Level],
    outer: Outer,
    x0: torch.Tensor,
    y0: torch.Tensor | None = None,
    project_y: Callable[[torch.Tensor], torch.Tensor] | None = None,
    inner_mean: InnerMean = GLOBAL_MEAN,
    outer_draws: bool = param(True, "whether the outer function uses data"),
    name: str = param("multilevel", "name of the problem in messages and tables"),
) -> Problem:
    """Build a problem of your own from K levels: min_x max_y M_k[ f_k( M_j[ g_j^(K) o ... o g_j^(1)(x) ], y ) ].

    ``levels`` are g^(1)..g^(K), each ``g(u, batch) -> vector``, of any matching lengths. ``outer`` is f: ``f(u,
    batch)``, or ``f(u, y, batch)`` with a dual that starts at ``y0``. All are means over the samples of ``batch``, a
    tuple of tensors such as ``(inputs, targets)``; each level draws its own batch. Set ``outer_draws=False`` if f uses
    no data. With ``inner_mean="local"``, f_k is evaluated at the client's own levels. For example, the mean of the
    losses plus their standard deviation:

        level_1 = lambda x, batch: torch.cat([x, losses(x, batch).mean(0, keepdim=True)])
        level_2 = lambda u, batch: torch.stack([u[-1], ((losses(u[:-1], batch) - u[-1]) ** 2).mean()])
        outer = lambda u, batch: u[0] + (u[1].relu() + 1e-4).sqrt()  # an estimate of u[1] may be negative
        problem = fs.multilevel([level_1, level_2], outer, x0, outer_draws=False)

    :func:`risk_averse` is such a problem for any model.
    """
    if not isinstance(levels, Sequence) or len(levels) == 0:
        raise invalid(
            "levels of the multilevel problem", levels, "a list of at least one function g(u, batch) -> vector"
        )
    return Problem(
        outer,
        x0,
        levels=tuple(levels),
        y0=y0,
        project_y=project_y,
        inner_mean=inner_mean,
        outer_draws=outer_draws,
        name=name,
        options={
            "levels": [getattr(level, "__name__", type(level).__name__) for level in levels],
            "outer": outer,
            "inner_mean": inner_mean,
            "outer_draws": outer_draws,
        },
    )


@builder
def risk_averse(
    model: nn.Module,
    weight: float = param(0.5, "weight of the upper semideviation", above=0),
    power: int = param(2, "power of the semideviation", choices=(1, 2)),
    smoothing: float = param(0.01, "for power 2: its square is added under the root", above=0),
    loss: str | Losses = LOSS,
    batchnorm: BatchNormRule = BATCHNORM,
    dropout: DropoutRule = DROPOUT,
    prior: bool = PRIOR,
) -> Problem:
    """Build risk-averse learning: the mean loss plus ``weight`` times its upper semideviation.

    min_x  m + weight * E[ max(loss - m, 0)^power ]^(1/power),  with E the mean over samples and m = E[loss]: losses
    above the mean are penalised. The levels are g_1(x) = (x, E[loss]) and g_2(x, m) = (m, E[max(loss(x) - m,
    0)^power]); the outer function is f(m, v) = m + weight * v^(1/power). For power 2, max(v, 0) + ``smoothing``^2
    replaces v, since estimates of v may be negative and the root has no derivative at 0. E is over the client's own
    data, and f takes the mean over clients of (m, v): the penalty is on the spread within clients.
    """
    base = erm(model, loss, batchnorm, dropout, prior)
    flat, losses = base.flat, base.losses
    assert flat is not None and losses is not None

    def mean_loss(x: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return torch.cat([x, base.outer(x, batch).reshape(1)])

    def semideviation(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        inputs, targets, weights = split(batch)
        above = (losses(flat(u[:-1], *inputs), targets) - u[-1]).relu()
        return torch.stack([u[-1], weighted_mean(above**power, weights)])

    def outer(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return u[0] + weight * (u[1] if power == 1 else (u[1].relu() + smoothing**2).sqrt())

    return replace(base, outer=outer, levels=(mean_loss, semideviation), inner_mean="global", outer_draws=False)
