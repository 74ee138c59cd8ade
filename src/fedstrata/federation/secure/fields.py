"""Shamir's secret sharing over a prime field (A. Shamir, "How to share a secret", 1979)."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence

PRIME = (1 << 521) - 1
"""The order of the field, a Mersenne prime: larger than a secret of :data:`SECRET` bytes followed by its hash."""

SECRET, SHARE = 32, 66
"""The bytes of a secret, and of a share."""


def split(secret: bytes, threshold: int, points: Sequence[int]) -> dict[int, bytes]:
    """Return a share for each of these different points, at least 1: any ``threshold`` of them recover the secret.

    Fewer tell nothing about it: they are values of a random polynomial whose value at 0 is the secret. The secret is
    shared together with its hash, so that a wrong share is noticed.
    """
    if len(secret) != SECRET or not 1 <= threshold <= len(points):
        raise ValueError(f"a secret has {SECRET} bytes, and a threshold is at most the number of shares")
    _check_points(points)
    coefficients = [
        int.from_bytes(_with_hash(secret), "big"),
        *(secrets.randbelow(PRIME) for _ in range(threshold - 1)),
    ]
    return {point: _value(coefficients, point).to_bytes(SHARE, "big") for point in points}


def _value(coefficients: Sequence[int], point: int) -> int:
    """Return the value of a polynomial at a point, by Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value


def weights_at_zero(points: Iterable[int]) -> dict[int, int]:
    """Return the weight of each point's share in the secret (Lagrange's interpolation at 0)."""
    points = list(points)
    _check_points(points)
    weights = {}
    for own in points:
        above = below = 1
        for other in points:
            if other != own:
                above = above * other % PRIME
                below = below * (other - own) % PRIME
        weights[own] = above * pow(below, -1, PRIME) % PRIME
    return weights


def recover(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes:
    """Return the secret, from the shares at exactly the points of ``weights``; raise ValueError if there is none."""
    if set(shares) != set(weights):
        raise ValueError("the shares must be those of the points that the weights are for")
    value = sum(weights[point] * element(share) for point, share in shares.items()) % PRIME
    content = value.to_bytes(SHARE, "big")[-2 * SECRET :]
    if value >> (16 * SECRET) or content != _with_hash(content[:SECRET]):
        raise ValueError("the shares do not belong to one secret")
    return content[:SECRET]


def _with_hash(secret: bytes) -> bytes:
    return secret + hashlib.sha256(secret).digest()


def element(share: bytes) -> int:
    """Return a share as an element of the field; raise ValueError if it is none."""
    value = int.from_bytes(share, "big")
    if len(share) != SHARE or value >= PRIME:
        raise ValueError("not a share")
    return value


def _check_points(points: Sequence[int]) -> None:
    if len(set(points)) != len(points) or not all(0 < point < PRIME for point in points):
        raise ValueError("the points of shares must be different, and at least 1")
