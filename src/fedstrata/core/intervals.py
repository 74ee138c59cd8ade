"""Student's t-intervals, which tables, verdicts and plots share."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

V = TypeVar("V", float, np.ndarray)

LEVEL = 0.05
"""Intervals leave out the truth with this probability, and verdicts are false with it."""


def half_width(variance: V, freedom: float) -> V:
    """Return half the width of the 95 % interval around an estimate with this variance and these degrees of freedom."""
    from scipy.special import stdtrit  # takes longer to import than the rest of this package

    half: V = float(stdtrit(freedom, 1 - LEVEL / 2)) * variance**0.5
    return half
