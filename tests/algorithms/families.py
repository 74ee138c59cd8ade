"""All tables of the equation tests."""

from __future__ import annotations

from algorithms import (
    equations_composition,
    equations_levels,
    equations_mixture,
    equations_plain,
    equations_rare,
    equations_saddle,
)
from algorithms.equations import Method

FAMILIES = [
    equations_plain,
    equations_mixture,
    equations_composition,
    equations_saddle,
    equations_levels,
    equations_rare,
]
METHODS: dict[str, Method] = {name: method for family in FAMILIES for name, method in family.METHODS.items()}
