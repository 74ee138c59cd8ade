"""Control variates of SAGDA and CODASCA: c_k, the mean of a client's gradients in its last round, in x and in y."""

from __future__ import annotations

import torch

from fedstrata.algorithms.descent import Pair
from fedstrata.clients import Client, Variables
from fedstrata.core.schedules import EqualSteps


def start_variates(client: Client, k: Variables, c_x: torch.Tensor, c_y: torch.Tensor, control: bool) -> Pair:
    """Set the drifts in ``k`` to c - c_k, 0 without control, and the sums of the gradients to 0; return c_k."""
    zero_x, zero_y = torch.zeros_like(k.x), torch.zeros_like(k.y)
    k.sum_x, k.sum_y, k.drift_x, k.drift_y = zero_x, zero_y, zero_x, zero_y
    if not control:
        return zero_x, zero_y
    c_kx, c_ky = client.kept("c_x", zero_x), client.kept("c_y", zero_y)
    k.drift_x, k.drift_y = c_x - c_kx, c_y - c_ky
    return c_kx, c_ky


def next_variates(client: Client, k: Variables, steps: EqualSteps) -> Pair:
    """Keep the mean of the round's gradients as c_k, and return it."""
    number = client.steps_now(steps)
    c_x, c_y = k.sum_x / number, k.sum_y / number
    client.keep(c_x=c_x, c_y=c_y)
    return c_x, c_y
