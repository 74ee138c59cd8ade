"""How many clients take part in a round, and how they are weighted."""

from __future__ import annotations

from typing import Literal

from fedstrata.core.errors import invalid, is_number

Weighting = Literal["uniform", "samples"]


def cohort_size(participation: int | float, clients: int) -> int:
    """Return how many clients take part in a round; ``participation`` is their number, or a fraction of all."""
    wanted = f"a fraction in (0, 1] or a whole number from 1 to {clients}"
    if not is_number(participation):
        raise invalid("participation", participation, wanted)
    if isinstance(participation, float):
        if not 0 < participation <= 1:
            raise invalid("participation", participation, wanted)
        return max(1, round(participation * clients))
    if not 1 <= participation <= clients:
        raise invalid("participation", participation, wanted)
    return participation


def check_weighting(weighting: str) -> Weighting:
    """Return the weighting; raise if its name is unknown."""
    if weighting == "uniform":
        return "uniform"
    if weighting == "samples":
        return "samples"
    raise invalid("weighting", weighting, "'uniform' or 'samples'")
