"""Checks of what problems are built with; errors say what, got and wanted."""

from __future__ import annotations

import math

from fedstrata.core.errors import invalid, is_number
from fedstrata.core.schedules import Schedule


def check_shift(name: str, shift: object) -> None:
    """Refuse what is neither None nor a finite number."""
    number = is_number(shift) and math.isfinite(shift)
    if shift is not None and not number:
        raise invalid(f"shift of the {name} problem", shift, "a finite number, or left out")


def check_positive(what: str, value: object, wants: str = "a positive number") -> None:
    """Refuse what is not a positive, finite number."""
    good = is_number(value) and 0 < value < math.inf
    if not good:
        raise invalid(what, value, wants)


def check_rate(what: str, value: object) -> None:
    """Refuse what is neither a positive number nor a schedule."""
    if not isinstance(value, Schedule):
        check_positive(what, value, "a positive number, or a schedule")


def check_switch(what: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise invalid(what, value, "true or false")


def check_counts(name: str, counts: dict[str, int], seed: int) -> None:
    """Refuse a count that is not a whole number of at least 1, and a seed below 0."""
    for what, count in {**counts, "seed": seed}.items():
        least = 0 if what == "seed" else 1
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise invalid(f"{what} of the {name}", count, f"a whole number of at least {least}")


def check_numbers(name: str, **numbers: tuple[float, float]) -> None:
    """Refuse a number that is below its least value."""
    for what, (value, least) in numbers.items():
        if not is_number(value) or not math.inf > value >= least:
            raise invalid(f"{what} of the {name}", value, f"a number of at least {least}")
