"""How many clients take part in a round, and how they are weighted."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

import torch

from fedstrata.core.errors import invalid

Weighting = Literal["uniform", "samples"]


def cohort_size(participation: int | float, clients: int) -> int:
    """Return how many clients take part in a round; ``participation`` is their number, or a fraction of all."""
    if isinstance(participation, float):
        return max(1, round(participation * clients))
    if participation > clients:
        raise invalid("participation", participation, f"a fraction in (0, 1] or a whole number from 1 to {clients}")
    return participation


def check_weighting(weighting: Weighting) -> Weighting:
    """Return the weighting; raise if its name is unknown."""
    if weighting not in get_args(Weighting):
        raise invalid("weighting", weighting, "'uniform' or 'samples'")
    return weighting


@lru_cache(maxsize=8)
def uniform_weights(clients: int) -> torch.Tensor:
    """Return the same weight for each of so many clients: [clients]. Shared: not to be changed in place."""
    return torch.full((clients,), 1.0 / clients, dtype=torch.float64)
