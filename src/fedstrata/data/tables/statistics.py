"""What a site computes from its raw values, and what of it leaves the site.

A site answers with sums: for a column its number of values, their mean and the sum of their squared deviations; how
often each category occurs; how many values lie below each point of a grid. None of these numbers is a row, and none of
the counts is below ``minimum`` (unless it is 0), neither by itself nor as the difference of two others:

- A column with fewer values than ``minimum`` counts as empty. The mean and the squared deviations of all others are
  exact, unless fewer than ``minimum`` cells are missing. Then the site says that none is, or that
  ``minimum`` are, but always none where that would leave fewer values than ``minimum``; and the mean and the
  squared deviations are rounded, since an exact mean of whole numbers tells of how many it is.
- A category with fewer rows than ``minimum`` is said to have none, or ``minimum``. If the rows of all such categories,
  and the missing cells if they are few, are together fewer than ``minimum``, those of the next larger one are rounded
  to a multiple of it too, so that their sum does not tell them. The moments of flags and ordinals are those of these
  counts, since exact ones would tell the counts.
- If a class of the target has fewer rows than ``minimum``, the numbers of rows up to each class are rounded to
  multiples of it, up or down by chance, so that they, and the shares of the classes, are right on average.
- The number of values below a point of the grid is told in groups: ``minimum`` neighbouring values, or more, count as
  one of them.

Rounding goes up or down, and the value of a group is chosen, by a number that only the site knows, so that the sum over
many sites is right on average; the same table gives the same answer, however often it is asked. With ``minimum = 1``
everything is exact.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Any

import numpy as np


def told(count: int, total: int, minimum: int, offset: int) -> int:
    """Return how many values a site tells that a column has in ``total`` rows."""
    missing = total - count
    if count < minimum:
        return 0
    if 0 < missing < minimum:
        lost = _rounded(missing, offset, minimum)
        return total if total - lost < minimum else total - lost
    return count


def moments(values: np.ndarray, minimum: int) -> np.ndarray:
    """Return the number, the mean and the sum of squared deviations of each column's values: [p, 3].

    values: raw values [n, p] with NaN where a cell is missing.
    """
    answers = np.zeros((values.shape[1], 3))
    for j, column in enumerate(values.T):
        present = column[~np.isnan(column)]
        count = told(len(present), len(column), minimum, _offset(present, minimum))
        if count:
            mean = math.fsum(present) / len(present)
            variance = math.fsum((present - mean) ** 2) / len(present)
            if count != len(present):
                mean, variance = coarse(mean, variance, len(present))
            answers[j] = count, mean, count * variance
    return answers


def coarse(mean: float, variance: float, count: int) -> tuple[float, float]:
    """Return the mean and the variance of ``count`` values, rounded as far as more or less values could have them.

    Means of n whole numbers are 1 / n apart, so they are rounded to at least the deviation over n, which is much less
    than a mean of n values is uncertain by.
    """
    return _to_unit(mean, math.sqrt(variance) / count), _to_unit(variance, variance / count)


def _to_unit(value: float, least: float) -> float:
    """Return a number rounded to a multiple of the smallest power of two that is not below ``least``."""
    unit = math.ldexp(1.0, math.ceil(math.log2(least))) if 0 < least < math.inf else 0.0
    return round(value / unit) * unit if unit > 0 else value


def moments_of_codes(counts: np.ndarray) -> np.ndarray:
    """Return the moments of codes, 0, 1 and so on, of which each occurs so often: [3]."""
    codes, count = np.arange(len(counts)), counts.sum()
    mean = counts @ codes / max(count, 1)
    return np.array([count, mean, counts @ (codes - mean) ** 2])


def merged(answers: np.ndarray) -> np.ndarray:
    """Return the moments of all sites together, of those of each: [N, p, 3] -> [p, 3]."""
    counts, means, squares = np.moveaxis(answers, 2, 0)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / np.maximum(total, 1)
    return np.stack([total, mean, (squares + counts * (means - mean) ** 2).sum(0)], axis=1)


def category_counts(column: np.ndarray, size: int, minimum: int) -> np.ndarray:
    """Return how often each of ``size`` categories occurs in a column of codes: [size]."""
    codes = column[~np.isnan(column)].astype(np.int64)
    counts: np.ndarray = np.bincount(codes[codes >= 0], minlength=size)[:size].astype(np.float64)
    counts = np.append(counts, len(column) - counts.sum())  # missing, or of no category
    hidden = counts < minimum
    while 0 < counts[hidden].sum() < minimum and not hidden.all():
        visible = np.flatnonzero(~hidden)
        hidden[visible[np.argmin(counts[visible])]] = True
    for c in np.flatnonzero(hidden & (counts > 0)):
        counts[c] = _rounded(int(counts[c]), _offset(np.append(codes, c), minimum), minimum)
    return counts[:size]


def class_counts(counts: np.ndarray, minimum: int, rows: np.ndarray) -> np.ndarray:
    """Return the numbers of rows of each class, [classes], that a site tells: exact if none of them is small.

    Otherwise the number of rows up to each class is rounded to a neighbouring point of a grid: 0, multiples of
    ``minimum`` and, if it is not below ``minimum``, the number of all rows, whose last cell is at least as wide. The
    nearer point is the more likely one, so that the expected numbers are the true ones. The chance follows from the
    ``rows`` of the site, held out or not: the same question has the same answer, and whoever lacks them cannot know it.
    """
    if not ((counts > 0) & (counts < minimum)).any():
        return counts.astype(np.float64)
    up_to, total = np.cumsum(counts), int(counts.sum())
    grid = np.arange(0, max(total, minimum) + 1, minimum)
    if total >= minimum:
        grid[-1] = total
    cell = np.clip(np.searchsorted(grid, up_to, side="right") - 1, 0, len(grid) - 2)
    low, high = grid[cell], grid[cell + 1]
    digest = int.from_bytes(blake2b(np.ascontiguousarray(rows).tobytes(), digest_size=8).digest(), "little")
    told_up_to = np.where(digest / 2**64 < (up_to - low) / (high - low), high, low)
    told_counts: np.ndarray = np.diff(told_up_to, prepend=0).astype(np.float64)
    return told_counts


def below(column: np.ndarray, points: np.ndarray, minimum: int, secret: np.ndarray | None = None) -> np.ndarray:
    """Return how many values of a column are at most each point of an increasing grid: [len(points)].

    Values above the last point count there. The values are told in groups of ``minimum``, the last of which is larger:
    a whole group counts as one of its values, the same in each.

    secret: what only the site knows; by default the values. Computed values may differ in their last bits.
    """
    present = np.sort(column[~np.isnan(column)])
    offset = _offset(present if secret is None else secret, minimum)
    total = told(len(present), len(column), minimum, offset)
    if not total:
        return np.zeros(len(points))
    exact = np.searchsorted(present, points, side="right")
    exact[-1] = len(present)
    ends = np.append(minimum * np.arange(total // minimum), total)
    starts, sizes = ends[:-1], np.diff(ends)
    chosen = starts + -(-sizes * (minimum - offset) // minimum)
    groups = np.searchsorted(chosen * len(present), exact * total, side="right")
    counts: np.ndarray = ends[groups].astype(np.float64)
    return counts


def _rounded(count: Any, offset: int, minimum: int) -> Any:
    return (count + offset) // minimum * minimum


def _offset(values: np.ndarray, minimum: int) -> int:
    """Return a number below the minimum that follows from the values themselves: whoever lacks them cannot know it."""
    return int.from_bytes(blake2b(values.tobytes(), digest_size=8).digest(), "little") % minimum


def quantile(grid: np.ndarray, counts: np.ndarray, share: float) -> float:
    """Return a quantile of values of which ``counts`` [b] are at most each point of ``grid`` [b].

    It lies between the two values nearest to it, in proportion, as NumPy computes it.
    """
    place = share * (counts[-1] - 1)
    near = [grid[np.searchsorted(counts, rank, side="right")] for rank in (math.floor(place), math.ceil(place))]
    return float(near[0] + (place - math.floor(place)) * (near[1] - near[0]))
