"""What the algorithms for saddle points share: gradients in both variables, and steps down in x and up in y."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedstrata.algorithms.descent import decayed
from fedstrata.algorithms.estimators import storm
from fedstrata.clients import Client
from fedstrata.core.errors import invalid
from fedstrata.data.batch import Batch

Pair = tuple[torch.Tensor, torch.Tensor]
"""A vector for x and one for y."""


def gradients(client: Client, x: torch.Tensor, y: torch.Tensor, batch: Batch, weight_decay: float = 0.0) -> Pair:
    """Return the gradients of f in x and in y; ``weight_decay`` is an L2 penalty in x."""
    g_x, g_y = client.f_grads(x, batch, y)
    return decayed(g_x, x, weight_decay), g_y


def first_estimates(client: Client, x: torch.Tensor, y: torch.Tensor, batches: int) -> Pair:
    """Return the gradients w, v on ``batches`` batches' worth of samples, and keep them with the point."""
    w, v = gradients(client, x, y, client.draw(batch_size=client.worth(batches)))
    client.keep(x=x, y=y, w=w, v=v)
    return w, v


def kept_estimates(client: Client, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what the clients kept: w, v, and the point x, y at which they were made."""
    return client.recall("w", x), client.recall("v", y), client.recall("x", x), client.recall("y", y)


def storm_pair(client: Client, old: Pair, new: Pair, estimates: Pair, weights: Sequence[float]) -> Pair:
    """Return the STORM estimates w, v of both gradients after a move from ``old`` to ``new``, on one fresh batch.

    ``weights`` are alpha, of a fresh gradient in y, and beta, of one in x.
    """
    alpha, beta = weights
    batch = client.draw()
    w, v = estimates
    w_new, v_new = gradients(client, *new, batch)
    w_old, v_old = gradients(client, *old, batch)
    return storm(w, w_new, w_old, beta), storm(v, v_new, v_old, alpha)


def down_up(client: Client, x: torch.Tensor, y: torch.Tensor, directions: Pair, rates: tuple[float, float]) -> Pair:
    """Step down in x and up in y at once, and project y."""
    g_x, g_y = directions
    return x.sub(g_x, alpha=rates[0]), client.project_y(y.add(g_y, alpha=rates[1]))


def snapshot(client: Client, x: torch.Tensor, every: int) -> torch.Tensor | None:
    """Return the x of the last round that began after a multiple of ``every`` steps; clients keep it.

    None when ``every`` is 1: the snapshot is then wherever the client is.
    """
    if every == 1:
        return None
    if client.clock.iteration % every == 0:
        client.keep(snapshot=x)
        return x
    return client.recall("snapshot", x)


def gradients_at_snapshot(
    client: Client, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor | None, weight_decay: float
) -> Pair:
    """Return the gradient in x at x, y, and the one in y at z, y, on one batch; without z both at x, y."""
    batch = client.draw()
    g_x, g_y = gradients(client, x, y, batch, weight_decay)
    return g_x, g_y if z is None else gradients(client, z, y, batch)[1]


def check_period(name: str, every: int, steps: int) -> None:
    """Refuse a time between snapshots that is not a whole number of rounds, nor a single step."""
    if every > 1 and every % steps:
        raise invalid(f"snapshot_every of {name}", every, f"1, or a multiple of steps, {steps}; 0 is steps^2")
