"""What the algorithms of mixtures share: the dual weighs the clients, and lives on the server."""

from __future__ import annotations

import torch

from fedstrata.clients import Client


def own_loss(client: Client) -> torch.Tensor:
    """Return the dual at which f_k is the client's own loss: the uniform one."""
    y0 = client.problem.y0
    assert y0 is not None
    return torch.full_like(y0, 1 / len(y0)).expand(len(client), -1)
