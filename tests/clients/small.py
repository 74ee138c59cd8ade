"""A small setting for tests of clients: five of unequal sizes, and answers that say whose they are."""

from __future__ import annotations

from typing import Any

import torch

from fedstrata.clients.client import Client
from fedstrata.clients.client_side import ClientSide
from support import make_setting, sized_data, softmax_problem

SIZES = [9, 4, 7, 2, 4]
DECREASING = [0, 2, 1, 4, 3]
"""The clients in order of decreasing size, as a chunk has them."""
STEPS = [5, 4, 2, 2, 1]
"""How many steps of batch size 2 an epoch of each of them takes, in that order."""


def setting(batch_size: int | None = 2, **options: Any) -> ClientSide:
    """Build what the five clients share."""
    return make_setting(softmax_problem(), sized_data(SIZES), batch_size=batch_size, **options)


def column(*values: float) -> torch.Tensor:
    """Return a number for each client, [C, 1]."""
    return torch.tensor(values, dtype=torch.float64)[:, None]


def ids_of(client: Client) -> torch.Tensor:
    """Return the numbers of the clients that are still in the loop, [C, 1]."""
    return torch.from_numpy(client.ids[: len(client)]).double()[:, None]
