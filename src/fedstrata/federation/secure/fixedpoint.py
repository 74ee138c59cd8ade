"""Fixed-point numbers: whole multiples of 2^-bits, as integers modulo 2^64, so that sums are exact."""

from __future__ import annotations

import numpy as np

from fedstrata.core.errors import FedstrataError

MODULUS_BITS = 64


def largest(terms: int) -> int:
    """Return the largest absolute value of a term for which a sum of so many terms cannot overflow."""
    return ((1 << (MODULUS_BITS - 1)) - 1) // terms


def encoded(values: np.ndarray, bits: int, terms: int) -> np.ndarray:
    """Return values, float64, rounded to the nearest multiples of 2^-bits, as uint64; a sum has at most ``terms``.

    Raise if a value is not finite, or so large that the sum could overflow.
    """
    if not np.isfinite(values).all():
        raise NotFinite("An answer for a secure sum must be finite. It has NaN or infinite entries.")
    numbers = np.rint(values * 2.0**bits)
    highest = float(np.abs(numbers).max(initial=0.0))
    limit = largest(terms)
    if highest >= limit:  # as a float, the limit may be rounded up
        raise FedstrataError(
            f"An answer for a secure sum of {terms} nodes with federation.bits = {bits} must have entries below "
            f"{limit / 2**bits:.3g} in absolute value, after multiplication by the client's weight. It has larger "
            "ones. Set fewer bits, or clip the updates ([channel] clip)."
        )
    return np.ascontiguousarray(numbers.astype(np.int64)).view(np.uint64)


def decoded(total: np.ndarray, bits: int) -> np.ndarray:
    """Return a sum of :func:`encoded` values as float64."""
    return total.view(np.int64) / 2.0**bits


class NotFinite(FedstrataError):
    """A value that is NaN or infinite cannot be summed."""
