"""Stages of CoDA and CODASCA: clients keep the centre, and the sum of their iterates' distances from it."""

from __future__ import annotations

import torch

from fedstrata.clients import Client, Variables


def start_stage(client: Client, stage: int, **centre: torch.Tensor) -> torch.Tensor:
    """Keep the centre of a stage, under the name that the algorithm uses for it, and a sum of 0; nothing is sent."""
    (x,) = centre.values()
    client.keep(client.variables(**centre, total=torch.zeros_like(x)))
    client.stamp(stage=stage)
    return x[:, :0]


def recall_stage(client: Client, stage: int, centre: str, **values: torch.Tensor) -> Variables:
    """Recall the centre and the sum, ``total``; a client that missed the start of this stage counts as lost."""
    client.require(stage=stage)
    return client.recall(centre, "total", **values)
