"""Several levels inside: a user's own, and risk-averse learning as an example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from fedstrata.core.errors import invalid
from fedstrata.core.options import options, param
from fedstrata.models.flat import BatchNormRule
from fedstrata.problems.erm import BATCHNORM, LOSS, Losses, erm, weighted_mean
from fedstrata.problems.problem import Arrays, InnerMean, Level, Outer, Problem


@options("the multilevel problem")
def multilevel(
    levels: Sequence[Level],
    outer: Outer,
    x0: torch.Tensor,
    y0: torch.Tensor | None = None,
    project_y: Callable[[torch.Tensor], torch.Tensor] | None = None,
    inner_mean: InnerMean = param(
        "global", "whether f_k meets the client's own levels, or their mean over all clients"
    ),
    outer_draws: bool = param(True, "whether the outer function looks at data"),
    name: str = param("multilevel", "what messages and tables call the problem"),
) -> Problem:
    """Build a problem of your own from K levels: min_x max_y M_k[ f_k( M_j[ g_j^(K) o ... o g_j^(1)(x) ], y ) ].

    ``levels`` are g^(1)..g^(K), each ``g(u, batch) -> vector``, of any lengths that fit; ``outer`` is f, ``f(u,
    batch)`` or with a dual, whose start is ``y0``, ``f(u, y, batch)``. All are means over the samples of ``batch``, a
    tuple of tensors such as ``(inputs, targets)``, and every level draws its own. Without ``outer_draws`` f looks at no
    data. With ``inner_mean = "local"`` f_k meets the client's own levels. The mean of the losses plus their standard
    deviation:

        level_1 = lambda x, batch: torch.cat([x, losses(x, batch).mean(0, keepdim=True)])
        level_2 = lambda u, batch: torch.stack([u[-1], ((losses(u[:-1], batch) - u[-1]) ** 2).mean()])
        outer = lambda u, batch: u[0] + (u[1].relu() + 1e-4).sqrt()  # an estimate of u[1] may be below 0
        problem = fs.multilevel([level_1, level_2], outer, x0, outer_draws=False)

    :func:`risk_averse` is such a problem, for any model.
    """
    if not isinstance(levels, Sequence) or len(levels) == 0:
        raise invalid(
            "levels of the multilevel problem", levels, "at least one function g(u, batch) -> vector, in a list"
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


@options("the risk_averse problem")
def risk_averse(
    model: nn.Module,
    weight: float = param(0.5, "weight of the upper semideviation", above=0),
    power: int = param(2, "power of the semideviation", choices=(1, 2)),
    smoothing: float = param(0.01, "what keeps the root of power 2 away from 0", above=0),
    loss: str | Losses = LOSS,
    batchnorm: BatchNormRule = BATCHNORM,
) -> Problem:
    """Build risk-averse learning: the mean loss plus ``weight`` times its upper semideviation.

    min_x  m + weight * E[ max(loss - m, 0)^power ]^(1/power),  E the mean over samples and m = E[loss]: losses above
    the mean cost more than those below it spare. In layers: g_1(x) = (x, E[loss]), g_2(x, m) = (m, E[max(loss(x) - m,
    0)^power]), and f(m, v) = m + weight * v^(1/power), for power 2 with max(v, 0) + ``smoothing``^2 in place of v: the
    root of 0 has no slope, and an estimate of v may be below 0. A client's E is over its own data, and f meets the mean
    over clients of (m, v): what is averse to risk is the spread within clients.
    """
    base = erm(model, loss, batchnorm)
    flat, losses = base.flat, base.losses
    assert flat is not None and losses is not None

    def mean_loss(x: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return torch.cat([x, base.outer(x, batch).reshape(1)])

    def semideviation(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        inputs, targets, *weights = batch
        above = (losses(flat(u[:-1], inputs), targets) - u[-1]).relu()
        return torch.stack([u[-1], weighted_mean(above**power, weights)])

    def outer(u: torch.Tensor, batch: Arrays) -> torch.Tensor:
        return u[0] + weight * (u[1] if power == 1 else (u[1].relu() + smoothing**2).sqrt())

    return replace(
        base,
        outer=outer,
        levels=(mean_loss, semideviation),
        inner_mean="global",
        outer_draws=False,
        name="risk_averse",
        options={**base.options, "weight": weight, "power": power, "smoothing": smoothing},
    )
