"""Snapshots of x, which Local-SGDA+ and its momentum variant use in the ascent instead of x."""

from __future__ import annotations

import torch

from fedstrata.algorithms.descent import Pair, gradients
from fedstrata.clients import Client, Variables
from fedstrata.core.errors import invalid
from fedstrata.core.schedules import Steps


def check_snapshot(name: str, every: int, steps: Steps) -> None:
    """Raise if the period of snapshots is neither a whole number of rounds nor a single step."""
    if every == 1:
        return
    if not isinstance(steps, int):
        raise invalid(f"steps of {name}", steps, "a whole number of at least 1: snapshots are taken after whole rounds")
    if every % steps:
        raise invalid(f"snapshot_every of {name}", every, f"1, or a multiple of steps, {steps}; 0 means steps^2")


def snapshot(client: Client, x: torch.Tensor, every: int, steps: Steps) -> torch.Tensor | None:
    """Return the x of the last round that began after a multiple of ``every`` steps; clients keep it.

    None if ``every`` is 1: the snapshot is then the client's current x.
    """
    if every == 1:
        return None
    assert isinstance(steps, int)
    period, steps_done = divmod(client.clock.iteration, every or steps**2)
    if steps_done == 0:
        keep_snapshot(client, x, every, steps)
        return x
    client.require(period=period)
    return client.recall("snapshot").snapshot


def keep_snapshot(client: Client, x: torch.Tensor, every: int, steps: Steps) -> torch.Tensor:
    """Keep x as the snapshot of this period; nothing is sent."""
    assert isinstance(steps, int)
    client.keep(snapshot=x)
    client.stamp(period=client.clock.iteration // (every or steps**2))
    return x[:, :0]


def gradients_at_snapshot(client: Client, k: Variables, z: torch.Tensor | None, weight_decay: float) -> Pair:
    """Return the gradient in x at k.x, k.y, and the one in y at z, k.y, on one batch; without z both at k.x, k.y."""
    batch = client.draw()
    g_x, g_y = gradients(client, k.x, k.y, batch, weight_decay)
    return g_x, g_y if z is None else gradients(client, z, k.y, batch)[1]
